"""How good a model is on labelled images."""

from dataclasses import dataclass

import torch

from geodl.app.state import State
from geodl.closed_form.offsets import unequal
from geodl.core.errors import DataError
from geodl.core.events import ImagesPredicted, Listener, ignore
from geodl.data.dataset import Skipped, insist
from geodl.data.intake import Intake
from geodl.model.metrics import Confusion, finite


@dataclass(frozen=True)
class Evaluation:
    """How good the model is on labelled images, in %; `confusion` holds the counts (C, C) with the true class first.

    balanced: the accuracy in which each class counts the same, where some have much more images than others; else None.
    """

    images: int
    accuracy: float
    balanced: float | None
    per_class: dict[str, float | None]
    per_step: dict[int, float | None]
    confusion: Confusion
    skipped: Skipped


def evaluated(
    state: State,
    intake: Intake,
    *,
    classifier: str | None = None,
    strict: bool = False,
    accelerator: str = "auto",
    workers: int | None = None,
    listener: Listener = ignore,
) -> Evaluation:
    """Measure accuracy on labelled images; options as for `IncrementalClassifier.evaluate`."""
    rows = {
        i: state.names.index(name) for i, name in enumerate(intake.classes) if name in state.names
    }
    strangers = [name for name in intake.classes if name not in state.names]
    skipped = [
        *intake.problems,
        *((name, "the model does not know this class") for name in strangers),
    ]
    known = [i for i, label in enumerate(intake.images.labels.tolist()) if label in rows]
    if not known:
        raise DataError(f"{intake.title}: no image of a class that the model knows")
    insist(strict, skipped)
    pictures = intake.images.select(known)
    true: list[int] = []
    predicted: list[int] = []
    recognizer = state.model.recognizer(classifier, accelerator=accelerator)
    for positions, answers, bad in recognizer.stream(pictures, workers):
        skipped += [(intake.names[known[i]], reason) for i, reason in bad]
        insist(strict, skipped)
        listener(ImagesPredicted(len(positions) + len(bad), len(pictures)))
        true += [rows[label] for label in pictures.labels[positions].tolist()]
        predicted += answers.scores.argmax(dim=1).tolist()
    if not true:
        first = f"{skipped[-1][0]}: {skipped[-1][1]}"
        raise DataError(f"{intake.title}: no image could be read, such as {first}")
    confusion = Confusion.of(torch.tensor(true), torch.tensor(predicted), state.names)
    return _evaluation(state, confusion, tuple(skipped))


def _evaluation(state: State, confusion: Confusion, skipped: Skipped) -> Evaluation:
    learned_in: dict[int, list[int]] = {}
    for step, i in sorted((known.step, i) for i, known in enumerate(state.classes)):
        learned_in.setdefault(step, []).append(i)
    return Evaluation(
        images=confusion.images,
        accuracy=confusion.accuracy,
        balanced=confusion.balanced if unequal(confusion.counts.sum(dim=1)) else None,
        per_class={name: finite(value) for name, value in confusion.per_class.items()},
        per_step={step: finite(confusion.rate(rows)) for step, rows in learned_in.items()},
        confusion=confusion,
        skipped=skipped,
    )
