"""The sources by name, and the two smallest of them: the embedded digits, and arrays in memory or in an npz file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geodl.data.cifar import read_cifar100
from geodl.data.dataset import Dataset, drawn, fingerprint_of, load, need_root, source, source_options, sources
from geodl.data.folder import scan_folder
from geodl.data.hub import read_hub
from geodl.data.images import PIXEL_LIMIT, ArrayImages
from geodl.data.names import class_name, class_names
from geodl.errors import DataError
from geodl.text import count, one_line

__all__ = ["Dataset", "load", "read_cifar100", "read_hub", "scan_folder", "source", "source_options", "sources"]


@source("digits")
def read_digits(root: Path | None) -> Dataset:
    """8 x 8 handwritten digits that ship with the package (digits.txt says whose they are): 10 classes, 1797 images."""
    with resources.files("geodl.data").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        grey = torch.from_numpy(np.rint(stored["images"] * (255 / 16)).astype(np.uint8))
        images = ArrayImages(grey[:, None].repeat(1, 3, 1, 1), torch.from_numpy(stored["labels"].astype(np.int64)))
    return _split("digits", images, tuple(str(digit) for digit in range(10)), 0.2, 0)


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
        name, found = path.stem, _read_npz(path)
        x_train, y_train = found.get("x_train", found.get("x")), found.get("y_train", found.get("y"))
        x_test, y_test, classes = found.get("x_test"), found.get("y_test"), found.get("classes")
    if x_train is None or y_train is None or (x_test is None) != (y_test is None):
        raise DataError(f"{name}: x_train and y_train are needed (or x and y); x_test and y_test come together")
    pixels = [as_pixels(x) for x in (x_train, x_test) if x is not None]
    for x, y in zip(pixels, (y_train, y_test), strict=False):
        if np.shape(y)[:1] != (len(x),):
            raise DataError(
                f"{name}: {count(len(x), 'image')} with {count(np.size(y), 'label')} given; as many are needed"
            )
    labels, names = _labels(y_train, y_test, None if classes is None else np.atleast_1d(classes))
    train = ArrayImages(pixels[0], labels[: len(pixels[0])])
    if x_test is None:
        return _split(name, train, names, test_fraction, split_seed)
    test = ArrayImages(pixels[1], labels[len(pixels[0]) :])
    return Dataset(name, train, test, names, fingerprint_of(train, test), split="as given")


def _split(name: str, images: ArrayImages, names: tuple[str, ...], fraction: float, seed: int) -> Dataset:
    train, test, words = drawn(images, names, fraction, seed)
    return Dataset(name, train, test, names, fingerprint_of(train, test), split=words)


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive.items())
    except Exception as error:  # zipfile, zlib, header parsing: a damaged archive fails in many ways
        raise DataError(f"{path}: not a readable npz file ({one_line(error)})") from None


def as_pixels(x: Any, *, one: bool = False) -> Tensor:
    """Turn (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W) into uint8 (N, 3, H, W); `one`: without N, one image.

    uint8 stays; other integers must lie in 0..255; floats must lie in 0..1 and are scaled.
    """
    values = _numbers_of_torch(x) if isinstance(x, torch.Tensor) else _numbers(x)
    if one:
        values = values[None]
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[3] in (1, 3):
        values = values.permute(0, 3, 1, 2)
    if values.ndim != 4 or values.shape[1] not in (1, 3):
        raise DataError(
            f"images of shape {tuple(values.shape)} given; allowed: N x H x W, with 1 or 3 channels last or second"
        )
    height, width = values.shape[2:]
    if not 0 < height * width <= PIXEL_LIMIT:
        raise DataError(f"images of {width} x {height} pixels given; allowed: 1 to {PIXEL_LIMIT} pixels")
    limit = 1 if values.is_floating_point() else 255
    if len(values) and not (values.min() >= 0 and values.max() <= limit):
        raise DataError(f"images from {values.min()} to {values.max()} given; {_KINDS}")
    if values.is_floating_point():
        values = (values * 255).round()
    return values.to(torch.uint8).expand(-1, 3, -1, -1).contiguous()


_KINDS = "allowed: integers 0..255, floats 0..1"


def _numbers_of_torch(tensor: Tensor) -> Tensor:
    """Return a tensor of plain numbers: dense, with values, on the CPU."""
    odd = {
        "nested": tensor.is_nested,
        "sparse": not tensor.is_nested and tensor.layout != torch.strided,
        "quantized": tensor.is_quantized,
        "without values (meta)": tensor.is_meta,
    }
    for name, found in odd.items():
        if found:
            raise DataError(f"images in a tensor that is {name} given; a dense one is needed")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"images of type {tensor.dtype} given; {_KINDS}")
    try:
        plain = tensor.detach().cpu()
        # Narrow floats and other integers than these two cannot be compared with 0 and 255, all of them.
        if plain.is_floating_point():
            return plain.float() if plain.itemsize < 4 else plain
        return plain if plain.dtype == torch.uint8 else plain.long()
    except RuntimeError as error:
        raise DataError(f"images of type {tensor.dtype} given; {_KINDS}") from error


def _numbers(x: Any) -> Tensor:
    """Return numbers as one of torch's tensors, which knows neither every width nor the other order of bytes."""
    try:
        array = np.asarray(x)
    except Exception as error:  # lists of different lengths, objects that fail to be arrays
        raise DataError(f"images: {type(x).__name__} given that is no array of numbers") from error
    if array.dtype.kind not in "uif":
        raise DataError(f"images of type {array.dtype} given; {_KINDS}")
    kind = f"f{min(array.itemsize, 8)}" if array.dtype.kind == "f" else "u1" if array.dtype == np.uint8 else "i8"
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))


def _labels(train: Any, test: Any, classes: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Return the labels of training then test images as positions in the class names, and the names.

    Integers with `classes` are positions already; anything else is a name, and the names are sorted.
    """
    try:
        parts = [np.asarray(part) for part in (train, test) if part is not None]
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError("labels: one label an image is needed, (N,)") from error
    for part in parts:
        if part.ndim != 1 and part.shape != (len(part), 1):
            raise DataError(f"labels of shape {part.shape} given; allowed: one label an image, (N,)")
    parts = [part.reshape(-1) for part in parts]
    values = np.concatenate(parts)
    if classes is not None and np.issubdtype(values.dtype, np.integer):
        return torch.from_numpy(values.astype(np.int64)), class_names(np.asarray(classes).tolist())
    texts = [class_name(value) for value in values.tolist()]
    # Numbers in the order of their values, texts in theirs.
    order = values.tolist() if values.dtype.kind in "iuf" else texts
    known = tuple(map(class_name, sorted(set(order)))) if classes is None else class_names(np.asarray(classes).tolist())
    position = {name: i for i, name in enumerate(known)}
    unknown = [text for text in texts if text not in position]
    if unknown:
        raise DataError(f"labels: {unknown[0]!r} is not one of the classes given")
    return torch.tensor([position[text] for text in texts]), known
