"""Prediction of a few photographs without torch, which takes longer to load than they take to predict.

The first prediction after a change converts the network and the classifier of a model into one ONNX graph, which is cached
for the next ones. Without such a graph, `IncrementalClassifier` predicts.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geodl import __version__
from geodl.core.cache import CONVERTED, Cache
from geodl.core.content import fingerprint
from geodl.core.decoding import SMALLEST, as_square, check_header, open_image, shown
from geodl.core.errors import DataError, GeodlError
from geodl.core.events import ImagesPredicted, Listener, ignore
from geodl.model.predictions import Predictions, check_wishes, named
from geodl.store import Directory, reading

VERSION = 2
"""To be raised when the conversion changes."""
FEW = 16
"""The most photographs; for more, several threads save more time than loading torch costs."""
READ = ("model.safetensors", "memory.safetensors", "extra.json")
"""The files that predicting reads of a model; verified here too, so that damage is detected."""


@dataclass(frozen=True)
class About:
    """The metadata of a converted model: class names, the square that it sees, and the threshold for unknown images."""

    classes: tuple[str, ...]
    size: int
    whole: bool
    threshold: float


def predict(
    path: Path,
    images: Sequence[Path],
    *,
    classifier: str | None = None,
    accelerator: str = "auto",
    top: int = 1,
    threshold: float | None = None,
    strict: bool = False,
    workers: int | None = None,
    listener: Listener = ignore,
) -> Predictions:
    """Predict files or folders of images, as `IncrementalClassifier.predict` does."""
    check_wishes(top, threshold, workers)
    few = len(images) <= FEW and all(map(os.path.isfile, images))
    entry = _entry(path) if few and classifier is None and accelerator != "cuda" else None
    graph = None if entry is None else Cache().read(entry)
    found = None if graph is None else _predicted(graph, images, top, threshold)
    if found is not None:
        listener(ImagesPredicted(len(images), len(images)))
        return found
    from geodl.app.classifier import IncrementalClassifier

    model = IncrementalClassifier(path)
    answer = model.predict(
        images,
        classifier=classifier,
        accelerator=accelerator,
        top=top,
        threshold=threshold,
        strict=strict,
        workers=workers,
        listener=listener,
    )
    if entry is not None and graph is None:
        from geodl.app.export import keep_converted

        learned = model.state().model
        if _entry(path) == entry:  # else another process has changed the model
            keep_converted(learned, entry)
    return answer


def _entry(path: Path) -> str | None:
    """Return the name of a model's graph in the cache, a fingerprint of what predicting reads; None if that fails."""

    def verified(here: Directory) -> str:
        phase = here.phase(-1)
        for name in READ:
            phase.read(name)
        # Not its ID, which a stranger's model can share.
        files = [phase.files[name] for name in READ]
        return fingerprint([VERSION, __version__, files]) + CONVERTED

    try:
        return reading(path, verified)
    except GeodlError:  # reported by the prediction that follows
        return None


def _predicted(
    graph: bytes, images: Sequence[Path], top: int, threshold: float | None
) -> Predictions | None:
    """Predict by a graph; None if an image cannot be read or the graph cannot be run."""
    began = time.perf_counter()
    try:
        session = _session(graph)
        about = _about(session)
        pixels = [np.ascontiguousarray(seen(image, about)[None]) for image in images]
        answers = [session.run(None, {"pixels": each}) for each in pixels]
    except Exception:  # the errors of onnxruntime have no other base class
        return None
    probabilities, scores = (np.concatenate(each) for each in zip(*answers, strict=True))
    if not (np.isfinite(probabilities).all() and np.isfinite(scores).all()):
        return None
    lowest = about.threshold if threshold is None else threshold
    names = [shown(image) for image in images]
    found = tuple(named(names, about.classes, probabilities, scores < lowest, scores, top))
    rate = len(found) / max(time.perf_counter() - began, 1e-9)
    return Predictions(found, about.classes, probabilities, (), rate)


def seen(image: Path, about: About) -> NDArray[np.uint8]:
    """Return the pixels of a file as the network sees it, (3, size, size)."""
    if min(check_header(image, reduced=True)) < SMALLEST:
        raise DataError("too small")
    pixels = as_square(
        lambda least: open_image(image, at_least=least), about.size, whole=about.whole
    )
    return pixels.transpose(2, 0, 1)


def _session(graph: bytes) -> Any:
    """Return a session with one thread: a photograph takes less time than waking up more."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _about(session: Any) -> About:
    """Return the metadata of a graph."""
    found = session.get_modelmeta().custom_metadata_map
    classes, transform = tuple(json.loads(found["labels"])), json.loads(found["preprocessing"])
    threshold = float(found.get("threshold", "-inf"))
    return About(classes, transform["size"], transform["crop"] == "whole", threshold)
