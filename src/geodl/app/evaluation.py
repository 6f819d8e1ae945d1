"""The accuracy of a model on labelled images."""

from dataclasses import dataclass

import torch

from geodl.app.state import State
from geodl.closed_form.offsets import unequal
from geodl.core.errors import DataError
from geodl.core.events import ImagesPredicted, Listener
from geodl.data.dataset import Skipped, insist
from geodl.data.intake import Intake
from geodl.model.metrics import Confusion, finite
from geodl.model.recognizer import Recognizer


@dataclass(frozen=True)
class Evaluation:
    """Accuracies on labelled images in %, and the confusion matrix.

    balanced: the accuracy in which each class counts the same; None where the classes have about as many images each.
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
    recognizer: Recognizer,
    intake: Intake,
    strict: bool,
    workers: int | None,
    listener: Listener,
) -> Evaluation:
    """Evaluate a model on labelled images; options as for `IncrementalClassifier.evaluate`."""
    skipped = list(intake.problems)
    rows = {}
    for i, name in enumerate(intake.classes):
        if name in state.names:
            rows[i] = state.names.index(name)
        else:
            skipped.append((name, "the model does not know this class"))
    known = [i for i, label in enumerate(intake.images.labels.tolist()) if label in rows]
    if not known:
        raise DataError(f"{intake.title}: no image of a class that the model knows")
    insist(strict, skipped)
    pictures = intake.images.select(known)
    true: list[int] = []
    predicted: list[int] = []
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
    steps: dict[int, list[int]] = {}
    for step, row in sorted((known.step, row) for row, known in enumerate(state.classes)):
        steps.setdefault(step, []).append(row)
    return Evaluation(
        images=confusion.images,
        accuracy=confusion.accuracy,
        balanced=confusion.balanced if unequal(confusion.counts.sum(dim=1)) else None,
        per_class={name: finite(value) for name, value in confusion.per_class.items()},
        per_step={step: finite(confusion.rate(rows)) for step, rows in steps.items()},
        confusion=confusion,
        skipped=tuple(skipped),
    )
