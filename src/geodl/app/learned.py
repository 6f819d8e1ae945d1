"""What a learn step did, in figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from geodl.app.advice import ONLY_SUMS, at_end_of_step
from geodl.app.kept import Kept, doubtful
from geodl.app.state import State
from geodl.closed_form.offsets import unequal
from geodl.data.dataset import Skipped
from geodl.model.metrics import finite

REPEATABLE = "No step was made, and no option of this command is applied; with --again the images are learned once more."
"""What to know where all images are known, but not by sums alone."""


@dataclass(frozen=True)
class Learned:
    """What a learn step did; accuracies in %, on the validation images; None where there are none.

    already: the model knew all images; nothing was changed.
    balanced: the accuracy in which each class counts the same, where some have much more images than others; else None.
    interval: of the accuracy, 95 %; judged: on how many images it rests; left_out: whether these were learned too, each judged
    by the model without it; series: how many series of several images there are among these, each left out as a whole;
    in_series: how many images these hold.
    before, after: the accuracy on the classes that were known before the step, and on those that it added.
    stored_features: of how many images the features are kept.
    earlier_images: whether the state before the step, which `undo` would bring back, holds images.
    doubtful: learned images whose labels the rest of the data contradicts.
    """

    already: bool
    step: int
    classes: tuple[str, ...]
    new: tuple[str, ...]
    returning: tuple[str, ...]
    images: int
    accuracy: float | None
    balanced: float | None
    interval: tuple[float, float]
    judged: int
    series: int
    in_series: int
    left_out: bool
    before: float | None
    after: float | None
    per_class: dict[str, float | None]
    stored_images: int
    stored_bytes: int
    stored_features: int
    earlier_images: bool
    warnings: tuple[str, ...]
    skipped: Skipped
    doubtful: tuple[Kept, ...] = ()


def figures(
    state: State,
    last: State | None,
    *,
    present: Sequence[int] = (),
    images: int = 0,
    problems: Skipped = (),
    repeatable: bool = False,
) -> Learned:
    """Return the figures of a step from the state `last`, which learned so many images, of the classes `present`.

    Where both states are the same object the model knew all images. problems: the images that were skipped; repeatable:
    whether the others can be learned once more.
    """
    already, known = state is last, len(last.classes) if last else 0
    switched = state.stored_sums and not (last is not None and last.stored_sums)
    notes = [REPEATABLE] if repeatable else [ONLY_SUMS] if switched else []
    names, confusion, default = state.names, state.confusion, state.model.default
    series, in_series = _series(state)
    advice = at_end_of_step(confusion, state.classes, state.config, present)
    return Learned(
        already=already,
        step=state.steps,
        classes=names,
        new=names[known:],
        returning=tuple(names[i] for i in present if i < known),
        images=images,
        accuracy=finite(confusion.accuracy),
        balanced=finite(confusion.balanced) if _unequal(state) else None,
        interval=confusion.interval,
        judged=confusion.images,
        series=series,
        in_series=in_series,
        left_out=default.left_out() is not None,
        before=finite(confusion.rate(range(known))),
        after=finite(confusion.rate(range(known, len(names)))),
        per_class={name: finite(value) for name, value in confusion.per_class.items()},
        stored_images=state.stored_images,
        stored_bytes=state.stored_bytes,
        stored_features=state.stored_features,
        earlier_images=not already and last is not None and last.stored_images > 0,
        warnings=(*notes, *advice, *default.notes(names)),
        skipped=problems,
        doubtful=doubtful(state),
    )


def _unequal(state: State) -> bool:
    return unequal(torch.tensor([each.images for each in state.classes]))


def _series(state: State) -> tuple[int, int]:
    """Return in how many series of several images the judged images are, and how many images these hold."""
    left_out = state.model.default.left_out()
    if left_out is None or left_out.series is None:
        return 0, 0
    _, sizes = torch.unique(left_out.series, return_counts=True)
    several = sizes[sizes > 1]
    return len(several), int(several.sum())
