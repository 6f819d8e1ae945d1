"""Predictions for many clients at once: whatever waits is predicted together, from the last complete state of the model."""

import base64
import io
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve.limits import Refused
from geodl.app.state import State
from geodl.core.decoding import Item, megapixels, read_bytes
from geodl.core.errors import StoreError
from geodl.data.batches import Transform, resized
from geodl.data.images import ArrayImages, FileImages, Images
from geodl.data.squares import square
from geodl.model.page import thumbnail
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
    def validation(self) -> Images | None:
        """The stored validation images."""
        return self.state.validation

    @property
    def side(self) -> int:
        """The size of the images that the network reads, in pixels."""
        return self.recognizer.transform.shorter_side

    def features(self, images: Images) -> Tensor:
        """Return the normalized features of images: (N, d)."""
        return normalize(self.recognizer.features(images).pooled, dim=1)

    @cached_property
    def known(self) -> Tensor:
        """The features of the validation images, (V, d)."""
        assert self.validation is not None
        return self.features(self.validation)

    def stack(self, pixels: Sequence[Tensor]) -> Images:
        """Put pictures together; one that was decoded for another size, before the model changed, is resized."""
        ready = torch.stack([self._fitting(each) for each in pixels])
        return ArrayImages(ready, torch.zeros(len(ready), dtype=torch.int64))

    def _fitting(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1] == self.side:
            return pixels
        alone = ArrayImages(pixels[None], torch.zeros(1, dtype=torch.int64))
        return resized(alone, self.side, whole=self.recognizer.transform.whole).pixels[0]


class Answer(NamedTuple):
    """A prediction, and the pixels (3, size, size) that it was made from."""

    prediction: Prediction
    pixels: Tensor


class _Waiting(NamedTuple):
    pixels: Tensor
    top: int
    answer: "Future[Answer | str]"


class Predictor:
    """Predicts images one by one for callers from any thread, in batches of all that wait.

    A thread that has decoded an image predicts it, with whatever else waits, unless another one does so already.
    """

    def __init__(self, model: IncrementalClassifier) -> None:
        self._model = model
        self._current: Current | None = None
        self._reading, self._predicting = threading.Lock(), threading.Lock()
        self._waiting: dict[bool, deque[_Waiting]] = {True: deque(), False: deque()}

    def current(self) -> Current:
        """Return the last complete state; it is made ready again only where the model has changed."""
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
        """Return how to decode pictures, and the megapixels that this takes."""
        return self.current().recognizer.transform, sum(map(megapixels, images))

    def predict(
        self, image: Item, seen: Transform, top: int, first: bool, answer: "Future[Answer | str]"
    ) -> None:
        """Decode a picture and answer with its prediction, before others if it is to be `first`, or why it cannot be used."""
        if answer.cancelled():
            return
        try:
            pixels = decode(image, seen)
        except Exception as error:  # the caller is told
            _settle(answer, error)
            return
        if isinstance(pixels, str):
            _settle(answer, pixels)
            return
        self._waiting[first].append(_Waiting(pixels, top, answer))
        # Whoever predicts looks again after letting the others in: nothing is left waiting.
        while any(self._waiting.values()) and self._predicting.acquire(blocking=False):
            try:
                self._predict_waiting()
            finally:
                self._predicting.release()

    def nearest(self, pixels: Tensor, count: int) -> list[dict[str, Any]]:
        """Return the stored validation images that are nearest to a decoded picture, the nearest first."""
        now = self.current()
        if now.validation is None or not len(now.validation):
            return []
        cosines = now.known @ now.features(now.stack([pixels])).squeeze(0)
        values, places = cosines.topk(min(count, len(cosines)))
        return [
            {
                "label": now.recognizer.classes[int(now.validation.labels[i])],
                "similarity": round(float(value), 4),
                "image": _data_address(thumbnail(now.validation.decode(int(i)), now.side)),
            }
            for value, i in zip(values, places, strict=True)
        ]

    def _predict_waiting(self) -> None:
        """Predict what waits; those whose callers have gone are left out."""
        batch: list[_Waiting] = []
        for queue in (self._waiting[True], self._waiting[False]):
            while queue and len(batch) < MOST:
                waiting = queue.popleft()
                if not waiting.answer.cancelled():
                    batch.append(waiting)
        if not batch:
            return
        try:
            now, most = self.current(), max(each.top for each in batch)
            answers = now.recognizer.answers(now.stack([each.pixels for each in batch]))
            found = list(now.recognizer.predictions([""] * len(batch), answers, most))
        except Exception as error:  # the callers are told
            for each in batch:
                _settle(each.answer, error)
            return
        for each, prediction in zip(batch, found, strict=True):
            cut = replace(prediction, top=prediction.top[: each.top])
            _settle(each.answer, Answer(cut, each.pixels))


def _settle(answer: "Future[Answer | str]", found: Answer | str | Exception) -> None:
    """Answer, unless the caller has gone."""
    if not answer.set_running_or_notify_cancel():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def decode(image: Item, seen: Transform) -> Tensor | str:
    """Return the pixels (3, side, side) of an encoded picture as a network sees it, or why it cannot be used."""
    images = FileImages((read_bytes(image),), torch.zeros(1, dtype=torch.int64))
    return square(images, 0, seen.shorter_side, seen.whole)


def _data_address(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
