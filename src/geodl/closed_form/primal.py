"""Ridge regression in primal form, with sums over the images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.expansion import insist_finite
from geodl.core.errors import ConfigError, TrainingError
from geodl.core.tensors import shaped

PANEL = 512
"""Columns of G computed in one product."""
WIDE = 8192
"""With at least this many features, the system is factored in float32 and its solution refined in float64."""
REFINEMENTS = 10
"""The maximum number of refinement steps; three suffice unless gamma is tiny."""
ENOUGH = 1e-10
"""The relative residual of each class at which refinement ends."""


@dataclass
class Statistics:
    """Sums over all images seen, G and C' in float64, and the number of images of each class.

    upper:  (M, M), the upper triangle of G; the rest is undefined.
    sums:   (classes, M), C': the sum of h of each class.
    counts: int64 (classes,).

    Each process adds its share of a phase's images to empty statistics; these are summed over the processes and added to the
    earlier ones. Every image counts the same, so large classes are favored over small ones: weights are not possible, since
    classes may grow later.
    """

    upper: Tensor
    sums: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, width: int, classes: int = 0) -> Statistics:
        """Return the statistics of no image, for `width` = M expanded features."""
        upper = torch.zeros(width, width, dtype=torch.float64)
        return cls(upper, upper.new_zeros(classes, width), torch.zeros(classes, dtype=torch.int64))

    def add(self, h: Tensor, labels: Tensor, classes: int) -> None:
        """Add images in place. h: (N, M), up to a few thousand rows; labels: int64 (N,); classes: their number, including new ones."""
        insist_finite(h, "the features have")
        self._grow(classes)
        rows = h.double()
        for start in range(0, rows.shape[1], PANEL):
            panel = slice(start, start + PANEL)
            self.upper[panel, start:].addmm_(rows[:, panel].T, rows[:, start:])
        # Only for present classes, so that the cost does not grow with their number.
        present = torch.bincount(labels).nonzero()
        self.sums[present.squeeze(1)] += (present == labels).double() @ rows
        self.counts += torch.bincount(labels, minlength=len(self.counts))

    def __add__(self, other: Statistics) -> Statistics:
        result = Statistics(self.upper + other.upper, self.sums.clone(), self.counts.clone())
        result._grow(len(other.counts))
        result.sums[: len(other.sums)] += other.sums
        result.counts[: len(other.counts)] += other.counts
        return result

    def __sub__(self, other: Statistics) -> Statistics:
        """Return the statistics without some of their images."""
        upper, sums = self.upper - other.upper, self.sums - other.sums
        return Statistics(upper, sums, self.counts - other.counts)

    def _grow(self, classes: int) -> None:
        """Give new classes their rows."""
        new = max(0, classes - len(self.counts))
        self.sums, self.counts = F.pad(self.sums, (0, 0, 0, new)), F.pad(self.counts, (0, new))

    def without(self, gone: int) -> Statistics:
        """Return the statistics without a class; later classes move up.

        G still contains its images, since the sum of h h' is not known by class: the head is as if these images were of no
        class, not as if they had never been seen. Exact removal needs the features (dual form).
        """
        stay = torch.arange(len(self.counts)) != gone
        return Statistics(self.upper.clone(), self.sums[stay], self.counts[stay])

    @property
    def gram(self) -> Tensor:
        """G: (M, M), in the memory of `upper`."""
        for start in range(0, len(self.upper), PANEL):
            end = start + PANEL
            square = self.upper[start:end, start:end]
            square.copy_(square.triu() + square.triu(1).T)
            self.upper[end:, start:end] = self.upper[start:end, end:].T
        return self.upper

    def solve(self, gamma: float) -> Primal:
        """Fit the head."""
        gram, cross = self.gram, self.sums.T
        refined = solve_refined(gram, cross, gamma) if len(gram) >= WIDE else None
        return solve(gram, cross, gamma) if refined is None else refined

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the upper triangle of G, row by row, and C' in float32: 35 MB for M = 4096 and 100 classes."""
        triangle = torch.cat([row[i:].float() for i, row in enumerate(self.upper)])
        insist_finite(triangle, "the sums of the features have, in float32,")
        return {"gram": triangle, "sums": self.sums.float(), "counts": self.counts.clone()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Statistics:
        """Return the statistics of `to_tensors`."""
        sums = shaped(tensors["sums"], "sums", None, None).double()
        classes, width = sums.shape
        shaped(tensors["gram"], "gram", width * (width + 1) // 2)
        shaped(tensors["counts"], "counts", classes, dtype=torch.int64)
        upper = sums.new_zeros(width, width)
        for i, row in enumerate(torch.split(tensors["gram"], list(range(width, 0, -1)))):
            upper[i, i:] = row
        return cls(upper, sums, tensors["counts"].clone())

    def rounded(self) -> Statistics:
        """Round to float32 in place, as stored: at the end of every phase, before solving, so that resuming is exact."""
        for start in range(0, len(self.upper), PANEL):
            panel = self.upper[start : start + PANEL, start:]
            panel.copy_(panel.float())
            insist_finite(panel, "the sums of the features have, in float32,")
        return Statistics(self.upper, self.sums.float().double(), self.counts)


@dataclass(frozen=True)
class Primal:
    """A fitted head: float64 (M, classes), and the lower Cholesky factor of G + lambda I: (M, M), float64 or float32."""

    head: Tensor
    factor: Tensor

    def leave_one_out(self, h: Tensor, targets: Tensor, views: Tensor | None = None) -> Tensor:
        """Return the leave-one-out scores (N, classes) of images that G and C contain, with lambda held fixed.

        h: (N, M); targets: float64 (N, classes). The score is y - (y - f) / (1 - h' (G + lambda I)^-1 h).
        views: (N, M), other views of the images, such as mirrored copies, to score instead:
        f(v) - v' (G + lambda I)^-1 h (y - f) / (1 - h' (G + lambda I)^-1 h).
        """
        rows = h.double()
        whitened = self.whitened(rows)
        gone = (targets - rows @ self.head) / (1 - whitened.square().sum(0).unsqueeze(1))
        if views is None:
            return targets - gone
        products = (self.whitened(views.double()) * whitened).sum(0).unsqueeze(1)
        return views.double() @ self.head - products * gone

    def whitened(self, rows: Tensor) -> Tensor:
        """Return L^-1 h' (M, N), float64, of rows h: (N, M)."""
        whitened: Tensor = torch.linalg.solve_triangular(
            self.factor, rows.T.to(self.factor.dtype), upper=False
        )
        return whitened.double()


def solve(gram: Tensor, cross: Tensor, gamma: float) -> Primal:
    """Fit the head (G + lambda I)^-1 C, lambda = gamma tr(G) / M. gram: float64 (M, M); cross: float64 (M, classes)."""
    factor = cholesky(gram, ridge_of(gram.trace(), gamma, len(gram)))
    return Primal(torch.cholesky_solve(cross, factor), factor)


def solve_refined(gram: Tensor, cross: Tensor, gamma: float) -> Primal | None:
    """Fit the head as `solve` does, from a float32 factor by iterative refinement; None if that does not converge.

    Residuals are computed in float64, so that the head is accurate to float64. It converges if the system's condition number is
    well below 1e7. The factor, which leave-one-out uses, stays in float32.
    """
    ridge = ridge_of(gram.trace(), gamma, len(gram))
    single = gram.float()
    single.diagonal().add_(ridge.float())
    factor, info = torch.linalg.cholesky_ex(single)
    if int(info):
        return None
    head, residual, last = torch.zeros_like(cross), cross, math.inf
    scale = torch.linalg.vector_norm(cross, dim=0).clamp_min(torch.finfo(cross.dtype).tiny)
    for _ in range(REFINEMENTS):
        head = head + torch.cholesky_solve(residual.float(), factor).double()
        residual = cross - gram @ head - ridge * head
        error = float((torch.linalg.vector_norm(residual, dim=0) / scale).max())
        if error < ENOUGH:
            return Primal(head, factor)
        if not error < last / 2:  # diverging, stuck, or not finite
            return None
        last = error
    return None


def ridge_of(trace: Tensor, gamma: float, width: int) -> Tensor:
    """Return lambda, a scalar; 1 if all features are 0, where the head is 0 with any lambda."""
    if not 0 < gamma < math.inf:
        raise ConfigError(f"gamma = {gamma}: allowed values are above 0")
    return torch.where(trace == 0, 1.0, gamma * trace / max(width, 1))


def cholesky(matrix: Tensor, ridge: Tensor, *, overwrite: bool = False) -> Tensor:
    """Return the lower factor of a symmetric matrix plus `ridge`, () or (n,), on the diagonal; overwrite: add it in place."""
    insist_finite(matrix, "the products of the features have")
    ridged = matrix if overwrite else matrix.clone()
    ridged.diagonal().add_(ridge)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(ridged)
    if int(info):
        raise TrainingError("the linear system is singular in double precision: use a larger gamma")
    return factor
