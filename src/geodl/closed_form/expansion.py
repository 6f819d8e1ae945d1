"""Standardization and random expansion of the features z of a frozen network."""

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

_DEAD = 1e-3  # coordinates whose deviation is below this share of their block's median are set to 0: they are noise
_FAR = (
    6.0  # standardized coordinates are clamped here: a rarely active one would outweigh all others
)
_HALF = torch.finfo(torch.float16).max


def insist_finite(x: Tensor, what: str) -> None:
    """Raise an error if a tensor has NaN or infinite values; what: the subject and verb of the message."""
    # isfinite() would allocate a mask of the same shape, for hundreds of megabytes.
    if x.numel() and not all(bool(end.isfinite()) for end in x.aminmax()):
        raise TrainingError(f"nothing can be learned in closed form: {what} NaN or infinite values")


def kept(z: Blocks) -> dict[str, Tensor]:
    """Return features rounded to float16, as they are stored; round before any use, so that both forms see the same numbers."""
    return {name: block.clamp(-_HALF, _HALF).half() for name, block in z.items()}


def selected(z: Blocks, rows: Tensor) -> dict[str, Tensor]:
    """Return the features of some images; rows: int64 or bool."""
    return {name: block[rows] for name, block in z.items()}


@dataclass(frozen=True)
class Standardization:
    """Mean and inverse deviation of every coordinate, by block: float32 (d_b,); the inverse is 0 for dead coordinates."""

    mean: dict[str, Tensor]
    scale: dict[str, Tensor]

    @classmethod
    def of(cls, z: Blocks) -> Standardization:
        """Return the standardization of features (N, d_b)."""
        mean, scale = {}, {}
        for name, block in z.items():
            insist_finite(block, f"the features {name!r} have")
            rows, count = block.double(), max(len(block), 1)
            center = rows.sum(0) / count
            deviation = ((rows - center).square().sum(0) / count).sqrt()
            # Also False if all images have the same features.
            alive = deviation > _DEAD * deviation.median()
            mean[name] = center.float()
            scale[name] = torch.where(alive, 1 / deviation, 0.0).float()
        return cls(mean, scale)

    def __call__(self, z: Blocks) -> dict[str, Tensor]:
        """Return z with mean 0 and deviation 1, clamped at 6 deviations, in float32 (float64 for float64)."""
        return {
            name: ((block.to(working_dtype(block)) - self.mean[name]) * self.scale[name]).clamp_(
                -_FAR, _FAR
            )
            for name, block in z.items()
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the means and scales as named tensors."""
        return {
            f"{kind}.{name}": x
            for kind in ("mean", "scale")
            for name, x in getattr(self, kind).items()
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Standardization:
        """Return the standardization of `to_tensors`."""
        mean, scale = part(tensors, "mean"), part(tensors, "scale")
        if mean.keys() != scale.keys():
            raise ValueError(f"means of {sorted(mean)}, deviations of {sorted(scale)}")
        for name in mean:
            shaped(scale[name], f"scale.{name}", len(shaped(mean[name], f"mean.{name}", None)))
        return cls(mean, scale)


def share_out(total: int, widths: Mapping[str, int]) -> dict[str, int]:
    """Divide `total` random features among blocks in proportion to their widths; the shares add up to `total`."""
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
    """A random layer for each block. sizes: M_b by name.

    A block's weights depend only on its name, its sizes and the seed, so an expansion of some of the blocks has the same
    columns for them as one of all blocks.
    """

    sizes: Mapping[str, int]
    seed: int
    _weights: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def width(self) -> int:
        """M, the number of expanded features."""
        return sum(self.sizes.values())

    def weights(self, name: str, width: int) -> Tensor:
        """Return W_b' / sqrt(d_b): float32 (d_b, M_b), drawn on first use."""
        if name not in self._weights:
            generator = torch.Generator().manual_seed(derive(self.seed, "expansion", name))
            # In float64: float32 draws differ between processors in the last bits.
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
