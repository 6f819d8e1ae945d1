"""The figures of a run: accuracy per phase, forgetting, transfer, all in % and in float64."""

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
    """How good the predictions of one class are: `right` of the `judged` images; accuracy and its 95 % interval in %, where there are any."""

    name: str
    judged: int = 0
    right: int = 0
    accuracy: float | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix.

    counts:  (C, C) int64, the true class first.
    classes: the names of the C classes, in the order in which they were learned.
    series:  (C,) int64, in how many series the images of each class are; None: each image is one.
    gains:   (C,) float64, how many more images of each class would be right had no series been left out; None: none.
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
        """Return the counts of images in series: labels, series, gains (N,)."""
        found = [labels[series == each][0] for each in torch.unique(series)]
        labelled = torch.tensor(found, dtype=torch.int64)
        numbers = torch.bincount(labelled, minlength=len(self.classes))
        sums = torch.zeros(len(self.classes), dtype=torch.float64)
        return replace(self, series=numbers, gains=sums.index_add_(0, labels, gains.double()))

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.counts.sum())

    @property
    def units(self) -> int:
        """The number of series, or of images where these are in none: as many observations the figures rest on."""
        return self.images if self.series is None else int(self.series.sum())

    @property
    def balanced(self) -> float:
        """The accuracy in % in which each class that has images counts the same; nan where there are none."""
        known = [value for value in self.per_class.values() if not math.isnan(value)]
        return math.fsum(known) / len(known) if known else math.nan

    @property
    def accuracy(self) -> float:
        """The accuracy in % on all images; nan where there are none."""
        return self.rate(range(len(self.classes)))

    @property
    def per_class(self) -> dict[str, float]:
        """The accuracy in % on each class; nan for a class without images."""
        return {name: self.rate([i]) for i, name in enumerate(self.classes)}

    @property
    def rows(self) -> list[ClassRow]:
        """The classes one by one."""
        judged, right = self.counts.sum(dim=1).tolist(), self.counts.diagonal().tolist()
        found = []
        for i, name in enumerate(self.classes):
            known = (judged[i], right[i], self.rate([i]), self.interval_of([i]))
            found.append(ClassRow(name, *known) if judged[i] else ClassRow(name))
        return found

    @property
    def weakest(self) -> list[ClassRow]:
        """The classes, the weakest first, those without images last."""
        return sorted(self.rows, key=lambda row: (not row.judged, row.accuracy or 0.0, -row.judged))

    def rate(self, classes: Iterable[int]) -> float:
        """Return the accuracy in % on the images of some classes, by position; nan where there are none."""
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
        """The 95 % interval of the accuracy, in %: on few images, or few series of them, it is wide."""
        return self.interval_of(range(len(self.classes)))

    def interval_of(self, classes: Iterable[int]) -> tuple[float, float]:
        """Return the 95 % interval of the accuracy on some classes, by position, in % (Wilson 1927).

        Gains widen it: they are an estimate, without which the accuracy is a lower bound.
        """
        rows = list(classes)
        known = self.counts.sum(dim=1) if self.series is None else self.series
        if not (number := int(known[rows].sum())):
            return 0.0, 100.0
        ends = (self.rate(rows), replace(self, gains=None).rate(rows))
        found = [wilson(each / 100, number) for each in ends]
        # The ends of 0 and 100 % are these, but for rounding.
        return min(low for low, _ in found), max(ends[0], *(high for _, high in found))

    def mistakes(self, most: int | None = None) -> list[tuple[int, int, int]]:
        """Return the confusions that occur, as (true class, prediction, count), the most frequent first."""
        wrong = self.counts.clone().fill_diagonal_(0)
        found = [(int(i), int(j), int(wrong[i, j])) for i, j in wrong.nonzero()]
        return sorted(found, key=lambda each: -each[2])[:most]

    def without(self, gone: int) -> "Confusion":
        """Return the counts without a class: its images, and those predicted as it, are no longer counted."""
        rest = [i for i in range(len(self.classes)) if i != gone]
        names = tuple(self.classes[i] for i in rest)
        series = None if self.series is None else self.series[rest]
        gains = None if self.gains is None else self.gains[rest]
        return Confusion(self.counts[rest][:, rest], names, series, gains)

    def to_json(self) -> list[list[int]]:
        """Return [true, predicted, count] of the counts that are not 0."""
        return [[int(i), int(j), int(self.counts[i, j])] for i, j in self.counts.nonzero()]

    @classmethod
    def from_json(cls, entries: Sequence[Sequence[int]], classes: Sequence[str]) -> Self:
        """Undo `to_json`."""
        counts = torch.zeros(len(classes), len(classes), dtype=torch.int64)
        for true, predicted, count in entries:
            counts[true, predicted] = count
        if bool((counts < 0).any()):
            raise ValueError("a count below 0")
        return cls(counts, tuple(classes))


def wilson(share: float, number: int) -> tuple[float, float]:
    """Return the 95 % interval, in %, of a share that was seen in so many cases."""
    z = 1.96
    center = share + z * z / (2 * number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    whole = 1 + z * z / number
    return 100 * (center - half) / whole, 100 * (center + half) / whole


def to_metrics(phase: int, confusions: Mapping[str, Confusion], **more: Any) -> dict[str, Any]:
    """Return what metrics.json holds of a phase: counts and figures alone, so that equal runs have equal bytes."""
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
    """Return the confusions in a metrics.json, by classifier."""
    if not all(isinstance(name, str) for name in metrics["classes"]):
        raise ValueError("the name of a class is no text")
    found = {
        name: Confusion.from_json(entries, metrics["classes"])
        for name, entries in metrics["confusions"].items()
    }
    for name, each in metrics.get("series", {}).items():
        size = len(found[name].classes)
        gains = shaped(torch.tensor(each["gains"], dtype=torch.float64), "gains", size)
        series = shaped(torch.tensor(each["numbers"]), "numbers", size, dtype=torch.int64)
        if bool((series < 0).any()):
            raise ValueError("a number of series below 0")
        found[name] = replace(found[name], series=series, gains=gains)
    return found


@dataclass(frozen=True)
class Trajectory:
    """What one classifier could do after each phase.

    confusions: one for each phase done, over the test images of the classes seen by then, those that it added last.
    """

    confusions: Sequence[Confusion]

    def __post_init__(self) -> None:
        sizes = [len(found.classes) for found in self.confusions]
        if not sizes or sizes != sorted(sizes):
            raise DataError(f"phases with {sizes} classes: one or more are needed, none with fewer")

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Self]:
        """Return the trajectory of every classifier that all of these metrics.json have, one for each phase."""
        phases = [confusions_of(each) for each in metrics]
        found = {}
        for name in phases[-1] if phases else ():
            confusions = [phase[name] for phase in phases if name in phase]
            if len(confusions) == len(phases):
                found[name] = cls(confusions)
        return found

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes of the last phase, in the learning order."""
        return self.confusions[-1].classes

    @property
    def groups(self) -> list[range]:
        """The classes, by position, that each phase added."""
        ends = [len(found.classes) for found in self.confusions]
        return [range(*pair) for pair in itertools.pairwise([0, *ends])]

    @property
    def accuracy(self) -> list[float]:
        """A_t: the accuracy on all classes seen up to each phase t."""
        return [found.accuracy for found in self.confusions]

    @property
    def matrix(self) -> list[list[float]]:
        """Group x phase accuracies; nan before the group is learned."""
        rows = []
        for g, group in enumerate(self.groups):
            known = [found.rate(group) for found in self.confusions[g:]]
            rows.append([math.nan] * g + known)
        return rows

    @property
    def per_class(self) -> dict[str, float]:
        """The last model's accuracy on each class seen, in the learning order; nan without test images."""
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
        """The paper's forgetting: accuracy on the first group by the phase-0 model minus by the last model."""
        return _mean([self.matrix[0][0] - self.matrix[0][-1]]) if len(self.confusions) > 1 else None

    @property
    def mean_forgetting(self) -> float | None:
        """The usual forgetting: best before the last phase minus last, mean over the groups learned before it."""
        return _mean(
            max(row[g:-1], default=math.nan) - row[-1] for g, row in enumerate(self.matrix)
        )

    @property
    def backward_transfer(self) -> float | None:
        """Last minus just learned, mean over the groups learned before the last phase."""
        return _mean(row[-1] - row[g] for g, row in enumerate(self.matrix[:-1]))

    def to_dict(self) -> dict[str, Any]:
        """Return everything by name, ready for JSON: classes by their names, None where there is no number."""
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
    """Return the mean of the numbers among `values`; None where there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [finite(value) for value in values]


def finite(value: float) -> float | None:
    """Replace nan, which JSON does not know, by None."""
    return None if math.isnan(value) else value
