"""The sources by name, and the two smallest of them: the embedded digits, and arrays in memory or in an npz file."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geodl.data.cifar import read_cifar100
from geodl.data.dataset import Dataset, load, need_root, source, source_options, sources, split_words, stratified
from geodl.data.folder import scan_folder
from geodl.data.hub import read_hub
from geodl.data.images import ArrayImages
from geodl.errors import DataError
from geodl.text import count

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
    return Dataset(name, train, test, names, _fingerprint(train, test), split="as given")


def _split(name: str, images: ArrayImages, names: tuple[str, ...], fraction: float, seed: int) -> Dataset:
    ours, theirs = stratified(images.labels, names, fraction, seed)
    train, test = images.select(ours), images.select(theirs)
    return Dataset(name, train, test, names, _fingerprint(train, test), split=split_words(fraction, seed))


def _fingerprint(train: ArrayImages, test: ArrayImages) -> str:
    return hashlib.sha256((train.digest() + test.digest()).encode()).hexdigest()


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive.items())
    except Exception as error:  # zipfile, zlib, header parsing: a damaged archive fails in many ways
        raise DataError(f"{path}: not a readable npz file ({error})") from None


def as_pixels(x: Any) -> Tensor:
    """Turn (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W) into uint8 (N, 3, H, W).

    uint8 stays; other integers must lie in 0..255; floats must lie in 0..1 and are scaled.
    """
    values = x.detach().cpu() if isinstance(x, torch.Tensor) else _numbers(np.asarray(x))
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[3] in (1, 3):
        values = values.permute(0, 3, 1, 2)
    if values.ndim != 4 or values.shape[1] not in (1, 3):
        raise DataError(
            f"images of shape {tuple(values.shape)} given; allowed: N x H x W, with 1 or 3 channels last or second"
        )
    limit = 1 if values.is_floating_point() else 255
    if len(values) and not (values.min() >= 0 and values.max() <= limit):
        raise DataError(f"images from {values.min()} to {values.max()} given; allowed: integers 0..255, floats 0..1")
    if values.is_floating_point():
        values = (values * 255).round()
    return values.to(torch.uint8).expand(-1, 3, -1, -1).contiguous()


def _numbers(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a numpy array of numbers as one of torch's, which knows neither every width nor the other order of bytes."""
    if array.dtype.kind not in "uif":
        raise DataError(f"images of type {array.dtype} given; allowed: integers 0..255, floats 0..1")
    kind = f"f{min(array.itemsize, 8)}" if array.dtype.kind == "f" else "u1" if array.dtype == np.uint8 else "i8"
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))


def _labels(train: Any, test: Any, classes: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Return the labels of training then test images as positions in the class names, and the names.

    Integers with `classes` are positions already; anything else is a name, and the names are sorted.
    """
    parts = [np.asarray(part) for part in (train, test) if part is not None]
    for part in parts:
        if part.ndim != 1 and part.shape != (len(part), 1):
            raise DataError(f"labels of shape {part.shape} given; allowed: one label an image, (N,)")
    parts = [part.reshape(-1) for part in parts]
    values = np.concatenate(parts)
    if classes is not None and np.issubdtype(values.dtype, np.integer):
        return torch.from_numpy(values.astype(np.int64)), tuple(str(name) for name in classes)
    known = np.unique(values) if classes is None else np.asarray(classes)
    position = {name: i for i, name in enumerate(known.tolist())}
    unknown = [value for value in values.tolist() if value not in position]
    if unknown:
        raise DataError(f"labels: {unknown[0]!r} is not one of the classes given")
    return torch.tensor([position[value] for value in values.tolist()]), tuple(str(name) for name in known.tolist())
