"""A model as one ONNX file: normalization of colors, network, classifiers and labels inside, and checked."""

import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geodl.core.decoding import GRAY
from geodl.core.errors import ConfigError, MissingExtraError, TrainingError
from geodl.core.files import atomic_write, make_directory
from geodl.core.keys import derive
from geodl.core.text import UNKNOWN
from geodl.data.batches import Transform
from geodl.data.images import ArrayImages, Images
from geodl.data.squares import squares
from geodl.model.features import Features
from geodl.model.model import Model
from geodl.nets import folded

TOLERANCE = 1e-4
CHECKED = 20
"""Images that the file is checked with: more than the two that the graph is traced with, so that the batch size is seen to be free."""


class Exported(nn.Module):
    """From pixels to confidences: the model's own classifiers as one graph."""

    factor: Tensor
    offset: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        ranked = sorted(model.classifiers.values(), key=lambda each: each.preference)
        self.scorers = {each.name: each.scorer(model.network) for each in ranked}
        self.default = model.default.name
        self.rejects = model.default.rejects
        levels = [name for scorer in self.scorers.values() for name in scorer.levels]
        self.levels = tuple(dict.fromkeys(levels))
        self.network = folded(model.network).cpu()  # predicting may have moved it to a GPU
        transform = model.transform
        # As in the batches: x / (255 std) - mean / std.
        mean, std = (torch.tensor(part)[:, None, None] for part in (transform.mean, transform.std))
        self.register_buffer("factor", 1 / (255 * std))
        self.register_buffer("offset", mean / std)

    @property
    def outputs(self) -> list[str]:
        """The names of what `forward` returns."""
        return [*self.scorers, *([UNKNOWN] if self.rejects else [])]

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Map pixels: uint8 (B, 3, size, size) to each classifier's confidences (B, C).

        Where the default classifier rejects images, unknown: bool (B,) comes last.
        """
        x = pixels.float() * self.factor - self.offset
        mirrors = any(scorer.mirrors for scorer in self.scorers.values())
        seen = [x, x.flip(3)] if mirrors else [x]
        views = [self._features(view.contiguous()) for view in seen]
        found = {name: scorer.answers(*views) for name, scorer in self.scorers.items()}
        strange = [found[self.default].unknown] if self.rejects else []
        return (*(each.probabilities for each in found.values()), *strange)

    def _features(self, x: Tensor) -> Features:
        output, levels = self.network.with_levels(x, self.levels)
        return Features(output.pooled, output.logits, torch.empty(0), levels)


def export(model: Model, path: Path, pictures: Images | None = None) -> dict[str, Any]:
    """Write a model to an ONNX file that holds no image, and compare its predictions with the model's.

    pictures: to compare them on, images like those that the model learned; made-up ones where there are none.
    """
    if path.suffix.lower() != ".onnx":
        raise ConfigError(f"export to {path}: the file must end in .onnx")
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx", "export") from error
    graph = Exported(model).eval()
    make_directory(path.parent)  # before tracing, which takes its time
    file = onnx.load_from_string(_traced(graph, model.transform.size))
    for key, value in _metadata(model, graph).items():
        entry = file.metadata_props.add()
        entry.key, entry.value = key, value
    data = file.SerializeToString()
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


def _traced(model: Exported, size: int) -> bytes:
    pixels = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter(
                "ignore"
            )  # torch's own, about its own exporter: nothing a user could do
            model(
                pixels
            )  # the expansion draws its weights at the first use: not while it is traced
            program = torch.onnx.export(
                model,
                (pixels,),
                dynamo=True,
                input_names=["pixels"],
                output_names=model.outputs,
                dynamic_shapes={"pixels": {0: torch.export.Dim("batch", min=1)}},
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def _metadata(model: Model, graph: Exported) -> dict[str, str]:
    transform, size = model.transform, model.transform.size
    meanings = {name: each.meaning for name, each in model.classifiers.items()}
    outputs = {name: f"confidences (batch, classes): {each}" for name, each in meanings.items()}
    found = {
        "labels": json.dumps(model.classes, ensure_ascii=False),
        "preprocessing": json.dumps(transform.to_dict()),
        "input": f"pixels: uint8 (batch, 3, {size}, {size}), RGB, 0..255: {_seen(transform)}; colors are "
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


def _seen(transform: Transform) -> str:
    """Say what the network sees of a picture."""
    if transform.whole:
        size = transform.size
        return f"the picture's longer side resized to {size} (bilinear, antialiased), in the middle of gray {GRAY}"
    return f"the picture's shorter side resized to {transform.shorter_side} (bilinear, antialiased), then its center"


def _pixels(transform: Transform, pictures: Images | None) -> tuple[Tensor, bool]:
    """Return pixels, uint8 (N, 3, size, size), of some pictures that can be read; or made-up ones, and False."""
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

    # The pictures have the size of the input.
    transform = replace(model.transform, crop="pad")
    images = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    answers = map(torch.from_numpy, session.run(graph.outputs, {"pixels": pixels.numpy()}))
    theirs, worst = dict(zip(graph.outputs, answers, strict=True)), 0.0
    for name in graph.scorers:
        recognizer = replace(model.recognizer(name), transform=transform)
        ours = recognizer.answers(images)
        worst = max(worst, float((theirs[name] - ours.probabilities).abs().max()))
        # Nearer to the threshold rounding may decide.
        clear = (ours.measure - recognizer.scorer.threshold).abs() > TOLERANCE
        rejects = graph.rejects and name == graph.default
        if rejects and not torch.equal(theirs[UNKNOWN][clear], ours.unknown[clear]):
            raise TrainingError("not written: the file calls other images unknown than the model")
    if not worst <= TOLERANCE:
        raise TrainingError(f"not written: the file differs from the model by {worst:.2g}")
    return worst
