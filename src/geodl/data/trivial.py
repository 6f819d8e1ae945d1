"""TrivialAugment (Mueller and Hutter 2021): one operation for each image, drawn at random, with a strength drawn at random.

The operations and their largest strengths are those of the "wide" space, 31 levels from none to all. Pillow does them, as the
authors' code has it: the nearest pixel is taken, shears keep the top left corner, what comes in from outside is black, like the
padding of the crop. But solarize is torchvision's: its threshold at strength 0 is 255, so that white becomes black.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

Picture = Image.Image

LEVELS = 31
NUMBERS = 3
"""Random numbers an image: operation, level, sign."""


def _affine(picture: Picture, *matrix: float) -> Picture:
    """Take for each pixel the one at (a x + b y + c, d x + e y + f)."""
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
"""Each takes an RGB picture and a strength from -1 to 1; the last four ignore the sign, two of them the strength too."""

_IN_ORDER = tuple(OPERATIONS.values())


def trivial(picture: Picture, numbers: Sequence[float]) -> Picture:
    """Return the augmented picture. numbers: three from [0, 1), which decide everything."""
    operation, level, sign = numbers
    strength = int(LEVELS * level) / (LEVELS - 1)
    return _IN_ORDER[int(len(_IN_ORDER) * operation)](picture, strength if sign < 0.5 else -strength)


def trivial_batch(pixels: Tensor, numbers: Tensor) -> Tensor:
    """Return augmented pixels. pixels: uint8 (b, H, W, 3); numbers: (b, 3) in [0, 1)."""
    rows = zip(pixels.numpy(), numbers.tolist(), strict=True)
    return torch.from_numpy(np.stack([np.asarray(trivial(Image.fromarray(x), three)) for x, three in rows]))
