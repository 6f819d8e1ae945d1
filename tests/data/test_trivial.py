"""TrivialAugment compared with NumPy, operation by operation."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from geodl.data.trivial import LEVELS, OPERATIONS, augmented, trivial

NAMES = list(OPERATIONS)
STRENGTHS = (-1.0, -17 / 30, -1 / 30, 0.0, 0.2, 22 / 30, 1.0)


def picture(seed=0, size=(32, 32)):
    """Return an image with smooth parts, noise, and channels of different ranges."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    noise = rng.integers(-20, 21, (size[1], size[0], 3))
    return np.clip(smooth * [0.7, 1.0, 0.4] + [30, 0, 60] + noise, 0, 255).astype(np.uint8)


def done(name, pixels, strength):
    """Apply an operation to pixels (H, W, 3)."""
    return np.asarray(OPERATIONS[name](Image.fromarray(pixels), strength))


def numbers_for(name, level=0, sign=1):
    """Return the middle of the numbers that mean this operation, level and sign."""
    side = 0.25 if sign > 0 else 0.75
    return (NAMES.index(name) + 0.5) / len(NAMES), (level + 0.5) / LEVELS, side


def moved(x, source):
    """Sample the nearest pixels at `source`, black outside; also return which of them are far from a boundary."""
    height, width = x.shape[:2]
    rows, columns = np.mgrid[:height, :width] + 0.5
    at = np.stack(source(columns, rows))
    column, row = np.floor(at).astype(int)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    result = np.where(inside[..., None], x[row.clip(0, height - 1), column.clip(0, width - 1)], 0)
    return result, (np.abs(at - np.round(at)) > 2e-3).all(0)


@pytest.mark.parametrize("size", [(32, 32), (48, 20)])
@pytest.mark.parametrize("s", STRENGTHS)
def test_geometric_operations(s, size):
    x = picture(1, size)
    center_x, center_y = size[0] / 2, size[1] / 2
    cos, sin = math.cos(math.radians(135 * s)), math.sin(math.radians(135 * s))

    def turned(u, v):
        # Counterclockwise: the source of a pixel is the opposite rotation (y points down).
        dx, dy = u - center_x, v - center_y
        return center_x + cos * dx - sin * dy, center_y + sin * dx + cos * dy

    sources = {
        "shear x": lambda u, v: (u + 0.99 * s * v, v),
        "shear y": lambda u, v: (u, v + 0.99 * s * u),
        "translate x": lambda u, v: (u + 32 * s, v),
        "translate y": lambda u, v: (u, v + 32 * s),
        "rotate": turned,
    }
    for name, source in sources.items():
        expected, sure = moved(x, source)
        found = done(name, x, s)
        assert sure.mean() > 0.7, name
        np.testing.assert_array_equal(found[sure], expected[sure], err_msg=name)
        if s == 0:
            np.testing.assert_array_equal(found, x, err_msg=name)


def smoothed(x):
    """Blur with weights 1 around 5, over 13; the border stays."""
    result = x.copy()
    around = sum(x[1 + i : 31 + i, 1 + j : 31 + j] for i in (-1, 0, 1) for j in (-1, 0, 1))
    result[1:-1, 1:-1] = (around + 4 * x[1:-1, 1:-1]) / 13
    return result


@pytest.mark.parametrize("s", STRENGTHS)
def test_enhancements_go_from_or_to_a_poorer_picture(s):
    pixels = picture(3)
    x = pixels.astype(float)
    grey = x @ [0.299, 0.587, 0.114]
    poorer = {
        "brightness": np.zeros_like(x),
        "contrast": np.full_like(x, round(grey.mean())),
        "color": np.repeat(grey[..., None], 3, axis=2),
        "sharpness": smoothed(x),
    }
    for name, other in poorer.items():
        expected = np.clip(other + (1 + 0.99 * s) * (x - other), 0, 255)
        found = np.asarray(OPERATIONS[name](Image.fromarray(pixels), s)).astype(float)
        assert np.abs(found - expected).max() <= 2, name  # rounding, also of the other image
        assert np.abs(found - x).max() > 5 or abs(s) < 0.3, name


@pytest.mark.parametrize(("s", "bits"), [(0, 8), (3 / 30, 7), (0.5, 5), (-0.5, 5), (1, 2)])
def test_posterize(s, bits):
    x = picture(4)
    step = 2 ** (8 - bits)
    np.testing.assert_array_equal(done("posterize", x, s), x // step * step)


@pytest.mark.parametrize(("s", "limit"), [(0, 255), (0.4, 153), (-0.4, 153), (1, 0)])
def test_solarize(s, limit):
    x = picture(5)
    np.testing.assert_array_equal(done("solarize", x, s), np.where(x >= limit, 255 - x, x))


def test_autocontrast_stretches_each_channel():
    x = picture(6) // 2 + 40
    low, high = x.min((0, 1)), x.max((0, 1))
    found = done("autocontrast", x, 0.3)
    assert np.abs(found - (x.astype(float) - low) * 255 / (high - low)).max() <= 1
    flat = np.full((32, 32, 3), 90, dtype=np.uint8)
    np.testing.assert_array_equal(done("autocontrast", flat, 0.3), flat)


def test_equalize_spreads_each_channel_evenly_and_keeps_its_order():
    x = picture(7)
    found = done("equalize", x, 0.3)
    for channel in range(3):
        before, after = x[..., channel].ravel(), found[..., channel].ravel()
        below = np.array([(before < value).mean() for value in before])
        assert np.abs(after - 255 * below).max() <= 40  # 1024 pixels, some values taken by many
        assert np.abs(after - 255 * below).mean() <= 8
        order = before.argsort(kind="stable")
        assert (np.diff(after[order].astype(int)) >= 0).all()


# ---- which operation, how strong


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_name_operation_level_and_sign(name):
    x = Image.fromarray(picture(8))
    for level in (0, 1, 15, 30):
        for sign in (1, -1):
            found = np.asarray(trivial(x, numbers_for(name, level, sign)))
            np.testing.assert_array_equal(found, np.asarray(OPERATIONS[name](x, sign * level / 30)))


def test_the_largest_numbers_are_in_range(monkeypatch):
    top = math.nextafter(1, 0)
    seen = []
    spies = tuple((lambda x, s: seen.append(s) or x) for _ in NAMES)
    monkeypatch.setattr("geodl.data.trivial._IN_ORDER", spies)
    for numbers in ((0, 0, 0), (top, top, 0.4), (top, top, top), (0.5, 0, top)):
        trivial(None, numbers)
    assert seen == [0, 1, -1, 0]


def test_all_operations_and_levels_are_equally_likely(monkeypatch):
    counts = Counter()

    def spy(name):
        return lambda x, s: counts.update([(name, round(30 * s))])

    monkeypatch.setattr("geodl.data.trivial._IN_ORDER", tuple(map(spy, NAMES)))
    steps = 14 * 31
    for i in range(steps):
        for sign in (0.1, 0.9):
            trivial(None, ((i % 14 + 0.5) / 14, (i // 14 + 0.5) / 31, sign))
    assert len(counts) == 14 * 61  # level 0 has no sign
    assert all(count == (2 if level == 0 else 1) for (_, level), count in counts.items())


def test_a_batch_is_its_pictures():
    rng = torch.Generator().manual_seed(1)
    pixels = torch.stack([torch.tensor(picture(seed, (20, 28))) for seed in range(64)])
    numbers = torch.rand(64, 3, generator=rng, dtype=torch.float64)
    before = pixels.clone()
    found = augmented(pixels, numbers, trivial)
    assert (found.dtype, found.shape) == (torch.uint8, (64, 28, 20, 3))
    assert pixels.equal(before)
    for x, three, y in zip(pixels.numpy(), numbers.tolist(), found.numpy(), strict=True):
        np.testing.assert_array_equal(np.asarray(trivial(Image.fromarray(x), three)), y)
