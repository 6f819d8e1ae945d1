"""From pictures of any kind to the likeliest classes: whatever cannot be read is skipped and named, never in the way."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geodl.data.batches import Transform, evaluation
from geodl.data.dataset import Skipped, insist
from geodl.data.images import ArrayImages, Images
from geodl.data.intake import as_images, squares
from geodl.data.names import UNKNOWN
from geodl.errors import ConfigError
from geodl.events import ImagesPredicted, Listener, ignore
from geodl.nets import Network
from geodl.predictors import Features, features_of

MOST_WORKERS = 1024


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one image: `top` holds the likeliest classes with their confidences, best first."""

    name: str
    top: tuple[tuple[str, float], ...]
    unknown: bool = False
    """Whether the image is unlike all classes: its score is below the threshold."""
    score: float = math.nan
    """The largest score, which the threshold is compared with."""

    @property
    def label(self) -> str:
        """The likeliest class, or "unknown"."""
        return UNKNOWN if self.unknown else self.top[0][0]

    @property
    def confidence(self) -> float:
        """Its confidence, 0 to 1."""
        return self.top[0][1]


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

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Scorer:
    """A classifier: `score` maps features of N images to scores (N, C); `scale` makes logits of them.

    threshold: of the largest score, below which an image is unlike all classes; mirrors: whether the scores of an image and of
    its mirrored copy are averaged.
    """

    score: Callable[[Features], Tensor]
    scale: float = 1.0
    threshold: float = -math.inf
    mirrors: bool = False

    def __call__(self, found: Features, mirrored: Features | None = None) -> Tensor:
        """Return the scores (N, C) of images, given their features and those of their mirrored copies."""
        if not self.mirrors:
            return self.score(found)
        assert mirrored is not None
        return (self.score(found) + self.score(mirrored)) / 2

    def judge(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities (N, C) that scores (N, C) stand for, and which images are unlike all classes (N,)."""
        return (self.scale * scores).softmax(dim=1), scores.amax(1) < self.threshold


@dataclass(frozen=True)
class Recognizer:
    """What prediction needs of a model; levels: those of the network that the classifier reads."""

    network: Network
    transform: Transform
    classes: tuple[str, ...]
    scorer: Scorer
    levels: tuple[str, ...] = ()
    bf16: bool = False

    def features(self, images: Images, *, mirror: bool = False) -> Features:
        """Return what the network makes of images in memory, or of their mirrored copies."""
        device = next(self.network.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            batches = evaluation(images, self.transform, mirror=mirror)
            return features_of(self.network, batches, device, self.levels)

    def scores(self, images: Images) -> Tensor:
        """Return the scores (N, C) of images in memory."""
        sides = (False, True) if self.scorer.mirrors else (False,)
        return self.scorer(*(self.features(images, mirror=side) for side in sides))

    def recognize(self, images: Images) -> tuple[Tensor, Tensor]:
        """Return the probabilities (N, C) of images in memory, and which of them are unlike all classes (N,)."""
        return self.scorer.judge(self.scores(images))

    def stream(self, images: Images, workers: int | None = None) -> Iterator[tuple[list[int], Tensor, list[Any]]]:
        """Yield (positions, scores (b, C), [(position, reason)]) by batch; decoding goes on meanwhile."""
        threads = workers if workers is not None else torch.get_num_threads() + 1
        for positions, pixels, bad in squares(images, self.transform.shorter_side, threads):
            yield positions, self.scores(ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))), bad

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

        threshold: an image whose largest score is below it is unknown; -inf: none is; None: as it was fitted.
        """
        if not isinstance(top, int) or top < 1:
            raise ConfigError(f"top = {top!r}: a whole number from 1 is needed")
        if workers is not None and (not isinstance(workers, int) or not 0 <= workers <= MOST_WORKERS):
            raise ConfigError(f"workers = {workers!r}: a whole number from 0 to {MOST_WORKERS} is needed")
        if threshold is not None and (not isinstance(threshold, int | float) or math.isnan(threshold)):
            raise ConfigError(f"threshold = {threshold!r}: a number is needed")
        scorer = self.scorer if threshold is None else replace(self.scorer, threshold=threshold)
        pictures, names, problems = as_images(images)
        began = time.perf_counter()
        found: list[Prediction] = []
        rows = [torch.empty(0, len(self.classes))]
        skipped = list(problems)
        insist(strict, skipped)
        for positions, scores, bad in self.stream(pictures, workers):
            skipped += [(names[i], reason) for i, reason in bad]
            insist(strict, skipped)
            listener(ImagesPredicted(len(positions) + len(bad), len(pictures)))
            probabilities, unknown = scorer.judge(scores)
            rows.append(probabilities)
            found += self._predictions([names[i] for i in positions], probabilities, unknown, scores.amax(1), top)
        seconds = max(time.perf_counter() - began, 1e-9)
        confidences = torch.cat(rows).float().numpy()
        return Predictions(tuple(found), self.classes, confidences, tuple(skipped), len(found) / seconds)

    def _predictions(
        self, names: list[str], probabilities: Tensor, unknown: Tensor, best: Tensor, top: int
    ) -> Iterator[Prediction]:
        values, places = probabilities.topk(min(top, probabilities.shape[1]))
        rows = (part.tolist() for part in (values, places, unknown, best))
        for name, confidences, classes, strange, score in zip(names, *rows, strict=True):
            likeliest = zip((self.classes[c] for c in classes), confidences, strict=True)
            yield Prediction(name, tuple(likeliest), strange, score)
