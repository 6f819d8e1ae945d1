"""TrivialAugment (Mueller and Hutter 2021): one random operation per image, with a random strength.

Operations and maximum strengths are those of the "wide" space, with 31 levels of strength. As in the authors' code, they are
Pillow's: nearest-neighbor sampling, shears that keep the top left corner, black outside the image, like the padding of the
crop. Only solarize is torchvision's: its threshold at strength 0 is 255, so that white becomes black.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from geodl.config import Registry

Picture = Image.Image

LEVELS = 31


class Augmentation(Protocol):
    """A deterministic function of an RGB image and `count` random numbers from [0, 1); it keeps the size of the image."""

    count: int

    def __call__(self, picture: Picture, numbers: Sequence[float], /) -> Picture:
        """Return the augmented image."""


AUGMENTATIONS = Registry[Augmentation]("augmentation", "augment", optional=True)


def augmentation(name: str, count: int) -> Callable[[Callable[..., Picture]], Augmentation]:
    """Return a decorator that registers a function as an augmentation with `count` random numbers per image."""

    def decorate(function: Callable[..., Picture]) -> Augmentation:
        function.count = count  # type: ignore[attr-defined]
        return AUGMENTATIONS.register(name)(function)  # type: ignore[return-value]

    return decorate


def _affine(picture: Picture, *matrix: float) -> Picture:
    """Replace each pixel by the one at (a x + b y + c, d x + e y + f)."""
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


OPERATIONS: dict[str, Callable[[Picture, float], Picture]] = {
    "identity": lambda picture, s: picture,
    "shear x": lambda picture, s: _affine(picture, 1, 0.99 * s, 0, 0, 1, 0),
    "shear y": lambda picture, s: _affine(picture, 1, 0, 0, 0.99 * s, 1, 0),
    "translate x": lambda picture, s: _affine(picture, 1, 0, 32 * s, 0, 1, 0),
    "translate y": lambda picture, s: _affine(picture, 1, 0, 0, 0, 1, 32 * s),
    "rotate": lambda picture, s: picture.rotate(135 * s),
    "brightness": lambda picture, s: ImageEnhance.Brightness(picture).enhance(1 + 0.99 * s),
    "contrast": lambda picture, s: ImageEnhance.Contrast(picture).enhance(1 + 0.99 * s),
    "color": lambda picture, s: ImageEnhance.Color(picture).enhance(1 + 0.99 * s),
    "sharpness": lambda picture, s: ImageEnhance.Sharpness(picture).enhance(1 + 0.99 * s),
    "posterize": lambda picture, s: ImageOps.posterize(picture, 8 - round(6 * abs(s))),
    "solarize": lambda picture, s: ImageOps.solarize(picture, round(255 * (1 - abs(s)))),
    "autocontrast": lambda picture, s: ImageOps.autocontrast(picture),
    "equalize": lambda picture, s: ImageOps.equalize(picture),
}
"""Functions of an RGB image and a strength from -1 to 1; the last four ignore the sign, the last two the strength as well."""

_IN_ORDER = tuple(OPERATIONS.values())


@augmentation("trivial", 3)
def trivial(picture: Picture, numbers: Sequence[float]) -> Picture:
    """Return the augmented image. numbers: operation, level and sign."""
    operation, level, sign = numbers
    strength = int(LEVELS * level) / (LEVELS - 1)
    return _IN_ORDER[int(len(_IN_ORDER) * operation)](
        picture, strength if sign < 0.5 else -strength
    )


def augmented(pixels: Tensor, numbers: Tensor, augment: Augmentation) -> Tensor:
    """Return augmented pixels. pixels: uint8 (b, H, W, 3); numbers: (b, augment.count) in [0, 1)."""
    rows = zip(pixels.numpy(), numbers.tolist(), strict=True)
    return torch.from_numpy(np.stack([np.asarray(augment(Image.fromarray(x), n)) for x, n in rows]))
