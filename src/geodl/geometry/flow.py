"""The geodesic flow between two subspaces and its kernel Q: one formula a line, in the symbols of docs/geometry.md.

The paper's flow (Eq. 4) and kernel (Eq. 5 to 7) are written from the middle of the path, where the mixed terms of the integral
cancel: no orthogonal complement, no generalized SVD, no d x d matrix, no division by sin w.

Misprints of the paper: Eq. 6 lacks a factor 1/2 (the loss's cosine cancels it); P_old = P_new gives Q = I only *on* the subspace,
not everywhere (after Eq. 9); the adaptive weight is sqrt(old/new) in the code behind the published numbers, not new/old.
"""

from typing import Self

import torch
from torch import Tensor

from geodl.geometry.subspaces import GeometryError, check_bases, principal_angles, working_dtype


class GeodesicFlow:
    """The geodesic Pi(v), v in [0, 1], from span(P_old) to span(P_new); make one with `GeodesicFlow.between`.

    `project`, `inner`, `norm` and `dense` are differentiable with respect to the rows and to both bases (as subspaces: a
    function of the span has the right gradient); `at` is not.
    """

    def __init__(
        self, p_old: Tensor, p_new: Tensor, *, eps: float, dtype: torch.dtype = torch.float64
    ) -> None:
        """Take float64 bases (..., d, n) as they are, of data with relative precision eps; results are of dtype.

        Columns that are zero in both bases add nothing to the kernel.
        """
        self.p_old, self.p_new, self.dtype = p_old, p_new, dtype
        # P_old' P_new = U cos(w) V': the columns of a = P_old U and b = P_new V meet in pairs at the principal angles w.
        overlap = p_old.mT @ p_new
        U, cosines, V_t = torch.linalg.svd(overlap.detach())
        V, self.cosines = V_t.mT, cosines.clamp(max=1.0)
        a, b = p_old.detach() @ U, p_new.detach() @ V
        # Pi(v) = s cos((v - 1/2) w) / (2 cos(w/2)) + t sin((v - 1/2) w) / (2 sin(w/2)), so that Pi(0) = a and Pi(1) = b.
        self.s, self.t = a + b, b - a
        # Q = int_0^1 Pi(v) Pi(v)' dv = sum_i alpha_i s_i s_i' + beta_i t_i t_i'.
        # At 90 degrees the shortest geodesic is not unique: the mean over all of them is Q = (a a' + b b') / 2.
        right_angle = self.cosines <= 64 * eps
        alpha, beta = (
            torch.where(right_angle, 0.25, weight) for weight in kernel_weights(self.cosines)
        )
        # Q = axes axes': the dot products of rows times axes are the kernel's.
        on_s, on_t = (weight.sqrt().unsqueeze(-2) for weight in (alpha, beta))
        self.axes = torch.cat([on_s * self.s, on_t * self.t], -1)  # (..., d, 2n)
        if overlap.requires_grad:
            from geodl.geometry.derivatives import Pairing, differentiable_axes

            pairing = Pairing(U, self.cosines, V, alpha, beta, right_angle)
            self.axes = differentiable_axes(self.axes, p_old, p_new, overlap, pairing)

    @classmethod
    def between(cls, p_old: Tensor, p_new: Tensor) -> Self:
        """Return the flow between the spans of orthonormal bases p_old and p_new: (..., d, n)."""
        check_bases(p_old, p_new)
        if p_old.shape[-1] != p_new.shape[-1]:
            raise GeometryError(
                f"a geodesic flow needs subspaces of equal dimension, not {p_old.shape[-1]} and {p_new.shape[-1]} columns"
            )
        dtype = working_dtype(p_old, p_new)
        return cls(p_old.double(), p_new.double(), eps=torch.finfo(dtype).eps, dtype=dtype)

    @property
    def angles(self) -> Tensor:
        """The principal angles w (..., n), ascending, to the last digits."""
        return principal_angles(self.p_old, self.p_new).to(self.dtype)

    def at(self, v: float | Tensor) -> Tensor:
        """Return an orthonormal basis Pi(v): (..., d, n) (Eq. 4); a tensor v: (...,) gives one basis for each value."""
        w = self.cosines.acos().unsqueeze(
            -2
        )  # 90 degrees keeps its pairing here: any of the shortest geodesics is one
        x = torch.as_tensor(v, dtype=w.dtype, device=w.device)[..., None, None] - 0.5
        small = w < 1e-7  # there sin(x w) / sin(w / 2) is 2x to the last digit
        sines = torch.where(small, 2 * x, (x * w).sin() / torch.where(small, 1.0, (w / 2).sin()))
        basis: Tensor = self.s * (x * w).cos() / (2 * (w / 2).cos()) + self.t * sines / 2
        return basis.to(self.dtype)

    def project(self, x: Tensor) -> Tensor:
        """Return coordinates (..., batch, 2n) of rows x: (..., batch, d); their dot products are the kernel's."""
        return (x.double() @ self.axes).to(self.dtype)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x' Q y (..., batch) of rows x, y: (..., batch, d): their inner products, integrated along the flow (Eq. 8)."""
        return (self.project(x) * self.project(y)).sum(-1)

    def norm(self, x: Tensor) -> Tensor:
        """Return the norms (..., batch) of rows x: (..., batch, d) under the kernel."""
        length: Tensor = torch.linalg.vector_norm(self.project(x), dim=-1)
        return length

    def dense(self) -> Tensor:
        """Return the kernel Q itself (..., d, d) (Eq. 7), for inspection: training never forms it."""
        return (self.axes @ self.axes.mT).to(self.dtype)


# j(e) = w / sin w as a power series in e = 1 - cos w: 1 + e/3 + 2e^2/15 + ... = 1 + e J(e), which is 2F1(1, 1; 3/2; e/2). All terms are
# positive, so nothing cancels at w = 0 where the closed form is 0/0, and each is at most half the one before up to w = 90 degrees.
_TERMS = 60
_J = [1.0 / 3.0]
for _k in range(1, _TERMS):
    _J.append(_J[-1] * (_k + 1) / (2 * _k + 3))
_J_SLOPE = [*(_k * _a for _k, _a in enumerate(_J) if _k), 0.0]


def inverse_sinc(cosines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return j = w / sin w, J = (j - 1) / (1 - cos w), and the slope of J with respect to 1 - cos w, for cos w in [0, 1]."""
    e = 1.0 - cosines
    powers = torch.linalg.vander(e, N=_TERMS)  # (..., n, terms)
    big_j, slope = (powers @ powers.new_tensor([_J, _J_SLOPE]).mT).unbind(-1)
    return 1.0 + e * big_j, big_j, slope


def kernel_weights(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha = (1 + sinc w) / (8 cos^2(w/2)) and beta = (1 - sinc w) / (8 sin^2(w/2)) for cos w: (..., n); sinc w = 1 / j.

    8 cos^2(w/2) = 4 (1 + cos w) and 8 sin^2(w/2) = 4 (1 - cos w).
    """
    j, big_j, _ = inverse_sinc(cosines)
    return (1.0 + 1.0 / j) / (4.0 * (1.0 + cosines)), big_j / (4.0 * j)
