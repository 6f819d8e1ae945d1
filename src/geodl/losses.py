"""Distillation losses, each registered under its name with its own options; and LUCIR's margin ranking.

A distillation compares student and teacher outputs for the same images, row by row: `loss(student, teacher)` with (batch, d)
each. Input that is not finite gives a loss that is not finite: nothing here waits for a GPU to find out.
"""

import math
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn

from geodl.config import MANY, option
from geodl.errors import ConfigError
from geodl.geometry import GeodesicFlow, GeometryError, common_subspaces, unit, working_dtype
from geodl.nets import Output
from geodl.ranks import Group, gather_rows, global_mean


class Distillation(nn.Module):
    """A way to carry the old network's knowledge over. A new one is a registered class that fills in what is here."""

    name: ClassVar[str]
    """As `--distill NAME` finds it."""
    title: ClassVar[str]
    """As tables name it; unset: its name."""
    Options: ClassVar[type[BaseModel]]
    """Its own options; their names must differ from all others."""
    of_features: ClassVar[bool]
    """Whether it compares features; then the old rows of a cosine head stand still. Otherwise it compares logits."""

    def __init__(self, group: Group = None, base_weight: float = 1.0) -> None:
        super().__init__()
        self.group = group
        self.base_weight = base_weight

    @classmethod
    def build(cls, options: Any, group: Group = None) -> Self:
        """Return the distillation that `options`, which has the fields of `Options`, asks for."""
        raise NotImplementedError

    def weight(self, old: int, new: int) -> float:
        """Return the weight of the loss in a phase with so many old and new classes: of features x sqrt(old / new).

        So LUCIR's and GeoDL's code have it (no new class: sqrt(old)). Their papers print new / old; the published numbers come from
        the code.
        """
        return self.base_weight * (math.sqrt(old / max(new, 1)) if self.of_features else 1.0)

    def compared(self, outputs: Output, old: int) -> Tensor:
        """Return what is compared of a network's outputs, (batch, d), where `old` classes are the teacher's."""
        raise NotImplementedError

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of student and teacher: (batch, d) each, the same images in the same order."""
        if student.dim() != 2 or student.shape != teacher.shape:
            raise GeometryError(
                f"student and teacher must both be (batch, d), not {tuple(student.shape)} and {tuple(teacher.shape)}"
            )
        with torch.autocast(student.device.type, enabled=False):
            return self.loss(student, teacher).to(working_dtype(student, teacher))

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the mean over the rows of all ranks."""
        return global_mean(self.rows(student, teacher), self.group)

    def rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of every row: (batch,), in float64 whatever the precision of what is compared."""
        raise NotImplementedError


DISTILLATIONS: dict[str, type[Distillation]] = {}
Kind = TypeVar("Kind", bound=type[Distillation])


def register(kind: Kind) -> Kind:
    """Make a distillation known by its name; a decorator of its class."""
    if kind.name in (*DISTILLATIONS, "none"):
        raise ConfigError(f"a distillation named {kind.name!r} is there already")
    kind.title = vars(kind).get("title", kind.name)  # not that of a class it inherits from
    DISTILLATIONS[kind.name] = kind
    return kind


# ------------------------------------------------------------------------------------------------- distillations


@register
class LogitDistillation(Distillation):
    """LwF's loss (Eq. 2): KL(teacher || student) of the classes' softmax at a temperature, batch mean, no T^2.

    Student and teacher logits are both (batch, old classes): the caller cuts the student's to the teacher's classes.
    """

    name = "lwf"
    title = "LwF"
    of_features = False

    class Options(BaseModel):
        """Options of the lwf distillation."""

        lwf_weight: float = option(1.0, "Distillation", "Weight of the lwf distillation.", ge=0, in_model="kept")
        temperature: float = option(2.0, "Distillation", "Temperature of the lwf distillation.", gt=0, in_model="kept")

    def __init__(self, temperature: float = 2.0, group: Group = None, *, base_weight: float = 1.0) -> None:
        super().__init__(group, base_weight)
        self.temperature = temperature

    @classmethod
    def build(cls, options: Any, group: Group = None) -> Self:
        """Return the loss that the options ask for."""
        return cls(options.temperature, group, base_weight=options.lwf_weight)

    def compared(self, outputs: Output, old: int) -> Tensor:
        """Return the logits of the teacher's classes."""
        return outputs.logits[:, :old]

    def rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence of every row: (batch,)."""
        new, old = (F.log_softmax(z.double() / self.temperature, dim=1) for z in (student, teacher))
        return F.kl_div(new, old, reduction="none", log_target=True).sum(1)


@register
class CosineDistillation(Distillation):
    """LUCIR's less-forget constraint (Eq. 3): mean of 1 - cos over the rows; a zero row counts 0."""

    name = "cosine"
    title = "Cos"
    of_features = True

    class Options(BaseModel):
        """Options of the cosine distillation."""

        cosine_weight: float = option(
            5.0, "Distillation", "Weight of the cosine distillation (times sqrt(old/new)).", ge=0, in_model="kept"
        )
        cosine_features: Literal["pooled", "grid"] = option(
            "pooled", "Distillation", "What is compared: pooled features, or GeoDL's 2 x 2 grid.", in_model="kept"
        )

    def __init__(
        self, group: Group = None, *, features: Literal["pooled", "grid"] = "pooled", base_weight: float = 5.0
    ) -> None:
        super().__init__(group, base_weight)
        self.features = features

    @classmethod
    def build(cls, options: Any, group: Group = None) -> Self:
        """Return the loss that the options ask for."""
        return cls(group, features=options.cosine_features, base_weight=options.cosine_weight)

    def compared(self, outputs: Output, old: int) -> Tensor:
        """Return the pooled features, or those on the grid."""
        compared: Tensor = getattr(outputs, self.features)
        return compared

    def rows(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return 1 - cos of every row: (batch,)."""
        return one_minus_cosine(unit(student), unit(teacher))


@register
class GeodesicDistillation(Distillation):
    """GeoDL's loss (Eq. 9): the mean of 1 - cos under the kernel of the geodesic flow between the batches' subspaces.

    dim: principal directions kept of each batch (127: all of a centered batch of 128). through_flow: differentiate the
    flow too; by default it is constant and only the projected student rows carry gradient, as in the reference code.
    group: take the subspaces of the global batch over these ranks. center: subtract the batch mean to find the subspaces.
    distance: "squared" takes the squared distance of the unit rows under the kernel instead of 1 - cos, as the released code does.
    """

    name = "geodesic"
    title = "GeoDL"
    of_features = True

    class Options(BaseModel):
        """Options of the geodesic distillation."""

        geodesic_weight: float = option(
            6.0,
            "Distillation",
            "Weight of the geodesic distillation (times sqrt(old/new)). On CIFAR-100 12 and 24 were worse than 6 under class means.",
            ge=0,
            in_model="kept",
        )
        subspace_dim: int = option(
            127, "Distillation", "Dimension n of the subspaces.", ge=1, le=MANY, in_model="kept", in_grid=True
        )
        through_flow: bool = option(
            False, "Distillation", "Differentiate through the geodesic flow too.", in_model="kept"
        )
        center: bool = option(True, "Distillation", "Find the subspaces about the mean of the batch.", in_model="kept")
        geodesic_distance: Literal["cosine", "squared"] = option(
            "cosine", "Distillation", "1 - cos of projected rows, or squared distance of unit rows.", in_model="kept"
        )

    def __init__(
        self,
        dim: int = 127,
        through_flow: bool = False,
        group: Group = None,
        *,
        center: bool = True,
        distance: Literal["cosine", "squared"] = "cosine",
        base_weight: float = 6.0,
    ) -> None:
        super().__init__(group, base_weight)
        if dim < 1:
            raise GeometryError(f"the subspace dimension must be at least 1, not {dim}")
        if distance not in ("cosine", "squared"):
            raise ConfigError(f"distance = {distance!r}: cosine and squared are allowed")
        self.dim = dim
        self.through_flow = through_flow
        self.center = center
        self.distance = distance

    @classmethod
    def build(cls, options: Any, group: Group = None) -> Self:
        """Return the loss that the options ask for."""
        return cls(
            options.subspace_dim,
            options.through_flow,
            group,
            center=options.center,
            distance=options.geodesic_distance,
            base_weight=options.geodesic_weight,
        )

    def compared(self, outputs: Output, old: int) -> Tensor:
        """Return the features on the grid, wide enough for 127 directions."""
        return outputs.grid

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the mean over the rows of all ranks, the subspaces being those of the global batch."""
        if self.group is None:
            return super().loss(student, teacher)
        # Each rank computes the whole batch's loss: its own rows carry the gradient, also through the flow.
        everything, start = gather_rows(torch.stack([student.detach(), teacher.detach()], 1), self.group)
        others, end = everything[:, 0], start + len(student)
        students = torch.cat([others[:start], student, others[end:]])
        loss = global_mean(self.rows(students, everything[:, 1]))
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
    """Return 1 - cos (batch,) of the rows of a, b: (batch, d); 0 where either is no longer than `least`.

    Half the squared distance of the unit rows: the textbook form loses the digits of small losses.
    """
    norms = [torch.linalg.vector_norm(z, dim=1, keepdim=True) for z in (a, b)]
    both = (norms[0] > least) & (norms[1] > least)
    a, b = (z / torch.where(both, norm, torch.inf) for z, norm in zip((a, b), norms, strict=True))
    return (a - b).square().sum(1) / 2


# ------------------------------------------------------------------------------------------------- margin ranking


def margin_ranking(
    cosines: Tensor, labels: Tensor, old: int, margin: float = 0.5, top: int = 2
) -> tuple[Tensor, Tensor]:
    """Return LUCIR's hinges max(0, margin - cos of the true class + cos of a hard new class), (batch, K), and which count.

    cosines: (batch, classes) before the scale sigma, those of the `old` classes first; labels: (batch,). K = min(top, new classes)
    are the highest new ones. The second result, (batch, 1) bool, tells the samples of old classes: LUCIR ranks those
    alone. Take `global_mean` of both.
    """
    true = cosines.gather(1, labels.unsqueeze(1))
    hardest = cosines[:, old:].topk(min(top, cosines.shape[1] - old), dim=1).values
    return (margin - true + hardest).clamp(min=0), labels.unsqueeze(1) < old
