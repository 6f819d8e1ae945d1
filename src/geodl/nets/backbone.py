"""The interface of backbones, and a wrapper for any module.

A backbone maps normalized images (B, 3, H, W) to features (B, d) or to a map (B, d, h, w). Optional attributes of a module:

- `width`: d. Without it, d is measured with an image of `PROBE` x `PROBE` pixels.
- `levels(x)`: a dict of maps (B, d, h, w) or features (B, d) from shallow to deep, the last one equal to `forward(x)`; and
  `level_grids`: a dict with the same keys, to n if the map is averaged to n x n cells. Without them there is one level,
  "top". The closed form reads all levels.
"""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from geodl.config import Registry
from geodl.core.errors import ConfigError
from geodl.core.text import one_line

OWN = "own:"
"""In the configuration, a user's own module is named by this prefix and its class; it cannot be built by name."""
PROBE = 64

Own = nn.Module | Callable[[], nn.Module]
"""A user's own backbone: a module, or a class or function without arguments that returns one."""
BACKBONES = Registry[Callable[[], nn.Module]](
    "backbone", "network", prefixes={"timm:": "timm:NAME", OWN: ""}
)
"""The backbones by name: classes or functions without arguments; the caller seeds them."""


class Backbone(nn.Module):
    """Maps images (B, 3, H, W) to `width` features: a map (B, width, h, w), or pooled features (B, width)."""

    foldable: ClassVar[bool] = True
    """Whether every batch norm that is registered directly after a convolution is also applied directly after it."""
    width: int
    level_grids: dict[str, int]
    """The levels, from shallow to deep, each with n if its map is averaged to n x n cells by default."""

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the map (B, d, h, w) of every level, or its features (B, d) if it has no map."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the deepest level for x: (B, 3, H, W)."""
        return list(self.levels(x).values())[-1]

    def last_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that adaptation trains: norms and biases by default."""
        return [parameter for parameter in self.parameters() if parameter.ndim <= 1]

    def published_name(self, key: str) -> str:
        """Return the name of the state's tensor `key` in published files of weights."""
        return key

    def published_weights(self) -> Path | None:
        """Return the file of pre-trained weights that an extra installs, or None."""
        return None

    def fix_size(self, size: int) -> None:
        """Prepare for images of only size x size pixels, before the network is traced."""

    def graph(self) -> bytes | None:
        """Return the ONNX graph of all levels for images of any size, batch norms folded, or None."""
        return None


class PlainBackbone(Backbone):
    """A wrapper for any module with the interface in this file."""

    foldable = False  # the order in which a foreign module registers its layers is not known

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.level_grids = getattr(module, "level_grids", {"top": 1})
        self.width = int(getattr(module, "width", 0)) or _width(module)

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, 3, H, W) to (B, d, h, w) or (B, d)."""
        features: Tensor = self.module(x)
        return features

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the output of every level for images x: (B, 3, H, W)."""
        if not hasattr(self.module, "level_grids"):
            return {"top": self(x)}
        levels: dict[str, Tensor] = self.module.levels(x)
        return levels

    def published_name(self, key: str) -> str:
        """Return the name of a tensor in the module."""
        return key.removeprefix("module.")


def as_backbone(own: Own) -> Backbone:
    """Return a new backbone: a copy of a module, or the result of a class or function."""
    module = deepcopy(own) if isinstance(own, nn.Module) else own()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"network: expected a torch module, got {type(module).__name__}")
    return module if isinstance(module, Backbone) else PlainBackbone(module)


def _width(module: nn.Module) -> int:
    """Return the number of features that a module computes."""
    training, parameter = module.training, next(module.parameters(), torch.empty(0))
    try:
        with torch.no_grad():
            output = module.eval()(parameter.new_zeros(1, 3, PROBE, PROBE))
    except Exception as error:  # a user's module can raise anything
        reason = f"no width, and an image of {PROBE} x {PROBE} pixels fails: {one_line(error)}"
        raise ConfigError(f"network {type(module).__name__}: {reason}") from error
    finally:
        module.train(training)
    if not isinstance(output, Tensor) or output.ndim not in (2, 4):
        actual = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"network {type(module).__name__}: expected features (B, d) or a map (B, d, h, w), got {actual}"
        )
    return output.shape[1]


def initialize(network: nn.Module) -> None:
    """Initialize every convolution with the Kaiming normal distribution, fan-out (norms start as the identity)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            # An input only reaches the outputs of its own group.
            module.weight.data *= module.groups**0.5
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def fold_batch_norms(network: nn.Module) -> None:
    """Fold every batch norm of a network in eval mode into the convolution that is registered directly before it."""
    for parent in list(network.modules()):
        for (conv_name, conv), (norm_name, norm) in pairwise(list(parent.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, _BatchNorm):
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, nn.Identity())
