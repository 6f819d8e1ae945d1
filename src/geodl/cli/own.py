"""``geodl learn``, ``predict``, ``evaluate`` and ``info``: your own images."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from geodl.app import quick
from geodl.cli import own_display as display
from geodl.cli.display import Json, Quiet, Stopper, echo, print_json
from geodl.core.errors import ConfigError, DataError, Interrupted

if TYPE_CHECKING:
    from geodl.app.classifier import IncrementalClassifier

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
    bool, Parameter(help="Stop at the first file that cannot be used, instead of skipping it.")
]
Workers = Annotated[
    int | None,
    Parameter(
        help="Threads that decode images; 0: decode in the main thread; unset: chosen.",
        group=_MACHINE,
    ),
]
Device = Literal["auto", "cpu", "cuda"]
Switch = Annotated[bool | None, Parameter(negative=None)]  # --flip and --no-flip
_DEVICE = Parameter(help="Where the network runs.", group=_MACHINE)


@Parameter(name="*")
@dataclass(frozen=True)
class Reading:
    """How images are read and classified, as keyword arguments of `IncrementalClassifier`.

    Attributes:
        classifier: analytic: closed form; nme: nearest mean of exemplars; ncm: nearest class mean; cnn: the network's
            output; unset: the best available.
    """

    classifier: str | None = None
    strict: Strict = False
    accelerator: Annotated[Device, _DEVICE] = "auto"
    workers: Workers = None


@Parameter(name="*", group=_CHOICES)
@dataclass(frozen=True)
class LearnFlags:
    """The options of a run that a learn step chooses unless they are set, in a practitioner's words.

    Attributes:
        method: analytic: closed form on pre-trained features, in seconds; lucir: train with GeoDL; finetune: train
            without.
        adapt: Train the last stages of the pre-trained network on the first images, then freeze it; auto: keep the
            result only if it classifies clearly more of the held-out images correctly. Takes minutes.
        network: The network: efficientnet-lite0, efficientnet-lite2 (larger), resnet32, resnet18, ..., or timm:NAME.
        pretrained: Start from published weights (efficientnet-lite0, efficientnet-lite2, timm:NAME).
        weights: Start from the weights in this file: safetensors, .pth or .pt.
        image_size: Side of the network's square input, in pixels.
        whole: Use all of each picture instead of its middle square: for panoramas and tall pictures.
        flip: Learn mirrored images too; not for text, signs or left and right.
        epochs: Epochs: passes over all the training images.
        batch_size: Images in one training step.
        lr: Learning rate, at its highest.
        exemplars: Images to keep: in a trained model to learn from again; in closed form only to show, at most 10 a
            class.
        memory_budget: Whether --exemplars counts for each class or in total.
        seed: Random seed: another number gives another, equally good model.
        threads: CPU threads; unset: the available cores, at most OMP_NUM_THREADS; one for tiny images.
    """

    method: Literal["analytic", "lucir", "finetune"] | None = None
    adapt: Literal["no", "auto", "yes"] | None = None
    network: Annotated[str | None, Parameter(name=("--backbone", "--network"))] = None
    pretrained: Switch = None
    weights: Path | None = None
    image_size: int | None = None
    whole: Switch = None
    flip: Switch = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    exemplars: int | None = None
    memory_budget: Literal["per_class", "total"] | None = None
    seed: int | None = None
    threads: Annotated[int | None, Parameter(group=_MACHINE)] = None
    workers: Workers = None
    accelerator: Annotated[Device | None, _DEVICE] = None

    def given(self) -> dict[str, Any]:
        """Return the options that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


def opened(model: Path) -> "IncrementalClassifier":
    """Return a model of the user's own images."""
    from geodl.app.classifier import IncrementalClassifier  # which loads torch

    return IncrementalClassifier(model)


def learn(
    model: Model,
    images: Folder,
    /,
    *,
    again: bool = False,
    relabel: bool = False,
    group_by: str = "auto",
    strict: Strict = False,
    flags: LearnFlags = LearnFlags(),  # noqa: B008  # frozen
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Learn the classes in a folder of class folders, a zip archive or a CSV table.

    Args:
        again: Learn images that the model knows once more; not possible where it keeps only sums.
        relabel: Move images that are known under another class to the class that they have here.
        group_by: How series of images (video frames, bursts) are found, which are left out as a whole to measure accuracy:
            auto, name, time, folder, none, or a regular expression, with one group, for the file's path in the class
            folder.
    """
    watch, stopper = display.LearnWatch(quiet=quiet or as_json), Stopper()
    with stopper.watching(), watch.bar:
        try:
            learned = opened(model).learn(
                images,
                again=again,
                relabel=relabel,
                group_by=group_by,
                strict=strict,
                listener=watch,
                stop=stopper,
                confirm=watch.confirm,
                **flags.given(),
            )
        except Interrupted as stop:
            saved = "stopped; progress is saved; the same command resumes"
            raise Interrupted(saved if watch.training else str(stop)) from None
    if as_json:
        doubtful = [image.to_json() for image in learned.doubtful]
        skipped = display.skipped_json(learned.skipped)
        print_json(vars(learned) | {"skipped": skipped, "doubtful": doubtful})
        return
    if learned.already:
        echo(f"already learned: {model} knows all of these images")
    display.print_learned(model, learned)


def predict(
    model: Model,
    images: list[Path],
    /,
    *,
    top: int = 1,
    threshold: float | None = None,
    no_unknown: bool = False,
    sort: bool = False,
    reading: Reading = Reading(),  # noqa: B008  # frozen
    as_json: Json = False,
    as_csv: Annotated[bool, Parameter(name="--csv")] = False,
) -> None:
    """Name the class of images.

    Args:
        images: Images, or folders with images.
        top: Show this many of the likeliest classes.
        threshold: Answer unknown below this score (--json shows it): the probability that the image is of a known class in
            closed form, else the largest score; unset: as fitted by learning.
        no_unknown: Never answer unknown.
        sort: Least certain first, by the margin between the two likeliest classes.
        as_csv: Print CSV.
    """
    if as_json and as_csv:
        raise ConfigError("--json and --csv: one of them, not both")
    if no_unknown and threshold is not None:
        raise ConfigError("--threshold and --no-unknown: one of them, not both")
    least = -math.inf if no_unknown else threshold
    with display.predicting() as listener:
        predictions = quick.predict(
            model, images, top=top, threshold=least, listener=listener, **vars(reading)
        )
    if sort:
        predictions = predictions.least_sure_first()
    if as_json:
        print_json(display.predictions_json(predictions))
    else:
        display.print_predictions(predictions, top, as_csv=as_csv)
    if not len(predictions):
        raise DataError("no image could be read" if predictions.skipped else "no images found")


def evaluate(
    model: Model,
    images: Folder,
    /,
    *,
    reading: Reading = Reading(),  # noqa: B008  # frozen
    as_json: Json = False,
) -> None:
    """Measure accuracy on images whose classes are known."""
    with display.predicting() as listener:
        found = opened(model).evaluate(images, listener=listener, **vars(reading))
    if as_json:
        confusion, skipped = found.confusion, display.skipped_json(found.skipped)
        counts = {"classes": confusion.classes, "confusion": confusion.counts.tolist()}
        print_json(vars(found) | counts | {"skipped": skipped})
        return
    display.print_skipped(found.skipped)
    display.print_evaluation(found)


def info(model: Model, /, *, images: bool = False, as_json: Json = False) -> None:
    """Describe what a model knows and keeps.

    Args:
        images: List the stored images.
    """
    facts = opened(model).info()
    if as_json:
        print_json(facts)
        return
    display.print_known(model, facts)
    display.print_doubtful(facts["doubtful"])
    display.print_history(facts)
    display.print_stored(facts, list_images=images)
