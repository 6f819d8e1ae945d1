"""The base class of methods: options, head, loss of a batch, and stages.

A method has no training loop. It yields *stages*, which the loop in ``learning/loop.py`` runs: parameters,
data, loss and schedule. Ordinary training is the first stage; corrections and fine-tuning are further ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from geodl.config import Options as BaseOptions
from geodl.config import Registry, RunConfig
from geodl.core.keys import derive
from geodl.data.batches import Batch, Batches
from geodl.losses import DISTILLATIONS, FeatureOptions
from geodl.model.memory import Memory, quota
from geodl.model.phase import Phase
from geodl.nets import Backbone, Network, Output, Own, build_backbone, with_head

Losses = Iterator[tuple[str, Tensor | None]]
"""The named parts of a loss. Their sum is minimized; a part that is None is left out."""


@dataclass(frozen=True)
class Schedule:
    """An optimizer, and its learning rate as a pure function of the step: resuming needs no scheduler state."""

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
        """Return an optimizer of the parameters that require gradients.

        Without norm_decay, vectors and scalars (norms, biases, scales) have no weight decay.
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
        """Return the learning rate at step ``step`` of ``steps`` in epoch ``epoch``, both counted from 0."""
        if self.kind == "step":
            # Never before the second epoch. The 1e-9 is for rounding: 0.55 * 100 is a little more than 55.
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
    """A part of the training of a phase: it minimizes ``loss`` over the parameters of ``module`` that require gradients."""

    name: str
    module: nn.Module
    batches: Batches
    loss: Callable[[nn.Module, Batch], Losses]
    """``loss(module, batch)`` yields the parts of the loss; module: as wrapped for the devices."""
    schedule: Schedule
    training: bool = True
    """Whether the network is in train mode, which updates batch statistics."""
    steps: int | None = None
    """The maximum number of steps in an epoch."""
    begin: Callable[[], None] = lambda: None
    """Called before the first step, but not when the stage is resumed."""
    finish: Callable[[], None] = lambda: None
    """Called after the last step, but not when a resumed phase skips the stage: it changes only the network, or its
    stage is the last."""


class Method:
    """A method of class-incremental learning; the base class minimizes cross-entropy and the distillation."""

    name: ClassVar[str]
    title: ClassVar[str]
    """The name in tables; default: `name`."""
    summary: ClassVar[str]
    paper: ClassVar[str]
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    """The method's own options, and its defaults of common ones."""
    head: Literal["cosine", "linear"] = "cosine"
    """The head of the network."""
    effort: ClassVar[float] = 1.0
    """The time of a phase with an old network, as a multiple of training the network; for estimates."""
    base_loss: str = ""
    """The name of the loss of phase 0: methods with the same one share base phases; empty: not shared."""
    joint: ClassVar[bool] = False
    """Whether every phase starts over with all images of all classes seen."""
    frozen: ClassVar[bool] = False
    """Whether the network is fixed after phase 0, as some classifiers require."""

    config: RunConfig
    options: Any

    def __init__(self, config: RunConfig | None = None) -> None:
        if config is not None:
            self.configure(config)

    def configure(self, config: RunConfig) -> None:
        """Set the options; a `Learner` calls this for a method that was constructed without."""
        self.config, self.options = config, config.of(self.Options)

    @property
    def distills_features(self) -> bool:
        """Whether the chosen distillation compares features, not logits."""
        return self.config.distill != "none" and DISTILLATIONS[self.config.distill].of_features

    @property
    def freezes_old_rows(self) -> bool:
        """Whether the head's rows of absent classes are frozen, as in LUCIR, unless switched off."""
        enabled = self.config.of(FeatureOptions).freeze_old_rows
        return self.head == "cosine" and self.distills_features and enabled

    def advice(self, classes: int) -> str | None:
        """Return a warning if there are too few exemplars for this number of classes, else None."""
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

    def initial_backbone(self, own: Own | None = None) -> Backbone:
        """Return the backbone of a new model; own: in place of the one that the options name."""
        config = self.config
        return build_backbone(
            own or config.network,
            seed=derive(config.seed, "network"),
            weights=config.weights,
            pretrained=config.pretrained,
        )

    def initial_network(self, classes: int, backbone: Backbone | None = None) -> Network:
        """Return the network of a new model; backbone: if it is built already."""
        backbone = self.initial_backbone() if backbone is None else backbone
        seed = derive(self.config.seed, "network")
        return with_head(backbone, classes, head=self.head, scale=self.config.scale, seed=seed)

    def share(self, classes: int) -> int:
        """Return how many images of each class are stored when `classes` are known."""
        return quota(classes, self.config.exemplars, self.config.memory_budget)

    def held_out(self, quota: int) -> int:
        """Return how many of a class's ``quota`` stored images are never trained on."""
        return 0

    def trains(self, phase: int) -> bool:
        """Return whether a phase trains the network."""
        return True

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Yield the stages of a phase; each is requested when the previous one is complete."""
        if self.trains(phase.index):
            yield self.main_stage(phase)

    def main_stage(self, phase: Phase) -> Stage:
        """Return the ordinary stage: the whole network on new images and exemplars."""

        def loss(student: nn.Module, batch: Batch) -> Losses:
            teacher = phase.taught(batch.images)
            return self.loss(phase, batch, student(batch.images), teacher)

        batches = phase.batches(phase.training_images, "train")
        return Stage("train", phase.network, batches, loss, self.main_schedule(phase.index))

    def main_schedule(self, phase: int) -> Schedule:
        """Return the schedule of the ordinary stage; phase 0 and joint training may have their own."""
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
    """Options of a method that has no teacher network."""

    def check(self, config: RunConfig) -> None:
        """Refuse a distillation."""
        if config.distill != "none":
            raise ValueError(
                f"distill = {config.distill!r}: with method {config.method} only none is allowed"
            )


METHODS = Registry[type[Method]]("method", "method")
register = METHODS.named
