"""``geodl learn``, ``predict``, ``evaluate`` and ``info``: your own images."""

import json
import math
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from geodl.app import quick
from geodl.cli import own_display as display
from geodl.cli.display import Stopper, say
from geodl.core.errors import ConfigError, DataError, Interrupted

if TYPE_CHECKING:
    from geodl.app.classifier import IncrementalClassifier

how = partial(Parameter, group=Group("How it is done", sort_key=6), negative=())
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
    bool, how(help="Stop at the first file that cannot be used, instead of skipping it.")
]
Json = Annotated[bool, how(name="--json", help="Print JSON.")]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Reading:
    """How images are read and told apart; the names are those of the library."""

    classifier: Annotated[
        str | None,
        how(
            help="analytic: closed form; nme: nearest mean of exemplars; ncm: nearest class mean; cnn: the network's output; "
            "unset: the best there is."
        ),
    ] = None
    strict: Strict = False
    accelerator: Annotated[Device, Parameter(help="Where the network runs.", group=_MACHINE)] = (
        "auto"
    )
    workers: Annotated[
        int | None,
        Parameter(
            help="Threads that decode images; 0: the main thread does; unset: chosen.",
            group=_MACHINE,
        ),
    ] = None


# The options of a run that a learn step chooses by itself, in a practitioner's words.
_LEARN: dict[str, tuple[Any, str]] = {
    "method": (
        Literal["analytic", "lucir", "finetune"],
        "analytic: closed form on pre-trained features, in seconds; lucir: train with GeoDL; finetune: train without.",
    ),
    "adapt": (
        Literal["no", "auto", "yes"],
        "Train the last stages of the pre-trained network on the first images, then freeze it; auto: keep that only where it is right on clearly more of the images set apart. Takes minutes.",
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
    "workers": (int, "Threads that decode images; 0: the main thread does; unset: chosen."),
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


def opened(model: Path) -> "IncrementalClassifier":
    """Return a model of a person's images."""
    from geodl.app.classifier import IncrementalClassifier  # which loads torch

    return IncrementalClassifier(model)


def print_json(facts: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(facts, ensure_ascii=False))


@dataclass(frozen=True)
class Taking:
    """Which images a step takes."""

    again: Annotated[
        bool,
        how(help="Learn images that the model knows once more; not where it keeps sums alone."),
    ] = False
    relabel: Annotated[
        bool,
        how(help="Move images that are known under another class to the class they have here."),
    ] = False
    group_by: Annotated[
        str,
        how(
            help="How series of images (frames of a video, bursts) are found, which accuracy leaves out as a whole: auto, name, time, "
            "folder, none, or a regular expression of the file's path in the class folder, with one group."
        ),
    ] = "auto"
    strict: Strict = False


def learn(
    model: Model,
    images: Folder,
    /,
    *,
    flags: Annotated[LearnFlags, Parameter(name="*")] = LearnFlags(),  # type: ignore[valid-type]  # noqa: B008
    taking: Annotated[Taking, Parameter(name="*")] = Taking(),  # noqa: B008  # frozen
    quiet: Annotated[bool, how(name=("--quiet", "-q"), help="Print the result alone.")] = False,
    as_json: Json = False,
) -> None:
    """Learn the classes in a folder of class folders, a zip archive or a CSV table."""
    watch, stopper = display.LearnWatch(quiet=quiet or as_json), Stopper()
    options = vars(taking) | given(flags)
    with stopper.watching(), watch.bar:
        try:
            done = opened(model).learn(
                images, listener=watch, stop=stopper, confirm=watch.confirm, **options
            )
        except Interrupted as stop:
            saved = "stopped; progress is saved; the same command resumes"
            raise Interrupted(saved if watch.training else str(stop)) from None
    if as_json:
        doubtful = [each.to_json() for each in done.doubtful]
        skipped = display.skipped_json(done.skipped)
        print_json(vars(done) | {"skipped": skipped, "doubtful": doubtful})
        return
    if done.already:
        say(f"already learned: {model} knows all of these images")
    display.say_learned(model, done)


def predict(
    model: Model,
    images: Annotated[list[Path], Parameter(help="Images, or folders with images.", negative=())],
    /,
    *,
    top: Annotated[int, how(help="Show so many of the likeliest classes.")] = 1,
    threshold: Annotated[
        float | None,
        how(
            help="Answer unknown where the score (--json shows it) is below this: the probability of being of a known class "
            "in closed form, else the largest score; unset: as learning fitted it."
        ),
    ] = None,
    no_unknown: Annotated[bool, how(help="Never answer unknown.")] = False,
    sort: Annotated[
        bool, how(help="Least sure first, by the margin between the two likeliest classes.")
    ] = False,
    reading: Annotated[Reading, Parameter(name="*")] = Reading(),  # noqa: B008  # frozen
    as_json: Json = False,
    as_csv: Annotated[bool, how(name="--csv", help="Print CSV.")] = False,
) -> None:
    """Name the class of images."""
    if as_json and as_csv:
        raise ConfigError("--json and --csv: one of them, not both")
    if no_unknown and threshold is not None:
        raise ConfigError("--threshold and --no-unknown: one of them, not both")
    least = -math.inf if no_unknown else threshold
    with display.predicting() as listener:
        found = quick.predict(
            model, images, top=top, threshold=least, listener=listener, **vars(reading)
        )
    if sort:
        found = found.least_sure_first()
    if as_json:
        print_json(display.predictions_json(found))
    else:
        display.say_predictions(found, top, as_csv=as_csv)
    if not len(found):
        raise DataError("no image could be read" if found.skipped else "no images found")


def evaluate(
    model: Model,
    images: Folder,
    /,
    *,
    reading: Annotated[Reading, Parameter(name="*")] = Reading(),  # noqa: B008  # frozen
    as_json: Json = False,
) -> None:
    """Measure how good a model is on images whose classes are known."""
    with display.predicting() as listener:
        found = opened(model).evaluate(images, listener=listener, **vars(reading))
    if as_json:
        confusion, skipped = found.confusion, display.skipped_json(found.skipped)
        counts = {"classes": confusion.classes, "confusion": confusion.counts.tolist()}
        print_json(vars(found) | counts | {"skipped": skipped})
        return
    display.say_skipped(found.skipped)
    display.say_evaluation(found)


def info(
    model: Model,
    /,
    *,
    images: Annotated[bool, how(help="List the stored images.")] = False,
    as_json: Json = False,
) -> None:
    """Describe what a model knows and keeps."""
    facts = opened(model).info()
    if as_json:
        print_json(facts)
        return
    display.say_known(model, facts)
    display.say_doubtful(facts["doubtful"])
    display.say_history(facts)
    display.say_kept(facts, listed=images)
