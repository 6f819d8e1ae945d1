"""One phase: its images, its networks, and what losses, stages and classifiers take for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.config import RunConfig
from geodl.core.keys import derive
from geodl.core.ranks import Ranks, global_mean
from geodl.data.batches import Batches, Transform
from geodl.data.images import Images, concat
from geodl.losses import DISTILLATIONS, Distillation
from geodl.model.features import Features
from geodl.model.memory import Memory
from geodl.nets import Network, Output

if TYPE_CHECKING:
    from geodl.model.classifiers import Adapted, Classifier

C = TypeVar("C", bound="Classifier")


@dataclass
class Phase:
    """What methods and classifiers see of one phase.

    The classes known before are the head's first ``old`` rows; the ``new`` ones follow. ``images``
    holds this phase's training images without those held out; ``memory`` is what the phase before
    left (with newly held-out images added), ``previous`` its classifiers by name.
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
    """``read(images, mirror=False)``: the network's features of un-augmented images, in eval mode; every rank calls it."""
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    before: Features | None = None
    """The teacher's features of the images at hand."""
    now: Features | None = None
    """The network's features of the images at hand, with all levels that a classifier wants, once no stage will move it any more."""
    kept: Memory | None = None
    """The memory for the next phase; there before classifiers are fitted, or where a stage has made it."""
    previous: Mapping[str, Classifier] = field(default_factory=dict)
    trained: bool = False
    """Whether the head was trained on all classes."""
    adapted: Adapted | None = None
    """How the network was adapted to the images before it is frozen."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The run's precision, for what a loss runs besides its stage's module, such as the teacher."""
    _fitted: dict[Any, Any] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """The number of classes known after the phase."""
        return self.old + self.new

    @property
    def training_images(self) -> Images:
        """The phase's images and the exemplars: D_t and M of the paper's Algorithm 1."""
        kept = self.memory.images
        return self.images if kept is None else concat([self.images, kept])

    @property
    def at_hand(self) -> Images:
        """All there is of this phase's classes: its images, and exemplars of returning classes."""
        kept = self.memory.images
        if kept is None:
            return self.images
        back = torch.isin(kept.labels, self.images.labels)
        return concat([self.images, kept.select(back)]) if back.any() else self.images

    # Parts of losses; each is a mean over the batch of all ranks.

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy: logits (B, C), labels (B,)."""
        smoothing = self.config.label_smoothing
        return self.mean(
            F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        )

    def distill(self, student: Output, teacher: Output | None) -> Tensor | None:
        """Return the chosen distillation times its weight; None without a teacher or with none."""
        if teacher is None or self._distillation is None:
            return None
        loss, old = self._distillation, self.old
        compared = loss.compared(student, old), loss.compared(teacher, old)
        value: Tensor = loss(*compared)
        return loss.weight(old, self.new) * value

    def mean(self, each: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the mean of values (B,), or of those that are counted: (B,) bool, over all ranks."""
        return global_mean(each, self.ranks.group, counted)

    def asked(self, images: Tensor) -> Output | None:
        """Return the teacher's output for a batch; None where no loss compares with it."""
        if self.teacher is None or self._distillation is None:
            return None
        with self.autocast():
            output: Output = self.teacher(images)
        return output

    @cached_property
    def _distillation(self) -> Distillation | None:
        if self.config.distill == "none":
            return None
        kind = DISTILLATIONS[self.config.distill]
        return kind.build(self.config.of(kind.Options), self.ranks.group)

    def exemplars(self, quota: int) -> Memory:
        """Choose the exemplars of this phase's classes and cut those of the others to the quota."""
        candidates = self.at_hand
        present = sorted(set(candidates.labels.tolist()))
        features = (self.now or self.read(candidates)).pooled
        selection = self.config.selection
        return self.memory.update(candidates, features, present, quota=quota, selection=selection)

    def batches(self, images: Images, stage: str, batch_size: int | None = None) -> Batches:
        """Return shuffled, augmented batches; their order depends on seed, phase and stage alone."""
        return Batches(
            images,
            self.transform,
            batch_size or self.config.batch_size,
            derive(self.config.seed, "batches", self.index, stage),
            rank=self.ranks.rank,
            world=self.ranks.world,
            workers=self.config.workers,
        )

    # Classifiers, once the network stands still.

    def classifier(self, kind: type[C]) -> C | None:
        """Return a classifier fitted to this phase, once for all who ask; None where it is not available."""
        if kind not in self._fitted:
            self._fitted[kind] = kind.fit(self)
        found: C | None = self._fitted[kind]
        return found

    def fit_all(self, kinds: Iterable[type[Classifier]]) -> dict[str, Classifier]:
        """Return all classifiers of these kinds that are available, by name."""
        found = {kind.name: self.classifier(kind) for kind in kinds}
        return {name: each for name, each in found.items() if each is not None}
