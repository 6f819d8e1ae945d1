"""Networks: backbones without the last ReLU under growing heads."""

from geodl.nets.backbone import BACKBONES, OWN, Backbone, Own
from geodl.nets.heads import CosineHead, LinearHead
from geodl.nets.network import (
    Network,
    Output,
    build_network,
    check_network,
    expected_images,
    folded,
    frozen_copy,
    networks,
)

__all__ = [
    "BACKBONES",
    "OWN",
    "Backbone",
    "CosineHead",
    "LinearHead",
    "Network",
    "Output",
    "Own",
    "build_network",
    "check_network",
    "expected_images",
    "folded",
    "frozen_copy",
    "networks",
]
