"""One phase: its images and networks, and what losses, stages and classifiers need of them."""

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
    """One phase of learning, as methods and classifiers see it.

    ``names`` are all classes in the order of the head's rows, of which the first ``old`` were known before. ``images``
    are this phase's training images, without held-out ones; ``memory`` is that of the previous phase, with newly
    held-out images added; ``previous`` are the previous phase's classifiers by name.
    """

    index: int
    config: RunConfig
    transform: Transform
    network: Network
    teacher: Network | None
    images: Images
    memory: Memory
    old: int
    names: tuple[str, ...]
    features: Callable[..., Features]
    """``features(network, images, mirror=False)``: a network's features of un-augmented images, in eval mode; every rank calls it."""
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    before: Features | None = None
    """The teacher's features of the images at hand."""
    now: Features | None = None
    """The trained network's features of the images at hand, with every level that a classifier needs."""
    kept: Memory | None = None
    """The memory for the next phase: set by a stage, or after the stages; classifiers are fitted later."""
    previous: Mapping[str, Classifier] = field(default_factory=dict)
    trained: bool = False
    """Whether the head was trained on all classes."""
    adapted: Adapted | None = None
    """How the network was adapted to the first images, before it was frozen."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The run's precision, for modules that a loss uses besides its stage's own, such as the teacher."""
    _fitted: dict[Any, Any] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """The number of classes known after the phase."""
        return len(self.names)

    @property
    def new(self) -> int:
        """The number of classes first seen in this phase."""
        return self.classes - self.old

    @property
    def training_images(self) -> Images:
        """The phase's images and the exemplars: D_t and M of the paper's Algorithm 1."""
        kept = self.memory.images
        return self.images if kept is None else concat([self.images, kept])

    @property
    def at_hand(self) -> Images:
        """All images of this phase's classes: the new ones, and exemplars of returning classes."""
        kept = self.memory.images
        if kept is None:
            return self.images
        back = torch.isin(kept.labels, self.images.labels)
        return concat([self.images, kept.select(back)]) if back.any() else self.images

    def read(self, images: Images, *, mirror: bool = False) -> Features:
        """Return the network's features of un-augmented images, or of their mirrored copies."""
        return self.features(self.network, images, mirror=mirror)

    # Parts of losses; each is a mean over the batches of all ranks.

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy: logits (B, C), labels (B,)."""
        smoothing = self.config.label_smoothing
        return self.mean(
            F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        )

    def distill(self, student: Output, teacher: Output | None) -> Tensor | None:
        """Return the weighted distillation loss; None without a teacher or without a distillation."""
        if teacher is None or self._distillation is None:
            return None
        loss, old = self._distillation, self.old
        compared = loss.compared(student, old), loss.compared(teacher, old)
        value: Tensor = loss(*compared)
        return loss.weight(old, self.new) * value

    def mean(self, each: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the mean over all ranks of values (B,), or of those under the mask `counted`: (B,)."""
        return global_mean(each, self.ranks.group, counted)

    def taught(self, images: Tensor) -> Output | None:
        """Return the teacher's output for a batch; None if no loss needs it."""
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
        """Select the exemplars of this phase's classes and cut those of the others to the quota."""
        candidates = self.at_hand
        present = sorted(set(candidates.labels.tolist()))
        features = (self.now or self.read(candidates)).pooled
        selection = self.config.selection
        return self.memory.update(candidates, features, present, quota=quota, selection=selection)

    def batches(self, images: Images, stage: str, batch_size: int | None = None) -> Batches:
        """Return shuffled, augmented batches; the order depends only on seed, phase and stage."""
        return Batches(
            images,
            self.transform,
            batch_size or self.config.batch_size,
            derive(self.config.seed, "batches", self.index, stage),
            rank=self.ranks.rank,
            world=self.ranks.world,
            workers=self.config.workers,
        )

    # Classifiers, after training.

    def classifier(self, kind: type[C]) -> C | None:
        """Return the fitted classifier of a kind, fitted once; None if it is not available."""
        if kind not in self._fitted:
            self._fitted[kind] = kind.fit(self)
        classifier: C | None = self._fitted[kind]
        return classifier

    def fit_all(self, kinds: Iterable[type[Classifier]]) -> dict[str, Classifier]:
        """Return the available classifiers of these kinds by name."""
        fitted = {kind.name: self.classifier(kind) for kind in kinds}
        return {name: each for name, each in fitted.items() if each is not None}
