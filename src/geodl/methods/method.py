"""What a method is: its options, its head, its loss for a batch, and its stages.

A method owns no loop. It hands *stages* to the one loop in ``learning/loop.py``: what moves, on which
data, by which loss, on which schedule. The ordinary phase is the first stage; corrections and
fine-tuning are further ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from geodl.config import Options as BaseOptions
from geodl.config import Registry, RunConfig
from geodl.data.batches import Batch, Batches
from geodl.losses import DISTILLATIONS, FeatureOptions
from geodl.model.memory import Memory, quota
from geodl.model.phase import Phase
from geodl.nets import Output

Losses = Iterator[tuple[str, Tensor | None]]
"""The named parts of a loss, whose sum is minimized; a part that is None is left out."""


@dataclass(frozen=True)
class Schedule:
    """An optimizer and its learning rate as a pure function of the step, which needs no restoring on resume."""

    epochs: int
    lr: float
    kind: Literal["step", "onecycle", "cosine"] = "step"
    milestones: tuple[float, ...] = ()
    decay: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    norm_decay: bool = True
    algorithm: Literal["sgd", "adamw"] = "sgd"

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters that need gradients.

        Without norm_decay, weight decay leaves out vectors and numbers: those of norms, biases and scales.
        """
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                decay = self.weight_decay if parameter.ndim > 1 or self.norm_decay else 0.0
                groups.setdefault(decay, []).append(parameter)
        decays = [{"params": moved, "weight_decay": decay} for decay, moved in groups.items()]
        if self.algorithm == "adamw":
            return torch.optim.AdamW(decays, self.lr, betas=(self.momentum, 0.999), fused=True)
        return torch.optim.SGD(decays, self.lr, self.momentum, nesterov=self.nesterov, fused=True)

    def lr_at(self, epoch: int, step: int, steps: int) -> float:
        """Return the rate for step ``step`` of ``steps`` in epoch ``epoch``, all counted from 0."""
        if self.kind == "step":
            # Never before the second epoch, however few there are; less a hair, because 0.55 * 100 is a hair over 55.
            starts = (
                max(1, math.ceil(fraction * self.epochs - 1e-9)) for fraction in self.milestones
            )
            passed = sum(epoch >= start for start in starts)
            return self.lr * self.decay**passed
        done = (epoch * steps + step + 0.5) / (self.epochs * steps)
        rise = 0.25 if self.kind == "onecycle" else 0.0
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
    """The parts of the loss of a batch, given the module as it is wrapped for the devices."""
    schedule: Schedule
    training: bool = True
    """Whether the network is in train mode, so that batch statistics move."""
    steps: int | None = None
    """At most so many steps an epoch."""
    begin: Callable[[], None] = lambda: None
    """Called once before the first step, and not again where a stage is resumed."""
    finish: Callable[[], None] = lambda: None
    """Called once after the last step, but not where a resumed phase skips the stage: it changes the
    network only, or its stage is the last."""


class Method:
    """A method of class-incremental learning; as it stands: cross-entropy plus the distillation."""

    name: ClassVar[str]
    title: ClassVar[str]
    """As tables name it; unset: its name."""
    summary: ClassVar[str]
    paper: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    """Its own options, and its own defaults of common ones."""
    head: Literal["cosine", "linear"] = "cosine"
    """Which head the network has."""
    effort: ClassVar[float] = 1.0
    """How long a phase with an old network takes, over the training of the network alone; for estimates."""
    base_loss: str = ""
    """The loss of phase 0 by name: runs of methods with the same one share base phases; empty: none does."""
    joint: ClassVar[bool] = False
    """Whether every phase starts over with all images of all classes seen."""
    frozen: ClassVar[bool] = False
    """Whether the network stands still after phase 0, as some classifiers need it."""

    config: RunConfig
    options: Any

    def __init__(self, config: RunConfig | None = None) -> None:
        if config is not None:
            self.configure(config)

    def configure(self, config: RunConfig) -> None:
        """Set the options; a `Learner` does it for a method that was made without."""
        self.config, self.options = config, config.of(self.Options)

    @property
    def distills_features(self) -> bool:
        """Whether the chosen distillation compares features, not logits."""
        return self.config.distill != "none" and DISTILLATIONS[self.config.distill].of_features

    @property
    def freezes_old_rows(self) -> bool:
        """Whether the head's rows of absent classes stand still, as in LUCIR, unless asked otherwise."""
        wanted = self.config.of(FeatureOptions).freeze_old_rows
        return self.head == "cosine" and self.distills_features and wanted

    def advice(self, classes: int) -> str | None:
        """Return what to know before so many classes are learned with too few exemplars; None: there are enough."""
        config = self.config
        share = self.share(classes)
        if self.joint or not self.trains(1) or share > self.held_out(share):
            return None
        cost = "earlier classes are forgotten faster, and there is no k-NME classifier"
        if not config.exemplars:
            return f"exemplars = 0: no image of earlier classes is kept; {cost}"
        return (
            f"exemplars = {config.exemplars}, memory_budget = {config.memory_budget}: with {classes} classes no class "
            f"keeps an exemplar; {cost}. At least one a class is needed: exemplars = {classes}"
        )

    def share(self, classes: int) -> int:
        """Return how many images are stored of each class where so many are known."""
        return quota(classes, self.config.exemplars, self.config.memory_budget)

    def held_out(self, quota: int) -> int:
        """Return how many of a class's ``quota`` stored images are held out of all training."""
        return 0

    def trains(self, phase: int) -> bool:
        """Return whether a phase moves the network."""
        return True

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Yield the stages of a phase; each is asked for when the one before is done."""
        if self.trains(phase.index):
            yield self.main_stage(phase)

    def main_stage(self, phase: Phase) -> Stage:
        """Return the ordinary stage: the whole network, on new images and exemplars."""

        def loss(student: nn.Module, batch: Batch) -> Losses:
            teacher = phase.asked(batch.images)
            return self.loss(phase, batch, student(batch.images), teacher)

        batches = phase.batches(phase.training_images, "train")
        return Stage("train", phase.network, batches, loss, self.main_schedule(phase.index))

    def main_schedule(self, phase: int) -> Schedule:
        """Return the schedule of the ordinary stage; a phase that starts over may have its own."""
        config = self.config
        base = phase == 0 or self.joint
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
            algorithm=config.optimizer,
        )

    def loss(self, phase: Phase, batch: Batch, student: Output, teacher: Output | None) -> Losses:
        """Yield the parts of the loss of a batch."""
        yield "ce", phase.cross_entropy(student.logits, batch.labels)
        yield "distill", phase.distill(student, teacher)

    def exemplars(self, phase: Phase, quota: int) -> Memory:
        """Return the memory for the next phase."""
        return phase.kept or phase.exemplars(quota)


class WithoutDistillation(BaseOptions):
    """Options of a method that does not train a network beside an old one."""

    def check(self, config: RunConfig) -> None:
        """Refuse a distillation."""
        if config.distill != "none":
            raise ValueError(
                f"distill = {config.distill!r}: with method {config.method} only none is allowed"
            )


METHODS = Registry[type[Method]]("method", "method")
register = METHODS.named
