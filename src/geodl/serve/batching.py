"""Predictions for many clients at once: whatever waits is predicted together, from the last complete state of the model."""

import base64
import io
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from geodl.classifier import IncrementalClassifier
from geodl.data.batches import evaluation, fit
from geodl.data.images import ArrayImages, FileImages, Images
from geodl.data.intake import square
from geodl.predicting import Prediction, Recognizer
from geodl.predictors import features_of

MOST = 64
"""Images in one pass of the network."""


@dataclass(frozen=True)
class Current:
    """A complete state, ready to predict."""

    stamp: Any
    recognizer: Recognizer
    validation: Images | None

    def features(self, images: Images) -> Tensor:
        """Return what the network makes of images, normalized: (N, d)."""
        network, transform = self.recognizer.network, self.recognizer.transform
        device = next(network.parameters()).device
        return normalize(features_of(network, evaluation(images, transform), device).pooled, dim=1)

    @cached_property
    def known(self) -> Tensor | None:
        """The features of the validation images, (V, d)."""
        return None if self.validation is None or not len(self.validation) else self.features(self.validation)


@dataclass(frozen=True)
class _Waiting:
    pixels: Tensor
    top: int
    answer: "Future[Prediction]"


class Predictor:
    """Predicts images one by one for callers from any thread, in batches of all that wait."""

    def __init__(self, model: IncrementalClassifier) -> None:
        self._model = model
        self._current: Current | None = None
        self._reading = threading.Lock()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="predictions", daemon=True)
        self._thread.start()

    def current(self) -> Current:
        """Return the last complete state; it is read anew only where it is another one than before."""
        with self._reading:
            stamp = self._model.stamp
            if stamp is None or self._current is None or self._current.stamp != stamp:
                self._current = Current(stamp, self._model.recognizer(), self._model.validation)
            return self._current

    def decode(self, items: Sequence[bytes]) -> list[Tensor | str]:
        """Return, for each encoded picture, its pixels (3, size, size) at the model's size, or why it cannot be used."""
        side = self.current().recognizer.transform.shorter_side
        images = FileImages(tuple(items), torch.zeros(len(items), dtype=torch.int64))
        return [square(images, i, side) for i in range(len(images))]

    def submit(self, pixels: Tensor, top: int) -> "Future[Prediction]":
        """Queue one decoded picture, (3, size, size); the answer holds the `top` likeliest classes."""
        waiting = _Waiting(pixels, top, Future())
        self._queue.put(waiting)
        return waiting.answer

    def nearest(self, pixels: Tensor, count: int) -> list[dict[str, Any]]:
        """Return the stored validation images that are nearest to a decoded picture, the nearest first."""
        now = self.current()
        if now.known is None or now.validation is None:
            return []
        cosines = now.known @ now.features(_images([pixels], now)).squeeze(0)
        values, places = cosines.topk(min(count, len(cosines)))
        return [
            {
                "label": now.recognizer.classes[int(now.validation.labels[i])],
                "similarity": round(float(value), 4),
                "image": _data_address(now.validation.decode(int(i))),
            }
            for value, i in zip(values, places, strict=True)
        ]

    def close(self) -> None:
        """End after what waits."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while len(batch) < MOST:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._queue.put(None)
                    break
                batch.append(more)
            self._answer(batch)

    def _answer(self, batch: list[_Waiting]) -> None:
        # Those whose callers no longer wait are left out: an answer to one of them would be an error for all.
        batch = [each for each in batch if each.answer.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            now = self.current()
            probabilities, unknown = now.recognizer.recognize(_images([each.pixels for each in batch], now))
            classes = now.recognizer.classes
            for each, row, strange in zip(batch, probabilities, unknown.tolist(), strict=True):
                values, places = row.topk(min(each.top, len(classes)))
                top = tuple((classes[c], value) for c, value in zip(places.tolist(), values.tolist(), strict=True))
                each.answer.set_result(Prediction("", top, strange))
        except Exception as error:  # the callers are told; the thread goes on for others
            for each in batch:
                if not each.answer.done():
                    each.answer.set_exception(error)


def _images(pixels: Sequence[Tensor], now: Current) -> Images:
    """Put pictures together; one that was decoded for another size, before the model changed, is brought to this one."""
    side = now.recognizer.transform.shorter_side
    ready = [fit(ArrayImages(each[None], torch.zeros(1, dtype=torch.int64)), side).pixels for each in pixels]
    return ArrayImages(torch.cat(ready), torch.zeros(len(ready), dtype=torch.int64))


def _data_address(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
