"""Predictions for images. This module does not import torch, which takes longer to load than a prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geodl.core.errors import ConfigError
from geodl.core.text import UNKNOWN

if TYPE_CHECKING:
    from geodl.data.dataset import Skipped

MOST_WORKERS = 1024


@dataclass(frozen=True)
class Prediction:
    """The prediction for an image; top: the likeliest classes with their confidences, best first."""

    name: str
    top: tuple[tuple[str, float], ...]
    unknown: bool = False
    """Whether the image is of no known class: its score is below the threshold."""
    score: float = math.nan
    """The number compared with the threshold: in closed form the probability of a known class, else the largest score."""

    @property
    def label(self) -> str:
        """The likeliest class, or "unknown"."""
        return UNKNOWN if self.unknown else self.top[0][0]

    @property
    def confidence(self) -> float:
        """The confidence in the likeliest class, 0 to 1, even if the image is unknown."""
        return self.top[0][1]

    def to_json(self) -> dict[str, Any]:
        """Return the prediction ready for JSON, as the command line and the HTTP API show it."""
        names = ("name", "label", "unknown", "confidence", "score")
        top = [{"label": label, "confidence": confidence} for label, confidence in self.top]
        return {name: getattr(self, name) for name in names} | {"top": top}


@dataclass(frozen=True)
class Predictions(Sequence[Prediction]):
    """The predictions for images, in their order, without unreadable ones.

    classes:       the names of all classes.
    probabilities: (N, C) float32, the confidence in each class.
    skipped:       (image, reason) of unreadable images.
    rate:          images/s.
    """

    items: tuple[Prediction, ...]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    skipped: Skipped
    rate: float

    @property
    def labels(self) -> NDArray[np.str_]:
        """The likeliest class of each image: (N,)."""
        return np.array([each.label for each in self.items])

    def least_sure_first(self) -> Predictions:
        """Return the predictions sorted by the margin between the two largest confidences, smallest first."""
        largest = np.sort(self.probabilities, axis=1)[:, -2:]
        order = np.argsort(np.ptp(largest, axis=1), kind="stable")
        items = tuple(self.items[i] for i in order)
        return replace(self, items=items, probabilities=self.probabilities[order])

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def named(
    names: Sequence[str],
    classes: Sequence[str],
    probabilities: NDArray[np.float32],
    unknown: NDArray[np.bool_],
    scores: NDArray[np.float32],
    top: int,
) -> Iterator[Prediction]:
    """Yield the predictions for named images. probabilities: (N, C); unknown, scores: (N,); top: number of classes each."""
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    for name, row, places, strange, score in zip(
        names, probabilities, best, unknown, scores, strict=True
    ):
        likeliest = tuple((classes[place], float(row[place])) for place in places)
        yield Prediction(name, likeliest, bool(strange), float(score))


def check_wishes(top: int, threshold: float | None, workers: int | None) -> None:
    """Raise a ConfigError if the options of `predict` are not valid."""
    if not isinstance(top, int) or top < 1:
        raise ConfigError(f"top = {top!r}: allowed values are integers from 1")
    if workers is not None and (not isinstance(workers, int) or not 0 <= workers <= MOST_WORKERS):
        allowed = f"allowed values are integers from 0 to {MOST_WORKERS}"
        raise ConfigError(f"workers = {workers!r}: {allowed}")
    if threshold is not None and (not isinstance(threshold, int | float) or math.isnan(threshold)):
        raise ConfigError(f"threshold = {threshold!r}: allowed values are numbers")
