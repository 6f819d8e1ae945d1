"""Photographs, as it were: shapes on noise, which a pretrained network tells apart."""

import numpy as np

SHAPES = ("disc", "square", "cross", "ring")


QUICK = {"image_size": 64}


def picture(shape: str, rng: np.random.Generator, size: int = 64) -> np.ndarray:
    """Draw a shape of random size, place and color on noise: uint8 (size, size, 3)."""
    y, x = np.mgrid[:size, :size]
    cy, cx, r = rng.uniform(24, 40), rng.uniform(24, 40), rng.uniform(10, 16)
    dy, dx = np.abs(y - cy), np.abs(x - cx)
    inside = {
        "disc": dy**2 + dx**2 < r**2,
        "square": np.maximum(dy, dx) < r,
        "cross": (np.minimum(dy, dx) < r / 3) & (np.maximum(dy, dx) < r),
        "ring": np.abs(np.sqrt(dy**2 + dx**2) - r) < r / 4,
        "left": (dy < r / 5) & (dx < r)
        | ((x - cx + r) < r) & ((x - cx + r) > 0) & (dy < (x - cx + r)),
    }
    if shape == "right":
        return picture("left", rng, size)[:, ::-1]
    image = rng.integers(0, 80, (size, size, 3))
    image[inside[shape]] = rng.integers(120, 255, 3)
    return image.astype(np.uint8)


def pictures(shapes: tuple[str, ...], count: int, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    labels = [shape for shape in shapes for _ in range(count)]
    return np.stack([picture(shape, rng) for shape in labels]), labels
