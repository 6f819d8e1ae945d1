"""The subspace that a batch of features spans, and the principal angles between two subspaces.

All is computed in float64. `eps` is the relative precision of the data, which may be less: what is below it is noise.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from geodl.core.errors import TrainingError


class GeometryError(TrainingError, ValueError):
    """Features or bases that no geometry can be computed from: not finite, or of shapes that do not fit."""


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the precision results are given in: float64 for float64 input, float32 for anything less."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def unit(z: Tensor) -> Tensor:
    """Return the rows of z: (..., d) with length 1, in float64; rows of zeros stay zero and get no gradient.

    So do rows that are too short to be divided by their length in z's own precision, or to be squared in float64.
    """
    shortest = max(torch.finfo(z.dtype).tiny, 1e-150)
    z = z.double()
    norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / torch.where(norms > shortest, norms, torch.inf)


# ---------------------------------------------------------------------------------------------------- subspaces


@dataclass(frozen=True)
class Spectrum:
    """The SVD of a batch, Z = left diag(values) right', largest value first, and its numerical rank."""

    rows: Tensor  # (..., batch, d): Z, centered if asked for; what follows carries no gradient
    left: Tensor  # (..., batch, k), k = min(batch, d)
    values: Tensor  # (..., k)
    right: Tensor  # (..., d, k): the principal directions
    in_rank: Tensor  # (..., k) bool
    eps: float  # relative precision of the data

    @classmethod
    def of(cls, z: Tensor, center: bool, eps: float) -> Self:
        """Decompose a float64 batch z: (..., batch, d) of data with relative precision eps."""
        batch, d = z.shape[-2:]
        # What centering may leave.
        noise = eps * torch.linalg.vector_norm(z.detach(), dim=(-2, -1)).unsqueeze(-1)
        if center:
            z = z - z[..., :1, :]  # rows that are all alike leave exactly nothing
            z = z - z.mean(-2, keepdim=True)
        # The factorization refuses NaN: a batch with any has no subspace here, and its projections are NaN all the same.
        left, values, right_t = torch.linalg.svd(
            z.detach().nan_to_num(0.0, 0.0, 0.0), full_matrices=False
        )
        # The usual max(batch, d) eps, but at most 256 eps: float32 features of any width keep singular values down to
        # 1e-4 of the largest, and their noise does not grow with d (it is near 1e-7).
        in_rank = (values > min(max(batch, d), 256) * eps * values[..., :1]) & (values > noise)
        if center:
            in_rank[..., batch - 1 :] = False  # the mean has taken one direction
        return cls(z, left, values, right_t.mT, in_rank, eps)

    def leading(self, keep: Tensor) -> Tensor:
        """Return the first principal directions (..., d, n), with zeros instead of those not to `keep`: (..., n) bool.

        Those to keep come first and are in the rank.
        """
        basis = self.right[..., : keep.shape[-1]] * keep.unsqueeze(-2)
        if not self.rows.requires_grad:
            return basis
        from geodl.geometry.derivatives import differentiable_subspace

        return differentiable_subspace(self, basis, keep)


def subspace(z: Tensor, dim: int, *, center: bool = True) -> Tensor:
    """Return an orthonormal basis (..., d, n) of the leading principal directions of a batch z: (..., batch, d).

    n = min(dim, rank), the smallest rank where there are leading dimensions. rank counts the singular values of the centered
    batch above max(batch, d) eps (at most 256 eps) of the largest. Differentiable as a subspace: a function of the basis has
    the right gradient if it depends on its span alone.
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
    if z.numel():  # the squares of 1e200 overflow
        largest = rows.detach().abs().amax((-2, -1), keepdim=True)
        rows = rows / torch.where(largest > 0, largest, 1.0)
    spectrum = Spectrum.of(rows, center, torch.finfo(dtype).eps)
    rank = int(spectrum.in_rank.sum(-1).min())
    return spectrum.leading(spectrum.in_rank[..., : min(dim, rank)]).to(dtype)


def common_subspaces(
    old: Tensor, new: Tensor, dim: int, *, center: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Return P_old and P_new: (d, n), the leading principal directions of float64 batches old, new: (batch, d).

    n = min(dim, batch, d) whatever the ranks, so that no GPU is waited for; columns beyond the rank of either batch are zero in
    both, and count for nothing in the flow between them.
    """
    spectra = [Spectrum.of(z, center, eps) for z in (old, new)]
    keep = (spectra[0].in_rank & spectra[1].in_rank)[..., :dim]
    return spectra[0].leading(keep), spectra[1].leading(keep)


# ------------------------------------------------------------------------------------------------------- angles


def principal_angles(p: Tensor, q: Tensor) -> Tensor:
    """Return the principal angles (..., n), ascending, in [0, pi/2], between orthonormal bases p: (..., d, n1), q: (..., d, n2).

    n = min(n1, n2). Sines below 45 degrees, cosines above (Bjorck and Golub 1973): right to the last digits at both ends.
    """
    check_bases(p, q)
    dtype = working_dtype(p, q)
    wide, narrow = (p, q) if p.shape[-1] >= q.shape[-1] else (q, p)
    wide, narrow = wide.double(), narrow.double()
    overlap = wide.mT @ narrow
    cosines = torch.linalg.svdvals(overlap)
    # What is left of `narrow` outside `wide`. Its singular values are the sines also among many tiny angles, where
    # the norms of single columns are not: the rotation that pairs the columns is then arbitrary.
    sines = torch.linalg.svdvals(narrow - wide @ overlap).flip(-1)
    small = sines < math.sqrt(0.5)
    # The clamps bind only on the branch that is not taken, and keep its derivative finite.
    return torch.where(small, sines.clamp(max=0.75).asin(), cosines.clamp(max=0.75).acos()).to(
        dtype
    )


def geodesic_distance(p: Tensor, q: Tensor) -> Tensor:
    """Return the arc length (...,) of the geodesic: the norm of the principal angles between p: (..., d, n1), q: (..., d, n2)."""
    length: Tensor = torch.linalg.vector_norm(principal_angles(p, q), dim=-1)
    return length


def check_bases(p: Tensor, q: Tensor) -> None:
    """Refuse bases that do not fit together, have no columns' axis, or are not finite."""
    if p.dim() < 2 or q.dim() < 2 or p.shape[-2] != q.shape[-2]:
        raise GeometryError(
            f"bases must have the shapes (d, n1) and (d, n2), not {tuple(p.shape)} and {tuple(q.shape)}"
        )
    if not bool(p.isfinite().all() and q.isfinite().all()):
        raise GeometryError("the bases contain NaN or infinite values")
