"""A network whose features are its input, and random images and features."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from geodl.data.images import ArrayImages
from geodl.nets.network import Output


class Plain(nn.Module):
    """Features and levels are the flat input, logits its first numbers."""

    def __init__(self, width: int, classes: int = 2) -> None:
        super().__init__()
        self.width = width
        self.head = nn.Module()
        self.head.classes = classes

    def forward(self, x: torch.Tensor) -> Output:
        flat = x.flatten(1)
        return Output(flat[:, : self.head.classes], flat, flat)

    def with_levels(
        self, x: torch.Tensor, levels: Sequence[str]
    ) -> tuple[Output, dict[str, torch.Tensor]]:
        return self(x), {name: x.flatten(1) for name in levels}


def pictures(labels: Sequence[int], size: int = 8, seed: int = 0) -> ArrayImages:
    """Return an image of noise for each label."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (len(labels), 3, size, size), dtype=np.uint8)
    return ArrayImages(torch.from_numpy(pixels), torch.tensor(labels, dtype=torch.int64))


def random_features(rows: int, width: int, seed: int, offset: float = 0.3) -> torch.Tensor:
    """Return normally distributed features (rows, width)."""
    drawn = np.random.default_rng(seed).normal(offset, 1, size=(rows, width))
    return torch.from_numpy(drawn).float()


def unit_rows(x: np.ndarray) -> np.ndarray:
    """Return rows of length 1."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
