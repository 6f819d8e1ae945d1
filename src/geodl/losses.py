"""Distillation losses between a frozen teacher and a student, and LUCIR's margin ranking.

Each distillation is a plain module: ``loss(student, teacher)`` of two (batch, d) tensors for the *same* augmented batch gives a
scalar. The geodesic one (paper, Eq. 9) compares rows by the cosine of the kernel of `geodl.geometry`:
``mean_i 1 - <z_new, K z_old> / (|K^1/2 z_new| |K^1/2 z_old|)``. Each 1 - cos is computed as half the squared distance of unit
vectors, because the textbook form loses the digits of small losses.

With a process group the value on every rank is the loss of the global batch, and the mean over ranks of the gradients (what
data-parallel training takes) is its gradient: a rank's gradient is world size x its own part. Without one nothing is gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from geodl.geometry import (
    GeometryError,
    Pairing,
    Spectrum,
    contrast,
    kernel_coordinates,
    leading_subspace,
    rank_tolerance,
    working_dtype,
)

Group = dist.ProcessGroup | None

FEW = 32  # With fewer directions than this, a row may be nearly orthogonal to all of them: float64 keeps its digits.


# ---------------------------------------------------------------------------------------------------- reductions


def global_mean(values: Tensor, group: Group = None) -> Tensor:
    """Return the mean over all elements of `values` on all ranks of the group; 0 where there is none anywhere.

    Every rank gets the global value; its gradient is world size x its own part, so that the mean over ranks is the gradient.
    """
    total = values.sum()
    if group is None:
        return total / max(values.numel(), 1)
    sums = torch.stack([total.detach().double(), total.new_tensor(values.numel(), dtype=torch.float64)])
    dist.all_reduce(sums, group=group)
    count = sums[1].clamp(min=1.0)
    own = total * (dist.get_world_size(group) / count).to(total.dtype)
    return (sums[0] / count).to(total.dtype) + (own - own.detach())


def gather_rows(z: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the rows of all ranks of z: (batch, ...) without gradient, and where this rank's begin; batches may differ in size."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=z.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(z)], device=z.device), group=group)
    counts = [int(size) for size in sizes]
    padded = z.new_zeros(max(counts), *z.shape[1:])  # collectives want equal shapes
    padded[: len(z)] = z.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    start = sum(counts[: dist.get_rank(group)])
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), start


# ------------------------------------------------------------------------------------------------- distillations


class LogitDistillation(nn.Module):
    """LwF's loss (Eq. 2): KL(teacher || student) of the classes' softmax at a temperature, batch mean, no T^2.

    Student and teacher logits are both (batch, old classes): the caller cuts the student's to the teacher's classes.
    """

    def __init__(self, temperature: float = 2.0, group: Group = None) -> None:
        super().__init__()
        self.temperature = temperature
        self.group = group

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of student and teacher logits: (batch, classes) each."""
        _check(student, teacher, self.group)
        with torch.autocast(student.device.type, enabled=False):
            dtype = working_dtype(student, teacher)
            new = F.log_softmax(student.to(dtype) / self.temperature, dim=1)
            old = F.log_softmax(teacher.to(dtype) / self.temperature, dim=1)
            rows = F.kl_div(new, old, reduction="none", log_target=True).sum(1)
            return global_mean(rows, self.group)


class CosineDistillation(nn.Module):
    """LUCIR's less-forget constraint (Eq. 3): mean of 1 - cos over the rows; a zero row counts 0."""

    def __init__(self, group: Group = None) -> None:
        super().__init__()
        self.group = group

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of student and teacher features: (batch, d) each."""
        _check(student, teacher, self.group)
        with torch.autocast(student.device.type, enabled=False):
            rows = one_minus_cosine(student, teacher)
            return global_mean(rows, self.group).to(working_dtype(student, teacher))


class GeodesicDistillation(nn.Module):
    """GeoDL's loss (Eq. 9): the mean of 1 - cos under the kernel of the geodesic flow between the batches' subspaces.

    dim: principal directions kept of each batch (127: all of a centred batch of 128). through_flow: differentiate the
    flow too; by default it is constant and only the projected student rows carry gradient, as in the reference code.
    group: take the subspaces of the global batch over these ranks. centre: subtract the batch mean to find the subspaces.
    """

    def __init__(self, dim: int = 127, through_flow: bool = False, group: Group = None, *, centre: bool = True) -> None:
        super().__init__()
        if dim < 1:
            raise GeometryError(f"the subspace dimension must be at least 1, not {dim}")
        self.dim = dim
        self.through_flow = through_flow
        self.group = group
        self.centre = centre

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of student and teacher features: (batch, d) each, the same images in the same order."""
        _check(student, teacher, self.group)
        with torch.autocast(student.device.type, enabled=False):
            if self.group is None:
                return global_mean(self._rows(student, teacher)).to(working_dtype(student, teacher))
            # Each rank computes the whole batch's loss: its own rows carry the gradient, also through the flow.
            both = [z.detach().to(working_dtype(student, teacher)) for z in (student, teacher)]
            everything, start = gather_rows(torch.stack(both, 1), self.group)
            end = start + len(student)
            others = everything[:, 0]
            students = torch.cat([others[:start], student, others[end:]])
            loss = global_mean(self._rows(students, everything[:, 1])).to(working_dtype(student, teacher))
            return loss.detach() + (loss - loss.detach()) * dist.get_world_size(self.group)

    def _rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of every row: (batch,), in float64 whatever the features' precision."""
        dtype = working_dtype(student, teacher)
        eps = torch.finfo(dtype).eps
        # The loss does not see the length of a projected row, so the norm carries gradient only into the flow.
        new = unit_rows(student, constant_norm=not self.through_flow)
        old = unit_rows(teacher if self.through_flow else teacher.detach())
        if self.through_flow:
            bases = _bases(old, new, self.dim, eps, self.centre, torch.float64)
        else:  # once they are orthonormal, bases are good enough in the precision of the data
            bases = _bases(old, new.detach(), self.dim, eps, self.centre, dtype)
        overlap = bases[0] @ bases[1].mT
        pairing = Pairing.of(overlap, eps)

        def coordinates(on_bases: Tensor) -> Tensor:
            on_old, on_new = on_bases.chunk(2, -1)
            return kernel_coordinates(on_old, on_new, overlap, pairing)

        axes = bases.flatten(0, 1).mT
        # The coordinates are linear in the rows: turn the d axes once, or the rows three times (old, new, and the gradient).
        narrow = len(axes) < 3 * len(student)
        if narrow:
            axes = coordinates(axes)

        def project(rows: Tensor) -> Tensor:
            on_axes = rows.to(axes.dtype) @ axes
            return (on_axes if narrow else coordinates(on_axes)).double()

        old_projected = project(old)
        new_projected = old_projected + project(new - old)  # keeps the digits of small differences
        # A row without a projection has no direction: it counts 0, as do all when there is no subspace (n = 0).
        return one_minus_cosine(new_projected, old_projected, least=16 * eps)


def _bases(old: Tensor, new: Tensor, dim: int, eps: float, centre: bool, dtype: torch.dtype) -> Tensor:
    """Return orthonormal rows (2, n, d) that span the principal subspaces of two float64 unit batches: (batch, d).

    n = min(dim, ranks); eps is the relative precision of the data. The result is of the given dtype where that is good enough,
    else of float64: where there are few directions, or where Cholesky's are ill-conditioned.
    """
    frames = [contrast(rows) if centre else rows for rows in (old, new)]
    m, d = frames[0].shape
    floor = eps * len(old) ** 0.5  # the noise that centring leaves
    # Where nothing is to be dropped, a subspace is the whole row space, and Cholesky gives a basis several times faster.
    # float64 Gram matrices are exact enough for float32 data of full rank, not for float64.
    if 0 < m <= min(dim, d) and eps > torch.finfo(torch.float64).eps:
        lower, info = torch.linalg.cholesky_ex(torch.stack([frame @ frame.mT for frame in frames]))
        eye = torch.eye(m, dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        # 1 / |L^-1| and |L| bound the smallest and the largest singular value: full rank by the rule of `Spectrum.of`.
        tolerance = rank_tolerance(m, d, eps)
        largest = torch.linalg.matrix_norm(lower).clamp(min=floor / tolerance)
        condition = torch.where(info == 0, largest * torch.linalg.matrix_norm(inverse), torch.inf).max().item()
        if condition < 1 / tolerance:
            # Factors rounded to dtype harm a basis by eps times its condition number, m-fold in `condition` if all directions are
            # alike: float64 where some are much weaker.
            precision = dtype if m >= FEW and condition < 4 * m else old.dtype
            parts = zip(inverse.to(precision), frames, strict=True)
            return torch.stack([part @ frame.to(precision) for part, frame in parts])
    spectra = [Spectrum.of(frame, old.new_tensor(floor), eps) for frame in frames]
    n = min(dim, *(spectrum.rank for spectrum in spectra))
    bases = [leading_subspace(frame, spectrum, n).mT for frame, spectrum in zip(frames, spectra, strict=True)]
    return torch.stack(bases).to(dtype if n >= FEW else old.dtype)


# ------------------------------------------------------------------------------------------------- margin ranking


def margin_ranking(cosines: Tensor, labels: Tensor, new: Tensor, margin: float = 0.5, top: int = 2) -> Tensor:
    """Return LUCIR's hinges (M, K): max(0, margin - cos of the true class + cos of a hard new class).

    cosines: (batch, classes) before the scale sigma; labels: (batch,); new: (classes,) bool, the classes of this phase. M counts
    the samples of old classes, K = min(top, new classes) their highest new ones. Take `global_mean` of the result.
    """
    old_rows = ~new[labels]
    cosines, labels = cosines[old_rows], labels[old_rows]
    true = cosines.gather(1, labels.unsqueeze(1))
    hardest = cosines[:, new].topk(min(top, int(new.sum())), dim=1).values
    return (margin - true + hardest).clamp(min=0)


# ----------------------------------------------------------------------------------------------------------- rows


def inverse_norms(z: Tensor, least: float | None = None) -> Tensor:
    """Return 1 / |row| of z: (batch, d) in float64, (batch, 1); 0 for rows without a direction.

    Those are rows with a norm below `least`, by default the smallest normal number.
    """
    norms: Tensor
    if least is None and z.dtype == torch.float64 and z.shape[1]:
        # float32's squares fit into float64, its own may not: scale first.
        largest = z.detach().abs().amax(1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1.0)
        norms = largest * torch.linalg.vector_norm(z / largest, dim=1, keepdim=True)
    else:
        norms = torch.linalg.vector_norm(z, dim=1, keepdim=True, dtype=torch.float64)
    least = torch.finfo(z.dtype).tiny if least is None else least
    return torch.where(norms >= least, norms, torch.inf).reciprocal()


def unit_rows(z: Tensor, *, constant_norm: bool = False) -> Tensor:
    """Return the rows of z: (batch, d) divided by their norms, in float64; with constant_norm no gradient sees the norms."""
    return z * inverse_norms(z.detach() if constant_norm else z)


class _OneMinusCosine(torch.autograd.Function):
    """1 - cos of paired rows, half the squared distance of unit rows, and its derivative in few operations."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, least: float | None) -> Tensor:
        a_scale, b_scale = inverse_norms(a, least), inverse_norms(b, least)
        both = (a_scale > 0) & (b_scale > 0)
        a_scale, b_scale = a_scale * both, b_scale * both
        a_unit, b_unit = a * a_scale, b * b_scale
        difference = a_unit - b_unit
        result = difference.square().sum(1, keepdim=True) / 2
        ctx.least = least
        ctx.save_for_backward(a, b, a_scale, b_scale, a_unit, b_unit, difference, result)
        return result[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b, a_scale, b_scale, a_unit, b_unit, difference, result = ctx.saved_tensors
        grad = grads[0].unsqueeze(1)
        a_grad = b_grad = None
        if torch.is_grad_enabled():  # to be differentiated again: in terms of a and b
            a_scale, b_scale = (inverse_norms(z, ctx.least) * (scale > 0) for z, scale in ((a, a_scale), (b, b_scale)))
            a_unit, b_unit = a * a_scale, b * b_scale
            difference = a_unit - b_unit
            result = difference.square().sum(1, keepdim=True) / 2
        if ctx.needs_input_grad[0]:
            a_grad = ((grad * a_scale) * (difference - result * a_unit)).to(a.dtype)
        if ctx.needs_input_grad[1]:
            b_grad = ((grad * b_scale) * (-difference - result * b_unit)).to(b.dtype)
        return a_grad, b_grad, None


def one_minus_cosine(a: Tensor, b: Tensor, least: float | None = None) -> Tensor:
    """Return 1 - cos (batch,) of the rows of a, b: (batch, d); 0 where either has no direction (see `inverse_norms`)."""
    result: Tensor = _OneMinusCosine.apply(a, b, least)  # type: ignore[no-untyped-call]
    return result


def _check(student: Tensor, teacher: Tensor, group: Group) -> None:
    if student.dim() != 2 or student.shape != teacher.shape:
        raise GeometryError(
            f"student and teacher must both be (batch, d), not {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
    # A sum carries any NaN or infinity along, ten times faster than a look at every element; it may also overflow.
    finite = math.isfinite((student.detach().sum() + teacher.detach().sum()).item())
    finite = finite or bool(student.isfinite().all() and teacher.isfinite().all())
    if group is not None:  # all ranks raise or none does: one alone would leave the others waiting for it
        flag = torch.tensor(float(finite), device=student.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group)
        if finite and not flag.item():
            raise GeometryError("the output on another rank contains NaN or infinite values")
    if not finite:
        name = "teacher" if bool(student.isfinite().all()) else "student"
        raise GeometryError(f"the {name}'s output contains NaN or infinite values")
