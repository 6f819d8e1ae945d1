"""Distillation losses, registered by name with their own options, and LUCIR's margin ranking.

A distillation compares student and teacher outputs for the same images, row by row: `loss(student, teacher)` with (batch, d)
each. Inputs that are not finite give a loss that is not finite; they are not checked, which would wait for a GPU.
"""

import math
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from geodl.config import MANY, Options, Registry
from geodl.config import Options as BaseOptions
from geodl.core.errors import ConfigError
from geodl.core.ranks import Group, gather_rows, global_mean
from geodl.geometry import GeodesicFlow, GeometryError, common_subspaces, unit, working_dtype
from geodl.nets import Output

WeightFactor = Literal["old/new", "new/old", "none"]
Pooling = Literal["pooled", "grid"]


class FeatureOptions(Options):
    """Options of every distillation that compares features."""

    weight_factor: WeightFactor = "old/new"
    """Factor of the weight: sqrt(old/new) classes as in the released code, sqrt(new/old) as printed in the papers, or none."""
    freeze_old_rows: bool = True
    """Freeze the rows of a cosine head whose classes have no new images."""


class Distillation(nn.Module):
    """Base class of the losses that preserve the old network's knowledge."""

    name: ClassVar[str]
    """The name for `--distill NAME`."""
    title: ClassVar[str]
    """The name in tables; default: `name`."""
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    """Its own options, a subclass of `FeatureOptions` if it compares features; other names must be unique."""
    of_features: ClassVar[bool]
    """Whether it compares features; otherwise logits."""
    features: Pooling = "pooled"
    """The features that it compares."""

    def __init__(
        self, group: Group = None, base_weight: float = 1.0, weight_factor: WeightFactor = "old/new"
    ) -> None:
        super().__init__()
        self.group = group
        self.base_weight = base_weight
        self.weight_factor = weight_factor

    @classmethod
    def build(cls, options: Any, group: Group = None) -> Self:
        """Return the distillation with these options; options: with the fields of `Options`."""
        raise NotImplementedError

    def weight(self, old: int, new: int) -> float:
        """Return the weight of the loss in a phase with these numbers of old and new classes.

        For features it has a factor: sqrt(old/new) in LUCIR's and GeoDL's code, sqrt(new/old) in their papers. No new class
        counts as one.
        """
        if not self.of_features or self.weight_factor == "none":
            return self.base_weight
        new = max(new, 1)
        return self.base_weight * math.sqrt(
            old / new if self.weight_factor == "old/new" else new / old
        )

    def compared(self, outputs: Output, old: int) -> Tensor:
        """Return what is compared of a network's outputs, (batch, d); here features. old: number of the teacher's classes."""
        compared: Tensor = getattr(outputs, self.features)
        return compared

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of student and teacher: (batch, d) each, of the same images in the same order."""
        for features in (student, teacher):
            if not isinstance(features, Tensor):
                kind = type(features).__name__
                raise GeometryError(f"student and teacher must be tensors, not {kind}")
        if student.dim() != 2 or student.shape != teacher.shape:
            raise GeometryError(
                f"student and teacher must both be (batch, d), not {tuple(student.shape)} and {tuple(teacher.shape)}"
            )
        if not student.is_floating_point() or not teacher.is_floating_point():
            kinds = f"{student.dtype} and {teacher.dtype}"
            raise GeometryError(f"student and teacher must be floating point, not {kinds}")
        with torch.autocast(student.device.type, enabled=False):
            return self.loss(student, teacher).to(working_dtype(student, teacher))

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the mean over the rows of all ranks."""
        return global_mean(self.rows(student, teacher), self.group)

    def rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of every row: (batch,), in float64 whatever the precision of the inputs."""
        raise NotImplementedError


DISTILLATIONS = Registry[type[Distillation]]("distillation", "distill", optional=True)
register = DISTILLATIONS.named


# ------------------------------------------------------------------------------------------------- distillations


class LogitOptions(Options):
    """Options of the lwf distillation."""

    lwf_weight: float = Field(1.0, ge=0)
    """Weight of the lwf distillation."""
    temperature: float = Field(2.0, gt=0)
    """Temperature of the lwf distillation."""


@register
class LogitDistillation(Distillation):
    """LwF's loss (Eq. 2): KL(teacher || student) of the classes' softmax at a temperature, batch mean, no T^2.

    Student and teacher logits are both (batch, old classes); the student's logits of new classes are left out.
    """

    name = "lwf"
    title = "LwF"
    of_features = False
    Options = LogitOptions

    def __init__(
        self, temperature: float = 2.0, group: Group = None, *, base_weight: float = 1.0
    ) -> None:
        super().__init__(group, base_weight)
        if not temperature > 0:
            raise ConfigError(f"temperature = {temperature}: allowed values are above 0")
        self.temperature = temperature

    @classmethod
    def build(cls, options: LogitOptions, group: Group = None) -> Self:
        """Return the distillation with these options."""
        return cls(options.temperature, group, base_weight=options.lwf_weight)

    def compared(self, outputs: Output, old: int) -> Tensor:
        """Return the logits of the teacher's classes."""
        return outputs.logits[:, :old]

    def rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence of every row: (batch,)."""
        new, old = (F.log_softmax(z.double() / self.temperature, dim=1) for z in (student, teacher))
        return F.kl_div(new, old, reduction="none", log_target=True).sum(1)


class CosineOptions(FeatureOptions):
    """Options of the cosine distillation."""

    cosine_weight: float = Field(5.0, ge=0)
    """Weight of the cosine distillation (times weight_factor)."""
    cosine_features: Pooling = "pooled"
    """Features that are compared: pooled, or GeoDL's 2 x 2 grid."""


@register
class CosineDistillation(Distillation):
    """LUCIR's less-forget constraint (Eq. 3): mean of 1 - cos over the rows; 0 for a zero row."""

    name = "cosine"
    title = "Cos"
    of_features = True
    Options = CosineOptions

    def __init__(
        self,
        group: Group = None,
        *,
        features: Pooling = "pooled",
        base_weight: float = 5.0,
        weight_factor: WeightFactor = "old/new",
    ) -> None:
        super().__init__(group, base_weight, weight_factor)
        self.features = features

    @classmethod
    def build(cls, options: CosineOptions, group: Group = None) -> Self:
        """Return the distillation with these options."""
        return cls(
            group,
            features=options.cosine_features,
            base_weight=options.cosine_weight,
            weight_factor=options.weight_factor,
        )

    def rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return 1 - cos of every row: (batch,)."""
        return one_minus_cosine(unit(student), unit(teacher))


class GeodesicOptions(FeatureOptions):
    """Options of the geodesic distillation."""

    geodesic_weight: float = Field(6.0, ge=0)
    """Weight of the geodesic distillation (times weight_factor). On CIFAR-100 12 and 24 were worse than 6 under class means."""
    subspace_dim: int = Field(127, ge=1, le=MANY)
    """Dimension n of the subspaces."""
    through_flow: bool = False
    """Differentiate through the geodesic flow too."""
    center: bool = True
    """Subtract the batch mean before finding the subspaces."""
    geodesic_distance: Literal["cosine", "squared"] = "cosine"
    """1 - cos of projected rows, or squared distance of unit rows."""
    geodesic_features: Pooling = "grid"
    """Features that are compared: the 2 x 2 grid, or pooled."""


@register
class GeodesicDistillation(Distillation):
    """GeoDL's loss (Eq. 9): the mean of 1 - cos under the kernel of the geodesic flow between the batches' subspaces.

    Args:
        dim: number of principal directions of each batch; 127: all of a centered batch of 128.
        through_flow: differentiate the flow too. By default it is constant and only the projected student
            rows carry gradient, as in the reference code.
        group: compute the subspaces of the global batch over these ranks.
        center: subtract the batch mean before finding the subspaces.
        distance: "squared": the squared distance of the unit rows under the kernel, as in the released
            code, instead of 1 - cos.
        features: the features that a method compares. With pooled features no wider than `dim`, the kernel
            is the identity and the loss 1 - cos.
        base_weight: weight of the loss in a method.
        weight_factor: factor of the weight in each phase.
    """

    name = "geodesic"
    title = "GeoDL"
    of_features = True
    Options = GeodesicOptions

    def __init__(
        self,
        dim: int = 127,
        through_flow: bool = False,
        group: Group = None,
        *,
        center: bool = True,
        distance: Literal["cosine", "squared"] = "cosine",
        features: Pooling = "grid",
        base_weight: float = 6.0,
        weight_factor: WeightFactor = "old/new",
    ) -> None:
        super().__init__(group, base_weight, weight_factor)
        if not isinstance(dim, int) or dim < 1:
            raise GeometryError(f"dim = {dim!r}: allowed values are integers from 1")
        if distance not in ("cosine", "squared"):
            raise ConfigError(f"distance = {distance!r}: allowed values are cosine and squared")
        self.dim = dim
        self.through_flow = through_flow
        self.center = center
        self.distance = distance
        self.features = features

    @classmethod
    def build(cls, options: GeodesicOptions, group: Group = None) -> Self:
        """Return the distillation with these options."""
        return cls(
            options.subspace_dim,
            options.through_flow,
            group,
            center=options.center,
            distance=options.geodesic_distance,
            features=options.geodesic_features,
            base_weight=options.geodesic_weight,
            weight_factor=options.weight_factor,
        )

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the mean over the rows of all ranks, with the subspaces of the global batch."""
        if self.group is None:
            return super().loss(student, teacher)
        # Each rank computes the loss of the global batch; its own rows carry the gradient, also through the flow.
        pairs = torch.stack([student.detach(), teacher.detach()], 1)
        gathered, start = gather_rows(pairs, self.group)
        others, end = gathered[:, 0], start + len(student)
        students = torch.cat([others[:start], student, others[end:]])
        loss = global_mean(self.rows(students, gathered[:, 1]))
        return loss.detach() + (loss - loss.detach()) * torch.distributed.get_world_size(self.group)

    def rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of every row: (batch,)."""
        eps = torch.finfo(working_dtype(student, teacher)).eps
        old, new = unit(teacher if self.through_flow else teacher.detach()), unit(student)
        spanning = new if self.through_flow else new.detach()
        p_old, p_new = common_subspaces(old, spanning, self.dim, center=self.center, eps=eps)
        flow = GeodesicFlow(p_old, p_new, eps=eps)
        on_old, change = flow.project(old), flow.project(new - old)
        if self.distance == "squared":
            return change.square().sum(1)
        # A row without a projection counts 0, as do all where there is no subspace.
        return one_minus_cosine(on_old + change, on_old, least=16 * eps)


def one_minus_cosine(a: Tensor, b: Tensor, least: float = 0.0) -> Tensor:
    """Return 1 - cos (batch,) of the rows of a, b: (batch, d); 0 if either has a length of at most `least`.

    Computed as half the squared distance of the unit rows: the textbook formula loses digits of small losses.
    """
    norms = [torch.linalg.vector_norm(z, dim=1, keepdim=True) for z in (a, b)]
    both = (norms[0] > least) & (norms[1] > least)
    a, b = (z / torch.where(both, norm, torch.inf) for z, norm in zip((a, b), norms, strict=True))
    return (a - b).square().sum(1) / 2


# ------------------------------------------------------------------------------------------------- margin ranking


def margin_ranking(
    cosines: Tensor, labels: Tensor, old: int, margin: float = 0.5, top: int = 2
) -> tuple[Tensor, Tensor]:
    """Return LUCIR's hinges max(0, margin - cos of the true class + cos of a hard new class), (batch, K), and a mask.

    cosines: (batch, classes) before the scale sigma, the `old` classes first; labels: (batch,). The hard classes are the
    K = min(top, new classes) highest new ones. The mask (batch, 1) selects the samples of old classes, which alone LUCIR ranks:
    pass both to `global_mean`.
    """
    true = cosines.gather(1, labels.unsqueeze(1))
    hardest = cosines[:, old:].topk(min(top, cosines.shape[1] - old), dim=1).values
    return (margin - true + hardest).clamp(min=0), labels.unsqueeze(1) < old
