"""``geodl learn``, ``predict``, ``evaluate``, ``info``, ``undo``, ``redo``, ``rename``, ``remove`` and ``export``: your own images."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from geodl.classifier import IncrementalClassifier
from geodl.cli.display import Stopper, errors, plain, say
from geodl.cli.own_display import (
    SHOWN,
    LearnWatch,
    csv_predictions,
    describe_step,
    percent,
    plain_table,
    predicting,
    say_classes,
    say_confusion,
    say_history,
    say_kept,
    say_learned,
    say_more,
    say_skipped,
    skipped_json,
    table_predictions,
    when,
)
from geodl.errors import ConfigError, DataError, Interrupted
from geodl.files import readable
from geodl.text import count

_how = partial(Parameter, group=Group("How it is done", sort_key=6), negative=())
_CHOICES = Group("Choices (made from your images and your machine unless you set them)", sort_key=7)
_MACHINE = Group("Machine", sort_key=8)

Model = Annotated[Path, Parameter(help="The model's directory.")]
Folder = Annotated[Path, Parameter(help="A folder with one folder of images for each class.")]
Strict = Annotated[bool, _how(help="Stop at the first file that cannot be used, instead of skipping it.")]
Json = Annotated[bool, _how(name="--json", help="Print JSON.")]
Classifier = Annotated[
    Literal["analytic", "nme", "ncm", "cnn"] | None,
    _how(
        help="analytic: closed form; nme: nearest mean of exemplars; ncm: nearest class mean; cnn: the network's own output; unset: the best there is."
    ),
]
Device = Literal["auto", "cpu", "cuda"]
Accelerator = Annotated[Device, Parameter(help="Where the network runs.", group=_MACHINE)]
Workers = Annotated[int | None, Parameter(help="Threads that decode images; unset: chosen.", group=_MACHINE)]


def _choice(text: str, *names: str, group: Group = _CHOICES) -> Parameter:
    return Parameter(name=names or None, help=text, group=group)


@dataclass(frozen=True)
class LearnFlags:
    """What a learn step chooses by itself where it is not told: the options of a run, in a practitioner's words."""

    method: Annotated[
        Literal["analytic", "lucir", "finetune"] | None,
        _choice(
            "analytic: closed form on pre-trained features, in seconds; lucir: train with GeoDL; finetune: train without."
        ),
    ] = None
    adapt: Annotated[
        bool | None, _choice("Train the pre-trained network on the images, with GeoDL, instead of the closed form.")
    ] = None
    network: Annotated[
        str | None,
        _choice("The network: efficientnet-lite0, resnet32, resnet18, ..., or timm:NAME.", "--backbone", "--network"),
    ] = None
    pretrained: Annotated[bool | None, _choice("Start from published weights (efficientnet-lite0, timm:NAME).")] = None
    weights: Annotated[Path | None, _choice("Begin with the weights in this file: safetensors, .pth or .pt.")] = None
    image_size: Annotated[int | None, _choice("Side of the squares, in pixels, that the network sees.")] = None
    flip: Annotated[bool | None, _choice("Learn mirrored images too; not for text, signs or left and right.")] = None
    epochs: Annotated[int | None, _choice("Epochs: how often training goes through all the images.")] = None
    batch_size: Annotated[int | None, _choice("Images in one training step.")] = None
    lr: Annotated[float | None, _choice("Learning rate, at its highest.")] = None
    exemplars: Annotated[
        int | None,
        _choice(
            "Images to keep: in a trained model to learn from once more; in closed form only to show, at most 10 a class."
        ),
    ] = None
    memory_budget: Annotated[
        Literal["per_class", "total"] | None, _choice("Whether --exemplars counts for each class or in total.")
    ] = None
    seed: Annotated[int | None, _choice("Another number gives another, equally good model.")] = None
    threads: Annotated[
        int | None,
        _choice(
            "CPU threads; unset: the cores there are, at most OMP_NUM_THREADS; one for tiny images.", group=_MACHINE
        ),
    ] = None
    workers: Workers = None
    accelerator: Annotated[Device | None, _choice("Where the network runs.", group=_MACHINE)] = None

    def given(self) -> dict[str, Any]:
        """Return those that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


def learn(
    model: Model,
    images: Folder,
    /,
    *,
    flags: Annotated[LearnFlags, Parameter(name="*")] = LearnFlags(),  # noqa: B008
    again: Annotated[bool, _how(help="Learn images that were just learned once more.")] = False,
    strict: Strict = False,
    quiet: Annotated[bool, _how(name=("--quiet", "-q"), help="Print the result alone.")] = False,
    as_json: Json = False,
) -> None:
    """Learn the classes in a folder of class folders."""
    watch, stopper = LearnWatch(quiet=quiet or as_json), Stopper()
    with stopper.watching(), watch.bar:
        try:
            done = IncrementalClassifier(model).learn(
                images, again=again, strict=strict, listener=watch, stop=stopper, confirm=watch.confirm, **flags.given()
            )
        except Interrupted as stop:
            saved = "; how far it came is saved, and the same command goes on from there" if watch.training else ""
            raise Interrupted(f"{'stopped' if saved else stop}{saved}") from None
    if as_json:
        print(json.dumps(vars(done) | {"skipped": skipped_json(done.skipped)}, ensure_ascii=False))
        return
    if done.already:
        say(f"already learned: {model} has just learned exactly these images (--again learns them once more)")
    say_learned(model, done)


def predict(
    model: Model,
    images: Annotated[list[Path], Parameter(help="Images, or folders with images.", negative=())],
    /,
    *,
    top: Annotated[int, _how(help="Show so many of the likeliest classes.")] = 1,
    threshold: Annotated[
        float | None,
        _how(help="Say unknown where the largest score (--json shows it) is below this; unset: as learning fitted it."),
    ] = None,
    no_unknown: Annotated[bool, _how(help="Never say unknown.")] = False,
    classifier: Classifier = None,
    strict: Strict = False,
    as_json: Json = False,
    as_csv: Annotated[bool, _how(name="--csv", help="Print CSV.")] = False,
    accelerator: Accelerator = "auto",
    workers: Workers = None,
) -> None:
    """Say what is in images."""
    if as_json and as_csv:
        raise ConfigError("--json and --csv: one of them, not both")
    if no_unknown and threshold is not None:
        raise ConfigError("--threshold and --no-unknown: one of them, not both")
    with predicting() as listener:
        found = IncrementalClassifier(model).predict(
            images,
            classifier=classifier,
            top=top,
            threshold=-math.inf if no_unknown else threshold,
            strict=strict,
            accelerator=accelerator,
            workers=workers,
            listener=listener,
        )
    if as_json:
        names = ("label", "confidence", "unknown", "score", "top")
        entries = [{"image": each.name, **{name: getattr(each, name) for name in names}} for each in found]
        facts = {"predictions": entries, "skipped": skipped_json(found.skipped), "images_per_second": found.rate}
        print(json.dumps(facts, ensure_ascii=False))
    elif as_csv:
        csv_predictions(found)
    elif found:
        table_predictions(found, top)
    if not as_json:
        say_skipped(found.skipped, to_errors=True)
        if len(found) > 1:
            errors.print(f"{count(len(found), 'image')}, {found.rate:.0f} images/s", markup=False)
    if not len(found):
        raise DataError("no image could be read" if found.skipped else "no images found")


def evaluate(
    model: Model,
    images: Folder,
    /,
    *,
    classifier: Classifier = None,
    strict: Strict = False,
    as_json: Json = False,
    accelerator: Accelerator = "auto",
    workers: Workers = None,
) -> None:
    """Say how good a model is on images whose classes are known."""
    with predicting() as listener:
        found = IncrementalClassifier(model).evaluate(
            images, classifier=classifier, strict=strict, accelerator=accelerator, workers=workers, listener=listener
        )
    if as_json:
        ready = {"classes": found.confusion.classes, "confusion": found.confusion.counts.tolist()}
        print(json.dumps(vars(found) | ready | {"skipped": skipped_json(found.skipped)}, ensure_ascii=False))
        return
    say_skipped(found.skipped)
    say(f"accuracy: {found.accuracy:.1f} % of {count(found.images, 'image')}", "bold")
    for step, value in found.per_step.items():
        say(f"  classes learned in step {step}: {percent(value)}")
    say_classes(found)
    say_confusion(found)


def info(
    model: Model,
    /,
    *,
    images: Annotated[bool, _how(help="List the stored images.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a model knows and keeps."""
    facts = IncrementalClassifier(model).info()
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    steps = max((record["step"] for record in facts["steps"] if record["action"] == "learn"), default=1)
    say(f"{model}: {count(len(facts['classes']), 'class')}, learned in {count(steps, 'step')}", "bold")
    if facts["unfinished"]:
        say("a learn step was stopped; the same learn command goes on with it", "yellow")
    left_out = facts["left_out"]  # then pictures are kept for show alone
    kept = {"validation": ">kept to show"} if left_out else {"exemplars": ">kept", "validation": ">for validation"}
    table = plain_table("class", "step", "learned", ">images seen", *kept.values(), ">accuracy")
    for each in facts["classes"][:SHOWN]:
        table.add_row(
            plain(each["name"]),
            str(each["step"]),
            when(each["learned"]),
            *(str(each[key]) for key in ("images", *kept)),
            percent(each["accuracy"]),
        )
    say(table)
    say_more(len(facts["classes"]), "class")
    say_history(facts)
    say_kept(facts, listed=images)


@contextmanager
def _giving_up(model: Path) -> Iterator[IncrementalClassifier]:
    """Give the model to change, and say so where the change gives up a learn step that was stopped."""
    classifier = IncrementalClassifier(model)
    unfinished = classifier.unfinished
    yield classifier
    if unfinished:
        say("a learn step had been stopped; it began from another state and is given up", "yellow")


def undo(model: Model, /) -> None:
    """Take the last step back."""
    with _giving_up(model) as classifier:
        record = classifier.undo()
    if record["action"] == "damaged":
        say("taken back: the last state, which is damaged; there is no way to bring it back")
    else:
        say(f"taken back: {describe_step(record)}; `geodl redo` brings it back, until the next change")


def redo(model: Model, /) -> None:
    """Bring back what was taken back last."""
    with _giving_up(model) as classifier:
        record = classifier.redo()
    say(f"brought back: {describe_step(record)}")


def rename(
    model: Model,
    old: Annotated[str, Parameter(help="What the class is called now.")],
    new: Annotated[str, Parameter(help="What it shall be called.")],
    /,
) -> None:
    """Give a class another name."""
    with _giving_up(model) as classifier:
        classifier.rename(old, new)
    say(f"{old} is now called {new}")


def remove(
    model: Model,
    name: Annotated[str, Parameter(name="class", help="The class to remove.")],
    /,
    *,
    for_good: Annotated[
        bool,
        Parameter(
            help="Remove all other states too, so that neither image nor features of the class are left; no undo.",
            negative=(),
        ),
    ] = False,
) -> None:
    """Remove a class and its images."""
    with _giving_up(model) as classifier:
        classifier.remove(name, for_good=for_good)
    rest = "`geodl undo` brings it back (--for-good: no way back)"
    if for_good:
        rest = "no image of it is left, and there is no undo"
        if classifier.info()["features"]["sums"]:
            rest += "; sums over the features of all images, in which it had its share, stay"
    say(f"{name} is removed; {rest}")


def export(
    model: Model,
    file: Annotated[Path, Parameter(help="The ONNX file to write.")],
    /,
    *,
    force: Annotated[bool, _how(help="Replace the file where it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model as one ONNX file."""
    done = IncrementalClassifier(model).export(file, force=force)
    if as_json:
        print(json.dumps(done, ensure_ascii=False))
        return
    say(
        f"{file}: {count(done['classes'], 'class')}, {readable(done['bytes'])}; differs from the model by {done['difference']:.1g} at most"
    )
