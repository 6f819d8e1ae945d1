"""Choices by leave-one-out: blocks and ridge, temperature and threshold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.dual import class_weights, solve_dual, targets_of
from geodl.closed_form.expansion import Blocks
from geodl.core.errors import ConfigError

GAMMAS = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""The values that `choose` tries. On CIFAR-100 the first three are nearly equal; for a few hundred photographs 0.1 is best."""


@dataclass(frozen=True)
class Choice:
    """The chosen blocks and gamma."""

    blocks: tuple[str, ...]
    gamma: float


def judged(labels: Tensor, groups: Tensor | None = None, barred: Tensor | None = None) -> Tensor:
    """Return a mask (N,) of the images that leave-one-out can validate: their class has images outside their group.

    With a single class there are none. groups: (N,); None: every image alone; barred: (N,) bool, images to leave out.
    """
    if groups is None:
        groups = torch.arange(len(labels))
    same_class = labels.unsqueeze(1) == labels
    others = same_class & (groups.unsqueeze(1) != groups)
    mask = others.any(1) & ~same_class.all()
    return mask if barred is None else mask & ~barred


def choose(
    products: Blocks,
    widths: Mapping[str, int],
    labels: Tensor,
    subsets: Sequence[Sequence[str]],
    *,
    gammas: Sequence[float] = GAMMAS,
    balanced: bool = False,
    groups: Tensor | None = None,
    barred: Tensor | None = None,
) -> Choice:
    """Return the blocks and gamma of least loss, among those with an accuracy within a standard error of the best.

    Accuracy and loss are those of leave-one-out.

    Args:
        products: products of the training images' h, by block, float64 (N, N).
        widths: M_b by block.
        labels: int64 (N,), 0 to classes - 1.
        subsets: the sets of blocks to try; the first one is the default if leave-one-out is not possible.
        gammas: the values to try with each set; the middle one is the default.
        balanced: whether every class counts the same, in the fit (`class_weights`) and in the accuracy.
        groups: groups of near-duplicates, (N,), which are left out together.
        barred: (N,) bool, images that do not count in the accuracy.
    """
    known = judged(labels, groups, barred)
    if not known.any():
        return Choice(tuple(subsets[0]), gammas[len(gammas) // 2])
    weights = class_weights(labels) if balanced else torch.ones_like(labels, dtype=torch.float64)
    targets = targets_of(labels, int(labels.max()) + 1)
    quality: dict[Choice, tuple[float, float]] = {}
    for names, gamma in itertools.product(subsets, gammas):
        kernel = torch.stack([products[name] for name in names]).sum(0)
        fit = solve_dual(kernel, targets, gamma, sum(widths[name] for name in names), weights)
        scores = fit.leave_out(groups)[known]
        quality[Choice(tuple(names), gamma)] = _quality(scores, labels[known], weights[known])
    best = max(accuracy for accuracy, _ in quality.values())
    images = int(known.sum()) if groups is None else len(torch.unique(groups[known]))
    error = math.sqrt(best * (1 - best) / images)
    least = best - error
    good = {choice: loss for choice, (accuracy, loss) in quality.items() if accuracy >= least}
    return min(good, key=good.__getitem__)


def _quality(scores: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return accuracy and loss of leave-one-out scores (n, classes). labels: (n,); weights: (n,), for the accuracy."""
    right = (scores.argmax(1) == labels) * weights
    loss = F.cross_entropy(scores / temperature(scores, labels), labels)
    return float(right.sum() / weights.sum()), float(loss)


def temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the T that maximizes the likelihood of softmax(scores / T). scores: (N, classes), leave-one-out; labels: (N,).

    The likelihood is concave in 1 / T, so its slope is bisected. One image in N + 2 counts as of any class: otherwise
    the temperature of scores that are always right would be 0.
    """
    spread = float((scores.amax(1) - scores.amin(1)).mean()) if len(scores) else 0.0
    if not spread > 0:
        return 1.0
    doubt = 1 / (len(labels) + 2)
    own = scores.gather(1, labels.unsqueeze(1)).mean() * (1 - doubt) + scores.mean() * doubt
    low, high = -14.0, 14.0  # log(spread / T)
    for _ in range(50):
        middle = (low + high) / 2
        expected = (F.softmax(scores * (math.exp(middle) / spread), dim=1) * scores).sum(1).mean()
        low, high = (middle, high) if expected < own else (low, middle)
    return spread / math.exp((low + high) / 2)


def threshold(confidences: Tensor, rate: float) -> float:
    """Return the confidence below which an image is unknown, so that at most a share `rate` of the known ones are below.

    confidences: (N,), leave-one-out, any measure that is larger for more certain images. Without images: -inf.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"rate = {rate}: allowed values are 0 to below 1")
    if not len(confidences):
        return -math.inf
    return float(confidences.sort().values[int(rate * len(confidences))])
