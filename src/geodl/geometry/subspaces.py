"""The subspace spanned by a batch of features, and the principal angles between two subspaces.

All computations are in float64. `eps` is the relative precision of the data, which may be lower; anything below is noise.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from geodl.core.errors import TrainingError


class GeometryError(TrainingError, ValueError):
    """Invalid features or bases: not finite, or of shapes that do not fit."""


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the precision of results: float64 for float64 input, float32 for lower precisions."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def unit(z: Tensor) -> Tensor:
    """Return the rows of z: (..., d) with length 1, in float64; zero rows stay zero and get no gradient.

    So do rows too short for a division by their length in z's own precision, or for squaring in float64.
    """
    shortest = max(torch.finfo(z.dtype).tiny, 1e-150)
    z = z.double()
    norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / torch.where(norms > shortest, norms, torch.inf)


# ---------------------------------------------------------------------------------------------------- subspaces


@dataclass(frozen=True)
class Spectrum:
    """The SVD of a batch, Z = left diag(values) right', largest value first, and its numerical rank."""

    rows: Tensor  # (..., batch, d): Z, centered on request; only this carries a gradient
    left: Tensor  # (..., batch, k), k = min(batch, d)
    values: Tensor  # (..., k)
    right: Tensor  # (..., d, k): the principal directions
    in_rank: Tensor  # (..., k) bool
    eps: float  # relative precision of the data

    @classmethod
    def of(cls, z: Tensor, center: bool, eps: float) -> Self:
        """Decompose a float64 batch z: (..., batch, d) of data with relative precision eps."""
        batch, d = z.shape[-2:]
        # The rounding error of centering.
        noise = eps * torch.linalg.vector_norm(z.detach(), dim=(-2, -1)).unsqueeze(-1)
        if center:
            z = z - z[..., :1, :]  # equal rows become exactly 0
            z = z - z.mean(-2, keepdim=True)
        # The SVD does not accept NaN. The projections of such a batch are still NaN.
        left, values, right_t = torch.linalg.svd(
            z.detach().nan_to_num(0.0, 0.0, 0.0), full_matrices=False
        )
        # The usual max(batch, d) eps, but at most 256 eps: float32 features of any width have singular values down to
        # 1e-4 of the largest, and their noise, about 1e-7, does not grow with d.
        in_rank = (values > min(max(batch, d), 256) * eps * values[..., :1]) & (values > noise)
        if center:
            in_rank[..., batch - 1 :] = False  # centering removes one direction
        return cls(z, left, values, right_t.mT, in_rank, eps)

    def leading(self, keep: Tensor) -> Tensor:
        """Return the first principal directions (..., d, n), with zeros for those not in `keep`: (..., n) bool.

        Those in `keep` are the first ones and within the rank.
        """
        basis = self.right[..., : keep.shape[-1]] * keep.unsqueeze(-2)
        if not self.rows.requires_grad:
            return basis
        from geodl.geometry.derivatives import differentiable_subspace

        return differentiable_subspace(self, basis, keep)


def subspace(z: Tensor, dim: int, *, center: bool = True) -> Tensor:
    """Return an orthonormal basis (..., d, n) of the leading principal directions of a batch z: (..., batch, d).

    n = min(dim, rank), with the smallest rank of all batches. The rank is the number of singular values of the centered
    batch above max(batch, d) eps (at most 256 eps) times the largest. Differentiable as a subspace: functions that depend only on
    the span of the basis have the right gradient.
    """
    if z.dim() < 2:
        raise GeometryError(
            f"a batch of features must have the shape (batch, d), not {tuple(z.shape)}"
        )
    if dim < 0:
        raise GeometryError(f"the dimension of a subspace cannot be {dim}")
    if not bool(z.isfinite().all()):
        raise GeometryError("the features contain NaN or infinite values")
    dtype = working_dtype(z)
    rows = z.double()
    if z.numel():  # scaled, because the square of 1e200 overflows
        largest = rows.detach().abs().amax((-2, -1), keepdim=True)
        rows = rows / torch.where(largest > 0, largest, 1.0)
    spectrum = Spectrum.of(rows, center, torch.finfo(dtype).eps)
    rank = int(spectrum.in_rank.sum(-1).min())
    return spectrum.leading(spectrum.in_rank[..., : min(dim, rank)]).to(dtype)


def common_subspaces(
    old: Tensor, new: Tensor, dim: int, *, center: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Return P_old and P_new: (d, n), the leading principal directions of float64 batches old, new: (batch, d).

    n = min(dim, batch, d) whatever the ranks, so that there is no need to wait for a GPU; columns beyond the rank of either batch
    are zero in both, and do not affect the flow between them.
    """
    spectra = [Spectrum.of(z, center, eps) for z in (old, new)]
    keep = (spectra[0].in_rank & spectra[1].in_rank)[..., :dim]
    return spectra[0].leading(keep), spectra[1].leading(keep)


# ------------------------------------------------------------------------------------------------------- angles


def principal_angles(p: Tensor, q: Tensor) -> Tensor:
    """Return the principal angles (..., n), ascending, in [0, pi/2], between orthonormal bases p: (..., d, n1), q: (..., d, n2).

    n = min(n1, n2). Computed from sines below 45 degrees, from cosines above (Bjorck and Golub 1973): accurate at both ends.
    """
    check_bases(p, q)
    dtype = working_dtype(p, q)
    wide, narrow = (p, q) if p.shape[-1] >= q.shape[-1] else (q, p)
    wide, narrow = wide.double(), narrow.double()
    overlap = wide.mT @ narrow
    cosines = torch.linalg.svdvals(overlap)
    # The part of `narrow` outside `wide`. Its singular values are the sines even for many tiny angles, whereas the norms
    # of single columns are not: the rotation that pairs the columns is then arbitrary.
    sines = torch.linalg.svdvals(narrow - wide @ overlap).flip(-1)
    small = sines < math.sqrt(0.5)
    # The clamps affect only the branch that is not used, and keep its derivative finite.
    return torch.where(small, sines.clamp(max=0.75).asin(), cosines.clamp(max=0.75).acos()).to(
        dtype
    )


def geodesic_distance(p: Tensor, q: Tensor) -> Tensor:
    """Return the arc length (...,) of the geodesic: the norm of the principal angles between p: (..., d, n1), q: (..., d, n2)."""
    length: Tensor = torch.linalg.vector_norm(principal_angles(p, q), dim=-1)
    return length


def check_bases(p: Tensor, q: Tensor) -> None:
    """Raise an error for bases that are no matrices, do not fit together, or are not finite."""
    if p.dim() < 2 or q.dim() < 2 or p.shape[-2] != q.shape[-2]:
        raise GeometryError(
            f"bases must have the shapes (d, n1) and (d, n2), not {tuple(p.shape)} and {tuple(q.shape)}"
        )
    if not bool(p.isfinite().all() and q.isfinite().all()):
        raise GeometryError("the bases contain NaN or infinite values")
