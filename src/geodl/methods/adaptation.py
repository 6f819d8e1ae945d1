"""First-session adaptation: the last stages of a pre-trained network move a little, on the first group of images alone.

After that the network is frozen, and the closed form keeps all its promises (RanPAC, McDonnell et al., NeurIPS 2023).
Whole series of images are set apart: they tell whether it pays, and they alone judge the model afterwards, since what a
network was trained on flatters it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from geodl.closed_form.apart import right, series_apart
from geodl.core.keys import derive
from geodl.data.batches import Batch
from geodl.data.images import short_hashes
from geodl.methods.method import Losses, Schedule, Stage
from geodl.model.classifiers import Adapted
from geodl.model.features import Features, class_means
from geodl.model.phase import Phase
from geodl.nets import Backbone, CosineHead, Network, build_network

APART = 0.2
"""The share of each class that is set apart."""
BATCH = 32


@dataclass
class Adaptation:
    """The one stage of adapting a phase's network; always: keep the result even where it does not pay."""

    phase: Phase
    schedule: Schedule
    always: bool

    @cached_property
    def frozen(self) -> Network:
        """The network as it was before: that in the phase may be from a checkpoint."""
        config, head = self.phase.config, self.phase.network.head
        found = build_network(
            config.network,
            head.classes,
            head="cosine" if isinstance(head, CosineHead) else "linear",
            scale=config.scale,
            seed=derive(config.seed, "network"),
            weights=config.weights,
            pretrained=config.pretrained,
        )
        return found.to(self.phase.device)

    @cached_property
    def before(self) -> Features:
        """What the frozen network makes of the phase's images."""
        with self._reading(self.frozen.backbone):
            return self.phase.read(self.phase.images)

    @cached_property
    def apart(self) -> Tensor:
        """Which images are set apart, (N,) bool: whole series."""
        found, clues = self.before, self.phase.images.clues
        return series_apart(found.levels, found.labels, clues, APART, self.phase.config.seed)

    def _right(self, found: Features) -> Tensor:
        """Return which of the images set apart are known from the others: (n,) bool."""
        clues, seed = self.phase.images.clues, self.phase.config.seed
        return right(found.levels, found.labels, clues, self.apart, seed)

    def stage(self) -> Stage:
        """Return the training: cross-entropy, neither mirrored images, which may be another class, nor batch statistics."""
        phase, network = self.phase, self.phase.network
        network.move_last_alone()
        unmirrored = replace(phase, transform=replace(phase.transform, flip=False))
        batches = unmirrored.batches(phase.images.select(~self.apart), "adapt", BATCH)

        def loss(student: nn.Module, batch: Batch) -> Losses:
            yield "ce", phase.cross_entropy(student(batch.images).logits, batch.labels)

        return Stage(
            "adapt",
            network,
            batches,
            loss,
            self.schedule,
            training=False,
            begin=self._imprint,
            finish=self._decide,
        )

    def _imprint(self) -> None:
        """Begin with the directions of the class means, so that the network need not move far."""
        head, rest = self.phase.network.head, ~self.apart
        if isinstance(head, CosineHead):
            z, labels = self.before.pooled[rest], self.before.labels[rest]
            head.imprint(range(head.classes), class_means(z, labels, head.classes))

    def _decide(self) -> None:
        """Keep the adapted network where it is right more often than chance explains, or always."""
        phase, apart = self.phase, self.apart
        phase.network.requires_grad_(True)
        after = phase.read(phase.images)
        was, now = self._right(self.before), self._right(after)
        gained, lost = int((now & ~was).sum()), int((was & ~now).sum())
        kept = self.always or gained - lost > (gained + lost) ** 0.5
        keys = short_hashes(phase.images.select(~apart).item_digests() if kept else [])
        phase.adapted = Adapted(keys, len(was), int(was.sum()), int(now.sum()), kept)
        phase.trained = kept
        if not kept:
            start = deepcopy(self.frozen)
            phase.network.backbone, phase.network.head = start.backbone, start.head

    @contextmanager
    def _reading(self, backbone: Backbone) -> Iterator[None]:
        """Let the phase's network read with another backbone."""
        network = self.phase.network
        own = network.backbone
        network.backbone = backbone
        try:
            yield
        finally:
            network.backbone = own
