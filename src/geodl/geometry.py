"""Subspaces of feature batches and the geodesic flow between them on the Grassmann manifold.

Two batches give subspaces with orthonormal bases P, Q (d x n) of principal directions (paper, section 4.1). With the SVD
``P'Q = U cos(w) V'`` the columns of ``a = PU`` and ``b = QV`` meet in pairs at the principal angles w, and with
``s = a + b``, ``t = b - a`` the geodesic flow (Eq. 4), written from its middle, is
    ``Pi(v) = s cos((v - 1/2) w) / (2 cos(w/2)) + t sin((v - 1/2) w) / (2 sin(w/2))``,   Pi(0) ~ P, Pi(1) ~ Q.
Its kernel (Eq. 5 to 7) needs no orthogonal complement, no generalised SVD and no d x d matrix, as mixed terms cancel:
    ``K = int_0^1 Pi(v) Pi(v)' dv = sum_i alpha_i s_i s_i' + beta_i t_i t_i'``,
    ``alpha = (1 + sinc w) / (8 cos^2(w/2))``,  ``beta = (1 - sinc w) / (8 sin^2(w/2))``,  ``sinc w = sin(w) / w``.
Equivalently ``K = D h(D'D) D'`` with ``D = [P Q]`` and ``h(x) = g(x) / x`` on the eigenvalues ``x = 1 +- cos w`` of D'D, where
``g(1 +- cos w) = (1 +- sinc w) / 2``: in [0, 1], trace n. At w = 90 degrees the shortest geodesic is not unique; the mean
over them is taken: g(1) = 1/2. Rows are compared by their 2n coordinates ``x D h(D'D)^(1/2)``, whose dot products are K's.

Misprints of the paper: Eq. 6 lacks a factor 1/2 (the loss's cosine cancels it); P = Q gives K = I only *on* the subspace,
not everywhere (after Eq. 9); the adaptive weight is sqrt(old/new) in the code behind the published numbers, not new/old.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from geodl.errors import TrainingError

_FLOAT64_EPS = torch.finfo(torch.float64).eps


class GeometryError(TrainingError, ValueError):
    """Features or bases that no geometry can be computed from: not finite, or of shapes that do not fit."""


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the precision results are given in: float64 for float64 input, float32 for anything less."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _once_only() -> None:
    """Refuse to differentiate a hand-written derivative again: the result would be silently wrong."""
    if torch.is_grad_enabled():
        raise GeometryError(
            "the geodesic flow has no second derivatives: use a constant flow (through_flow=False) there"
        )


# ---------------------------------------------------------------------------------------------------- subspaces


def contrast(z: Tensor) -> Tensor:
    """Return batch - 1 rows with the singular values and right singular vectors of the centred batch z: (..., batch, d).

    They are all but the first of the rows after the reflection that turns the column of ones into the first axis, and with it
    what the rows have in common into the first row. Taking the differences first leaves nothing of that in the others.
    """
    root = math.sqrt(z.shape[-2])
    differences = z[..., 1:, :] - z[..., :1, :]
    differences -= differences.sum(-2, keepdim=True) / (z.shape[-2] - root or 1.0)  # of a single row nothing is left
    return differences


def rank_tolerance(batch: int, d: int, eps: float) -> float:
    """Return the share of the largest singular value of a (batch, d) matrix below which others are rounding noise.

    The usual max(batch, d) * eps, but no more than 256 eps: float32 features of any width are to keep singular values down
    to 1e-4 of the largest, and their noise does not grow with d (it is near 1e-7).
    """
    return min(max(batch, d), 256) * eps


@dataclass(frozen=True)
class Spectrum:
    """Singular triplets of rows: (..., m, d), largest first; those beyond the numerical rank have zero vectors in `right`."""

    left: Tensor  # (..., m, k), k = min(m, d)
    values: Tensor  # (..., k)
    right: Tensor  # (..., d, k)
    rank: int  # of the poorest batch
    eps: float  # relative precision of the data

    @classmethod
    def of(cls, rows: Tensor, floor: Tensor, eps: float) -> Spectrum:
        """Decompose float64 rows: (..., m, d) of data with relative precision eps; floor: (...,) is the noise centring leaves."""
        rows = rows.detach()
        m, d = rows.shape[-2:]
        # A float64 Gram matrix resolves float32 data several times faster, but squares what is small.
        left, values, right = _by_gram(rows) if eps > _FLOAT64_EPS else _by_svd(rows)
        if not values.numel():
            return cls(left, values, right, 0, eps)
        least = rank_tolerance(m, d, eps) * values[..., :1]
        if eps > _FLOAT64_EPS and bool(((values > least) & (values < 1e-4 * values[..., :1])).any()):
            left, values, right = _by_svd(rows)
        kept = (values > least) & (values > floor.unsqueeze(-1))
        rank = int(kept.sum(-1).min())
        return cls(left, values, right * kept.unsqueeze(-2), rank, eps)


def _by_svd(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right_t = torch.linalg.svd(rows, full_matrices=False)
    return left, values, right_t.mT


def _by_gram(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = rows.shape[-2] <= rows.shape[-1]
    squares, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)
    values, vectors = squares.flip(-1).clamp(min=0).sqrt(), vectors.flip(-1)
    others = (rows.mT if wide else rows) @ vectors
    others = others / values.clamp(min=torch.finfo(values.dtype).tiny).unsqueeze(-2)
    return (vectors, values, others) if wide else (others, values, vectors)


class _LeadingSubspace(torch.autograd.Function):
    """The n leading right singular vectors of rows; its derivative is that of the subspace they span.

    Whatever is computed from a subspace does not see rotations inside it, so only the gaps between kept and dropped singular
    values appear, never those inside either set (an SVD's own derivative divides by them). The gradient that comes in
    must be that of a function of the span.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spectrum: Spectrum, n: int) -> Tensor:
        ctx.spectrum, ctx.n = spectrum, n
        return spectrum.right[..., :n].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _once_only()
        spectrum, n, grad = ctx.spectrum, ctx.n, grads[0]
        values, left, right = spectrum.values, spectrum.left, spectrum.right
        keep, drop = values[..., None, :n], values[..., n:, None]
        gap = keep**2 - drop**2  # (dropped, kept); a tie across the cut has no derivative: nothing flows there
        largest = values[..., :1, None]
        noise = 16 * largest * (spectrum.eps * keep + _FLOAT64_EPS * largest)  # of the data, and of our own arithmetic
        gap = torch.where(gap > noise, gap, torch.inf)
        mixed = (right[..., n:].mT @ grad) / gap
        outside = (grad - right @ (right.mT @ grad)) / keep
        rows_grad = left[..., :n] @ (right[..., n:] @ (mixed * keep) + outside).mT
        rows_grad = rows_grad + left[..., n:] @ ((mixed * drop) @ right[..., :n].mT)
        return rows_grad, None, None


def leading_subspace(rows: Tensor, spectrum: Spectrum, n: int) -> Tensor:
    """Return the n leading principal directions (..., d, n) of rows: (..., m, d), differentiable as a subspace."""
    result: Tensor = _LeadingSubspace.apply(rows, spectrum, n)  # type: ignore[no-untyped-call]
    return result


def subspace(z: Tensor, dim: int, *, centre: bool = True) -> Tensor:
    """Return an orthonormal basis (..., d, n) of the leading principal directions of a batch z: (..., batch, d).

    n = min(dim, rank); rank counts the singular values of the centred batch above `rank_tolerance` * the largest
    (the smallest rank, where there are leading dimensions). Differentiable as a subspace (see `_LeadingSubspace`).
    """
    if z.dim() < 2:
        raise GeometryError(f"a batch of features must have the shape (batch, d), not {tuple(z.shape)}")
    if dim < 0:
        raise GeometryError(f"the dimension of a subspace cannot be {dim}")
    if not bool(z.isfinite().all()):
        raise GeometryError("the features contain NaN or infinite values")
    dtype = working_dtype(z)
    eps = torch.finfo(dtype).eps
    rows = z.double()
    largest = rows.detach().abs().amax((-2, -1), keepdim=True) if z.numel() else rows.new_ones(())
    rows = rows / torch.where(largest > 0, largest, 1.0)  # the squares of 1e200 overflow
    floor = eps * torch.linalg.vector_norm(rows.detach(), dim=(-2, -1))
    if centre:
        rows = contrast(rows)
    spectrum = Spectrum.of(rows, floor, eps)
    return leading_subspace(rows, spectrum, min(dim, spectrum.rank)).to(dtype)


# ------------------------------------------------------------------------------------------------------- angles


def principal_angles(p: Tensor, q: Tensor) -> Tensor:
    """Return the principal angles (..., n), ascending, in [0, pi/2], between orthonormal bases p: (..., d, n1), q: (..., d, n2).

    n = min(n1, n2). Sines below 45 degrees, cosines above (Bjorck and Golub 1973): right to the last digits at both ends.
    """
    _check_bases(p, q)
    dtype = working_dtype(p, q)
    wide, narrow = (p.double(), q.double()) if p.shape[-1] >= q.shape[-1] else (q.double(), p.double())
    overlap = wide.mT @ narrow
    cosines = torch.linalg.svdvals(overlap)
    # What is left of `narrow` outside `wide`. Its singular values are the sines also among many tiny angles, where
    # the norms of single columns are not: the rotation that pairs the columns is then arbitrary.
    sines = torch.linalg.svdvals(narrow - wide @ overlap).flip(-1)
    small = sines < math.sqrt(0.5)
    # The clamps bind only on the branch that is not taken, and keep its derivative finite.
    return torch.where(small, sines.clamp(max=0.75).asin(), cosines.clamp(max=0.75).acos()).to(dtype)


def geodesic_distance(p: Tensor, q: Tensor) -> Tensor:
    """Return the arc length (...,) of the geodesic: the norm of the principal angles between p: (..., d, n1), q: (..., d, n2)."""
    length: Tensor = torch.linalg.vector_norm(principal_angles(p, q), dim=-1)
    return length


def _check_bases(p: Tensor, q: Tensor) -> None:
    if p.dim() < 2 or q.dim() < 2 or p.shape[-2] != q.shape[-2]:
        raise GeometryError(
            f"bases must have the shapes (d, n1) and (d, n2), not {tuple(p.shape)} and {tuple(q.shape)}"
        )
    if not bool(p.isfinite().all() and q.isfinite().all()):
        raise GeometryError("the bases contain NaN or infinite values")


# --------------------------------------------------------------------------------------------------- the kernel

# j(e) = w / sin w with e = 1 - cos w is 2F1(1, 1; 3/2; e/2) = 1 + e J(e): all terms positive, so nothing cancels at w = 0.
_SERIES = [1.0 / 3.0]  # of J
for _k in range(1, 7):
    _SERIES.append(_SERIES[-1] * (_k + 1) / (2 * _k + 3))
_SERIES_SLOPE = [_k * _a for _k, _a in enumerate(_SERIES)][1:]
_SERIES_REACH = 0.01  # (e/2)^7 is below float64 there, and beyond it the closed forms lose three digits


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    result = x * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        result = result * x + coefficient
    return result


def _j(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Return j = w / sin w and J = (j - 1) / (1 - cos w)."""
    e = 1.0 - cosines
    safe = cosines.clamp(max=1.0 - _SERIES_REACH)
    far = (safe.acos() / (1.0 - safe**2).sqrt() - 1.0) / (1.0 - safe)
    big_j = torch.where(e < _SERIES_REACH, _polynomial(_SERIES, e), far)
    return 1.0 + e * big_j, big_j


def _roots(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Return sqrt h(1 + c) and sqrt h(1 - c) for c = cos w: (..., n) each."""
    j, big_j = _j(cosines)
    plus = (1.0 + 1.0 / j) / (2.0 * (1.0 + cosines))  # (1 + sinc w) / 2 / (1 + cos w)
    minus = big_j / (2.0 * j)  # (1 - sinc w) / 2 / (1 - cos w)
    return plus.sqrt(), minus.sqrt()


def _root_slopes(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivatives of both `_roots` with respect to c."""
    j, big_j = _j(cosines)
    e = 1.0 - cosines
    safe = e.clamp(min=_SERIES_REACH)
    far = ((1.0 - cosines * j) / (safe * (2.0 - safe)) - big_j) / safe
    dbig_j = torch.where(e < _SERIES_REACH, _polynomial(_SERIES_SLOPE, e), far)  # with respect to e, like dj
    dj = big_j + e * dbig_j
    plus, minus = _roots(cosines)
    dplus = (plus**2 - dj / (2.0 * j**2)) / (1.0 + cosines)
    dminus = (dbig_j * j - big_j * dj) / (2.0 * j**2)
    return -dplus / (2.0 * plus), -dminus / (2.0 * minus)


@dataclass(frozen=True)
class Pairing:
    """The SVD of an overlap P'Q: (..., n, n), which pairs the columns of the bases at the principal angles, in any order."""

    u: Tensor  # (..., n, n)
    cosines: Tensor  # (..., n), in [0, 1], float64
    v: Tensor  # (..., n, n)
    right_angle: float  # cosines up to this one count as 90 degrees

    @classmethod
    def of(cls, overlap: Tensor, eps: float) -> Pairing:
        """Decompose the overlap of bases whose data have relative precision eps."""
        overlap = overlap.detach()
        # For float32 data eigh does, twice as fast, unless its error of eps / cos^2 w is too large.
        if eps > _FLOAT64_EPS:
            v = torch.linalg.eigh(overlap.mT @ overlap).eigenvectors
            turned = overlap @ v
            cosines = torch.linalg.vector_norm(turned, dim=-2)
            if bool((cosines > (1e-3 if overlap.dtype == torch.float64 else 0.1)).all()):
                return cls(turned / cosines.unsqueeze(-2), cosines.double().clamp(max=1.0), v, 64 * eps)
        u, cosines, v_t = torch.linalg.svd(overlap)
        return cls(u, cosines.double().clamp(max=1.0), v_t.mT, 64 * eps)

    @cached_property
    def roots(self) -> tuple[Tensor, Tensor]:
        """The kernel's roots on s and t, sqrt h(1 + c) and sqrt h(1 - c): (..., n) each."""
        right = self.cosines <= self.right_angle
        half = math.sqrt(0.5)  # the mean over the shortest geodesics: h(1) = g(1) = 1/2
        plus, minus = _roots(self.cosines)
        return torch.where(right, half, plus), torch.where(right, half, minus)

    def divided_differences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (f(x_i) - f(x_j)) / (x_i - x_j) of f = sqrt h among x = 1 + c, across to 1 - c, and among those: (..., n, n) each."""
        c = self.cosines
        plus, minus = self.roots
        apart, middle = c.unsqueeze(-1) - c.unsqueeze(-2), (c.unsqueeze(-1) + c.unsqueeze(-2)) / 2
        # Close on one smooth branch: the mean slope by two Gauss nodes, to (1e-3)^4.
        close = apart.abs() < 1e-3
        nodes = [(middle + sign * apart / math.sqrt(12)).clamp(0.0, 1.0) for sign in (1, -1)]
        slopes = [(one + other) / 2 for one, other in zip(*map(_root_slopes, nodes), strict=True)]
        same = []
        for f, slope in zip((plus, minus), slopes, strict=True):
            quotient = (f.unsqueeze(-1) - f.unsqueeze(-2)) / torch.where(close, 1.0, apart)
            same.append(torch.where(close, slope, quotient))
        # Across the jump of f at 90 degrees there is no derivative: nothing flows.
        jump = middle <= self.right_angle
        across = (plus.unsqueeze(-1) - minus.unsqueeze(-2)) / torch.where(jump, 1.0, 2 * middle)
        return same[0], torch.where(jump, 0.0, across), -same[1]


class _KernelCoordinates(torch.autograd.Function):
    """``[x P, x Q] h(D'D)^(1/2) E`` from x P, x Q and P'Q, with E the eigenvectors ``[[U, U], [V, -V]] / sqrt 2`` of D'D.

    E is an orthogonal change of coordinates that no dot product sees: it is held fixed. The derivative of h^(1/2) (Daleckii and
    Krein) then holds divided differences only, which coinciding angles do not harm as they harm the derivative of an SVD. The
    gradient that comes in must be that of a function of dot products.
    """

    @staticmethod
    def forward(ctx: Any, on_p: Tensor, on_q: Tensor, overlap: Tensor, pairing: Pairing) -> Tensor:
        a, b = on_p @ pairing.u, on_q @ pairing.v
        plus, minus = (root.unsqueeze(-2).to(a.dtype) * math.sqrt(0.5) for root in pairing.roots)
        ctx.pairing, ctx.scales = pairing, (plus, minus)
        ctx.save_for_backward(*((a, b) if ctx.needs_input_grad[2] else ()))
        return torch.cat([(a + b).mul_(plus), (a - b).mul_(minus)], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        pairing, (plus, minus) = ctx.pairing, ctx.scales
        up, down = grads[0].chunk(2, -1)
        grad_plus, grad_minus = up * plus, down * minus
        on_p = (grad_plus + grad_minus) @ pairing.u.mT
        on_q = (grad_plus - grad_minus) @ pairing.v.mT
        if not ctx.needs_input_grad[2]:
            return on_p, on_q, None, None
        _once_only()
        a, b = ctx.saved_tensors
        sums, differences = (a + b).mT * math.sqrt(0.5), (a - b).mT * math.sqrt(0.5)
        pp, pm, mm = pairing.divided_differences()
        one = pp * (sums @ up) - mm * (differences @ down)
        other = pm.mT * (differences @ up) - pm * (sums @ down)
        overlap = pairing.u @ ((one + other + (one - other).mT) / 2) @ pairing.v.mT
        return on_p, on_q, overlap, None


def kernel_coordinates(on_p: Tensor, on_q: Tensor, overlap: Tensor, pairing: Pairing) -> Tensor:
    """Return 2n coordinates of rows x whose dot products are the flow's kernel.

    on_p, on_q: (..., batch, n) are x P and x Q, overlap: (..., n, n) is P'Q and pairing its SVD.
    """
    result: Tensor = _KernelCoordinates.apply(on_p, on_q, overlap, pairing)  # type: ignore[no-untyped-call]
    return result


# ----------------------------------------------------------------------------------------------------- the flow


@dataclass(frozen=True)
class GeodesicFlow:
    """The geodesic Pi(v), v in [0, 1], from span(p) to span(q); make one with `GeodesicFlow.between`.

    `project`, `inner`, `norm` and `dense` are differentiable with respect to both bases, as subspaces; `at` is not.
    """

    p: Tensor  # (..., d, n), float64 like all that follows
    q: Tensor  # (..., d, n)
    overlap: Tensor  # (..., n, n), P'Q
    pairing: Pairing
    dtype: torch.dtype  # of the results

    @classmethod
    def between(cls, p: Tensor, q: Tensor) -> GeodesicFlow:
        """Return the flow between the spans of orthonormal bases p and q: (..., d, n)."""
        _check_bases(p, q)
        if p.shape[-1] != q.shape[-1]:
            raise GeometryError(
                f"a geodesic flow needs subspaces of equal dimension, not {p.shape[-1]} and {q.shape[-1]} columns"
            )
        dtype = working_dtype(p, q)
        p, q = p.double(), q.double()
        overlap = p.mT @ q
        return cls(p, q, overlap, Pairing.of(overlap, torch.finfo(dtype).eps), dtype)

    @property
    def angles(self) -> Tensor:
        """The principal angles (..., n), ascending, to the last digits."""
        return principal_angles(self.p, self.q).to(self.dtype)

    def at(self, v: float | Tensor) -> Tensor:
        """Return an orthonormal basis Pi(v): (..., d, n) (Eq. 4); a tensor v: (...,) gives one basis for each value."""
        a, b = self.p.detach() @ self.pairing.u, self.q.detach() @ self.pairing.v
        # 90 degrees keeps its pairing here: any of the shortest geodesics is one.
        w = self.pairing.cosines.acos().unsqueeze(-2)
        u = torch.as_tensor(v, dtype=w.dtype, device=w.device)[..., None, None] - 0.5
        small = w < 1e-7  # there sin(u w) / sin(w / 2) is 2u to the last digit
        ratio = torch.where(small, 2 * u, (u * w).sin() / torch.where(small, 1.0, (w / 2).sin()))
        return ((a + b) * ((u * w).cos() / (2 * (w / 2).cos())) + (b - a) * (ratio / 2)).to(self.dtype)

    def project(self, x: Tensor) -> Tensor:
        """Return coordinates (..., batch, 2n) of rows x: (..., batch, d); their dot products are the kernel's."""
        return self._project(x.double()).to(self.dtype)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the inner products (..., batch) of rows a, b: (..., batch, d), integrated along the flow (Eq. 8)."""
        return (self.project(a) * self.project(b)).sum(-1)

    def norm(self, a: Tensor) -> Tensor:
        """Return the norms (..., batch) of rows a: (..., batch, d) under the kernel."""
        length: Tensor = torch.linalg.vector_norm(self.project(a), dim=-1)
        return length

    def dense(self) -> Tensor:
        """Return the kernel itself (..., d, d) (Eq. 7), for inspection: training never forms it."""
        factor = self._project(torch.eye(self.p.shape[-2], dtype=self.p.dtype, device=self.p.device))
        return (factor @ factor.mT).to(self.dtype)

    def _project(self, x: Tensor) -> Tensor:
        return kernel_coordinates(x @ self.p, x @ self.q, self.overlap, self.pairing)
