"""Which images of a class are its exemplars: herding (iCaRL), or the nearest to the class mean (the paper's text)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from geodl.config import Registry
from geodl.core.errors import DataError, TrainingError
from geodl.geometry import unit

# Rounding a unit vector moves a score by its machine precision times the lengths it is made of. Scores that differ by no
# more than some thousand times that are a tie: which of two equally good images is kept must not depend on rounding.
TIE = 1e-12

SELECTORS = Registry[Callable[[Tensor, int], Tensor]]("selector", "selection")
"""How exemplars are chosen: from the features (N, d) of a class and a number k to at most k row numbers, best first."""


@SELECTORS.register("herding")
def herding(features: Tensor, k: int) -> Tensor:
    """Return the first `k` exemplars of one class by herding (iCaRL Alg. 4): (min(k, N),) row numbers.

    features: (N, d), normalized here. Each pick brings the mean of the picks so far nearest to the mean of all; nothing is picked
    twice; the lowest row wins a tie.
    """
    rows = _finite_unit(features)
    away = rows - rows.mean(0)
    size = torch.linalg.vector_norm(away, dim=1)
    lag = away.new_zeros(away.shape[1])  # of the sum of the picks behind their number of means
    free = torch.ones_like(size, dtype=torch.bool)
    picks: list[int] = []
    for _ in range(min(k, len(rows))):
        # |mean - (sum of the picks + x) / count| = |lag - (x - mean)| / count is least where this is largest:
        score = (away @ lag - size.square() / 2).masked_fill(~free, -torch.inf)
        slack = TIE * (size + torch.linalg.vector_norm(lag))
        picks.append(int(torch.nonzero(score + slack >= score.max())[0]))
        lag = lag - away[picks[-1]]
        free[picks[-1]] = False
    return torch.tensor(picks, dtype=torch.int64, device=features.device)


@SELECTORS.register("nearest")
def nearest(features: Tensor, k: int) -> Tensor:
    """Return the `k` rows of `features: (N, d)` nearest in cosine to the class mean, (min(k, N),); the lowest row wins a tie."""
    rows = _finite_unit(features)
    # A sum along each row, not a matrix product: equal rows then have equal scores to the last bit.
    return (rows * rows.mean(dim=0)).sum(dim=1).argsort(descending=True, stable=True)[:k]


def members(labels: Tensor, classes: Sequence[int]) -> dict[int, Tensor]:
    """Return for each class the rows that carry its label, in order; a class without any is an error."""
    counts = torch.bincount(labels).tolist()
    groups = torch.split(labels.argsort(stable=True), counts)
    missing = [c for c in classes if c >= len(counts) or not counts[c]]
    if missing:
        raise DataError(f"class {missing[0]} has no image to choose exemplars from")
    return {c: groups[c] for c in classes}


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """Return the first `count` rows of each class there is, class by class."""
    present = sorted(set(labels.tolist()))
    return torch.cat([rows[:count] for rows in members(labels, present).values()])


def _finite_unit(features: Tensor) -> Tensor:
    rows = unit(features)
    if not rows.isfinite().all():
        raise TrainingError("exemplars cannot be chosen: the features hold NaN or infinite values")
    return rows
