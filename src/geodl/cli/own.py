"""``geodl learn``, ``predict``, ``evaluate``, ``info``, ``undo``, ``redo``, ``rename``, ``remove``, ``relabel``, ``forget`` and ``export``: your own images."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from geodl.app import quick
from geodl.cli import own_display as display
from geodl.cli.display import Stopper, errors, say
from geodl.core.errors import ConfigError, DataError, Interrupted
from geodl.core.text import count, readable

if TYPE_CHECKING:
    from geodl.app.classifier import IncrementalClassifier

_how = partial(Parameter, group=Group("How it is done", sort_key=6), negative=())
_CHOICES = Group("Choices (made from your images and your machine unless you set them)", sort_key=7)
_MACHINE = Group("Machine", sort_key=8)

Model = Annotated[Path, Parameter(help="The model's directory.")]
Folder = Annotated[
    Path,
    Parameter(
        help="A folder with one folder of images for each class, a zip archive of one, or a CSV table: file,label."
    ),
]
Strict = Annotated[
    bool, _how(help="Stop at the first file that cannot be used, instead of skipping it.")
]
Json = Annotated[bool, _how(name="--json", help="Print JSON.")]
_CLASSIFIERS = "analytic: closed form; nme: nearest mean of exemplars; ncm: nearest class mean; cnn: the network's output; unset: the best there is."
Classifier = Annotated[str | None, _how(help=_CLASSIFIERS)]
Device = Literal["auto", "cpu", "cuda"]
Accelerator = Annotated[Device, Parameter(help="Where the network runs.", group=_MACHINE)]
Workers = Annotated[
    int | None, Parameter(help="Threads that decode images; unset: chosen.", group=_MACHINE)
]

# The options of a run that a learn step chooses by itself, in a practitioner's words.
_LEARN: dict[str, tuple[Any, str]] = {
    "method": (
        Literal["analytic", "lucir", "finetune"],
        "analytic: closed form on pre-trained features, in seconds; lucir: train with GeoDL; finetune: train without.",
    ),
    "adapt": (
        Literal["no", "auto", "yes"],
        "Train the last stages of the pre-trained network on the first images, then freeze it; auto: keep that only where it is right on more of the images set apart. Takes minutes.",
    ),
    "network": (
        str,
        "The network: efficientnet-lite0, efficientnet-lite2 (larger), resnet32, resnet18, ..., or timm:NAME.",
    ),
    "pretrained": (
        bool,
        "Start from published weights (efficientnet-lite0, efficientnet-lite2, timm:NAME).",
    ),
    "weights": (Path, "Start from the weights in this file: safetensors, .pth or .pt."),
    "image_size": (int, "Side of the squares, in pixels, that the network sees."),
    "whole": (
        bool,
        "See all of each picture, not its middle square: for panoramas and tall pictures.",
    ),
    "flip": (bool, "Learn mirrored images too; not for text, signs or left and right."),
    "epochs": (int, "Epochs: how often training goes through all the images."),
    "batch_size": (int, "Images in one training step."),
    "lr": (float, "Learning rate, at its highest."),
    "exemplars": (
        int,
        "Images to keep: in a trained model to learn from again; in closed form only to show, at most 10 a class.",
    ),
    "memory_budget": (
        Literal["per_class", "total"],
        "Whether --exemplars counts for each class or in total.",
    ),
    "seed": (int, "Random seed: another number gives another, equally good model."),
    "threads": (
        int,
        "CPU threads; unset: the cores there are, at most OMP_NUM_THREADS; one for tiny images.",
    ),
    "workers": (int, "Threads that decode images; unset: chosen."),
    "accelerator": (Device, "Where the network runs."),
}


def _learn_flags() -> type[Any]:
    fields = []
    for name, (kind, text) in _LEARN.items():
        names = ("--backbone", "--network") if name == "network" else None
        group = _MACHINE if name in ("threads", "workers", "accelerator") else _CHOICES
        parameter = Parameter(name=names, help=text, group=group)
        fields.append((name, Annotated[kind | None, parameter], None))
    made = make_dataclass("LearnFlags", fields, frozen=True)
    made.__module__ = __name__  # where the command-line library looks for what the annotations mean
    return made


LearnFlags = _learn_flags()


def given(flags: Any) -> dict[str, Any]:
    """Return the options of a learn step that are set."""
    return {name: value for name, value in vars(flags).items() if value is not None}


def _opened(model: Path) -> "IncrementalClassifier":
    from geodl.app.classifier import IncrementalClassifier  # which loads torch

    return IncrementalClassifier(model)


def _print_json(facts: Any) -> None:
    print(json.dumps(facts, ensure_ascii=False))


def learn(
    model: Model,
    images: Folder,
    /,
    *,
    flags: Annotated[LearnFlags, Parameter(name="*")] = LearnFlags(),  # type: ignore[valid-type]  # noqa: B008
    again: Annotated[bool, _how(help="Learn images that were just learned once more.")] = False,
    relabel: Annotated[
        bool,
        _how(help="Move images that are known under another class to the class they have here."),
    ] = False,
    group_by: Annotated[
        str,
        _how(
            help="How series of images (frames of a video, bursts) are found, which accuracy leaves out as a whole: auto, name, time, "
            "folder, none, or a regular expression of the file's path in the class folder, with one group."
        ),
    ] = "auto",
    strict: Strict = False,
    quiet: Annotated[bool, _how(name=("--quiet", "-q"), help="Print the result alone.")] = False,
    as_json: Json = False,
) -> None:
    """Learn the classes in a folder of class folders, a zip archive or a CSV table."""
    watch, stopper = display.LearnWatch(quiet=quiet or as_json), Stopper()
    with stopper.watching(), watch.bar:
        try:
            done = _opened(model).learn(
                images,
                again=again,
                relabel=relabel,
                group_by=group_by,
                strict=strict,
                listener=watch,
                stop=stopper,
                confirm=watch.confirm,
                **given(flags),
            )
        except Interrupted as stop:
            saved = "stopped; progress is saved; the same command resumes"
            raise Interrupted(saved if watch.training else str(stop)) from None
    if as_json:
        doubtful = [each.to_json() for each in done.doubtful]
        skipped = display.skipped_json(done.skipped)
        _print_json(vars(done) | {"skipped": skipped, "doubtful": doubtful})
        return
    if done.already:
        say(f"already learned: {model} knows all of these images (--again repeats the step)")
    display.say_learned(model, done)


def predict(
    model: Model,
    images: Annotated[list[Path], Parameter(help="Images, or folders with images.", negative=())],
    /,
    *,
    top: Annotated[int, _how(help="Show so many of the likeliest classes.")] = 1,
    threshold: Annotated[
        float | None,
        _how(
            help="Answer unknown where the score (--json shows it) is below this: the probability of being of a known class "
            "in closed form, else the largest score; unset: as learning fitted it."
        ),
    ] = None,
    no_unknown: Annotated[bool, _how(help="Never answer unknown.")] = False,
    sort: Annotated[
        bool, _how(help="Least sure first, by the margin between the two likeliest classes.")
    ] = False,
    classifier: Classifier = None,
    strict: Strict = False,
    as_json: Json = False,
    as_csv: Annotated[bool, _how(name="--csv", help="Print CSV.")] = False,
    accelerator: Accelerator = "auto",
    workers: Workers = None,
) -> None:
    """Name the class of images."""
    if as_json and as_csv:
        raise ConfigError("--json and --csv: one of them, not both")
    if no_unknown and threshold is not None:
        raise ConfigError("--threshold and --no-unknown: one of them, not both")
    with display.predicting() as listener:
        found = quick.predict(
            model,
            images,
            classifier=classifier,
            top=top,
            threshold=-math.inf if no_unknown else threshold,
            strict=strict,
            accelerator=accelerator,
            workers=workers,
            listener=listener,
        )
    if sort:
        found = found.least_sure_first()
    if as_json:
        _print_json(display.predictions_json(found))
    elif as_csv:
        display.csv_predictions(found)
    elif found:
        display.table_predictions(found, top)
    if not as_json:
        display.say_skipped(found.skipped, to_errors=True)
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
    """Measure how good a model is on images whose classes are known."""
    with display.predicting() as listener:
        found = _opened(model).evaluate(
            images,
            classifier=classifier,
            strict=strict,
            accelerator=accelerator,
            workers=workers,
            listener=listener,
        )
    if as_json:
        confusion, skipped = found.confusion, display.skipped_json(found.skipped)
        counts = {"classes": confusion.classes, "confusion": confusion.counts.tolist()}
        _print_json(vars(found) | counts | {"skipped": skipped})
        return
    display.say_skipped(found.skipped)
    display.say_evaluation(found)


def info(
    model: Model,
    /,
    *,
    images: Annotated[bool, _how(help="List the stored images.")] = False,
    as_json: Json = False,
) -> None:
    """Describe what a model knows and keeps."""
    facts = _opened(model).info()
    if as_json:
        _print_json(facts)
        return
    display.say_known(model, facts)
    display.say_doubtful(facts["doubtful"])
    display.say_history(facts)
    display.say_kept(facts, listed=images)


@contextmanager
def _giving_up(model: Path) -> "Iterator[IncrementalClassifier]":
    """Give the model to change, and print a line where the change gives up a learn step that was stopped."""
    classifier = _opened(model)
    unfinished = classifier.unfinished
    yield classifier
    if unfinished:
        say("an interrupted learn step is given up: it began from another state", "yellow")


def undo(model: Model, /) -> None:
    """Undo the last step."""
    with _giving_up(model) as classifier:
        record = classifier.undo()
    if record["action"] == "damaged":
        say("undone: the last state, which is damaged; there is no redo")
    else:
        say(
            f"undone: {display.describe_step(record)}; `geodl redo` restores it, until the next change"
        )


def redo(model: Model, /) -> None:
    """Restore the step that was undone last."""
    with _giving_up(model) as classifier:
        record = classifier.redo()
    say(f"restored: {display.describe_step(record)}")


def rename(
    model: Model,
    old: Annotated[str, Parameter(help="The present name of the class.")],
    new: Annotated[str, Parameter(help="Its new name.")],
    /,
) -> None:
    """Rename a class."""
    with _giving_up(model) as classifier:
        classifier.rename(old, new)
    say(f"{old} is now called {new}")


def remove(
    model: Model,
    name: Annotated[str, Parameter(name="CLASS", help="The class to remove.")],
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
        stays = classifier.remove(name, for_good=for_good)
    rest = "`geodl undo` restores it (--for-good: no undo)"
    if for_good:
        rest = "no image of it is left, and there is no undo"
    rest += f"; {stays} stay" if stays else ""
    say(f"{name} is removed; {rest}")


_LEARNED = "a file, the name that it was learned under, or the identity that --json shows."


def relabel(
    model: Model,
    image: Annotated[str, Parameter(help=f"The learned image: {_LEARNED}")],
    name: Annotated[
        str,
        Parameter(
            name="CLASS", help="The right class; the class that it has: its label is confirmed."
        ),
    ],
    /,
) -> None:
    """Move a learned image to its right class."""
    with _giving_up(model) as classifier:
        record = classifier.relabel(image, name)
    done = f"is now of class {name}" if record["action"] == "relabel" else f"stays in class {name}"
    say(f"{image} {done}; `geodl undo` takes it back")
    _say_subtracted(record)


def forget(
    model: Model,
    images: Annotated[list[str], Parameter(help=f"Learned images: {_LEARNED}", negative=())],
    /,
) -> None:
    """Forget learned images."""
    with _giving_up(model) as classifier:
        number = classifier.forget(images)
        record = classifier.info()["steps"][-1]
    say(f"{count(number, 'image')} forgotten; `geodl undo` takes it back")
    _say_subtracted(record)


def _say_subtracted(record: Mapping[str, Any]) -> None:
    """Print what stays of an image where only sums over all are kept."""
    if record.get("subtracted"):
        say(
            "Only sums over the images are kept: its share is subtracted; standardization, levels and ridge stay as they were"
        )


def export(
    model: Model,
    file: Annotated[Path, Parameter(help="The ONNX file or, with --format web, the folder.")],
    /,
    *,
    to: Annotated[
        Literal["onnx", "web"],
        _how(name="--format", help="One ONNX file, or a folder with a page that runs it."),
    ] = "onnx",
    runtime: Annotated[
        Path | None,
        _how(help="With --format web: a directory with onnxruntime-web; else npm fetches it."),
    ] = None,
    force: Annotated[bool, _how(help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model as one ONNX file, or as a page for the browser."""
    classifier = _opened(model)
    if to == "web":
        done = classifier.export_web(file, runtime=runtime, force=force)
    else:
        done = classifier.export(file, force=force)
    if as_json:
        _print_json(done)
        return
    what = count(done["checked"], "made-up image" if done["made_up"] else "kept image")
    size = f"{count(done['classes'], 'class')}, {readable(done['bytes'])}"
    say(f"{file}: {size}; differs from the model by {done['difference']:.1g} at most on {what}")
