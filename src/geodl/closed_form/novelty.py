"""Novelty detection: the probability that an image is of a learned class, from two measures that are larger for known images.

- The *score*: the largest score of the closed form. It separates classes similar to the learned ones, but can be anything for
  images unlike all learned ones.
- The *nearness*: the largest cosine of the image's deepest features with the mean direction of a class. It is small for images
  unlike all classes, but hardly separates similar classes.

Both are standardized by the leave-one-out values of the learned images: s and n. The measure of an image is the minimum of 3 s + n,
standardized again, and of n + slack: an image far from all classes is unknown whatever its score. The slack is 1, which few classes
need, or 2 if that better separates the learned images from their values by a fit without their whole class. The probability of a
known class is a logistic function of the measure: 95 % at the measure that 5 % of the learned images are below, and 1/2 where, by a
normal distribution, 0.5 % of them are. Images of unknown classes are not available, so nothing more can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.choices import threshold
from geodl.closed_form.expansion import Blocks
from geodl.core.tensors import part, shaped

REJECTED = 0.05
"""The share of known images that are called unknown."""
DOUBTED = 0.005
"""The share of known images that, by the normal distribution, have a probability below 1/2."""
KNOWN = 0.95
"""The probability of a known class below which an image is called unknown."""
WEIGHT = 3.0
"""The weight of the score relative to the nearness."""
SLACKS = 1.0, 2.0
"""The candidates for the slack; the first is the default."""
MEASURED = 20_000
"""The maximum number of images whose measures are kept."""
LEAST = 1e-6
"""The smallest deviation."""


def _deviations(share: float) -> float:
    """Return how many deviations below the median the lowest `share` of normally distributed values is."""
    return -NormalDist().inv_cdf(share)


@dataclass(frozen=True)
class Scale:
    """A linear map of values, (N,): (values - center) / unit."""

    center: float
    unit: float

    @classmethod
    def of(cls, values: Tensor) -> Scale:
        """Return the map that standardizes values by their median and lowest 5 %. values: float64 (N,)."""
        center = float(values.median())
        spread = center - float(values.quantile(REJECTED))
        return cls(center, max(spread / _deviations(REJECTED), LEAST))

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mapped values."""
        return (values - self.center) / self.unit


ONE, ALL = Scale(0.0, 1.0), Scale(-math.inf, 1.0)
"""The identity, and the map to log odds with which every image is known."""


@dataclass(frozen=True)
class Novelty:
    """Estimates the probability that an image is of a known class.

    level:    the level of the features for nearness, the deepest one.
    sums:     sums of the features' directions by class, float32 (classes, d).
    measured: leave-one-out score and nearness of learned images, from when they were learned, float32 (n, 2).
    score, nearness, both: the standardizations.
    odds:     from the measure to the log odds of a known class.
    slack:    one of SLACKS.
    """

    level: str
    sums: Tensor
    measured: Tensor
    score: Scale
    nearness: Scale
    both: Scale
    odds: Scale
    slack: float = SLACKS[0]

    def learned(self, z: Blocks, labels: Tensor, classes: int) -> Novelty:
        """Add the directions of images by their features z: (N, d_b) by block; labels: int64 (N,)."""
        return replace(self, sums=directions(z[self.level], labels, self.sums, classes))

    def fit(self, scores: Tensor, near: Tensor, strangers: Tensor | None = None) -> Novelty:
        """Fit to leave-one-out values of new images, their largest scores and nearness (N,), and to earlier values.

        strangers: (N, 2), these values by fits without the image's whole class.
        """
        if not len(scores):
            return self
        latest = torch.stack([scores, near.to(scores)], dim=1).float()
        measured = torch.cat([self.measured, latest])
        measured = measured[:: -(-len(measured) // MEASURED)]
        scores, near = measured.double().unbind(1)
        score, nearness = Scale.of(scores), Scale.of(near)
        both = Scale.of(WEIGHT * score(scores) + nearness(near))
        fitted = replace(self, measured=measured, score=score, nearness=nearness, both=both)
        if strangers is not None and len(strangers):

            def separated(slack: float) -> float:
                candidate = replace(fitted, slack=slack)
                others = candidate.measure(*strangers.double().unbind(1))
                return separation(candidate.measure(scores, near), others)

            fitted = replace(fitted, slack=max(SLACKS, key=separated))
        measures = fitted.measure(scores, near)
        lowest = threshold(measures, REJECTED)
        spread = (float(measures.median()) - lowest) / _deviations(REJECTED)
        width = max(spread * (_deviations(DOUBTED) - _deviations(REJECTED)), LEAST)
        return replace(fitted, odds=Scale(lowest - width, width / math.log(KNOWN / (1 - KNOWN))))

    def forgetful(self) -> Novelty:
        """Return a copy without measured values, which the next fit replaces."""
        return replace(self, measured=self.measured[:0])

    @classmethod
    def unfitted(cls, z: Blocks) -> Novelty:
        """Return a Novelty for which every image is known. z: features (N, d_b) by block, the deepest last."""
        level, deepest = list(z.items())[-1]
        none = torch.zeros(0, deepest.shape[1])
        return cls(level, none, torch.zeros(0, 2), ONE, ONE, ONE, ALL)

    @property
    def fitted(self) -> bool:
        """Whether any image can be unknown."""
        return self.odds != ALL

    def near(self, z: Blocks) -> Tensor:
        """Return the nearness (N,) of images by their features z: (N, d_b) by block."""
        return cosines(z[self.level], self.sums).amax(1)

    def measure(self, scores: Tensor, near: Tensor) -> Tensor:
        """Return the measure (N,) for largest scores and nearness, (N,)."""
        n = self.nearness(near)
        return torch.minimum(self.both(WEIGHT * self.score(scores) + n), n + self.slack)

    def known(self, scores: Tensor, near: Tensor) -> Tensor:
        """Return the probability (N,) of a known class for scores (N, classes) and nearness (N,)."""
        return self.odds(self.measure(scores.amax(1), near)).sigmoid()

    def without(self, gone: int) -> Novelty:
        """Return a copy without a class."""
        return replace(self, sums=torch.cat([self.sums[:gone], self.sums[gone + 1 :]]))

    def moved(self, z: Blocks, old: Tensor, row: int) -> Novelty:
        """Move images to class `row`; -1: remove them. z: (N, d_b) by block; old: int64 (N,), their classes."""
        units = F.normalize(z[self.level].float(), dim=1)
        sums = self.sums.index_add(0, old, -units)
        if row >= 0:
            sums.index_add_(0, torch.full_like(old, row), units)
        return replace(self, sums=sums)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the fields as named tensors; the level is part of a name."""
        scales = [self.score, self.nearness, self.both, self.odds]
        numbers = torch.tensor([[each.center, each.unit] for each in scales], dtype=torch.float64)
        slack = torch.tensor(self.slack, dtype=torch.float64)
        tensors = {f"directions.{self.level}": self.sums, "measured": self.measured}
        return tensors | {"scales": numbers, "slack": slack}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Novelty | None:
        """Return the Novelty of `to_tensors`; None if there is none, as in models of version 0.2."""
        if "scales" not in tensors:
            return None
        ((level, sums),) = part(tensors, "directions").items()
        if not bool(shaped(sums, "directions", None, None, dtype=torch.float32).isfinite().all()):
            raise ValueError("the directions of classes have values that are not finite")
        score, nearness, both, odds = (
            Scale(*each) for each in shaped(tensors["scales"], "scales", 4, 2).tolist()
        )
        slack = shaped(tensors["slack"], "slack").item()
        if slack not in SLACKS:
            raise ValueError(f"slack = {slack}: allowed values are {SLACKS}")
        measured = shaped(tensors["measured"], "measured", None, 2)
        return cls(level, sums, measured, score, nearness, both, odds, slack)


def separation(known: Tensor, others: Tensor) -> float:
    """Return the area under the ROC curve of a measure, (N,) and (M,), that is larger for known images."""
    ordered = others.sort().values
    places = torch.searchsorted(ordered, known) + torch.searchsorted(ordered, known, right=True)
    return float((places / 2 / max(len(others), 1)).double().mean())


def stranger_nearness(z: Tensor, labels: Tensor, sums: Tensor) -> Tensor:
    """Return the nearness (N,) of learned images to the other classes. Arguments as for `left_out_nearness`."""
    return cosines(z, sums).scatter(1, labels.unsqueeze(1), -math.inf).amax(1)


def cosines(z: Tensor, sums: Tensor) -> Tensor:
    """Return the cosines (N, classes) of features z: (N, d) with the mean directions of classes."""
    return F.normalize(z.float(), dim=1) @ F.normalize(sums, dim=1).T


def directions(z: Tensor, labels: Tensor, before: Tensor, classes: int) -> Tensor:
    """Return the sums of the directions of features z: (N, d) by class, float32 (classes, d).

    before: (C, d), the sums of earlier images of the first C classes.
    """
    sums = F.pad(before.double(), (0, 0, 0, classes - len(before)))
    return sums.index_add_(0, labels, F.normalize(z.float(), dim=1).double()).float()


def left_out_nearness(
    z: Tensor,
    labels: Tensor,
    sums: Tensor,
    groups: Tensor | None = None,
    views: Tensor | None = None,
) -> Tensor:
    """Return the nearness (N,) of learned images to the classes without the image's group.

    Args:
        z: features (N, d), which `sums` includes.
        labels: int64 (N,).
        sums: (classes, d).
        groups: int64 (N,), equal for near-duplicates; None: every image alone.
        views: features (N, d) of other views of the images, such as mirrored copies, to use instead.
    """
    own = F.normalize(z.float(), dim=1)
    gone = own
    if groups is not None:
        _, places = torch.unique(groups * len(sums) + labels, return_inverse=True)
        gone = torch.zeros_like(own).index_add_(0, places, own)[places]
    seen = own if views is None else F.normalize(views.float(), dim=1)
    near = seen @ F.normalize(sums, dim=1).T
    rest = F.normalize(sums[labels] - gone, dim=1)
    return near.scatter(1, labels.unsqueeze(1), (seen * rest).sum(1, keepdim=True)).amax(1)
