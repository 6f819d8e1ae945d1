"""The figures of a run: accuracy per phase, forgetting, transfer, all in % and in float64."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geodl.errors import DataError


def confusion(labels: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Count pairs of true class and prediction: labels, predictions (N,) -> (classes, classes) int64, true class first."""
    for name, values in (("label", labels), ("prediction", predictions)):
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < classes:
            raise DataError(f"{name}s from {int(values.min())} to {int(values.max())}: allowed are 0 to {classes - 1}")
    return torch.bincount(labels * classes + predictions, minlength=classes * classes).reshape(classes, classes)


@dataclass(frozen=True)
class Trajectory:
    """What one classifier could do after each phase.

    groups:     the classes (positions in the learning order) that each phase adds; of any sizes.
    confusions: one (C, C) matrix for each phase done, over the test images of the classes seen by then; C may grow.
    classes:    the names of the classes in the learning order.
    """

    groups: Sequence[Sequence[int]]
    confusions: Sequence[Tensor]
    classes: Sequence[str]

    def __post_init__(self) -> None:
        if not 1 <= len(self.confusions) <= len(self.groups):
            raise DataError(f"{len(self.confusions)} phases evaluated: allowed are 1 to {len(self.groups)}")
        for phase, counts in enumerate(self.confusions):
            if len(counts) <= max(self._seen(phase)):
                raise DataError(f"the confusion matrix of phase {phase} lacks class {max(self._seen(phase))}")

    def _seen(self, phase: int) -> list[int]:
        return [c for group in self.groups[: phase + 1] for c in group]

    def _rate(self, phase: int, classes: Sequence[int]) -> float:
        """Return the accuracy in % of a phase's model on some classes' test images; nan where there are none."""
        rows = self.confusions[phase][list(classes)]
        total = int(rows.sum())
        return 100 * int(self.confusions[phase].diagonal()[list(classes)].sum()) / total if total else math.nan

    @property
    def accuracy(self) -> list[float]:
        """A_t: the accuracy on all classes seen up to each phase t."""
        return [self._rate(t, self._seen(t)) for t in range(len(self.confusions))]

    @property
    def matrix(self) -> list[list[float]]:
        """Group x phase accuracies; nan before the group is learned."""
        phases = range(len(self.confusions))
        return [
            [self._rate(t, group) if t >= g else math.nan for t in phases]
            for g, group in enumerate(self.groups[: len(self.confusions)])
        ]

    @property
    def per_class(self) -> list[float]:
        """The last model's accuracy on each class seen, in the learning order; nan without test images."""
        last = len(self.confusions) - 1
        return [self._rate(last, [c]) for c in sorted(self._seen(last))]

    @property
    def average(self) -> float | None:
        """The paper's average accuracy: the mean of A_1..A_T, without phase 0; None while only phase 0 is done."""
        return _mean(self.accuracy[1:])

    @property
    def average_incremental(self) -> float | None:
        """Most other papers' average: the mean of A_0..A_T; None while only phase 0 is done."""
        return _mean(self.accuracy) if len(self.confusions) > 1 else None

    @property
    def forgetting(self) -> float | None:
        """The paper's forgetting: accuracy on the first group by the phase-0 model minus by the last model."""
        return _mean([self.matrix[0][0] - self.matrix[0][-1]]) if len(self.confusions) > 1 else None

    @property
    def mean_forgetting(self) -> float | None:
        """The usual forgetting: best before the last phase minus last, mean over the groups learned before it."""
        return _mean(max(row[g:-1], default=math.nan) - row[-1] for g, row in enumerate(self.matrix))

    @property
    def backward_transfer(self) -> float | None:
        """Last minus just learned, mean over the groups learned before the last phase."""
        return _mean(row[-1] - row[g] for g, row in enumerate(self.matrix[:-1]))

    def to_dict(self) -> dict[str, Any]:
        """Return everything by name, ready for JSON: classes by their names, None where there is no number."""
        seen = sorted(self._seen(len(self.confusions) - 1))
        return {
            "accuracy": _json(self.accuracy),
            "average": self.average,
            "average_incremental": self.average_incremental,
            "forgetting": self.forgetting,
            "mean_forgetting": self.mean_forgetting,
            "backward_transfer": self.backward_transfer,
            "groups": [[self.classes[c] for c in group] for group in self.groups[: len(self.confusions)]],
            "matrix": [_json(row) for row in self.matrix],
            "per_class": dict(zip((self.classes[c] for c in seen), _json(self.per_class), strict=True)),
        }


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean of the numbers among `values`; None where there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def _json(values: Sequence[float]) -> list[float | None]:
    """Replace nan, which JSON does not know, by None."""
    return [None if math.isnan(value) else value for value in values]


def sparse(matrix: Tensor) -> list[list[int]]:
    """Give a confusion matrix as [true, predicted, count] for the counts that are not 0."""
    return [[int(i), int(j), int(matrix[i, j])] for i, j in matrix.nonzero()]


def dense(entries: list[list[int]], classes: int) -> Tensor:
    """Give back the (C, C) confusion matrix that ``sparse`` wrote."""
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    for true, predicted, count in entries:
        matrix[true, predicted] = count
    return matrix
