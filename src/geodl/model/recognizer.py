"""From pictures of any kind to the likeliest classes: whatever cannot be read is skipped and named, never in the way."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geodl.core.errors import ConfigError
from geodl.core.events import ImagesPredicted, Listener, ignore
from geodl.data.batches import Transform, evaluation
from geodl.data.dataset import Skipped, insist
from geodl.data.images import ArrayImages, Images
from geodl.data.intake import as_images, squares
from geodl.data.names import UNKNOWN
from geodl.model.classifiers import Scorer
from geodl.model.classifiers.base import Answers
from geodl.model.features import Features, features_of
from geodl.nets import Network

MOST_WORKERS = 1024


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one image: `top` holds the likeliest classes with their confidences, best first."""

    name: str
    top: tuple[tuple[str, float], ...]
    unknown: bool = False
    """Whether the image is unlike all classes: its score is below the threshold."""
    score: float = math.nan
    """What the threshold is compared with: the probability of being known in closed form, else the largest score."""

    @property
    def label(self) -> str:
        """The likeliest class, or "unknown"."""
        return UNKNOWN if self.unknown else self.top[0][0]

    @property
    def confidence(self) -> float:
        """The confidence in the likeliest class, 0 to 1; also of an unknown image."""
        return self.top[0][1]

    def to_json(self) -> dict[str, Any]:
        """Return the prediction ready for JSON: one form for the command line and HTTP."""
        names = ("name", "label", "unknown", "confidence", "score")
        top = [{"label": label, "confidence": confidence} for label, confidence in self.top]
        return {name: getattr(self, name) for name in names} | {"top": top}


@dataclass(frozen=True)
class Predictions(Sequence[Prediction]):
    """The predictions of some images, in their order, without those that could not be read.

    classes:       the names of all classes.
    probabilities: (N, C) float32, the confidence in each class.
    skipped:       (image, reason) of those that could not be read.
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

    def least_sure_first(self) -> "Predictions":
        """Return them by the margin between the two largest confidences, the smallest first."""
        largest = np.sort(self.probabilities, axis=1)[:, -2:]
        order = np.argsort(np.ptp(largest, axis=1), kind="stable")
        items = tuple(self.items[i] for i in order)
        return replace(self, items=items, probabilities=self.probabilities[order])

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Recognizer:
    """What prediction needs of a model."""

    network: Network
    transform: Transform
    classes: tuple[str, ...]
    scorer: Scorer

    def features(self, images: Images, *, mirror: bool = False) -> Features:
        """Return what the network makes of images in memory, or of their mirrored copies."""
        device = next(self.network.parameters()).device
        batches = evaluation(images, self.transform, mirror=mirror)
        return features_of(self.network, batches, device, self.scorer.levels)

    def answers(self, images: Images) -> Answers:
        """Return what the classifier makes of images in memory."""
        if not len(images):
            none = torch.empty(0, len(self.classes))
            return Answers(none, none, none.sum(1), none.any(1))
        sides = (False, True) if self.scorer.mirrors else (False,)
        found = self.scorer.answers(*(self.features(images, mirror=side) for side in sides))
        self.scorer.finite(found.scores)
        return found

    def stream(
        self, images: Images, workers: int | None = None
    ) -> Iterator[tuple[list[int], Answers, list[Any]]]:
        """Yield (positions, answers, [(position, reason)]) by batch; decoding goes on meanwhile."""
        threads = workers if workers is not None else torch.get_num_threads() + 1
        seen = self.transform
        for positions, pixels, bad in squares(images, seen.shorter_side, threads, seen.whole):
            yield (
                positions,
                self.answers(ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))),
                bad,
            )

    def predict(
        self,
        images: Any,
        *,
        top: int = 1,
        threshold: float | None = None,
        strict: bool = False,
        workers: int | None = None,
        listener: Listener = ignore,
    ) -> Predictions:
        """Predict images of any kind (see `as_images`); `strict` makes the first that cannot be read a DataError.

        threshold: an image whose `score` is below it is unknown; -inf: none is; None: as it was fitted.
        """
        _check(top, threshold, workers)
        judging = self
        if threshold is not None:
            judging = replace(self, scorer=replace(self.scorer, threshold=threshold))
        pictures, names, problems = as_images(images)
        began = time.perf_counter()
        found: list[Prediction] = []
        rows = [torch.empty(0, len(self.classes))]
        skipped = list(problems)
        insist(strict, skipped)
        for positions, answers, bad in judging.stream(pictures, workers):
            skipped += [(names[i], reason) for i, reason in bad]
            insist(strict, skipped)
            listener(ImagesPredicted(len(positions) + len(bad), len(pictures)))
            rows.append(answers.probabilities)
            found += self.predictions([names[i] for i in positions], answers, top)
        seconds = max(time.perf_counter() - began, 1e-9)
        confidences = torch.cat(rows).float().numpy()
        return Predictions(
            tuple(found), self.classes, confidences, tuple(skipped), len(found) / seconds
        )

    def predictions(self, names: Sequence[str], answers: Answers, top: int) -> Iterator[Prediction]:
        """Yield the predictions that answers for named images stand for."""
        values, places = answers.probabilities.topk(min(top, len(self.classes)))
        rows = (part.tolist() for part in (values, places, answers.unknown, answers.measure))
        for name, confidences, classes, strange, score in zip(names, *rows, strict=True):
            likeliest = zip((self.classes[c] for c in classes), confidences, strict=True)
            yield Prediction(name, tuple(likeliest), strange, score)


def _check(top: int, threshold: float | None, workers: int | None) -> None:
    """Refuse options of a prediction that cannot be."""
    if not isinstance(top, int) or top < 1:
        raise ConfigError(f"top = {top!r}: a whole number from 1 is needed")
    if workers is not None and not (isinstance(workers, int) and 0 <= workers <= MOST_WORKERS):
        raise ConfigError(
            f"workers = {workers!r}: a whole number from 0 to {MOST_WORKERS} is needed"
        )
    number = threshold is None or isinstance(threshold, int | float)
    if not number or threshold != threshold:  # nan
        raise ConfigError(f"threshold = {threshold!r}: a number is needed")
