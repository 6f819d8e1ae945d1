"""Choices by leave-one-out: blocks and ridge, temperature and threshold; and which images it can judge."""

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
"""What `choose` tries. On CIFAR-100 the first three are nearly the same; a few hundred photographs want about 0.1."""


@dataclass(frozen=True)
class Choice:
    """Blocks and gamma."""

    blocks: tuple[str, ...]
    gamma: float


def judged(labels: Tensor, groups: Tensor | None = None, barred: Tensor | None = None) -> Tensor:
    """Return which images (N,) leave-one-out can judge: those whose class has images outside their own group.

    Of a single class none: there is nothing else to take them for. barred: (N,) bool, others that must not judge.
    """
    kin = labels.unsqueeze(1) == labels
    own = (
        torch.eye(len(labels), dtype=torch.bool)
        if groups is None
        else groups.unsqueeze(1) == groups
    )
    found = (kin & ~own).any(1) & ~kin.all()
    return found if barred is None else found & ~barred


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
    """Return the likeliest blocks and gamma among those whose leave-one-out accuracy is within a standard error of the best.

    Args:
        products: of the training images' h with each other, by block, float64 (N, N).
        widths: M_b by block.
        labels: int64 (N,), 0 to classes - 1.
        subsets: the sets of blocks to try; the first is taken where no image can be judged.
        gammas: to try with each of them; the middle one is taken where no image can be judged.
        balanced: whether every class counts the same, in the fit (`class_weights`) and in the accuracy.
        groups: of near-duplicates, (N,).
        barred: (N,) bool, images that must not judge.
    """
    known = judged(labels, groups, barred)
    if not known.any():
        return Choice(tuple(subsets[0]), gammas[len(gammas) // 2])
    weights = class_weights(labels) if balanced else torch.ones_like(labels, dtype=torch.float64)
    targets = targets_of(labels, int(labels.max()) + 1)
    found: dict[Choice, tuple[float, float]] = {}
    for names, gamma in itertools.product(subsets, gammas):
        kernel = torch.stack([products[name] for name in names]).sum(0)
        fit = solve_dual(kernel, targets, gamma, sum(widths[name] for name in names), weights)
        scores = fit.leave_out(groups)[known]
        found[Choice(tuple(names), gamma)] = _quality(scores, labels[known], weights[known])
    best = max(accuracy for accuracy, _ in found.values())
    images = int(known.sum()) if groups is None else len(torch.unique(groups[known]))
    error = math.sqrt(best * (1 - best) / images)
    good = {choice: loss for choice, (accuracy, loss) in found.items() if accuracy >= best - error}
    return min(good, key=good.__getitem__)


def _quality(scores: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return accuracy and loss of leave-one-out scores (n, classes). labels: (n,); weights: (n,), of images in the accuracy."""
    right = (scores.argmax(1) == labels) * weights
    loss = F.cross_entropy(scores / temperature(scores, labels), labels)
    return float(right.sum() / weights.sum()), float(loss)


def temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the T of softmax(scores / T) with the largest likelihood. scores: (N, classes), leave-one-out; labels: (N,).

    The likelihood is concave in 1 / T: its slope is bisected. One image in N + 2 counts as of no class in particular, or
    scores that are always right would have the temperature 0.
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
    """Return the confidence below which an image is called unknown, so that at most a share `rate` of the known ones are.

    confidences: (N,), leave-one-out; any measure that is larger for surer images. Without images nothing is unknown.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"rate = {rate}: from 0 to below 1 is allowed")
    if not len(confidences):
        return -math.inf
    return float(confidences.sort().values[int(rate * len(confidences))])
