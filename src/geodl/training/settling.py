"""What is kept once a phase is trained: exemplars chosen under the network as it is now, class means, the method's own."""

from dataclasses import replace

import torch
from torch import Tensor

from geodl.data.batches import Transform
from geodl.data.images import Images
from geodl.memory import Memory, quota
from geodl.methods import Method, Phase
from geodl.nets import Network
from geodl.predictors import Features, class_means, drift, exemplar_means
from geodl.training.loop import Trainer


def settled(trainer: Trainer, method: Method, phase: Phase) -> Memory:
    """Return the memory for the next phase: exemplars chosen under the trained network, class means."""
    config, classes = phase.config, phase.old + phase.new
    share = quota(classes, config.exemplars, config.memory_budget)
    phase.settled = phase.read(phase.at_hand())
    chosen = method.exemplars(phase, share - method.held_out(share))
    means = _means(phase, phase.settled)
    taken = means_of_exemplars(trainer, phase.network, chosen.images, phase.transform, classes)
    if taken is not None:  # a class of which no exemplar is kept stands by its class mean
        taken = _filled(taken, means)
    # Laid out as they are read back: the last digits of what is computed with them depend on it.
    own = {name: tensor.contiguous() for name, tensor in method.keep(phase).items()}
    return replace(chosen, means=means, exemplar_means=taken, own=own)


def means_of_exemplars(
    trainer: Trainer, network: Network, images: Images | None, transform: Transform, classes: int
) -> Tensor | None:
    """Return the (C, d) means of k-NME: over exemplars and, where mirroring keeps the class, their mirrored copies."""
    if images is None:
        return None
    sides = (False, True) if trainer.config.flip else (False,)
    return exemplar_means([trainer.features(network, images, transform, mirror=m) for m in sides], classes)


def _means(phase: Phase, now: Features) -> Tensor:
    """Return the class means (C, d) of NCM: those of classes at hand are taken, the others drift along (SDC)."""
    classes = phase.old + phase.new
    taken = class_means(now.pooled, now.labels, classes)
    moved = phase.memory.means
    if moved is None:
        return taken
    if phase.before is not None:
        moved = drift(moved, phase.before.pooled, now.pooled)
    return _filled(taken, torch.cat([moved, moved.new_zeros(classes - len(moved), moved.shape[1])]))


def _filled(means: Tensor, others: Tensor) -> Tensor:
    """Return the means (C, d), and where a class has none (zeros) the others."""
    return torch.where((means != 0).any(dim=1, keepdim=True), means, others)
