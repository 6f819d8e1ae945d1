"""Similarity of two representations of the same images: SVCCA, linear CKA, angles between leading directions."""

import torch
from torch import Tensor

from geodl.core.errors import ConfigError, DataError
from geodl.geometry import principal_angles, subspace

ANGLES = 16
"""The number of leading directions whose angles are compared."""


def svcca(x: Tensor, y: Tensor, keep: float = 0.99) -> float:
    """Return the mean canonical correlation of two representations, each reduced to `keep` of its variance.

    x: (N, d1), y: (N, d2), row i of both from image i. 1 for representations that differ by a rotation and a scaling;
    nan if one of them is constant. Unless N is much larger than d1 + d2, unrelated features correlate by chance.
    """
    if not 0 < keep <= 1:
        raise ConfigError(
            f"keep = {keep}: allowed values are shares of the variance, above 0 and at most 1"
        )
    x, y = _centered(x, y)
    # The left singular vectors are orthonormal bases, so the canonical correlations are the cosines between them.
    correlations = torch.linalg.svdvals(_directions(x, keep).T @ _directions(y, keep))
    return float(correlations.clamp(max=1).mean())


def _directions(x: Tensor, keep: float) -> Tensor:
    """Return the leading left singular vectors (N, r) of centered x: (N, d) that hold `keep` of its variance."""
    left: Tensor
    left, values, _ = torch.linalg.svd(x, full_matrices=False)
    rank = int((values > max(x.shape) * torch.finfo(x.dtype).eps * values.max()).sum())
    variance = values.square().cumsum(0)
    enough = int((variance < keep * variance[-1]).sum()) + 1
    return left[:, : min(enough, rank)]


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear centered kernel alignment of x: (N, d1) and y: (N, d2), row i of both from image i.

    |Y'X|^2 / (|X'X| |Y'Y|) in Frobenius norms (Kornblith et al. 2019); nan if one of them is constant.
    """
    x, y = _centered(x, y)
    return float((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))


def leading_angles(x: Tensor, y: Tensor) -> list[float]:
    """Return the principal angles in degrees, ascending, between the leading directions of x and y: (N, d) each.

    At most `ANGLES` directions, and at most d / 2, which leaves them room to turn; none if a representation is constant.
    """
    bases = [subspace(each.double(), min(ANGLES, each.shape[1] // 2)) for each in (x, y)]
    n = min(basis.shape[1] for basis in bases)
    angles: list[float] = principal_angles(*(basis[:, :n] for basis in bases)).rad2deg().tolist()
    return angles


def _centered(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float64 with column means 0; an error if they do not fit together."""
    if len(x) != len(y) or len(x) < 2:
        raise DataError(
            f"representations of {len(x)} and {len(y)} images: both must be of the same images, at least 2"
        )
    if not (x.isfinite().all() and y.isfinite().all()):
        raise DataError("a representation holds NaN or infinite values")
    return _center(x.double()), _center(y.double())


def _center(x: Tensor) -> Tensor:
    """Subtract the column means of x: (N, d); constant columns become exactly 0 despite rounding."""
    centered = x - x.mean(dim=0)
    noise = len(x) * torch.finfo(x.dtype).eps * x.abs().amax(dim=0)
    return centered.masked_fill(centered.abs().amax(dim=0) <= noise, 0)
