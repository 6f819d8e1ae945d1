"""What a classifier is: how the features of a network are read.

A classifier is an immutable value that is fitted at the end of every phase. Its file alone knows what
it keeps; the model stores that as named tensors.
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
"""Images that are scored at a time."""


class Answers(NamedTuple):
    """What a classifier makes of N images."""

    scores: Tensor
    """(N, C)."""
    probabilities: Tensor
    """(N, C); where novelty is known they add up to that of being known, else to 1."""
    measure: Tensor
    """(N,), what the threshold is compared with: the probability of being known, else the largest score."""
    unknown: Tensor
    """(N,) bool."""


@dataclass(frozen=True)
class Scorer:
    """How features become scores.

    score:     maps the features of N images to scores (N, C); traceable for export.
    scale:     makes logits of the scores.
    novelty:   gives the probability that an image is of a known class; None: not known.
    threshold: an image whose measure is below is unlike all classes.
    mirrors:   whether the scores of an image and of its mirrored copy are averaged.
    levels:    the levels of the network that are read besides the pooled features.
    """

    score: Callable[[Features], Tensor]
    scale: float = 1.0
    novelty: Novelty | None = None
    threshold: float = -math.inf
    mirrors: bool = False
    levels: tuple[str, ...] = ()

    def __call__(self, found: Features, mirrored: Features | None = None) -> Tensor:
        """Return the scores (N, C) of images from their features and those of mirrored copies."""
        return self._averaged(self.score, found, mirrored)

    def answers(self, found: Features, mirrored: Features | None = None) -> Answers:
        """Judge images by their features and those of mirrored copies."""
        scores, novelty = self(found, mirrored), self.novelty
        probabilities = (self.scale * scores).softmax(dim=1)
        measure = scores.amax(1)
        if novelty is not None:
            near = self._averaged(lambda view: novelty.near(view.levels), found, mirrored)
            measure = novelty.known(scores, near)
            probabilities = probabilities * measure.unsqueeze(1)
        return Answers(scores, probabilities, measure, measure < self.threshold)

    def _averaged(
        self, measure: Callable[[Features], Tensor], found: Features, mirrored: Features | None
    ) -> Tensor:
        if not self.mirrors or mirrored is None:
            return measure(found)
        return (measure(found) + measure(mirrored)) / 2

    def in_chunks(self, found: Features, mirrored: Features | None = None) -> Tensor:
        """Return the scores (N, C) of many images, some at a time."""
        views = [view.chunks(CHUNK) for view in (found, mirrored) if view is not None]
        return self.finite(torch.cat([self(*some) for some in zip(*views, strict=True)]))

    def finite(self, scores: Tensor) -> Tensor:
        """Return scores as they are; an image whose largest one is NaN or infinite, as of weights that overflow, is an error.

        -inf beside others is that of a class of which nothing is known.
        """
        if not bool((self.scale * scores).amax(1).isfinite().all()):
            words = "the model gives scores that are NaN or infinite: nothing is predicted"
            raise TrainingError(words)
        return scores


@dataclass(frozen=True)
class Stored:
    """What a classifier stores of images besides class statistics; `sums`: over all images."""

    images: int = 0
    bytes: int = 0
    sums: bool = False


class Classifier(ABC):
    """A way to read features; `fit` makes one from a phase and the one before."""

    name: ClassVar[str]
    title: ClassVar[str]
    """As tables show it."""
    note: ClassVar[str] = ""
    """What a reader of tables must know of it."""
    meaning: ClassVar[str] = "softmax of its scores"
    """What its confidences are, for those who read an exported file."""
    preference: ClassVar[int] = 9
    """The classifier of a model with the least number predicts where none is named."""
    oracle: ClassVar[bool] = False
    """Whether it needs old images that a learner has thrown away; never part of a model."""
    needs_frozen: ClassVar[bool] = False
    """Whether what it keeps is wrong once the network moves."""
    Options: ClassVar[type[BaseOptions]] = BaseOptions
    """Its own options, there where it is fitted."""
    rejects: ClassVar[bool] = False
    """Whether it can call an image unknown, by a threshold."""

    @classmethod
    def levels(cls, network: Network, config: RunConfig) -> tuple[str, ...]:
        """Return the levels of the network that fitting and reading need."""
        return ()

    @classmethod
    @abstractmethod
    def fit(cls, phase: Phase) -> Self | None:
        """Return the classifier after this phase; None where it is not available."""

    @abstractmethod
    def scorer(self, network: Network) -> Scorer:
        """Return how features become scores."""

    @abstractmethod
    def without(self, row: int) -> Self:
        """Return the classifier without a class; those after it move up."""

    def tensors(self) -> Tensors:
        """Return all that predicting needs, by name."""
        return {}

    def statistics(self) -> Tensors:
        """Return what only the next phase needs, by name: older phases drop it."""
        return {}

    @classmethod
    def from_tensors(cls, tensors: Tensors, config: RunConfig) -> Self:
        """Undo `tensors` and, where they are there, `statistics`."""
        return cls()

    @property
    def classes(self) -> int | None:
        """How many classes are told apart; None: those of the network's head."""
        return None

    def left_out(self) -> LeftOut | None:
        """Return what leave-one-out says of learned images; None where it cannot be known."""
        return None

    def places(self, found: Features) -> Tensor | None:
        """Return where in `left_out` images are, by their features, (N,), -1: not there."""
        return None

    def kept_labels(self) -> Tensor | None:
        """Return the classes (N,) of the images whose features are kept one by one; None where none are."""
        return None

    def threshold(self) -> float | None:
        """Return the measure (see `Scorer`) below which an image is unknown; None where none is."""
        return None

    def stored(self) -> Stored:
        """Return what is stored of images."""
        return Stored()

    def notes(self, classes: Sequence[str] = ()) -> tuple[str, ...]:
        """Return sentences about what was found in the images of these classes, for their owner."""
        return ()


@dataclass(frozen=True)
class Adapted:
    """How a network was adapted to the first images, of which some were set apart.

    keys:   short hashes of those that it was adapted to, int64 (n,): nothing is judged by them, as they flatter it; empty
            where the network stays as it was.
    apart:  how many were set apart; before, after: how many of these were right with the network before and after.
    kept:   whether the network stays as it was adapted.
    """

    keys: Tensor
    apart: int
    before: int
    after: int
    kept: bool

    def saw(self, images: Images) -> Tensor | None:
        """Return which images the network was adapted to, (N,) bool; None: it was to none at all."""
        if not len(self.keys):
            return None
        return torch.isin(short_hashes(images.item_digests()), self.keys)

    def to_tensors(self) -> Tensors:
        """Return the counts and the keys."""
        counts = torch.tensor([self.apart, self.before, self.after, self.kept])
        return {"adapting": counts, "adapting_keys": self.keys}

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Self | None:
        """Undo `to_tensors`; None where nothing was adapted."""
        if "adapting" not in tensors:
            return None
        apart, before, after, kept = tensors["adapting"].tolist()
        keys = tensors.get("adapting_keys", torch.empty(0, dtype=torch.int64))
        shaped(keys, "adapting_keys", None, dtype=torch.int64)
        return cls(keys, apart, before, after, bool(kept))

    def __str__(self) -> str:
        """Return a sentence for the images' owner."""
        after, before = (f"{100 * n / max(self.apart, 1):.1f} %" for n in (self.after, self.before))
        found = f"{after} instead of {before} on {self.apart} images set apart"
        if self.kept:
            return f"The network is adapted to the images of the first step: {found}."
        return f"Adapting the network to the images does not pay ({found}): it stays as it was."


CLASSIFIERS = Registry[type[Classifier]](
    "classifier", used=lambda kind, method: kind in fittable(method.frozen)
)


register = CLASSIFIERS.named


def default_classifier(names: Iterable[str]) -> str:
    """Return the classifier to use, or to show where there is room for one: no oracle, and one that is there, if possible."""

    def last(name: str) -> tuple[bool, bool, int]:
        kind = CLASSIFIERS.get(name, Classifier)
        return name not in CLASSIFIERS, kind.oracle, kind.preference

    return min(names, key=last)


def titles() -> dict[str, str]:
    """Return how tables name the classifiers, in their order; with one that old results have."""
    found = {name: kind.title for name, kind in CLASSIFIERS.items()}
    return found | {"analytic_single": "closed form, no mirrored copies"}


def notes_on(names: Collection[str]) -> list[str]:
    """Return what a reader of tables must know of some classifiers."""
    return [kind.note for name, kind in CLASSIFIERS.items() if kind.note and name in names]


def is_oracle(name: str) -> bool:
    """Return whether a classifier, which old results may name, needs old images."""
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
