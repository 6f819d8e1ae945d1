"""Residual networks without the last ReLU, so that features can be negative.

Modules have the names of ImageNet checkpoints (`conv1`, `layer1.0.bn2`, ...), so that published weights load. Every network
maps images (B, 3, H, W) to a feature map (B, width, h, w).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from geodl.nets.backbone import Backbone, initialize


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut; `last` omits the ReLU after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, last: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y)) + self.downsample(x)
        return y if self.last else F.relu(y, inplace=True)


class ResNet(Backbone):
    """Stages of `blocks` residual blocks each; every stage after the first halves the map."""

    def __init__(
        self, widths: tuple[int, ...], blocks: int, *, imagenet_stem: bool = False
    ) -> None:
        super().__init__()
        self.width = widths[-1]
        kernel, stride = (7, 2) if imagenet_stem else (3, 1)
        self.conv1 = nn.Conv2d(3, widths[0], kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if imagenet_stem else nn.Identity()
        self.level_grids = {f"stage{stage}": 2 for stage in range(1, len(widths) + 1)}
        inputs = widths[0]
        for stage, outputs in enumerate(widths):
            layer = nn.Sequential()
            for block in range(blocks):
                last = stage == len(widths) - 1 and block == blocks - 1
                stride = 2 if stage > 0 and block == 0 else 1
                layer.append(Block(inputs, outputs, stride, last=last))
                inputs = outputs
            self.add_module(f"layer{stage + 1}", layer)
        initialize(self)

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps (B, d, h, w) of all stages for images x: (B, 3, H, W)."""
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        maps = {}
        for stage, name in enumerate(self.level_grids, start=1):
            maps[name] = x = self.get_submodule(f"layer{stage}")(x)
        return maps


class ConvNet(Backbone):
    """Three convolutions with group norm: without batch statistics, ranks with unequal shares of a batch agree."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 32
        self.level_grids = {"stage1": 2, "stage2": 2, "stage3": 2}
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
        )
        initialize(self)

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps (B, d, h, w) of the convolutions, with ReLU except after the last, for images x: (B, 3, H, W)."""
        first = self.layers[:3](x)
        second = self.layers[3:6](first)
        return {"stage1": first, "stage2": second, "stage3": self.layers[6](second)}


CIFAR = (16, 32, 64)
BACKBONES: dict[str, Callable[[], Backbone]] = {
    "convnet": ConvNet,  # for tiny images and tests
    "resnet8": partial(ResNet, CIFAR, blocks=1),
    "resnet18": partial(ResNet, (64, 128, 256, 512), blocks=2, imagenet_stem=True),
    "resnet20": partial(ResNet, CIFAR, blocks=3),
    "resnet32": partial(ResNet, CIFAR, blocks=5),
}
"""The networks of this file by name."""
