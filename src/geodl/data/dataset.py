"""Datasets, and the registry of sources that load them by name."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl.config import Registry, import_installed
from geodl.core.errors import ConfigError, DataError
from geodl.core.keys import derive
from geodl.core.text import count
from geodl.data.images import ArrayImages, Images, Some, pack, sampled_sizes
from geodl.data.names import class_names

Skipped = tuple[tuple[str, str], ...]
"""Skipped files, folders and classes, each with the reason."""


def insist(strict: bool, skipped: Sequence[tuple[str, str]]) -> None:
    """If `strict`, raise a DataError for the first skipped file."""
    if strict and skipped:
        raise DataError(f"{skipped[0][0]}: {skipped[0][1]}")


@dataclass(frozen=True)
class Dataset:
    """Training and test images whose labels are positions in `classes`."""

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    fingerprint: str
    """A hash of the images, their labels and the split."""
    skipped: Skipped = ()
    split: str = ""
    """A description of the split into training and test images."""

    def __post_init__(self) -> None:
        if not self.classes or not len(self.train):
            classes, images = len(self.classes), len(self.train)
            raise DataError(
                f"{self.name}: {count(classes, 'class')} and {count(images, 'training image')} found"
            )
        try:
            class_names(self.classes)
        except DataError as error:
            raise DataError(f"{self.name}: {error}") from None
        for part in ("train", "test"):  # images have the names of their classes with them
            object.__setattr__(self, part, replace(getattr(self, part), names=tuple(self.classes)))
        for labels in (self.train.labels, self.test.labels):
            low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
            if low < 0 or high >= len(self.classes):
                allowed = f"allowed are 0 to {len(self.classes) - 1}"
                raise DataError(f"{self.name}: labels from {low} to {high}: {allowed}")

    def summary(self, most: int = 20) -> str:
        """Return a description in a few lines: classes, images, sizes, and at most `most` skipped files."""
        counts = torch.bincount(self.train.labels, minlength=len(self.classes))
        images = f"{len(self.train)} training and {count(len(self.test), 'test image')}"
        per_class = f"{int(counts.min())} to {int(counts.max())}"
        lines = [
            f"{self.name}: {count(len(self.classes), 'class')}, {images}",
            f"  images per class: {per_class}; size: {_size(self.train)}",
        ]
        if self.split:
            lines.append(f"  split: {self.split}")
        if self.skipped:
            reasons = {reason for _, reason in self.skipped}
            lines.append(f"  skipped: {len(self.skipped)}, for {count(len(reasons), 'reason')}")
            lines += [f"    {what}: {reason}" for what, reason in self.skipped[:most]]
            if len(self.skipped) > most:
                lines.append(f"    and {len(self.skipped) - most} more")
        return "\n".join(lines)


def _size(images: Images) -> str:
    """Describe the sizes of images, or of a sample of many files."""
    sizes = sampled_sizes(images)
    if not sizes:
        return "unknown"
    if isinstance(images, ArrayImages):
        return f"{sizes[0][0]} x {sizes[0][1]} pixels, in memory"
    widths, heights = zip(*sizes, strict=True)
    sample = "" if len(sizes) == len(images) else f" (of a sample of {len(sizes)})"
    largest = f"{max(widths)} x {max(heights)}"
    return f"{min(widths)} x {min(heights)} to {largest} pixels, in files{sample}"


Reader = Callable[..., Dataset]
SOURCES = Registry[Reader]("source", "data")
source = SOURCES.register
"""Registers a reader `(root, **options) -> Dataset` under a name; the first line of its docstring describes it."""


def sources() -> dict[str, str]:
    """Return the names of the sources, each with a description of one line."""
    lines = {name: inspect.getdoc(reader) or "" for name, reader in sorted(SOURCES.items())}
    return {name: text.partition("\n")[0] for name, text in lines.items()}


def source_options(name: str) -> list[str]:
    """Return the names of a source's options: the keyword arguments of its reader."""
    if not SOURCES.knows(name):
        import_installed()
    if not SOURCES.knows(name):
        raise ConfigError(f"data = {name!r}: allowed values are {', '.join(sorted(SOURCES))}")
    return list(inspect.signature(SOURCES[name]).parameters)[1:]


def load(name: str, root: Path | str | None = None, **options: Any) -> Dataset:
    """Load a dataset.

    Args:
        name: of its source: ``digits``, ``folder``, ``cifar100``, ``arrays``, ...
        root: its file or folder; None: the folder $GEODL_DATA.
        options: of the source.
    """
    known = source_options(name)
    for key in options:
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"data: {name} has no option {key!r}, allowed: {allowed}")
    if not isinstance(root, str | os.PathLike | None):
        raise ConfigError(f"data_dir: expected a file or folder, got {type(root).__name__}")
    return SOURCES[name](None if root is None else Path(root).expanduser(), **options)


def data_directory(root: Path | None) -> Path | None:
    """Return the user's data directory: `root`, by default $GEODL_DATA."""
    if root is None and os.environ.get("GEODL_DATA"):
        return Path(os.environ["GEODL_DATA"])
    return root


def need_root(root: Path | None, name: str, what: str, *, shared: bool = False) -> Path:
    """Return the root of a dataset, which must exist; its default is $GEODL_DATA for a well-known dataset (`shared`)."""
    root = data_directory(root) if shared else root
    if root is None:
        where = "data_dir (or the environment's GEODL_DATA)" if shared else "data_dir"
        raise ConfigError(f"{where}: {name} needs {what}")
    if not os.path.lexists(root):
        raise DataError(f"{root}: no such file or folder; {name} needs {what}")
    return root


def stratified(
    labels: Tensor, names: Sequence[str], fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Split each class into training and test positions, both in ascending order. labels: int64 (N,).

    A class keeps at least one training image, and has at least one test image if it has two images. Its split depends
    only on its name and its number of images, not on other classes.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"test_fraction = {fraction}: allowed values are 0 to below 1")
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label, name in enumerate(names):
        positions = (labels == label).nonzero().flatten()
        share = round(fraction * len(positions))
        if fraction > 0:
            share = min(max(share, 1), len(positions) - 1)
        generator = torch.Generator().manual_seed(derive(seed, "split", name))
        order = torch.randperm(len(positions), generator=generator)
        is_test[positions[order[: max(share, 0)]]] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def drawn(images: Some, names: Sequence[str], fraction: float, seed: int) -> tuple[Some, Some, str]:
    """Split images without a test part; return training images, test images and a description of the split."""
    train, test = (images.select(rows) for rows in stratified(images.labels, names, fraction, seed))
    return train, test, f"{fraction:.0%} of each class drawn as test images (split seed {seed})"


def fingerprint_of(train: Images, test: Images, more: str = "") -> str:
    """Return the fingerprint of a dataset: a hash of image contents, labels and `more`."""
    return hashlib.sha256((train.digest() + test.digest() + more).encode()).hexdigest()


def packed(train: Images, test: Images) -> tuple[Images, Images]:
    """Decode small images into memory, either both training and test images or neither."""
    small, small_test = pack(train), pack(test)
    return (small, small_test) if type(small) is type(small_test) else (train, test)
