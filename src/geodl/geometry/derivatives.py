"""Derivatives of a subspace and of the flow's kernel, for differentiating a loss through the flow.

The autograd SVD divides by the differences of all singular values. But functions of a subspace do not depend on rotations
inside it, and dot products do not depend on rotations of the coordinates. Without both, only the gaps between *kept and
dropped* singular values are divided by, and ties inside either set are harmless. The loss is not smooth at a tie between
the sets, at a change of rank and at 90 degrees; there the gradient is set to 0, so that it stays finite.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from geodl.geometry.flow import inverse_sinc, kernel_weights
from geodl.geometry.subspaces import GeometryError, Spectrum

_FLOAT64_EPS = torch.finfo(torch.float64).eps


def differentiable_subspace(spectrum: Spectrum, basis: Tensor, keep: Tensor) -> Tensor:
    """Return the basis (..., d, n) of the spectrum's directions to `keep`: (..., n), as a function of the spectrum's rows."""
    result: Tensor = _Subspace.apply(spectrum.rows, spectrum, basis, keep)  # type: ignore[no-untyped-call]
    return result


class Pairing(NamedTuple):
    """Results of the forward pass: P_old' P_new = U cos(w) V', the kernel's weights, and which angles count as 90 degrees."""

    U: Tensor  # (..., n, n)
    cosines: Tensor  # (..., n)
    V: Tensor  # (..., n, n)
    alpha: Tensor  # (..., n)
    beta: Tensor  # (..., n)
    right_angle: Tensor  # (..., n) bool


def differentiable_axes(
    axes: Tensor, p_old: Tensor, p_new: Tensor, overlap: Tensor, pairing: Pairing
) -> Tensor:
    """Return the axes (..., d, 2n) of a flow as a function of its bases (..., d, n) and of their overlap P_old' P_new."""
    result: Tensor = _Axes.apply(axes, p_old, p_new, overlap, pairing)  # type: ignore[no-untyped-call]
    return result


class _Subspace(Function):
    """The span of the kept right singular vectors of Z = L S R', as a function of Z.

    A change dZ turns the kept direction r_j into the dropped r_i by (s_j l_j' dZ r_i + s_i l_i' dZ r_j) / (s_j^2 - s_i^2), and out of
    the row space by dZ' l_j / s_j. The incoming gradient must be that of a function of the span.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spectrum: Spectrum, basis: Tensor, keep: Tensor) -> Tensor:
        ctx.spectrum, ctx.keep = spectrum, keep
        return basis

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        _once_only()
        spectrum, keep = ctx.spectrum, ctx.keep.unsqueeze(-2)  # (..., 1, n)
        n, left = keep.shape[-1], spectrum.left
        # Beyond the rank there are no directions.
        right = spectrum.right * spectrum.in_rank.unsqueeze(-2)
        grad = grad * keep
        s_j = torch.where(keep, spectrum.values[..., None, :n], torch.inf)
        s_i = spectrum.values.unsqueeze(-1)
        largest = spectrum.values[..., :1, None]
        # The rounding errors of the data and of the computation.
        noise = 16 * largest * (spectrum.eps * s_j + _FLOAT64_EPS * largest)
        gap = s_j**2 - s_i**2  # (..., k, n)
        kept_i = torch.nn.functional.pad(ctx.keep, (0, spectrum.values.shape[-1] - n)).unsqueeze(-1)
        turn = torch.where(keep & ~kept_i & (gap > noise), (right.mT @ grad) / gap, 0.0)
        s_j = torch.where(keep, s_j, 1.0)
        outside = (grad - right @ (right.mT @ grad)) / s_j
        rows_grad = left[..., :n] @ (right @ (turn * s_j) + outside).mT
        return rows_grad + left @ (turn * s_i) @ (right[..., :n] * keep).mT, None, None, None


class _Axes(Function):
    """The axes D f(D'D) E of the kernel Q = D f(D'D)^2 D', as a function of D = [P_old, P_new].

    D'D has the eigenvalues 1 + cos w and 1 - cos w, with eigenvectors E = [[U, -U], [V, V]] / sqrt 2, so that D E = [s, t] / sqrt 2
    and f = sqrt(2 alpha), sqrt(2 beta). E is an orthogonal change of coordinates that no dot product sees: it is held fixed. The
    derivative of f(D'D) (Daleckii and Krein) then contains only divided differences of f. The incoming gradient must
    be that of a function of dot products.
    """

    @staticmethod
    def forward(
        ctx: Any, axes: Tensor, p_old: Tensor, p_new: Tensor, overlap: Tensor, pairing: Pairing
    ) -> Tensor:
        ctx.save_for_backward(p_old, p_new)
        ctx.pairing = pairing
        return axes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None]:
        _once_only()
        U, cosines, V, alpha, beta, _ = ctx.pairing
        n = cosines.shape[-1]
        E = torch.cat([torch.cat([U, -U], -1), torch.cat([V, V], -1)], -2) * math.sqrt(0.5)
        f = (2 * torch.cat([alpha, beta], -1)).sqrt()
        of_bases = (grad * f.unsqueeze(-2)) @ E.mT  # (..., d, 2n)
        turned = (torch.cat(ctx.saved_tensors, -1) @ E).mT @ grad
        of_gram = E @ (_divided_differences(ctx.pairing) * turned) @ E.mT
        of_overlap = of_gram[..., :n, n:] + of_gram[..., n:, :n].mT  # the rest of D'D is constant
        return None, of_bases[..., :n], of_bases[..., n:], of_overlap, None


def _divided_differences(pairing: Pairing) -> Tensor:
    """Return (f(x_i) - f(x_j)) / (x_i - x_j) for the eigenvalues x = 1 + cos w, then 1 - cos w: (..., 2n, 2n).

    f has two smooth branches and a jump between them, at 90 degrees, x = 1.
    """
    c, right = pairing.cosines, pairing.right_angle
    f_plus, f_minus = (2 * pairing.alpha).sqrt(), (2 * pairing.beta).sqrt()
    apart, middle = c.unsqueeze(-1) - c.unsqueeze(-2), (c.unsqueeze(-1) + c.unsqueeze(-2)) / 2
    # Close on one smooth branch: the mean slope by two Gauss nodes, to (1e-3)^4.
    close = apart.abs() < 1e-3
    nodes = [(middle + sign * apart / math.sqrt(12)).clamp(0.0, 1.0) for sign in (1, -1)]
    slopes = [(one + other) / 2 for one, other in zip(*map(_slopes, nodes), strict=True)]
    plus, minus = (
        torch.where(
            close, slope, (f.unsqueeze(-1) - f.unsqueeze(-2)) / torch.where(close, 1.0, apart)
        )
        for f, slope in zip((f_plus, f_minus), slopes, strict=True)
    )
    # At the jump of f at 90 degrees there is no derivative: the difference is 0, since both f are their mean there.
    jump = right.unsqueeze(-1) & right.unsqueeze(-2)
    across = (f_plus.unsqueeze(-1) - f_minus.unsqueeze(-2)) / torch.where(jump, 1.0, 2 * middle)
    return torch.cat([torch.cat([plus, across], -1), torch.cat([across.mT, -minus], -1)], -2)


def _slopes(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivatives of sqrt(2 alpha) and sqrt(2 beta) with respect to cos w."""
    j, big_j, big_j_slope = inverse_sinc(cosines)
    j_slope = big_j + (1.0 - cosines) * big_j_slope  # with respect to 1 - cos w, as that of J is
    alpha, beta = kernel_weights(cosines)
    alpha_slope = (j_slope / (4.0 * j**2) - alpha) / (1.0 + cosines)
    beta_slope = -(big_j_slope * j - big_j * j_slope) / (4.0 * j**2)
    return alpha_slope / (2.0 * alpha).sqrt(), beta_slope / (2.0 * beta).sqrt()


def _once_only() -> None:
    """Raise an error for second derivatives, which would be silently wrong, even with torch's `once_differentiable`."""
    if torch.is_grad_enabled():
        raise GeometryError(
            "the geodesic flow has no second derivatives: use a constant flow (through_flow=False) there"
        )
