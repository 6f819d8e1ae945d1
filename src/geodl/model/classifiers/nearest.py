"""What the classifiers by nearest class mean share."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from geodl.config import RunConfig
from geodl.core.tensors import shaped
from geodl.model.classifiers.base import Classifier, Scorer, Tensors
from geodl.model.features import nearest_mean
from geodl.nets import Network

NO_SCALE = 10.0
"""Cosines are multiplied by the head's learned scale, or by this where it has none."""


@dataclass(frozen=True)
class NearestMean(Classifier):
    """The class whose mean is nearest in cosine. means: (C, d), zeros where one is unknown."""

    means: Tensor

    @property
    def classes(self) -> int:
        """How many classes are told apart."""
        return len(self.means)

    def scorer(self, network: Network) -> Scorer:
        """Return the cosines with the means as scores."""
        scale = getattr(network.head, "scale", torch.tensor(NO_SCALE)).detach().item()
        return Scorer(lambda found: nearest_mean(found.pooled, self.means), scale=scale)

    def without(self, row: int) -> Self:
        """Return the classifier without a class."""
        return type(self)(torch.cat([self.means[:row], self.means[row + 1 :]]))

    def tensors(self) -> Tensors:
        """Return the means."""
        return {"means": self.means}

    @classmethod
    def from_tensors(cls, tensors: Tensors, config: RunConfig) -> Self:
        """Undo `tensors`."""
        return cls(shaped(tensors["means"], "means", None, None))
