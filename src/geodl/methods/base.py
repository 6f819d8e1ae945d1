"""What a method is: its options, its head, its loss for a batch, and its stages.

A method owns no loop. It hands *stages* to the one loop in ``training/loop.py``: what moves, on which data, by which loss, on
which schedule. The ordinary phase is the first stage; corrections and fine-tuning are further ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geodl.closed_form import Fitted
from geodl.config import RunConfig, derive
from geodl.data.batches import Batch, Batches, Transform
from geodl.data.images import Images, concat
from geodl.losses import DISTILLATIONS
from geodl.memory import Memory
from geodl.nets import Network, Output
from geodl.predictors import Features, Judged
from geodl.ranks import Ranks, global_mean

Losses = dict[str, Tensor]


@dataclass
class Phase:
    """What a method sees of one phase.

    The classes known before are the head's first ``old`` rows; the ``new`` ones follow. ``images`` holds this phase's
    training images without those held out; ``memory`` is what the phase before left (with newly held-out images added).
    """

    index: int
    config: RunConfig
    transform: Transform
    network: Network
    teacher: Network | None
    images: Images
    memory: Memory
    old: int
    new: int
    read: Callable[..., Features]
    """``read(images, mirror=False)``: what the network, as it is now, makes of un-augmented images, in eval mode."""
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    read_teacher: Callable[..., Features] | None = None
    """``read`` with the teacher in place of the network, where there is one."""
    before: Features | None = None
    """What the teacher makes of the images at hand: new rows are imprinted by it, and drift is measured from it."""
    settled: Features | None = None
    """What the network makes of the images at hand, once no stage will move it any more."""
    optimized: Memory | None = None
    """The memory for the next phase where a stage has made it; None: exemplars are chosen among the images."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The run's precision, in which a stage's module runs by itself: for all else that a loss runs, such as the teacher."""

    def training_images(self) -> Images:
        """Return the phase's images and the exemplars together: D_t and M of the paper's Algorithm 1."""
        return self.images if self.memory.images is None else concat([self.images, self.memory.images])

    def at_hand(self) -> Images:
        """Return all there is of this phase's classes: its images and, of a class that comes back, the exemplars too."""
        if self.memory.images is None:
            return self.images
        back = torch.isin(self.memory.images.labels, self.images.labels)
        return concat([self.images, self.memory.images.select(back)]) if back.any() else self.images

    def batches(self, images: Images, stage: str, batch_size: int | None = None) -> Batches:
        """Return shuffled, augmented batches whose order depends on the seed, the phase and the stage alone."""
        return Batches(
            images,
            self.transform,
            batch_size or self.config.batch_size,
            derive(self.config.seed, "batches", self.index, stage),
            rank=self.ranks.rank,
            world=self.ranks.world,
            workers=self.config.workers,
        )


@dataclass(frozen=True)
class Schedule:
    """SGD and its learning rate as a pure function of the step, so that nothing needs to be restored on resume."""

    epochs: int
    lr: float
    kind: Literal["step", "onecycle"] = "step"
    milestones: tuple[float, ...] = ()
    decay: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    norm_decay: bool = True

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        """Return SGD over the parameters that need gradients; a vector or a number is a norm's, a bias or a scale."""
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                decay = self.weight_decay if parameter.ndim > 1 or self.norm_decay else 0.0
                groups.setdefault(decay, []).append(parameter)
        return torch.optim.SGD(
            [{"params": moved, "weight_decay": decay} for decay, moved in groups.items()],
            self.lr,
            self.momentum,
            nesterov=self.nesterov,
            fused=True,
        )

    def lr_at(self, epoch: int, step: int, steps: int) -> float:
        """Return the rate for step ``step`` of ``steps`` in epoch ``epoch``, all counted from 0."""
        if self.kind == "step":
            # Never before the second epoch, however few there are; less a hair, because 0.55 * 100 is a hair over 55.
            starts = (max(1, math.ceil(fraction * self.epochs - 1e-9)) for fraction in self.milestones)
            passed = sum(epoch >= start for start in starts)
            return self.lr * self.decay**passed
        done = (epoch * steps + step + 0.5) / (self.epochs * steps)
        rise = 0.25
        if done < rise:
            return self.lr * (0.04 + 0.96 * done / rise)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (done - rise) / (1 - rise)))


@dataclass
class Stage:
    """One piece of training: the parameters of ``module`` that need gradients move down ``loss``."""

    name: str
    module: nn.Module
    batches: Batches
    loss: Callable[[nn.Module, Batch], Losses]
    """Named parts of the loss of a batch, given the module as it is wrapped for the devices."""
    schedule: Schedule
    training: bool = True
    """Whether the network is in train mode, so that batch statistics move."""
    steps: int | None = None
    """At most so many steps an epoch."""
    finish: Callable[[], None] = lambda: None
    """Called once after the last step."""


class Method:
    """A method of class-incremental learning; as it stands: cross-entropy plus the chosen distillation."""

    name: ClassVar[str]
    title: ClassVar[str]
    """As tables name it; unset: its name."""
    summary: ClassVar[str]
    paper: ClassVar[str]
    Config: ClassVar[type[RunConfig]] = RunConfig
    head: Literal["cosine", "linear"] = "cosine"
    """Which head the network has."""
    base_loss: str = ""
    """The loss of phase 0 by name: methods with the same one share trained base phases; empty: this method's alone."""
    keeps_all_data: ClassVar[bool] = False
    """Joint training alone: every phase starts anew with all the images of all the classes seen."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    def distills_features(self) -> bool:
        """Whether the chosen distillation compares features, not logits."""
        return self.config.distill != "none" and DISTILLATIONS[self.config.distill].of_features

    @property
    def freezes_old_rows(self) -> bool:
        """Whether the head's rows of absent classes stand still: with feature distillation, as in LUCIR."""
        return self.head == "cosine" and self.distills_features

    def held_out(self, quota: int) -> int:
        """How many of a class's ``quota`` stored images are held out of all training."""
        return 0

    def trains(self, phase: int) -> bool:
        """Return whether a phase moves the network."""
        return True

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Return the stages of a phase, one after the other: each is asked for when the one before is done."""
        if self.trains(phase.index if phase.old else 0):  # a first class alone was not trained: that is still to come
            yield self.main_stage(phase)

    def main_stage(self, phase: Phase) -> Stage:
        """Return the ordinary stage: the whole network, on new images and exemplars (the paper's Algorithm 1)."""
        distill = self.distillation(phase)

        def loss(student: nn.Module, batch: Batch) -> Losses:
            with phase.autocast():
                teacher = phase.teacher(batch.images) if phase.teacher is not None and distill is not None else None
            return self.losses(phase, batch, student(batch.images), teacher, distill)

        return Stage(
            "train",
            phase.network,
            phase.batches(phase.training_images(), "train"),
            loss,
            self.main_schedule(phase.index if phase.old else 0),
        )

    def main_schedule(self, phase: int) -> Schedule:
        """Return the schedule of the ordinary stage; training that starts anew may have its own epochs and rate."""
        config = self.config
        base = phase == 0 or self.keeps_all_data
        return Schedule(
            epochs=(config.base_epochs if base else None) or config.epochs,
            lr=(config.base_lr if base else None) or config.lr,
            kind=config.schedule,
            milestones=config.milestones,
            decay=config.lr_decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            norm_decay=config.norm_decay,
        )

    def losses(
        self, phase: Phase, batch: Batch, student: Output, teacher: Output | None, distill: "Distill | None"
    ) -> Losses:
        """Return the named parts of the loss of a batch; their sum is minimized."""
        parts = {"ce": self.cross_entropy(phase, student.logits, batch.labels)}
        if teacher is not None and distill is not None:
            parts["distill"] = distill(student, teacher)
        return parts

    def cross_entropy(self, phase: Phase, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the batch of all ranks: logits (B, C), labels (B,)."""
        each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.config.label_smoothing)
        return global_mean(each, phase.ranks.group)

    def distillation(self, phase: Phase) -> "Distill | None":
        """Return the chosen distillation with its weight; None without a teacher or with distill = none."""
        if phase.teacher is None or self.config.distill == "none":
            return None
        loss = DISTILLATIONS[self.config.distill].build(self.config, phase.ranks.group)
        weight, old = loss.weight(phase.old, phase.new), phase.old
        return lambda student, teacher: weight * loss(loss.compared(student, old), loss.compared(teacher, old))

    def exemplars(self, phase: Phase, quota: int) -> Memory:
        """Choose what is kept of this phase's classes and cut the rest to the quota: the memory for the next phase."""
        candidates = phase.at_hand()
        present = sorted(set(candidates.labels.tolist()))
        features = (phase.settled or phase.read(candidates)).pooled
        return phase.memory.update(candidates, features, present, quota=quota, selection=self.config.selection)

    # What a method may keep of the images besides exemplars and class means, and a classifier made from it.

    def mirrors(self, kept: Mapping[str, Tensor]) -> bool:
        """Return whether that classifier averages over mirrored test images."""
        return False

    def only_to_learn(self, name: str) -> bool:
        """Return whether something that is kept is needed by the next phase alone, not to predict: old phases drop it."""
        return False

    def levels(self, network: Network) -> tuple[str, ...]:
        """Return the levels of the network whose features are wanted, besides the pooled ones."""
        return ()

    def keep(self, phase: Phase) -> dict[str, Tensor]:
        """Return what to keep once the network has settled, as named tensors; the last is in ``phase.memory.own``."""
        return {}

    def fitted(self, kept: Mapping[str, Tensor]) -> Fitted | None:
        """Return the classifier that was made from what is kept."""
        return None

    def validated(self, kept: Mapping[str, Tensor]) -> Judged | None:
        """Return what a fit without an image says of it, for images that were learned, where the method can say."""
        return None

    def recalled(self, kept: Mapping[str, Tensor], levels: Mapping[str, Tensor]) -> Tensor:
        """Return where in `validated` images are that were learned, told by their features, (N,); -1: not there."""
        raise NotImplementedError

    def without(self, kept: Mapping[str, Tensor], gone: int) -> dict[str, Tensor]:
        """Return what is kept, without a class."""
        return {}


Distill = Callable[[Output, Output], Tensor]

METHODS: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its name; a decorator of the method's class."""
    method.title = vars(method).get("title", method.name)  # not that of a class it inherits from
    METHODS[method.name] = method
    return method
