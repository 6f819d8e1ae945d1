"""Networks: backbones without the last ReLU, and growing heads."""

from geodl.nets.backbone import BACKBONES, OWN, Backbone, Own
from geodl.nets.heads import CosineHead, LinearHead
from geodl.nets.inference import OnnxBackbone
from geodl.nets.network import (
    PUBLISHED,
    Network,
    Output,
    build_backbone,
    build_network,
    check_network,
    expected_images,
    folded,
    frozen_copy,
    reading_copy,
    with_head,
)

__all__ = [
    "BACKBONES",
    "OWN",
    "PUBLISHED",
    "Backbone",
    "CosineHead",
    "LinearHead",
    "Network",
    "OnnxBackbone",
    "Output",
    "Own",
    "build_backbone",
    "build_network",
    "check_network",
    "expected_images",
    "folded",
    "frozen_copy",
    "reading_copy",
    "with_head",
]
