"""A listener that follows how the subspaces turn while a phase is learned."""

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


class AngleWatch:
    """After each epoch of the ordinary stage, tells the principal angles between the old and the new network's features.

    ``features`` maps a network and images to their features; it may be a collective call: every rank listens.
    """

    def __init__(self, phase: Phase, features: Callable[[Network, Images], Features], listener: Listener) -> None:
        assert phase.teacher is not None
        self.phase, self.features, self.listener = phase, features, listener
        self.sample = spread(phase.training_images(), SAMPLE)
        self.before = features(phase.teacher, self.sample).pooled

    def __call__(self, event: Event) -> None:
        """Hear of the end of an epoch."""
        if isinstance(event, EpochEnded) and event.stage == "train":
            now = self.features(self.phase.network, self.sample).pooled
            angles = leading_angles(self.before, now)
            self.listener(AnglesTaken(event.phase, event.stage, event.epoch, angles))


def spread(images: Images, count: int) -> Images:
    """Return at most ``count`` images, evenly spread."""
    return images.select(torch.arange(0, len(images), max(1, math.ceil(len(images) / count))))
