"""The base class of classifiers, which map a network's features to scores.

A classifier is an immutable value, fitted at the end of every phase. Only its own file knows its state, which the model
stores as named tensors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from geodl.closed_form.fitted import LeftOut
from geodl.closed_form.novelty import Novelty
from geodl.config import Options as BaseOptions
from geodl.config import Registry, RunConfig
from geodl.core.errors import TrainingError
from geodl.core.tensors import shaped
from geodl.data.images import Images, short_hashes
from geodl.model.features import Features
from geodl.model.phase import Phase
from geodl.nets import Network

Tensors = dict[str, Tensor]
CHUNK = 2048
"""Images scored at a time."""


class Answers(NamedTuple):
    """The output of a classifier for N images."""

    scores: Tensor
    """(N, C)."""
    probabilities: Tensor
    """(N, C); they add up to the probability of a known class if the classifier estimates it, else to 1."""
    measure: Tensor
    """(N,), compared with the threshold: the probability of a known class if estimated, else the largest score."""
    unknown: Tensor
    """(N,) bool."""


@dataclass(frozen=True)
class Scorer:
    """Maps features to scores.

    score:     maps the features of N images to scores (N, C); traceable for export.
    scale:     logits are scale * scores.
    novelty:   estimates the probability that an image is of a known class; None: not estimated.
    threshold: an image whose measure is below is unknown.
    mirrors:   whether the scores of an image and of its mirrored copy are averaged.
    levels:    the levels of the network that are needed besides the pooled features.
    """

    score: Callable[[Features], Tensor]
    scale: float = 1.0
    novelty: Novelty | None = None
    threshold: float = -math.inf
    mirrors: bool = False
    levels: tuple[str, ...] = ()

    def __call__(self, features: Features, mirrored: Features | None = None) -> Tensor:
        """Return the scores (N, C) of images from their features and those of their mirrored copies."""
        return self._averaged(self.score, features, mirrored)

    def answers(self, features: Features, mirrored: Features | None = None) -> Answers:
        """Return the answers for images from their features and those of their mirrored copies."""
        scores, novelty = self(features, mirrored), self.novelty
        probabilities = (self.scale * scores).softmax(dim=1)
        measure = scores.amax(1)
        if novelty is not None:
            near = self._averaged(lambda view: novelty.near(view.levels), features, mirrored)
            measure = novelty.known(scores, near)
            probabilities = probabilities * measure.unsqueeze(1)
        return Answers(scores, probabilities, measure, measure < self.threshold)

    def _averaged(
        self, measure: Callable[[Features], Tensor], features: Features, mirrored: Features | None
    ) -> Tensor:
        if not self.mirrors or mirrored is None:
            return measure(features)
        return (measure(features) + measure(mirrored)) / 2

    def in_chunks(self, features: Features, mirrored: Features | None = None) -> Tensor:
        """Return the scores (N, C) of many images, computed in chunks."""
        views = [view.chunks(CHUNK) for view in (features, mirrored) if view is not None]
        return self.finite(torch.cat([self(*some) for some in zip(*views, strict=True)]))

    def finite(self, scores: Tensor) -> Tensor:
        """Return the scores; an error if the largest one of an image is NaN or infinite, as after an overflow.

        -inf beside a finite score is that of a class without a mean.
        """
        if not bool((self.scale * scores).amax(1).isfinite().all()):
            raise TrainingError("the model's scores are NaN or infinite: nothing is predicted")
        return scores


@dataclass(frozen=True)
class Stored:
    """What a classifier stores: features of `images`, their size in bytes, and whether it stores sums over all images."""

    images: int = 0
    bytes: int = 0
    sums: bool = False


class Classifier(ABC):
    """Maps features to scores; `fit` makes one from a phase and the classifier before it."""

    name: ClassVar[str]
    title: ClassVar[str]
    """The name in tables."""
    note: ClassVar[str] = ""
    """A footnote for tables."""
    meaning: ClassVar[str] = "softmax of its scores"
    """How its confidences are computed, for the metadata of exported files."""
    preference: ClassVar[int] = 9
    """By default, the model's classifier with the lowest number predicts."""
    oracle: ClassVar[bool] = False
    """Whether it needs old images that a learner has discarded; never part of a model."""
    needs_frozen: ClassVar[bool] = False
    """Whether its state is wrong once the network is trained further."""
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    """Its own options."""
    rejects: ClassVar[bool] = False
    """Whether it can call an image unknown, by a threshold."""

    @classmethod
    def levels(cls, network: Network, config: RunConfig) -> tuple[str, ...]:
        """Return the levels of the network that fitting and scoring need."""
        return ()

    @classmethod
    @abstractmethod
    def fit(cls, phase: Phase) -> Self | None:
        """Return the classifier after this phase; None if it is not available."""

    @abstractmethod
    def scorer(self, network: Network) -> Scorer:
        """Return the scorer, which maps features to scores."""

    @abstractmethod
    def without(self, row: int) -> Self:
        """Return the classifier without a class; the rows of later classes move up."""

    def tensors(self) -> Tensors:
        """Return the state that predicting needs, by name."""
        return {}

    def statistics(self) -> Tensors:
        """Return the state that only further learning needs, by name: older phases drop it."""
        return {}

    @classmethod
    def from_tensors(cls, tensors: Tensors, config: RunConfig) -> Self:
        """Return the classifier of `tensors` and, if they are present, `statistics`."""
        return cls()

    @property
    def classes(self) -> int | None:
        """The number of classes; None: that of the network's head."""
        return None

    def left_out(self) -> LeftOut | None:
        """Return the leave-one-out predictions of learned images; None if they are not known."""
        return None

    def places(self, features: Features) -> Tensor | None:
        """Return the positions (N,) in `left_out` of images, found by their features; -1: not found."""
        return None

    def kept_labels(self) -> Tensor | None:
        """Return the classes (N,) of the images whose features are stored; None if none are."""
        return None

    def threshold(self) -> float | None:
        """Return the measure (see `Answers`) below which an image is unknown; None: no image is."""
        return None

    def stored(self) -> Stored:
        """Return what is stored of the images."""
        return Stored()

    def notes(self, classes: Sequence[str] = ()) -> tuple[str, ...]:
        """Return sentences about the learned images for the user; classes: the names of the classes."""
        return ()


@dataclass(frozen=True)
class Adapted:
    """The adaptation of a network to the first images, of which some were set apart for validation.

    keys:   int64 (n,), short hashes of the images that it was adapted to, which validate nothing; empty if the
            adaptation was not kept.
    apart:  the number of images set apart; before, after: how many of these were right before and after.
    kept:   whether the adaptation was kept.
    """

    keys: Tensor
    apart: int
    before: int
    after: int
    kept: bool

    def saw(self, images: Images) -> Tensor:
        """Return a mask (N,) of the images that the network was adapted to."""
        if not len(self.keys):  # no need to hash the images
            return torch.zeros(len(images), dtype=torch.bool)
        return torch.isin(short_hashes(images.item_digests()), self.keys)

    def to_tensors(self) -> Tensors:
        """Return the fields as named tensors."""
        counts = torch.tensor([self.apart, self.before, self.after, self.kept])
        return {"adapting": counts, "adapting_keys": self.keys}

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Self | None:
        """Return the adaptation of `to_tensors`; None if there was none."""
        if "adapting" not in tensors:
            return None
        apart, before, after, kept = tensors["adapting"].tolist()
        keys = shaped(tensors["adapting_keys"], "adapting_keys", None, dtype=torch.int64)
        return cls(keys, apart, before, after, bool(kept))

    def __str__(self) -> str:
        """Return a sentence for the user."""
        after, before = (f"{100 * n / max(self.apart, 1):.1f} %" for n in (self.after, self.before))
        figures = f"{after} instead of {before} on {self.apart} images set apart"
        if self.kept:
            return f"The network is adapted to the images of the first step: {figures}."
        return f"Adapting the network to the images does not pay ({figures}): it stays unchanged."


CLASSIFIERS = Registry[type[Classifier]](
    "classifier", used=lambda kind, method: kind in fittable(method.frozen)
)


register = CLASSIFIERS.named


def default_classifier(names: Iterable[str]) -> str:
    """Return the preferred classifier: if possible a registered one, and no oracle."""

    def rank(name: str) -> tuple[bool, bool, int]:
        kind = CLASSIFIERS.get(name, Classifier)
        return name not in CLASSIFIERS, kind.oracle, kind.preference

    return min(names, key=rank)


def titles() -> dict[str, str]:
    """Return the classifiers' names in tables, in order, including one of old results."""
    names = {name: kind.title for name, kind in CLASSIFIERS.items()}
    return names | {"analytic_single": "closed form, no mirrored copies"}


def notes_on(names: Collection[str]) -> list[str]:
    """Return the footnotes for tables with these classifiers."""
    return [kind.note for name, kind in CLASSIFIERS.items() if kind.note and name in names]


def is_oracle(name: str) -> bool:
    """Return whether a classifier, which may be one of old results, needs old images."""
    return name in CLASSIFIERS and CLASSIFIERS[name].oracle


def fittable(frozen: bool) -> list[type[Classifier]]:
    """Return the classifiers that are fitted in every phase; frozen: whether the network is fixed after phase 0."""
    kinds = CLASSIFIERS.values()
    return [kind for kind in kinds if not kind.oracle and (frozen or not kind.needs_frozen)]


def levels_of(
    kinds: Iterable[type[Classifier]], network: Network, config: RunConfig
) -> tuple[str, ...]:
    """Return the levels of the network that some of these classifiers need."""
    needed = [name for kind in kinds for name in kind.levels(network, config)]
    return tuple(dict.fromkeys(needed))
