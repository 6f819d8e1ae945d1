"""Prediction of images of any kind; unreadable ones are skipped and reported."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from geodl.core.events import ImagesPredicted, Listener, ignore
from geodl.data.batches import Transform, evaluation
from geodl.data.dataset import insist
from geodl.data.images import ArrayImages, Images
from geodl.data.intake import as_images
from geodl.data.squares import squares
from geodl.model.classifiers import Scorer
from geodl.model.classifiers.base import Answers
from geodl.model.features import Features, features_of
from geodl.model.predictions import Prediction, Predictions, check_wishes, named
from geodl.nets import Network


@dataclass(frozen=True)
class Recognizer:
    """The part of a model that predicts."""

    network: Network
    transform: Transform
    classes: tuple[str, ...]
    scorer: Scorer

    def features(self, images: Images, *, mirror: bool = False) -> Features:
        """Return the network's features of images in memory, or of their mirrored copies."""
        device = next(self.network.parameters()).device
        batches = evaluation(images, self.transform, mirror=mirror)
        return features_of(self.network, batches, device, self.scorer.levels)

    def answers(self, images: Images) -> Answers:
        """Return the classifier's answers for images in memory."""
        if not len(images):
            none = torch.empty(0, len(self.classes))
            return Answers(none, none, none.sum(1), none.any(1))
        sides = (False, True) if self.scorer.mirrors else (False,)
        answers = self.scorer.answers(*(self.features(images, mirror=side) for side in sides))
        self.scorer.finite(answers.scores)
        return answers

    def stream(
        self, images: Images, workers: int | None = None
    ) -> Iterator[tuple[list[int], Answers, list[Any]]]:
        """Yield (positions, answers, [(position, reason)]) by batch, while the next images are decoded."""
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
        """Predict images of any kind; see `Predicting.predict`."""
        check_wishes(top, threshold, workers)
        recognizer = self
        if threshold is not None:
            recognizer = replace(self, scorer=replace(self.scorer, threshold=threshold))
        pictures, names, problems = as_images(images)
        began = time.perf_counter()
        items: list[Prediction] = []
        rows = [torch.empty(0, len(self.classes))]
        skipped = list(problems)
        insist(strict, skipped)
        for positions, answers, bad in recognizer.stream(pictures, workers):
            skipped += [(names[i], reason) for i, reason in bad]
            insist(strict, skipped)
            listener(ImagesPredicted(len(positions) + len(bad), len(pictures)))
            rows.append(answers.probabilities)
            items += self.predictions([names[i] for i in positions], answers, top)
        rate = len(items) / max(time.perf_counter() - began, 1e-9)
        confidences = torch.cat(rows).float().numpy()
        return Predictions(tuple(items), self.classes, confidences, tuple(skipped), rate)

    def predictions(self, names: Sequence[str], answers: Answers, top: int) -> Iterator[Prediction]:
        """Yield predictions from the answers for named images."""
        arrays = (answers.probabilities, answers.unknown, answers.measure)
        probabilities, unknown, measure = (each.numpy() for each in arrays)
        yield from named(names, self.classes, probabilities, unknown, measure, top)


class Predicting(ABC):
    """Base class of `Learner` and `IncrementalClassifier`, which predict with a recognizer."""

    @abstractmethod
    def recognizer(self, classifier: str | None = None, accelerator: str = "auto") -> Recognizer:
        """Return a recognizer for the current model, for many calls."""

    def predict(
        self,
        images: Any,
        *,
        classifier: str | None = None,
        accelerator: str = "auto",
        top: int = 1,
        threshold: float | None = None,
        strict: bool = False,
        workers: int | None = None,
        listener: Listener = ignore,
    ) -> Predictions:
        """Predict the classes of images, in order.

        Args:
            images: files, folders, arrays (N, H, W[, C]), PIL images, or a list of these.
            classifier: its name; None: the preferred one of the model.
            accelerator: auto, cpu or cuda.
            top: the number of likeliest classes in each prediction.
            threshold: `score` below which an image is unknown; -inf: no image is; None: as fitted.
            strict: raise a DataError for the first unreadable image, instead of skipping it
                and adding it to `skipped`.
            workers: threads that decode images; 0: the calling thread; None: one more than torch uses.
            listener: called with each event (`geodl.core.events`).
        """
        return self.recognizer(classifier, accelerator).predict(
            images,
            top=top,
            threshold=threshold,
            strict=strict,
            workers=workers,
            listener=listener,
        )
