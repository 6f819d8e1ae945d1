"""A model as one ONNX file: preprocessing of colours, network, class means and labels inside, and checked."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geodl.app.state import State
from geodl.config import derive
from geodl.errors import ConfigError, MissingExtraError, TrainingError
from geodl.files import atomic_write

TOLERANCE = 1e-4
_CHECKED = 5  # images: more than the two that the graph was traced with, so that the batch size is seen to be free


class Exported(nn.Module):
    """From pixels to confidences, as prediction computes them."""

    factor: Tensor
    offset: Tensor
    means: Tensor
    unknown: Tensor

    def __init__(self, state: State) -> None:
        super().__init__()
        transform = state.transform
        self.network = state.network.cpu().eval()  # predicting may have moved it to a GPU
        # As in the batches: x / (255 std) - mean / std.
        mean, std = (torch.tensor(values)[:, None, None] for values in (transform.mean, transform.std))
        self.register_buffer("factor", 1 / (255 * std))
        self.register_buffer("offset", mean / std)
        memory = state.learner.memory
        means = memory.exemplar_means if memory.exemplar_means is not None else memory.means
        assert means is not None
        self.register_buffer("means", nn.functional.normalize(means, dim=1))
        self.register_buffer("unknown", (means == 0).all(dim=1))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Map pixels: uint8 (B, 3, size, size) to confidences (B, C) of nearest-mean and of the head."""
        output = self.network((pixels.float() * self.factor - self.offset).contiguous())
        cosines = nn.functional.normalize(output.pooled, dim=1) @ self.means.T
        scores = (self.network.head.scale * cosines).masked_fill(self.unknown, -1e9)  # type: ignore[operator]
        return scores.softmax(dim=1), output.logits.softmax(dim=1)


def export(state: State, path: Path) -> dict[str, Any]:
    """Write the model to an ONNX file that holds no image, and compare the file's output with the model's."""
    if path.suffix.lower() != ".onnx":
        raise ConfigError(f"export to {path}: the file must end in .onnx")
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx", "export") from error
    model = Exported(state).eval()
    size = state.transform.size
    graph = onnx.load_from_string(_traced(model, size))
    for key, value in _metadata(state).items():
        entry = graph.metadata_props.add()
        entry.key, entry.value = key, value
    data = graph.SerializeToString()
    difference = _compare(model, data, size)
    atomic_write(path, data)
    return {"file": str(path), "bytes": len(data), "classes": len(state.classes), "difference": difference}


def _traced(model: Exported, size: int) -> bytes:
    pixels = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its own exporter: nothing a user could do
            program = torch.onnx.export(
                model,
                (pixels,),
                dynamo=True,
                input_names=["pixels"],
                output_names=["nme", "cnn"],
                dynamic_shapes={"pixels": {0: torch.export.Dim("batch", min=1)}},
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def _metadata(state: State) -> dict[str, str]:
    transform = state.transform
    return {
        "labels": json.dumps(state.names, ensure_ascii=False),
        "preprocessing": json.dumps(transform.to_dict()),
        "input": f"pixels: uint8 (batch, 3, {transform.size}, {transform.size}), RGB, 0..255: the picture's shorter side "
        f"resized to {transform.shorter_side} (bilinear, antialiased), then its centre; colours are normalised inside",
        "outputs": "nme, cnn: confidences (batch, classes); nme is the nearest class mean, the default of geodl predict",
        "confidence": "softmax of the network's learned scale times the cosines with the class means (nme) or head rows (cnn)",
        "producer": "geodl",
    }


def _compare(model: Exported, data: bytes, size: int) -> float:
    """Run the file on made-up pictures and return the largest difference from the model's own output."""
    import onnxruntime

    generator = torch.Generator().manual_seed(derive(0, "export"))
    pixels = torch.randint(0, 256, (_CHECKED, 3, size, size), dtype=torch.uint8, generator=generator)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    theirs = session.run(["nme", "cnn"], {"pixels": pixels.numpy()})
    with torch.inference_mode():
        ours = model(pixels)
    worst = max(float(np.abs(a.numpy() - b).max()) for a, b in zip(ours, theirs, strict=True))
    if not worst <= TOLERANCE:
        raise TrainingError(
            f"the exported file differs from the model by {worst:.2g}, more than {TOLERANCE}: not written"
        )
    return worst
