"""What all backbones share: the maps of several levels from one pass."""

from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval


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

    def published_name(self, key: str) -> str:
        """Return the name that the tensor `key` of the state has in files of weights that others publish."""
        return key

    def published_weights(self) -> Path | None:
        """Return the file of pre-trained weights that an extra installs; None where there is none."""
        return None


def initialize(network: nn.Module) -> None:
    """Draw every convolution from the Kaiming normal distribution, fan-out (normalizations start as the identity)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            module.weight.data *= module.groups**0.5  # an input reaches the outputs of its own group only
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def fold_batch_norms(network: nn.Module) -> None:
    """Merge every batch norm of a network in eval mode into the convolution registered right before it."""
    for parent in list(network.modules()):
        for (conv_name, conv), (norm_name, norm) in pairwise(list(parent.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, _BatchNorm):
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, nn.Identity())
