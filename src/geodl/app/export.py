"""A model as one ONNX file: normalization of colors, network, classifiers and labels inside, and checked."""

import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geodl.config import derive
from geodl.data.images import ArrayImages
from geodl.data.names import UNKNOWN
from geodl.errors import ConfigError, MissingExtraError, TrainingError
from geodl.files import atomic_write, make_directory
from geodl.learner import Learner
from geodl.nets import folded
from geodl.predictors import Features, default_classifier

TOLERANCE = 1e-4
_CHECKED = 5  # images: more than the two that the graph was traced with, so that the batch size is seen to be free

_MEANINGS = {
    "analytic": "softmax of the closed form's scores divided by the temperature",
    "nme": "softmax of the network's scale times the cosines with the means of the exemplars",
    "ncm": "softmax of the network's scale times the cosines with the class means",
    "cnn": "softmax of the network's own output",
}


class Exported(nn.Module):
    """From pixels to confidences: the model's own classifiers as one graph."""

    factor: Tensor
    offset: Tensor

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        network, transform = learner.known()
        there = learner.classifiers()
        # Class means of all images only where there are none of exemplars, and no closed form.
        names = ["analytic", "nme", *(["ncm"] if not {"analytic", "nme"} & there.keys() else []), "cnn"]
        self.scorers = {name: there[name] for name in names if name in there}
        fitted = learner.method.fitted(learner.memory.own)
        if fitted is not None:
            self.scorers["analytic"] = replace(there["analytic"], score=lambda seen: fitted.scores_at_once(seen.levels))
        self.levels = () if fitted is None else tuple(fitted.expansion.sizes)
        self.network = folded(network).cpu()  # predicting may have moved it to a GPU
        # As in the batches: x / (255 std) - mean / std.
        mean, std = (torch.tensor(part)[:, None, None] for part in (transform.mean, transform.std))
        self.register_buffer("factor", 1 / (255 * std))
        self.register_buffer("offset", mean / std)

    @property
    def outputs(self) -> list[str]:
        """The names of what `forward` returns."""
        return [*self.scorers, *([UNKNOWN] if "analytic" in self.scorers else [])]

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Map pixels: uint8 (B, 3, size, size) to each classifier's confidences (B, C) and, in closed form, unknown: bool (B,)."""
        x = pixels.float() * self.factor - self.offset
        mirrors = any(scorer.mirrors for scorer in self.scorers.values())
        views = [self._features(view.contiguous()) for view in ([x, x.flip(3)] if mirrors else [x])]
        found = {name: scorer.judge(scorer(*views)) for name, scorer in self.scorers.items()}
        strange = [found["analytic"][1]] if "analytic" in found else []
        return (*(confidences for confidences, _ in found.values()), *strange)

    def _features(self, x: Tensor) -> Features:
        output, levels = self.network.with_levels(x, self.levels)
        return Features(output.pooled, output.logits, torch.empty(0), levels)


def export(learner: Learner, path: Path) -> dict[str, Any]:
    """Write a learner to an ONNX file that holds no image, and compare what the file predicts with what the learner does."""
    if path.suffix.lower() != ".onnx":
        raise ConfigError(f"export to {path}: the file must end in .onnx")
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx", "export") from error
    model = Exported(learner).eval()
    make_directory(path.parent)  # before tracing, which takes its time
    graph = onnx.load_from_string(_traced(model, learner.known()[1].size))
    for key, value in _metadata(learner, model).items():
        entry = graph.metadata_props.add()
        entry.key, entry.value = key, value
    data = graph.SerializeToString()
    difference = _compare(learner, model.outputs, data)
    atomic_write(path, data)
    return {"file": str(path), "bytes": len(data), "classes": len(learner.classes), "difference": difference}


def _traced(model: Exported, size: int) -> bytes:
    pixels = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own, about its own exporter: nothing a user could do
            model(pixels)  # the expansion draws its weights at the first use: not while it is traced
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


def _metadata(learner: Learner, model: Exported) -> dict[str, str]:
    _, transform = learner.known()
    outputs = {name: f"confidences (batch, classes): {_MEANINGS[name]}" for name in model.scorers}
    found = {
        "labels": json.dumps(learner.classes, ensure_ascii=False),
        "preprocessing": json.dumps(transform.to_dict()),
        "input": f"pixels: uint8 (batch, 3, {transform.size}, {transform.size}), RGB, 0..255: the picture's shorter side "
        f"resized to {transform.shorter_side} (bilinear, antialiased), then its center; colors are normalized inside",
        "default": default_classifier(model.scorers),
        "producer": "geodl",
    }
    if "analytic" in model.scorers:
        scorer = model.scorers["analytic"]
        outputs[UNKNOWN] = "bool (batch): unlike all classes, the largest score is below the threshold"
        found |= {"temperature": repr(1 / scorer.scale), "threshold": repr(scorer.threshold)}
        found["mirrored"] = json.dumps(scorer.mirrors)
    return found | {"outputs": json.dumps(outputs)}


def _compare(learner: Learner, outputs: list[str], data: bytes) -> float:
    """Run the file on made-up pictures and return the largest difference from the learner's own confidences."""
    import onnxruntime

    transform = replace(learner.known()[1], crop="pad", resize=None)  # the pictures have the size of the input
    generator = torch.Generator().manual_seed(derive(0, "export"))
    pixels = torch.randint(0, 256, (_CHECKED, 3, *2 * [transform.size]), dtype=torch.uint8, generator=generator)
    images = ArrayImages(pixels, torch.zeros(_CHECKED, dtype=torch.int64))
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    theirs = dict(zip(outputs, map(torch.from_numpy, session.run(outputs, {"pixels": pixels.numpy()})), strict=True))
    worst = 0.0
    for name in (name for name in outputs if name != UNKNOWN):
        recognizer = replace(learner.recognizer(name), transform=transform, bf16=False)
        scores = recognizer.scores(images)
        confidences, strange = recognizer.scorer.judge(scores)
        worst = max(worst, float((theirs[name] - confidences).abs().max()))
        clear = (scores.amax(1) - recognizer.scorer.threshold).abs() > TOLERANCE  # else rounding may decide
        if name == "analytic" and not torch.equal(theirs[UNKNOWN][clear], strange[clear]):
            raise TrainingError("the exported file calls other images unknown than the model does: not written")
    if not worst <= TOLERANCE:
        raise TrainingError(
            f"the exported file differs from the model by {worst:.2g}, more than {TOLERANCE}: not written"
        )
    return worst
