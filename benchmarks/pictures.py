"""Generated photographs: JPEG files that cost as much to decode as real ones."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_photographs(root: Path, count: int, side: int = 256, classes: int = 10) -> Path:
    """Write JPEG files of side x 3/4 side pixels into class folders: a pattern per class under noise. Return the root."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, (classes, 6, 8, 3), np.uint8)
    size = (side, side * 3 // 4)
    for i in range(count):
        pattern = patterns[i % classes] // 2 + rng.integers(0, 128, (6, 8, 3), np.uint8)
        smooth = np.asarray(Image.fromarray(pattern).resize(size), np.int16)
        pixels = (smooth + rng.integers(-12, 13, smooth.shape, np.int16)).clip(0, 255)
        path = root / f"class {i % classes}" / f"{i:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
    return root
