"""Networks: backbones without the last ReLU under growing heads."""

from geodl.nets.heads import CosineHead, LinearHead
from geodl.nets.network import Network, Output, build_network, expected_images, folded, frozen_copy, networks

__all__ = [
    "CosineHead",
    "LinearHead",
    "Network",
    "Output",
    "build_network",
    "expected_images",
    "folded",
    "frozen_copy",
    "networks",
]
