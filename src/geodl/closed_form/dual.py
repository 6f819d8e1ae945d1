"""Ridge regression in dual form, with the features of all images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.expansion import Blocks
from geodl.closed_form.primal import Primal, cholesky, ridge_of

MANY = 20
"""With this many series of a class, leaving one out makes no difference."""


def class_weights(labels: Tensor) -> Tensor:
    """Return weights (N,) with the same sum for every class and mean 1: N / (classes n_c)."""
    counts = torch.bincount(labels).double()
    return len(labels) / ((counts > 0).sum() * counts[labels])


def targets_of(labels: Tensor, classes: int) -> Tensor:
    """Return one-hot targets, float64 (N, classes)."""
    return F.one_hot(labels, classes).double()


@dataclass(frozen=True)
class Dual:
    """A fit to targets (N, classes): coefficients a (N, classes) and inverse A = (K + lambda W^-1)^-1 (N, N); all float64."""

    coefficients: Tensor
    inverse: Tensor
    targets: Tensor

    def head(self, h: Tensor) -> Tensor:
        """Return the head (M, classes) from the training images' h: (N, M)."""
        return h.double().T @ self.coefficients

    def leave_out(self, groups: Tensor | None = None) -> Tensor:
        """Return each training image's scores (N, classes) by the fit without its group.

        groups: int64 (N,), equal for near-duplicates; None: every image alone. lambda, weights and standardization are
        held fixed.
        """
        gone = self._gone()
        for rows in repeated(groups):
            gone[rows] = torch.linalg.solve(self.inverse[rows][:, rows], self.coefficients[rows])
        return self.targets - gone

    def strangers(self, labels: Tensor) -> Tensor:
        """Return each image's largest score (N,) by the fit without its whole class; labels: (N,)."""
        return self.leave_out(labels).scatter(1, labels.unsqueeze(1), -math.inf).amax(1)

    def gains(self, labels: Tensor, groups: Tensor) -> Tensor:
        """Estimate how much more often each image, (N,), would be right with one more series of its class.

        Leaving a series out leaves n - 1 of the class's n, so the accuracy is too low. By how much is estimated by leaving
        out a second one: for an error proportional to 1 / n, (n - 2) / n of that difference. labels: (N,);
        groups: (N,), equal for images of one series.
        """
        gains = torch.zeros(len(labels), dtype=torch.float64)
        for label in torch.unique(labels):
            mine = torch.unique(groups[labels == label])
            series = [(groups == each).nonzero().squeeze(1) for each in mine]
            if 3 <= len(series) < MANY:
                for i, rows in enumerate(series):
                    others = (series[(i + k) % len(series)] for k in range(1, min(len(series), 6)))
                    share = (len(series) - 2) / len(series)
                    gains[rows] = share * self._worse(rows, list(others), int(label))
        return gains

    def _worse(self, rows: Tensor, others: Sequence[Tensor], label: int) -> Tensor:
        """Return how much less often images (n,) are right if one of `others` is left out with them."""
        right = self._right(rows, len(rows), label)
        fewer = [self._right(torch.cat([rows, other]), len(rows), label) for other in others]
        return right - torch.stack(fewer).mean(0)

    def _right(self, rows: Tensor, first: int, label: int) -> Tensor:
        """Return whether the fit without these images gets the `first` of them right, float64."""
        gone = torch.linalg.solve(self.inverse[rows][:, rows], self.coefficients[rows])
        scores: Tensor = self.targets[rows[:first]] - gone[:first]
        return scores.argmax(1).eq(label).double()

    def leave_out_for(self, rows: Tensor, products: Tensor) -> Tensor:
        """Return the scores (R, classes) of other images, each by the fit without one training image.

        rows: (R,), the images left out; products: (R, N) of the other images' h with those of all training images. The
        score of x without image i is f(x) - (k(x)' A e_i) a_i / A_ii.
        """
        lost = (products * self.inverse[rows]).sum(1, keepdim=True) * self._gone()[rows]
        return products @ self.coefficients - lost

    def _gone(self) -> Tensor:
        # (A_SS)^-1 a_S for a group S of one image.
        return self.coefficients / self.inverse.diagonal().unsqueeze(1)


def repeated(groups: Tensor | None) -> list[list[int]]:
    """Return the rows of every group of more than one image."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate([] if groups is None else groups.tolist()):
        members.setdefault(group, []).append(row)
    return [rows for rows in members.values() if len(rows) > 1]


def solve_dual(
    kernel: Tensor,
    targets: Tensor,
    gamma: float,
    width: int,
    weights: Tensor | None = None,
    *,
    overwrite: bool = False,
) -> Dual:
    """Fit in dual form. kernel: float64 (N, N), products of the h of all images; targets: (N, classes); width: M; weights: (N,).

    overwrite: whether to reuse the kernel's memory.
    """
    if weights is None:
        weights = kernel.new_ones(len(kernel))
    ridge = ridge_of((weights * kernel.diagonal()).sum(), gamma, width)
    factor = cholesky(kernel, ridge / weights, overwrite=overwrite)
    del kernel  # as large as the factor
    inverse = torch.cholesky_inverse(factor)
    return Dual(inverse @ targets, inverse, targets)


def kernels(h: Blocks, others: Blocks) -> dict[str, Tensor]:
    """Return the products of images' h with others' h by block: float64 (N, others)."""
    return {name: block.double() @ others[name].double().T for name, block in h.items()}


def kernel_of(h: Blocks, others: Blocks) -> Tensor:
    """Return the products of images' h with others' h over all blocks: float64 (N, others)."""
    counts = (len(next(iter(each.values()))) for each in (h, others))
    total = torch.zeros(*counts, dtype=torch.float64)
    for name, block in h.items():
        rows = block.double()
        total.addmm_(rows, (rows if others[name] is block else others[name].double()).T)
    return total


def dual_of(solved: Primal, h: Tensor, targets: Tensor) -> Dual:
    """Return a Dual that leaves images out of a fit to sums that contain them. h: (n, M); targets: (n, classes).

    Without a group S, its scores are y_S - (I - H_S (G + lambda I)^-1 H_S')^-1 (y_S - f_S).
    """
    whitened = solved.whitened(h)
    inverse = torch.eye(len(h), dtype=torch.float64) - whitened.T @ whitened
    return Dual(targets - h.double() @ solved.head, inverse, targets)
