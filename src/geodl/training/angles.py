"""How the subspaces turn while a phase is learned."""

import math
from collections.abc import Callable

import torch

from geodl.analysis import leading_angles
from geodl.data.images import Images
from geodl.events import AnglesTaken, EpochEnded, Event, Listener
from geodl.methods import Phase
from geodl.nets import Network
from geodl.predictors import Features

SAMPLE = 128
"""Images that are compared after each epoch."""


def with_angles(phase: Phase, features: Callable[[Network, Images], Features], listener: Listener) -> Listener:
    """Return a listener that is also told, after each epoch, the principal angles between the old and the new features.

    ``features`` maps a network and images to their features; it may be a collective call: every rank listens.
    """
    if phase.teacher is None or not phase.config.analysis:
        return listener
    sample = spread(phase.training_images(), SAMPLE)
    before = features(phase.teacher, sample).pooled

    def both(event: Event) -> None:
        listener(event)
        if isinstance(event, EpochEnded) and event.stage == "train":
            angles = leading_angles(before, features(phase.network, sample).pooled)
            listener(AnglesTaken(event.phase, event.stage, event.epoch, angles))

    return both


def spread(images: Images, count: int) -> Images:
    """Return at most ``count`` images, evenly spread."""
    return images.select(torch.arange(0, len(images), max(1, math.ceil(len(images) / count))))
