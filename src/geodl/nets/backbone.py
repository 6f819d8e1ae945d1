"""What a backbone is, and how any module becomes one.

The protocol: a module that maps images (B, 3, H, W), normalized, to features (B, d) or to a map (B, d, h, w). Optional:

- `width`: d; without it, d is what the module gives for an image of `PROBE` pixels a side.
- `levels(x)`, a dict of maps (B, d, h, w) or features (B, d) from shallow to deep, the last one as `forward` gives it, and
  `level_grids`, a dict of the same keys: the cells a side to which a level's map is averaged. Without them there is one
  level, "top". The closed form reads all levels.
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
"""A network that was handed over as an object is called so and by its class in the configuration: nobody can build it by name."""
PROBE = 64

Own = nn.Module | Callable[[], nn.Module]
"""A backbone that is given as it is: a module, or a class or function without arguments that makes one."""
BACKBONES = Registry[Callable[[], nn.Module]](
    "backbone", "network", prefixes={"timm:": "timm:NAME", OWN: ""}
)
"""What builds each backbone: a class or function without arguments; seeded from outside."""


class Backbone(nn.Module):
    """Maps images (B, 3, H, W) to `width` features: a map (B, width, h, w), or pooled features (B, width)."""

    foldable: ClassVar[bool] = True
    """Whether a batch norm that is registered right after a convolution is also applied right after it."""
    width: int
    level_grids: dict[str, int]
    """The levels, from shallow to deep, each with the cells a side to which its map is averaged unless told otherwise."""

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        """Return the map (B, d, h, w) of every level, or features (B, d) where a level has no map."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return what the deepest level gives for x: (B, 3, H, W)."""
        return list(self.levels(x).values())[-1]

    def last_parameters(self) -> list[nn.Parameter]:
        """Return what moves where a pre-trained network is adapted: norms and biases, unless a network has last stages."""
        return [each for each in self.parameters() if each.ndim <= 1]

    def published_name(self, key: str) -> str:
        """Return the name that the tensor `key` of the state has in files of weights that others publish."""
        return key

    def published_weights(self) -> Path | None:
        """Return the file of pre-trained weights that an extra installs; None where there is none."""
        return None

    def fix_size(self, size: int) -> None:
        """Prepare for images of size x size pixels alone, before the network is traced."""

    def graph(self) -> bytes | None:
        """Return the ONNX graph of all levels, batch norms folded, for images of any size; None: there is none."""
        return None


class PlainBackbone(Backbone):
    """Any module that follows the protocol of this file."""

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
        """Return what every level gives for images x: (B, 3, H, W)."""
        found: dict[str, Tensor] = (
            self.module.levels(x) if hasattr(self.module, "level_grids") else {"top": self(x)}
        )
        return found

    def published_name(self, key: str) -> str:
        """Return the module's own name of a tensor."""
        return key.removeprefix("module.")


def as_backbone(own: Own) -> Backbone:
    """Return a new backbone: a copy of a module, or what a class or function makes."""
    module = deepcopy(own) if isinstance(own, nn.Module) else own()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"network: expected a torch module, got {type(module).__name__}")
    return module if isinstance(module, Backbone) else PlainBackbone(module)


def _width(module: nn.Module) -> int:
    """Return the number of features that a module gives."""
    training, parameter = module.training, next(module.parameters(), torch.empty(0))
    try:
        with torch.no_grad():
            found = module.eval()(parameter.new_zeros(1, 3, PROBE, PROBE))
    except Exception as error:  # whatever a foreign module raises
        reason = (
            f"it has no width, and an image of {PROBE} x {PROBE} pixels fails: {one_line(error)}"
        )
        raise ConfigError(f"network {type(module).__name__}: {reason}") from error
    finally:
        module.train(training)
    if not isinstance(found, Tensor) or found.ndim not in (2, 4):
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"network {type(module).__name__}: it gives {given}; features (B, d) or a map (B, d, h, w) are needed"
        )
    return found.shape[1]


def initialize(network: nn.Module) -> None:
    """Draw every convolution from the Kaiming normal distribution, fan-out (normalizations start as the identity)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            # An input reaches the outputs of its own group only.
            module.weight.data *= module.groups**0.5
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def fold_batch_norms(network: nn.Module) -> None:
    """Merge every batch norm of a network in eval mode into the convolution registered right before it."""
    for parent in list(network.modules()):
        for (conv_name, conv), (norm_name, norm) in pairwise(list(parent.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, _BatchNorm):
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, nn.Identity())
