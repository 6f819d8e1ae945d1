"""From features z of a frozen network to random features h: standardized, expanded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geodl.core.errors import TrainingError
from geodl.core.keys import derive
from geodl.core.tensors import part, shaped
from geodl.geometry import working_dtype

Blocks = Mapping[str, Tensor]
"""Features of N images by the name of the block: (N, d_b) each."""

_DEAD = 1e-3  # a coordinate that deviates by less than this share of its block's median would be magnified noise
_FAR = 6.0  # deviations: a coordinate that was hardly ever active in few images would outweigh all others when it is
_HALF = torch.finfo(torch.float16).max


def insist_finite(x: Tensor, what: str) -> None:
    """Raise an error where a tensor has NaN or infinite values; `what` has them."""
    # Not isfinite(), which copies what may be hundreds of megabytes.
    if x.numel() and not all(bool(end.isfinite()) for end in x.aminmax()):
        raise TrainingError(f"nothing can be learned in closed form: {what} NaN or infinite values")


def kept(z: Blocks) -> dict[str, Tensor]:
    """Return features as they are stored, in float16; round before any use, so that all forms see the same numbers."""
    return {name: block.clamp(-_HALF, _HALF).half() for name, block in z.items()}


def selected(z: Blocks, rows: Tensor) -> dict[str, Tensor]:
    """Return the features of some images: int64 or bool rows."""
    return {name: block[rows] for name, block in z.items()}


@dataclass(frozen=True)
class Standardization:
    """Mean and inverse deviation of every coordinate, by block: float32 (d_b,), the inverse 0 where a coordinate is dead."""

    mean: dict[str, Tensor]
    scale: dict[str, Tensor]

    @classmethod
    def of(cls, z: Blocks) -> Standardization:
        """Measure features."""
        mean, scale = {}, {}
        for name, block in z.items():
            insist_finite(block, f"the features {name!r} have")
            rows, count = block.double(), max(len(block), 1)
            center = rows.sum(0) / count
            deviation = ((rows - center).square().sum(0) / count).sqrt()
            # False too where every image has the same features.
            alive = deviation > _DEAD * deviation.median()
            mean[name] = center.float()
            scale[name] = torch.where(alive, 1 / deviation, 0.0).float()
        return cls(mean, scale)

    def __call__(self, z: Blocks) -> dict[str, Tensor]:
        """Return the blocks of z with mean 0 and deviation 1, cut off at 6 deviations, in float32 (float64 for float64)."""
        return {
            name: ((block.to(working_dtype(block)) - self.mean[name]) * self.scale[name]).clamp_(
                -_FAR, _FAR
            )
            for name, block in z.items()
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all numbers as named tensors."""
        return {
            f"{kind}.{name}": x
            for kind in ("mean", "scale")
            for name, x in getattr(self, kind).items()
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Standardization:
        """Undo `to_tensors`."""
        mean, scale = part(tensors, "mean"), part(tensors, "scale")
        if mean.keys() != scale.keys():
            raise ValueError(f"means of {sorted(mean)}, deviations of {sorted(scale)}")
        for name in mean:
            shaped(scale[name], f"scale.{name}", len(shaped(mean[name], f"mean.{name}", None)))
        return cls(mean, scale)


def share_out(total: int, widths: Mapping[str, int]) -> dict[str, int]:
    """Return how many of `total` expanded features each block gets, in proportion to its width; they add up to `total`."""
    ends, seen = {}, 0
    for name, width in widths.items():
        seen += width
        ends[name] = round(total * seen / sum(widths.values()))
    return {
        name: end - start
        for (name, end), start in zip(ends.items(), [0, *ends.values()], strict=False)
    }


@dataclass(frozen=True)
class Expansion:
    """A random layer for each block. sizes: the M_b by name; a block's weights depend on its name, its sizes and the seed alone.

    So an expansion of some of the blocks gives the columns that one of all blocks has for them.
    """

    sizes: Mapping[str, int]
    seed: int
    _weights: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def width(self) -> int:
        """M, the number of expanded features."""
        return sum(self.sizes.values())

    def weights(self, name: str, width: int) -> Tensor:
        """Return W_b' / sqrt(d_b): float32 (d_b, M_b). Drawn at the first use, stored nowhere."""
        if name not in self._weights:
            generator = torch.Generator().manual_seed(derive(self.seed, "expansion", name))
            # In float64: what is drawn in float32 differs in its last bits between processors.
            drawn = torch.randn(width, self.sizes[name], generator=generator, dtype=torch.float64)
            self._weights[name] = (drawn / math.sqrt(width)).float()
        return self._weights[name]

    def blocks(self, z: Blocks) -> dict[str, Tensor]:
        """Return h_b: (N, M_b) of the standardized z_b: (N, d_b)."""
        return {
            name: (z[name] @ self.weights(name, z[name].shape[1]).to(z[name])).relu_()
            for name in self.sizes
        }

    def __call__(self, z: Blocks) -> Tensor:
        """Return h: (N, M) of the standardized z."""
        return torch.cat(list(self.blocks(z).values()), dim=1)
