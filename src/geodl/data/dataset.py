"""What every source gives: a dataset; and the list of sources that fill one by name."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from geodl.config import derive
from geodl.data.images import ArrayImages, FileImages, Images, check_header, pack
from geodl.data.names import class_names
from geodl.errors import ConfigError, DataError
from geodl.text import count

Some = TypeVar("Some", ArrayImages, FileImages)
Skipped = tuple[tuple[str, str], ...]
"""What was skipped, and why: (file, folder or class; reason)."""


def insist(strict: bool, skipped: Sequence[tuple[str, str]]) -> None:
    """Make the first thing that was skipped an error, where that is asked for."""
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
    """Changes whenever the images, their labels or the split change."""
    skipped: Skipped = ()
    split: str = ""
    """How training and test images were told apart, in words."""

    def __post_init__(self) -> None:
        if not self.classes or not len(self.train):
            raise DataError(
                f"{self.name}: {count(len(self.classes), 'class')} and {count(len(self.train), 'training image')} found"
            )
        try:
            class_names(self.classes)
        except DataError as error:
            raise DataError(f"{self.name}: {error}") from None
        for part in (self.train, self.test):
            if len(part) and not 0 <= int(part.labels.min()) <= int(part.labels.max()) < len(self.classes):
                low, high = int(part.labels.min()), int(part.labels.max())
                raise DataError(f"{self.name}: labels go from {low} to {high}, 0 to {len(self.classes) - 1} allowed")

    def summary(self, most: int = 20) -> str:
        """Describe the dataset in a few lines: classes, images, sizes, and what was skipped (at most `most` lines)."""
        counts = torch.bincount(self.train.labels, minlength=len(self.classes))
        images = f"{len(self.train)} training and {count(len(self.test), 'test image')}"
        lines = [
            f"{self.name}: {count(len(self.classes), 'class')}, {images}",
            f"  images a class: {int(counts.min())} to {int(counts.max())}; size: {_size(self.train)}",
        ]
        if self.split:
            lines.append(f"  split: {self.split}")
        if self.skipped:
            reasons = Counter(reason for _, reason in self.skipped)
            lines.append(f"  skipped: {len(self.skipped)} in all, {len(reasons)} kinds")
            lines += [f"    {what}: {reason}" for what, reason in self.skipped[:most]]
            if len(self.skipped) > most:
                lines.append(f"    and {len(self.skipped) - most} more")
        return "\n".join(lines)


def _size(images: Images, looks: int = 200) -> str:
    """Describe the sizes of images; of many files only some, evenly spread, are looked at."""
    if isinstance(images, ArrayImages):
        return f"{images.pixels.shape[3]} x {images.pixels.shape[2]} pixels, in memory"
    sizes = []
    for item in images.items[:: max(1, math.ceil(len(images) / looks))]:
        with suppress(DataError):
            sizes.append(check_header(item))
    if not sizes:
        return "unknown"
    (width, height), (most_width, most_height) = map(min, zip(*sizes, strict=True)), map(max, zip(*sizes, strict=True))
    seen = "" if len(sizes) == len(images) else f" ({len(sizes)} files looked at)"
    return f"{width} x {height} to {most_width} x {most_height} pixels, in files{seen}"


Reader = Callable[..., Dataset]
_readers: dict[str, Reader] = {}


def source(name: str) -> Callable[[Reader], Reader]:
    """Register a reader `(root, **options) -> Dataset` under a name; the first line of its docstring describes it."""

    def register(reader: Reader) -> Reader:
        _readers[name] = reader
        return reader

    return register


def sources() -> dict[str, str]:
    """Return the names of the sources, each with one line that says what it reads."""
    return {name: (inspect.getdoc(reader) or "").splitlines()[0] for name, reader in sorted(_readers.items())}


def source_options(name: str) -> list[str]:
    """Return the names of a source's options: the keyword arguments of its reader."""
    if not isinstance(name, str) or name not in _readers:
        raise ConfigError(f"data: unknown source {name!r}, allowed: {', '.join(sorted(_readers))}")
    return list(inspect.signature(_readers[name]).parameters)[1:]


def load(name: str, root: Path | str | None = None, **options: Any) -> Dataset:
    """Read a dataset by the name of its source. root: its file or folder."""
    known = source_options(name)
    for key in options:
        if key not in known:
            raise ConfigError(f"data: {name} has no option {key!r}, allowed: {', '.join(known) or 'none'}")
    if not isinstance(root, str | os.PathLike | None):
        raise ConfigError(f"data_dir: {type(root).__name__} given, a file or folder is needed")
    return _readers[name](None if root is None else Path(root).expanduser(), **options)


def need_root(root: Path | None, name: str, what: str, *, shared: bool = False) -> Path:
    """Return the root (for a well-known dataset, `shared`, $GEODL_DATA if none is given), or say what it should be."""
    if root is None and shared and os.environ.get("GEODL_DATA"):
        root = Path(os.environ["GEODL_DATA"])
    if root is None:
        where = "data_dir (or the environment's GEODL_DATA)" if shared else "data_dir"
        raise ConfigError(f"{where}: {name} needs {what}")
    if not os.path.lexists(root):
        raise DataError(f"{root}: no such file or folder; {name} needs {what}")
    return root


def stratified(labels: Tensor, names: Sequence[str], fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split each class into training and test positions, both in their old order. labels: int64 (N,).

    A class keeps at least one training image, and gives at least one test image if it has two. Its split depends on
    its name and its number of images only, so that other classes can come and go.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"test_fraction: {fraction} given, at least 0 and below 1 allowed")
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label, name in enumerate(names):
        positions = (labels == label).nonzero().flatten()
        count = round(fraction * len(positions))
        if fraction > 0:
            count = min(max(count, 1), len(positions) - 1)
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(derive(seed, "split", name)))
        is_test[positions[order[: max(count, 0)]]] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def drawn(images: Some, names: Sequence[str], fraction: float, seed: int) -> tuple[Some, Some, str]:
    """Split images that have no test part: training and test images, and in words how they were told apart."""
    train, test = (images.select(rows) for rows in stratified(images.labels, names, fraction, seed))
    return train, test, f"{fraction:.0%} of each class drawn as test images (split seed {seed})"


def fingerprint_of(train: Images, test: Images, more: str = "") -> str:
    """Return the fingerprint of a dataset by the contents of its images, their labels and whatever else counts."""
    return hashlib.sha256((train.digest() + test.digest() + more).encode()).hexdigest()


def packed(train: Images, test: Images) -> tuple[Images, Images]:
    """Decode small images into memory: training and test images both, or neither."""
    small, small_test = pack(train), pack(test)
    return (small, small_test) if type(small) is type(small_test) else (train, test)
