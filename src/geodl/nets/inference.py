"""Features of frozen networks: with onnxruntime on a CPU, with torch elsewhere.

onnxruntime computes one image at a time, so that the features of an image depend neither on its batch nor on the number of
threads. The graph is built at each start, in some hundredths of a second.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geodl.nets.backbone import Backbone


class Graph:
    """A builder of ONNX graphs: each method adds a node and returns the name of its value."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._tensors: list[Any] = []

    def tensor(self, values: Tensor | NDArray[np.float32]) -> str:
        """Add a constant."""
        from onnx import numpy_helper

        name = f"constant{len(self._tensors)}"
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        self._tensors.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def number(self, value: float) -> str:
        """Add a constant number."""
        return self.tensor(np.array(value, dtype=np.float32))

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operation; return its output."""
        from onnx.helper import make_node

        name = f"value{len(self._nodes)}"
        self._nodes.append(make_node(kind, inputs, [name], **attributes))
        return name

    def model(self, images: str, outputs: Mapping[str, str]) -> bytes:
        """Return the ONNX model from `images` (B, 3, H, W) to its outputs: value by output name."""
        from onnx import TensorProto, helper

        for name, value in outputs.items():
            self._nodes.append(helper.make_node("Identity", [value], [name]))
        sides: list[str | int | None] = ["batch", 3, "height", "width"]
        inputs = [helper.make_tensor_value_info(images, TensorProto.FLOAT, sides)]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self._nodes, "levels", inputs, results, self._tensors)
        opset = [helper.make_opsetid("", 17)]
        model: bytes = helper.make_model(
            graph, opset_imports=opset, ir_version=9
        ).SerializeToString()
        return model


class OnnxBackbone(Backbone):
    """A backbone that onnxruntime runs on the CPU; it cannot be trained."""

    def __init__(self, backbone: Backbone, graph: bytes) -> None:
        import onnxruntime

        super().__init__()
        self.width, self.level_grids, self._graph = backbone.width, backbone.level_grids, graph
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps (B, d, h, w) of all levels for images x: (B, 3, H, W)."""
        images = x.numpy(force=True)
        threads = min(torch.get_num_threads(), len(images))
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                outputs = list(pool.map(self._run, images))
        else:
            outputs = [self._run(image) for image in images]
        maps = [torch.from_numpy(np.concatenate(level)) for level in zip(*outputs, strict=True)]
        return dict(zip(self.level_grids, maps, strict=True))

    def graph(self) -> bytes:
        """Return the ONNX graph."""
        return self._graph

    def _run(self, image: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Return the maps of one image (3, H, W), in the order of the levels."""
        inputs = {"images": np.ascontiguousarray(image)[None]}
        maps: list[NDArray[np.float32]] = self._session.run(list(self.level_grids), inputs)
        return maps


def by_onnxruntime(backbone: Backbone) -> Backbone:
    """Return a folded backbone for reading features on a CPU: with onnxruntime if it is installed."""
    try:
        graph = backbone.graph()
        return backbone if graph is None else OnnxBackbone(backbone, graph)
    except ImportError:
        return backbone
