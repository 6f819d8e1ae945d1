"""Metrics of a run: accuracy per phase, forgetting, transfer, all in % and in float64."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from geodl.core.errors import DataError
from geodl.core.tensors import shaped


@dataclass(frozen=True)
class ClassRow:
    """The predictions of one class: `right` of the `judged` images; accuracy and its 95 % interval in %, if there are any."""

    name: str
    judged: int = 0
    right: int = 0
    accuracy: float | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix.

    counts:  (C, C) int64, rows are true classes.
    classes: the names of the C classes, in learning order.
    series:  (C,) int64, the number of series of each class's images; None: each image is its own.
    gains:   (C,) float64, how many more images of each class would be right if no series were left out; None: none.
    """

    counts: Tensor
    classes: tuple[str, ...]
    series: Tensor | None = None
    gains: Tensor | None = None

    @classmethod
    def of(cls, labels: Tensor, predictions: Tensor, classes: Sequence[str]) -> Self:
        """Count pairs of true class and prediction: labels, predictions (N,)."""
        size = len(classes)
        for name, values in (("label", labels), ("prediction", predictions)):
            if len(values) and not 0 <= int(values.min()) <= int(values.max()) < size:
                raise DataError(
                    f"{name}s from {int(values.min())} to {int(values.max())}: allowed are 0 to {size - 1}"
                )
        counts = torch.bincount(labels * size + predictions, minlength=size * size)
        return cls(counts.reshape(size, size), tuple(classes))

    def in_series(self, labels: Tensor, series: Tensor, gains: Tensor) -> "Confusion":
        """Return the matrix with the numbers and gains of series: labels, series, gains (N,)."""
        classes = [labels[series == each][0] for each in torch.unique(series)]
        numbers = torch.bincount(
            torch.tensor(classes, dtype=torch.int64), minlength=len(self.classes)
        )
        sums = torch.zeros(len(self.classes), dtype=torch.float64)
        return replace(self, series=numbers, gains=sums.index_add_(0, labels, gains.double()))

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.counts.sum())

    @property
    def units(self) -> int:
        """The number of independent observations: of series, or of images if they are in none."""
        return self.images if self.series is None else int(self.series.sum())

    @property
    def balanced(self) -> float:
        """The mean of the classes' accuracies in %; nan without images."""
        known = [value for value in self.per_class.values() if not math.isnan(value)]
        return math.fsum(known) / len(known) if known else math.nan

    @property
    def accuracy(self) -> float:
        """The accuracy in % on all images; nan without images."""
        return self.rate(range(len(self.classes)))

    @property
    def per_class(self) -> dict[str, float]:
        """The accuracy in % on each class; nan for a class without images."""
        return {name: self.rate([i]) for i, name in enumerate(self.classes)}

    @property
    def rows(self) -> list[ClassRow]:
        """The predictions of each class."""
        judged, right = self.counts.sum(dim=1).tolist(), self.counts.diagonal().tolist()
        rows = []
        for i, name in enumerate(self.classes):
            figures = (judged[i], right[i], self.rate([i]), self.interval_of([i]))
            rows.append(ClassRow(name, *figures) if judged[i] else ClassRow(name))
        return rows

    @property
    def weakest(self) -> list[ClassRow]:
        """The rows, the weakest class first, classes without images last."""
        return sorted(self.rows, key=lambda row: (not row.judged, row.accuracy or 0.0, -row.judged))

    def rate(self, classes: Iterable[int]) -> float:
        """Return the accuracy in % on the images of some classes, by position; nan without images."""
        rows = list(classes)
        total = int(self.counts[rows].sum())
        if not total:
            return math.nan
        right = int(self.counts.diagonal()[rows].sum())
        if self.gains is None or not bool(self.gains[rows].any()):
            return 100 * right / total
        return 100 * min(max(right + float(self.gains[rows].sum()), 0.0), total) / total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy in %."""
        return self.interval_of(range(len(self.classes)))

    def interval_of(self, classes: Iterable[int]) -> tuple[float, float]:
        """Return the 95 % interval of the accuracy on some classes, by position, in % (Wilson 1927).

        Gains widen it: they are an estimate; the accuracy without them is a lower bound.
        """
        rows = list(classes)
        units = self.counts.sum(dim=1) if self.series is None else self.series
        if not (number := int(units[rows].sum())):
            return 0.0, 100.0
        rates = (self.rate(rows), replace(self, gains=None).rate(rows))
        intervals = [wilson(rate / 100, number) for rate in rates]
        # Of 100 % the upper end is 100 %, except for rounding.
        return min(low for low, _ in intervals), max(rates[0], *(high for _, high in intervals))

    def mistakes(self, most: int | None = None) -> list[tuple[int, int, int]]:
        """Return the mistakes as (true class, prediction, count), the most frequent first."""
        wrong = self.counts.clone().fill_diagonal_(0)
        mistakes = [(int(i), int(j), int(wrong[i, j])) for i, j in wrong.nonzero()]
        return sorted(mistakes, key=lambda each: -each[2])[:most]

    def without(self, gone: int) -> "Confusion":
        """Return the matrix without a class: without its images, and without those predicted as it."""
        rest = [i for i in range(len(self.classes)) if i != gone]
        names = tuple(self.classes[i] for i in rest)
        series = None if self.series is None else self.series[rest]
        gains = None if self.gains is None else self.gains[rest]
        return Confusion(self.counts[rest][:, rest], names, series, gains)

    def to_json(self) -> list[list[int]]:
        """Return the counts above 0 as [true, predicted, count]."""
        return [[int(i), int(j), int(self.counts[i, j])] for i, j in self.counts.nonzero()]

    @classmethod
    def from_json(cls, entries: Sequence[Sequence[int]], classes: Sequence[str]) -> Self:
        """Return the matrix of `to_json`."""
        counts = torch.zeros(len(classes), len(classes), dtype=torch.int64)
        for true, predicted, count in entries:
            counts[true, predicted] = count
        if bool((counts < 0).any()):
            raise ValueError("a count below 0")
        return cls(counts, tuple(classes))


def wilson(share: float, number: int) -> tuple[float, float]:
    """Return the 95 % interval in % of a share observed in `number` cases."""
    z = 1.96
    center = share + z * z / (2 * number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    whole = 1 + z * z / number
    return 100 * (center - half) / whole, 100 * (center + half) / whole


def to_metrics(phase: int, confusions: Mapping[str, Confusion], **more: Any) -> dict[str, Any]:
    """Return the content of metrics.json for a phase. It has no times and paths, so that equal runs have equal bytes."""
    classes = next(iter(confusions.values())).classes
    counts = {name: confusion.to_json() for name, confusion in confusions.items()}
    accuracy = {name: finite(confusion.accuracy) for name, confusion in confusions.items()}
    series = {
        name: {"numbers": confusion.series.tolist(), "gains": confusion.gains.tolist()}
        for name, confusion in confusions.items()
        if confusion.series is not None and confusion.gains is not None
    }
    if series:
        more = {"series": series, **more}
    return {
        "phase": phase,
        "classes": list(classes),
        "accuracy": accuracy,
        "confusions": counts,
        **more,
    }


def confusions_of(metrics: Mapping[str, Any]) -> dict[str, Confusion]:
    """Return the confusion matrices of a metrics.json by classifier."""
    if not all(isinstance(name, str) for name in metrics["classes"]):
        raise ValueError("the name of a class is no text")
    confusions = {
        name: Confusion.from_json(entries, metrics["classes"])
        for name, entries in metrics["confusions"].items()
    }
    for name, each in metrics.get("series", {}).items():
        size = len(confusions[name].classes)
        gains = shaped(torch.tensor(each["gains"], dtype=torch.float64), "gains", size)
        series = shaped(torch.tensor(each["numbers"]), "numbers", size, dtype=torch.int64)
        if bool((series < 0).any()):
            raise ValueError("a number of series below 0")
        confusions[name] = replace(confusions[name], series=series, gains=gains)
    return confusions


@dataclass(frozen=True)
class Trajectory:
    """The confusion matrices of one classifier after each phase.

    confusions: one per completed phase, on the test images of the classes seen so far, the phase's own classes last.
    """

    confusions: Sequence[Confusion]

    def __post_init__(self) -> None:
        sizes = [len(confusion.classes) for confusion in self.confusions]
        if not sizes or sizes != sorted(sizes):
            raise DataError(
                f"phases with {sizes} classes: one or more phases are needed, and classes never decrease"
            )

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Self]:
        """Return the trajectory of every classifier that occurs in all of these metrics.json, one per phase."""
        phases = [confusions_of(each) for each in metrics]
        trajectories = {}
        for name in phases[-1] if phases else ():
            confusions = [phase[name] for phase in phases if name in phase]
            if len(confusions) == len(phases):
                trajectories[name] = cls(confusions)
        return trajectories

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes of the last phase, in learning order."""
        return self.confusions[-1].classes

    @property
    def groups(self) -> list[range]:
        """The classes, by position, that each phase added."""
        ends = [len(confusion.classes) for confusion in self.confusions]
        return [range(*pair) for pair in itertools.pairwise([0, *ends])]

    @property
    def accuracy(self) -> list[float]:
        """A_t: the accuracy on all classes seen up to each phase t."""
        return [confusion.accuracy for confusion in self.confusions]

    @property
    def matrix(self) -> list[list[float]]:
        """Group x phase accuracies; nan before the group is learned."""
        rows = []
        for g, group in enumerate(self.groups):
            known = [confusion.rate(group) for confusion in self.confusions[g:]]
            rows.append([math.nan] * g + known)
        return rows

    @property
    def per_class(self) -> dict[str, float]:
        """The last model's accuracy on each class, in learning order; nan without test images."""
        return self.confusions[-1].per_class

    @property
    def final(self) -> float | None:
        """The last model's accuracy on all classes seen; None without test images."""
        return finite(self.accuracy[-1])

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
        """The paper's forgetting: the phase-0 model's accuracy on the first group minus the last model's."""
        return _mean([self.matrix[0][0] - self.matrix[0][-1]]) if len(self.confusions) > 1 else None

    @property
    def mean_forgetting(self) -> float | None:
        """The usual forgetting: best accuracy before the last phase minus last, mean over earlier groups."""
        return _mean(
            max(row[g:-1], default=math.nan) - row[-1] for g, row in enumerate(self.matrix)
        )

    @property
    def backward_transfer(self) -> float | None:
        """Last accuracy minus that when just learned, mean over earlier groups."""
        return _mean(row[-1] - row[g] for g, row in enumerate(self.matrix[:-1]))

    def to_dict(self) -> dict[str, Any]:
        """Return all metrics by name, ready for JSON: classes by name, None for nan."""
        return {
            "accuracy": _numbers(self.accuracy),
            "final": self.final,
            "average": self.average,
            "average_incremental": self.average_incremental,
            "forgetting": self.forgetting,
            "mean_forgetting": self.mean_forgetting,
            "backward_transfer": self.backward_transfer,
            "groups": [list(self.classes[group.start : group.stop]) for group in self.groups],
            "matrix": [_numbers(row) for row in self.matrix],
            "per_class": {name: finite(value) for name, value in self.per_class.items()},
        }


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean without nans; None if nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [finite(value) for value in values]


def finite(value: float) -> float | None:
    """Replace nan, which JSON does not have, by None."""
    return None if math.isnan(value) else value
