"""The result of a learn step: its figures, advice, and what was skipped."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from geodl.app.advice import ONLY_SUMS, at_end_of_step
from geodl.app.kept import Kept, doubtful
from geodl.app.state import State
from geodl.closed_form.offsets import unequal
from geodl.data.dataset import Skipped
from geodl.model.metrics import finite

REPEATABLE = "No step was made, and no option of this command was applied; --again learns the images once more."
"""Said where all images are known, unless only sums are kept of them."""


@dataclass(frozen=True)
class Learned:
    """The result of a learn step; accuracies in %, None where they were not measured.

    already:         the model knew all images; nothing was changed.
    accuracy:        on validation images, or by leave-one-out.
    balanced:        the accuracy in which each class counts the same; None where the classes have about as many images each.
    interval:        95 % interval of the accuracy.
    judged:          the number of images that the accuracy was measured on.
    series:          the number of series of several images among these, each left out as a whole; in_series: their images.
    left_out:        whether the images were learned too, each judged by the model without it.
    before, after:   the accuracy on the classes known before the step, and on those that it added.
    stored_features: the number of images whose features are stored.
    earlier_images:  whether the state before the step, which `undo` restores, contains images.
    doubtful:        learned images whose labels the rest of the data contradicts.
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
    """Return the result of a step that led from `last` to `state`; if both are the same object, all images were known.

    present: the step's classes; images: the number learned; problems: the images that were skipped; repeatable: whether
    the known ones can be learned again.
    """
    already, known = state is last, len(last.classes) if last else 0
    names, confusion, default = state.names, state.confusion, state.model.default
    stored, left_out = default.stored(), default.left_out()
    switched = stored.sums and not (last is not None and last.model.default.stored().sums)
    notes = [REPEATABLE] if repeatable else [ONLY_SUMS] if switched else []
    advice = at_end_of_step(confusion, state.classes, state.config, present)
    series = torch.empty(0, dtype=torch.int64)
    if left_out is not None and left_out.series is not None:
        sizes = torch.unique(left_out.series, return_counts=True)[1]
        series = sizes[sizes > 1]
    is_unequal = unequal(torch.tensor([each.images for each in state.classes]))
    return Learned(
        already=already,
        step=state.steps,
        classes=names,
        new=names[known:],
        returning=tuple(names[i] for i in present if i < known),
        images=images,
        accuracy=finite(confusion.accuracy),
        balanced=finite(confusion.balanced) if is_unequal else None,
        interval=confusion.interval,
        judged=confusion.images,
        series=len(series),
        in_series=int(series.sum()),
        left_out=left_out is not None,
        before=finite(confusion.rate(range(known))),
        after=finite(confusion.rate(range(known, len(names)))),
        per_class={name: finite(value) for name, value in confusion.per_class.items()},
        stored_images=state.stored_images,
        stored_bytes=state.stored_bytes,
        stored_features=stored.images,
        earlier_images=not already and last is not None and last.stored_images > 0,
        warnings=(*notes, *advice, *default.notes(names)),
        skipped=problems,
        doubtful=doubtful(state),
    )
