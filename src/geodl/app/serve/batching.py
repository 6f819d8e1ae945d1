"""Predictions for many clients: waiting images are predicted in batches, from the last complete state of the model."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve.limits import Refused
from geodl.app.serve.schemas import Picture
from geodl.app.state import State
from geodl.core.decoding import Item, megapixels, read_bytes
from geodl.core.errors import StoreError
from geodl.data.batches import Transform, resized
from geodl.data.images import ArrayImages, FileImages, Images
from geodl.data.squares import square
from geodl.model.predictions import Prediction
from geodl.model.recognizer import Recognizer

MOST = 64
"""Images in one pass of the network."""


@dataclass(frozen=True)
class Current:
    """A complete state, ready to predict."""

    state: State
    recognizer: Recognizer

    @property
    def side(self) -> int:
        """The side of the network's input, in pixels."""
        return self.recognizer.transform.shorter_side

    def features(self, images: Images) -> Tensor:
        """Return the normalized features of images: (N, d)."""
        return normalize(self.recognizer.features(images).pooled, dim=1)

    @cached_property
    def known(self) -> Tensor:
        """The features of the stored validation images, (V, d)."""
        assert self.state.validation is not None
        return self.features(self.state.validation)

    def stack(self, pixels: Sequence[Tensor]) -> Images:
        """Return a batch of decoded pictures; one that was decoded before the model changed its input size is resized."""
        batch = torch.stack([self._resized(picture) for picture in pixels])
        return ArrayImages(batch, torch.zeros(len(batch), dtype=torch.int64))

    def _resized(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1] == self.side:
            return pixels
        single = ArrayImages(pixels[None], torch.zeros(1, dtype=torch.int64))
        return resized(single, self.side, whole=self.recognizer.transform.whole).pixels[0]


class Answer(NamedTuple):
    """A prediction, and the pixels (3, size, size) that it was made from."""

    prediction: Prediction
    pixels: Tensor


class _Waiting(NamedTuple):
    pixels: Tensor
    top: int
    answer: "Future[Answer | str]"


class Predictor:
    """Predicts single images for callers in any thread, in batches of all images that wait.

    A thread that has decoded an image predicts it together with all that wait, unless another thread is doing so already.
    """

    def __init__(self, model: IncrementalClassifier) -> None:
        self._model = model
        self._current: Current | None = None
        self._reading, self._predicting = threading.Lock(), threading.Lock()
        self._waiting: dict[bool, deque[_Waiting]] = {True: deque(), False: deque()}

    def current(self) -> Current:
        """Return the last complete state; it is read again only if the model has changed."""
        with self._reading:
            try:
                state = self._model.state()
            except StoreError:
                if self._model.version is None:
                    raise Refused(409, "the model has learned nothing yet") from None
                raise
            if self._current is None or self._current.state is not state:
                self._current = Current(state, state.model.recognizer(accelerator="auto"))
            return self._current

    def measure(self, images: Sequence[Item]) -> tuple[Transform, float]:
        """Return how to decode pictures for the network, and their size in megapixels."""
        return self.current().recognizer.transform, sum(map(megapixels, images))

    def predict(
        self,
        image: Item,
        transform: Transform,
        top: int,
        first: bool,
        answer: "Future[Answer | str]",
    ) -> None:
        """Decode a picture and answer with its prediction, or with the reason why it cannot be used.

        first: predict it before those that are not.
        """
        if answer.cancelled():
            return
        try:
            pixels = decode(image, transform)
        except Exception as error:  # passed on to the caller
            _settle(answer, error)
            return
        if isinstance(pixels, str):
            _settle(answer, pixels)
            return
        self._waiting[first].append(_Waiting(pixels, top, answer))
        # The thread that predicts checks again after it releases the lock, so that no image is left waiting.
        while any(self._waiting.values()) and self._predicting.acquire(blocking=False):
            try:
                self._predict_waiting()
            finally:
                self._predicting.release()

    def nearest(self, pixels: Tensor, count: int) -> list[dict[str, Any]]:
        """Return the stored validation images that are most similar to a decoded picture, the most similar first."""
        current = self.current()
        validation = current.state.validation
        if validation is None or not len(validation):
            return []
        cosines = current.known @ current.features(current.stack([pixels])).squeeze(0)
        values, rows = cosines.topk(min(count, len(cosines)))
        return [
            {
                "label": current.recognizer.classes[int(validation.labels[row])],
                "similarity": round(float(value), 4),
                "image": Picture.of(validation.decode(row), current.side).image,
            }
            for value, row in zip(values, rows.tolist(), strict=True)
        ]

    def _predict_waiting(self) -> None:
        """Predict the images that wait, without those whose callers have gone."""
        batch: list[_Waiting] = []
        for queue in (self._waiting[True], self._waiting[False]):
            while queue and len(batch) < MOST:
                waiting = queue.popleft()
                if not waiting.answer.cancelled():
                    batch.append(waiting)
        if not batch:
            return
        try:
            current, most = self.current(), max(waiting.top for waiting in batch)
            images = current.stack([waiting.pixels for waiting in batch])
            answers = current.recognizer.answers(images)
            predictions = list(current.recognizer.predictions([""] * len(batch), answers, most))
        except Exception as error:  # passed on to the callers
            for waiting in batch:
                _settle(waiting.answer, error)
            return
        for waiting, prediction in zip(batch, predictions, strict=True):
            cut = replace(prediction, top=prediction.top[: waiting.top])
            _settle(waiting.answer, Answer(cut, waiting.pixels))


def _settle(answer: "Future[Answer | str]", result: Answer | str | Exception) -> None:
    """Set the result, unless the caller has gone."""
    if not answer.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def decode(image: Item, transform: Transform) -> Tensor | str:
    """Return the pixels (3, side, side) of an encoded picture for a network, or the reason why it cannot be used."""
    images = FileImages((read_bytes(image),), torch.zeros(1, dtype=torch.int64))
    return square(images, 0, transform.shorter_side, transform.whole)
