"""CNN: the head of the network."""

from dataclasses import dataclass
from typing import Self

from geodl.model.classifiers.base import Classifier, Scorer
from geodl.model.phase import Phase
from geodl.nets import Network


@dataclass(frozen=True)
class Cnn(Classifier):
    """argmax of the head's logits, including BiC's correction; it has no state of its own."""

    name = "cnn"
    title = "CNN"
    meaning = "softmax of the network's own output"
    preference = 3

    @classmethod
    def fit(cls, phase: Phase) -> Self | None:
        """Return the classifier if the head was trained on all classes."""
        return cls() if phase.trained else None

    def scorer(self, network: Network) -> Scorer:
        """Return the logits as scores."""
        return Scorer(lambda features: features.logits)

    def without(self, row: int) -> Self:
        """Return itself: the head loses the row."""
        return self
