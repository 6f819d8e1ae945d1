"""Images in arrays: the digits in the package, arrays in memory, npz files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geodl.core.decoding import PIXEL_LIMIT
from geodl.core.errors import DataError
from geodl.core.files import open_regular
from geodl.core.text import one_line
from geodl.data.dataset import Dataset, drawn, fingerprint_of, need_root, source
from geodl.data.images import ArrayImages
from geodl.data.names import labels_of, numbered

_KINDS = "allowed are integers 0..255 and floats 0..1"


@source("digits")
def read_digits(root: Path | None) -> Dataset:
    """8 x 8 handwritten digits that ship with the package (source: digits.txt): 10 classes, 1797 images."""
    file = resources.files("geodl.data") / "digits.npz"
    with file.open("rb") as opened, np.load(opened) as stored:
        gray = torch.from_numpy(np.rint(stored["images"] * (255 / 16)).astype(np.uint8))
        labels = torch.from_numpy(stored["labels"].astype(np.int64))
    images = ArrayImages(gray[:, None].repeat(1, 3, 1, 1), labels)
    return _split("digits", images, tuple("0123456789"), 0.2, 0)


@source("arrays")
def read_arrays(
    root: Path | None,
    *,
    x_train: Any = None,
    y_train: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    classes: Any = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Dataset:
    """Arrays in memory or in an npz file: x_train, y_train (or x, y), and optionally x_test, y_test, classes."""
    name = "arrays"
    if x_train is None:
        path = need_root(root, "arrays", "an npz file with x_train and y_train")
        name, stored = path.stem, _read_npz(path)
        x_train, y_train = (stored.get(f"{k}_train", stored.get(k)) for k in ("x", "y"))
        x_test, y_test, classes = (stored.get(key) for key in ("x_test", "y_test", "classes"))
    if x_train is None or y_train is None or (x_test is None) != (y_test is None):
        needed = "x_train and y_train are needed (or x and y); x_test and y_test come together"
        raise DataError(f"{name}: {needed}")
    pixels = as_pixels(x_train)
    test_pixels = pixels[:0] if x_test is None else as_pixels(x_test)
    labels = labels_of(len(pixels), y_train)
    labels += [] if x_test is None else labels_of(len(test_pixels), y_test)
    rows, names = numbered(labels, None if classes is None else np.ravel(classes))
    train = ArrayImages(pixels, rows[: len(pixels)])
    if x_test is None:
        return _split(name, train, names, test_fraction, split_seed)
    test = ArrayImages(test_pixels, rows[len(pixels) :])
    return Dataset(name, train, test, names, fingerprint_of(train, test), split="as given")


def _split(
    name: str, images: ArrayImages, names: tuple[str, ...], fraction: float, seed: int
) -> Dataset:
    train, test, words = drawn(images, names, fraction, seed)
    return Dataset(name, train, test, names, fingerprint_of(train, test), split=words)


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            return dict(archive)
    except Exception as error:  # zipfile, zlib, header parsing: damage shows in many ways
        reason = one_line(error)
        if "pickle" in reason:  # NumPy's advice would run any code in the file
            reason = "it holds Python objects, which are never loaded; save plain numbers and texts"
        raise DataError(f"{path}: not a readable npz file ({reason})") from None


def as_pixels(x: Any, *, one: bool = False) -> Tensor:
    """Convert (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W) to uint8 (N, 3, H, W); `one`: a single image, without N.

    Integers must be in 0..255; floats must be in 0..1 and are scaled.
    """
    values = _numbers_of_torch(x) if isinstance(x, torch.Tensor) else _numbers(x)
    if one:
        values = values[None]
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[3] in (1, 3):
        values = values.permute(0, 3, 1, 2)
    if values.ndim != 4 or values.shape[1] not in (1, 3):
        allowed = "(N, H, W), (N, H, W, 1 or 3), (N, 1 or 3, H, W)"
        raise DataError(f"images of shape {tuple(values.shape)}: allowed are {allowed}")
    height, width = values.shape[2:]
    if not 0 < height * width <= PIXEL_LIMIT:
        raise DataError(f"images of {width} x {height} pixels: allowed are 1 to {PIXEL_LIMIT}")
    limit = 1 if values.is_floating_point() else 255
    if len(values) and not (values.min() >= 0 and values.max() <= limit):
        raise DataError(f"images with values {values.min()} to {values.max()}: {_KINDS}")
    if values.is_floating_point():
        values = (values * 255).round()
    return values.to(torch.uint8).expand(-1, 3, -1, -1).contiguous()


def _numbers_of_torch(tensor: Tensor) -> Tensor:
    """Return a tensor as plain numbers: dense, materialized, on the CPU."""
    dense = not tensor.is_nested and tensor.layout == torch.strided
    if not dense or tensor.is_quantized or tensor.is_meta:
        raise DataError(
            "images: expected a dense tensor, got a nested, sparse, quantized or meta one"
        )
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"images of type {tensor.dtype}: {_KINDS}")
    try:
        plain = tensor.detach().cpu()
        # torch cannot compare every narrow float and integer type with 0 and 255.
        if plain.is_floating_point():
            return plain.float() if plain.itemsize < 4 else plain
        return plain if plain.dtype == torch.uint8 else plain.long()
    except RuntimeError as error:
        raise DataError(f"images of type {tensor.dtype}: {_KINDS}") from error


def _numbers(x: Any) -> Tensor:
    """Return an array as a tensor; torch does not know every width, nor the other byte order."""
    try:
        array = np.asarray(x)
    except Exception as error:  # lists of different lengths, objects that cannot become arrays
        raise DataError(f"images: expected an array of numbers, got {type(x).__name__}") from error
    if array.dtype.kind not in "uif":
        raise DataError(f"images of type {array.dtype}: {_KINDS}")
    kind = "u1" if array.dtype == np.uint8 else "i8"
    if array.dtype.kind == "f":
        kind = f"f{min(array.itemsize, 8)}"
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))
