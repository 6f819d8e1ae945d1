"""Export of a model to one ONNX file with normalization, network, classifiers and labels, checked against the model."""

import importlib.util
import io
import json
import logging
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geodl.core.cache import CONVERTED, Cache
from geodl.core.decoding import GRAY
from geodl.core.errors import ConfigError, MissingExtraError, StoreError, TrainingError
from geodl.core.files import atomic_write, make_directory
from geodl.core.keys import derive
from geodl.core.text import UNKNOWN
from geodl.data.batches import Transform
from geodl.data.images import ArrayImages, Images
from geodl.data.squares import squares
from geodl.model.features import Features
from geodl.model.model import Model
from geodl.nets import folded
from geodl.nets.backbone import PlainBackbone

TOLERANCE = 1e-4
CHECKED = 20
"""Images that the file is checked with: not as many as it is traced with, which proves that the batch size is free."""
FEW = 3
"""Images that a graph for the cache is checked with."""
KEPT = 8
"""Converted models in the cache."""
SCORE = "score"
_log = logging.getLogger("geodl")


class Exported(nn.Module):
    """From pixels to confidences: the model's own classifiers as one graph.

    quick: the default classifier alone, with its score (`Answers.measure`), as `geodl.app.quick` reads it.
    """

    factor: Tensor
    offset: Tensor

    def __init__(self, model: Model, *, quick: bool = False) -> None:
        super().__init__()
        ranked = [model.default]
        if not quick:
            ranked = sorted(model.classifiers.values(), key=lambda each: each.preference)
        self.scorers = {each.name: each.scorer(model.network) for each in ranked}
        self.default = model.default.name
        self.rejects, self.quick = model.default.rejects, quick
        levels = [name for scorer in self.scorers.values() for name in scorer.levels]
        self.levels = tuple(dict.fromkeys(levels))
        self.network = folded(model.network).cpu()  # it may be on a GPU
        transform = model.transform
        self.network.backbone.fix_size(transform.size)
        # As in the batches: x / (255 std) - mean / std.
        mean, std = (torch.tensor(part)[:, None, None] for part in (transform.mean, transform.std))
        self.register_buffer("factor", 1 / (255 * std))
        self.register_buffer("offset", mean / std)

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs of `forward`."""
        if self.quick:
            return [self.default, SCORE]
        return [*self.scorers, *([UNKNOWN] if self.rejects else [])]

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Map pixels: uint8 (B, 3, size, size) to each classifier's confidences (B, C).

        The last output is unknown: bool (B,) if the default classifier rejects images; of a quick graph, its score (B,).
        """
        x = pixels.float() * self.factor - self.offset
        mirrors = any(scorer.mirrors for scorer in self.scorers.values())
        seen = [x, x.flip(3)] if mirrors else [x]
        views = [self._features(view.contiguous()) for view in seen]
        found = {name: scorer.answers(*views) for name, scorer in self.scorers.items()}
        default = found[self.default]
        if self.quick:
            return default.probabilities, default.measure
        strange = [default.unknown] if self.rejects else []
        return (*(each.probabilities for each in found.values()), *strange)

    def _features(self, x: Tensor) -> Features:
        output, levels = self.network.with_levels(x, self.levels)
        return Features(output.pooled, output.logits, torch.empty(0), levels)


def export(model: Model, path: Path, pictures: Images | None = None) -> dict[str, Any]:
    """Write a model to an ONNX file that holds no image, and compare its predictions with the model's.

    pictures: images like those that the model learned, to compare on; None: random pixels.
    """
    if path.suffix.lower() != ".onnx":
        raise ConfigError(f"export to {path}: the file must end in .onnx")
    if not can_export():
        raise MissingExtraError("onnx", "export")
    graph = Exported(model).eval()
    make_directory(path.parent)  # before tracing, which takes long
    data = _file(model, graph)
    pixels, real = _pixels(model.transform, pictures)
    difference = _compare(model, graph, data, pixels)
    atomic_write(path, data)
    return {
        "file": str(path),
        "bytes": len(data),
        "classes": len(model.classes),
        "difference": difference,
        "checked": len(pixels),
        "made_up": not real,
    }


def can_export() -> bool:
    """Return whether the packages that exporting needs are installed."""
    return all(map(importlib.util.find_spec, ("onnx", "onnxruntime")))


def keep_converted(model: Model, name: str) -> None:
    """Put the graph for `geodl.app.quick` into the cache; an empty entry, if there can be none, saves another try."""
    if not can_export():
        return
    try:
        graph = _converted(model)
    except Exception as error:  # whatever the converting libraries raise
        _log.debug("not converted: %s", error)
        graph = b""
    with suppress(StoreError):
        Cache().write(name, graph)
        Cache().keep_latest(CONVERTED, KEPT)


def _converted(model: Model) -> bytes:
    """Return the graph of the default classifier; b"" for a plug-in, or a crop that `geodl.app.quick` does not do."""
    parts = (model.network.backbone, model.default)
    ours = all(type(each).__module__.startswith("geodl.") for each in parts)
    transform = model.transform
    if not ours or isinstance(parts[0], PlainBackbone) or transform.shorter_side != transform.size:
        return b""
    graph = Exported(model, quick=True).eval()
    data = _file(model, graph)
    _compare(model, graph, data, _pixels(transform, None)[0][:FEW])
    return data


def _file(model: Model, graph: Exported) -> bytes:
    """Return a graph with its metadata as an ONNX file."""
    import onnx

    file = onnx.load_from_string(_traced(graph, model.transform.size))
    _share_constants(file.graph)
    for key, value in _metadata(model, graph).items():
        file.metadata_props.add(key=key, value=value)
    content: bytes = file.SerializeToString()
    return content


def _traced(model: Exported, size: int) -> bytes:
    """Return the ONNX graph, for any number of images."""
    pixels, file = torch.zeros(2, 3, size, size, dtype=torch.uint8), io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        # The exporter that torch recommends takes fifteen times as long; all sizes but the batch's are fixed.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        model(pixels)  # draws the weights of the expansion, which must not be traced
        torch.onnx.export(
            model,
            (pixels,),
            file,  # type: ignore[arg-type]  # it accepts buffers
            dynamo=False,
            input_names=["pixels"],
            output_names=model.outputs,
            dynamic_axes={name: {0: "batch"} for name in ("pixels", *model.outputs)},
            opset_version=17,
        )
    return file.getvalue()


def _share_constants(graph: Any) -> None:
    """Merge equal constants: an image and its mirrored copy are multiplied by the same large weights."""
    first: dict[bytes, str] = {}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        if node.op_type == "Constant":
            content = node.attribute[0].SerializeToString(deterministic=True)
            names[node.output[0]] = first.setdefault(content, node.output[0])
        if names.get(node.output[0]) in (None, node.output[0]):
            node.input[:] = [names.get(each, each) for each in node.input]
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _metadata(model: Model, graph: Exported) -> dict[str, str]:
    transform, size = model.transform, model.transform.size
    if transform.whole:
        seen = f"the picture's longer side resized to {size} (bilinear, antialiased), in the middle of gray {GRAY}"
    else:
        seen = f"the picture's shorter side resized to {transform.shorter_side} (bilinear, antialiased), then its center"
    meanings = {name: model.classifiers[name].meaning for name in graph.scorers}
    outputs = {name: f"confidences (batch, classes): {each}" for name, each in meanings.items()}
    found = {
        "labels": json.dumps(model.classes, ensure_ascii=False),
        "preprocessing": json.dumps(transform.to_dict()),
        "input": f"pixels: uint8 (batch, 3, {size}, {size}), RGB, 0..255: {seen}; colors are "
        "normalized inside",
        "default": graph.default,
        "producer": "geodl",
    }
    if graph.rejects:
        scorer = graph.scorers[graph.default]
        measure = "the probability of being known" if scorer.novelty else "the largest score"
        outputs[UNKNOWN] = f"bool (batch): unlike all classes, {measure} is below the threshold"
        found |= {"temperature": repr(1 / scorer.scale), "threshold": repr(scorer.threshold)}
        found["mirrored"] = json.dumps(scorer.mirrors)
    return found | {"outputs": json.dumps(outputs)}


def _pixels(transform: Transform, pictures: Images | None) -> tuple[Tensor, bool]:
    """Return pixels, uint8 (N, 3, size, size), of some pictures, and True; random ones, and False, if none can be read."""
    size, side = transform.size, transform.shorter_side
    if pictures is not None and len(pictures):
        some = pictures.select(torch.arange(0, len(pictures), -(-len(pictures) // CHECKED)))
        start = (side - size) // 2
        found = torch.cat([pixels for _, pixels, _ in squares(some, side, 1, transform.whole)])
        if len(found):
            return found[:, :, start : start + size, start : start + size].contiguous(), True
    generator = torch.Generator().manual_seed(derive(0, "export"))
    shape = (CHECKED, 3, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), False


def _compare(model: Model, graph: Exported, data: bytes, pixels: Tensor) -> float:
    """Run the file on pixels; return the largest difference from the model's confidences."""
    import onnxruntime

    transform = replace(model.transform, crop="pad")  # the pixels have the size of the input
    images = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    answers = map(torch.from_numpy, session.run(graph.outputs, {"pixels": pixels.numpy()}))
    theirs, worst = dict(zip(graph.outputs, answers, strict=True)), 0.0
    for name in graph.scorers:
        recognizer = replace(model.recognizer(name), transform=transform)
        ours = recognizer.answers(images)
        worst = max(worst, float((theirs[name] - ours.probabilities).abs().max()))
        if graph.quick:
            worst = max(worst, float((theirs[SCORE] - ours.measure).abs().max()))
        # Closer to the threshold, rounding may decide.
        clear = (ours.measure - recognizer.scorer.threshold).abs() > TOLERANCE
        rejects = UNKNOWN in theirs and name == graph.default
        if rejects and not torch.equal(theirs[UNKNOWN][clear], ours.unknown[clear]):
            raise TrainingError("not written: the file calls other images unknown than the model")
    if not worst <= TOLERANCE:
        raise TrainingError(f"not written: the file differs from the model by {worst:.2g}")
    return worst
