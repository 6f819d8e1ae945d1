"""First-session adaptation: fine-tune the last stages of a pre-trained network on the first group of images.

After that the network is frozen, and the closed form keeps its guarantees (RanPAC, McDonnell et al., NeurIPS 2023).
Whole series of images are set apart. They decide whether the adaptation is kept, and only they validate the model
afterwards: accuracy on images that the network was trained on would be too high.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from geodl.closed_form.apart import right, series_apart
from geodl.data.batches import Batch
from geodl.data.images import short_hashes
from geodl.methods.method import Losses, Method, Schedule, Stage
from geodl.model.classifiers import Adapted
from geodl.model.features import Features, class_means
from geodl.model.phase import Phase
from geodl.nets import CosineHead, Network

APART = 0.2
"""The share of each class that is set apart."""
BATCH = 32


@dataclass
class Adaptation:
    """The stage that adapts a phase's network; always: keep the result even if it does not pay."""

    method: Method
    phase: Phase
    schedule: Schedule
    always: bool

    @cached_property
    def original(self) -> Network:
        """The network before the adaptation; the one in the phase may come from a checkpoint."""
        return self.method.initial_network(self.phase.classes).to(self.phase.device)

    @cached_property
    def before(self) -> Features:
        """The original network's features of the phase's images."""
        return self.phase.features(self.original, self.phase.images)

    @cached_property
    def apart(self) -> Tensor:
        """A mask (N,) of the images that are set apart: whole series."""
        before, clues = self.before, self.phase.images.clues
        return series_apart(before.levels, before.labels, clues, APART, self.phase.config.seed)

    def _right(self, features: Features) -> Tensor:
        """Return which of the images set apart a fit to the others gets right: (n,) bool."""
        clues, seed = self.phase.images.clues, self.phase.config.seed
        return right(features.levels, features.labels, clues, self.apart, seed)

    def stage(self) -> Stage:
        """Return the stage: cross-entropy in eval mode, without mirroring, which may change the class."""
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
        """Start the head from the class means, so that the network need not move far."""
        head, rest = self.phase.network.head, ~self.apart
        if isinstance(head, CosineHead):
            z, labels = self.before.pooled[rest], self.before.labels[rest]
            head.imprint(range(head.classes), class_means(z, labels, head.classes))

    def _decide(self) -> None:
        """Keep the adapted network if its gain is more than chance, or always."""
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
            phase.network.backbone, phase.network.head = self.original.backbone, self.original.head
