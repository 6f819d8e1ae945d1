"""The entrance for a user's images: folders, arrays, datasets. Unusable files are skipped and reported in one line each."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from geodl.core.decoding import Item, shown, upright_rgb
from geodl.core.errors import DataError
from geodl.core.files import is_folder
from geodl.core.text import count, one_line
from geodl.data.arrays import as_pixels
from geodl.data.dataset import Skipped
from geodl.data.folder import PARTS, Skips, identity, scan_folder, walk
from geodl.data.images import ArrayImages, FileImages, Images, pack, png_of
from geodl.data.listing import read_listing
from geodl.data.names import class_names, labels_of, numbered, plain_labels

LISTINGS = (".zip", ".csv", ".tsv")
"""Suffixes of files that hold or list labelled images."""


@dataclass(frozen=True)
class Intake:
    """Labelled images with the names of their classes; `names` has the origin of each image for messages."""

    title: str
    images: Images
    names: tuple[str, ...]
    problems: Skipped = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; labels are positions in them."""
        return self.images.names

    @cached_property
    def key(self) -> str:
        """A hash of class names and image contents, independent of order and file names."""
        names = [self.classes[label] for label in self.images.labels.tolist()]
        pairs = sorted(zip(names, self.images.item_digests(), strict=True))
        return hashlib.sha256(repr(pairs).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- images with labels


def take(
    source: Any,
    labels: Any = None,
    classes: Sequence[str] | None = None,
    *,
    strict: bool = False,
    series: bool = False,
) -> Intake:
    """Return labelled images from any source.

    Args:
        source: a folder of class folders, a zip archive of one, or a CSV table of files and labels; arrays, files or
            PIL images with `labels`; a torch Dataset of (image, label) pairs; ArrayImages or FileImages; or an Intake,
            which is returned unchanged.
        labels: one class name or number per image (see `geodl.data.names.numbered`).
        classes: names for numbered labels.
        strict: raise a DataError for the first file that would be skipped.
        series: folders inside class folders are series of images, whatever their names.
    """
    if isinstance(source, Intake):
        return source
    if isinstance(source, str | Path):
        if labels is not None:
            raise DataError(f"labels: not allowed with {source}, whose folders are its classes")
        path = Path(source)
        if path.suffix.lower() in LISTINGS and not is_folder(path):
            images, names, skipped = read_listing(path, strict)
            return Intake(shown(path), images, names, tuple(skipped))
        return _folder(path, strict, series)
    if labels is not None:
        pictures, _, _ = as_images(source)
        return _named("arrays", pictures, labels_of(len(pictures), labels), classes)
    if isinstance(source, ArrayImages | FileImages):
        return _own(source)
    return _dataset(source, classes)


def labelled(images: Any, labels: Any = None) -> Images:
    """Return labelled images from any source of `take`; small files of one size are decoded, as arrays are."""
    taken = take(images, labels, strict=True).images
    return taken if isinstance(images, ArrayImages | FileImages) and labels is None else pack(taken)


def _folder(root: Path, strict: bool, series: bool) -> Intake:
    images, classes, problems = scan_folder(root, strict)
    if not classes:
        first = f"; first: {problems[0][0]}: {problems[0][1]}" if problems else ""
        remedy = "put the images of each class into a folder of its own, named after the class"
        raise DataError(f"{shown(root)}: no class folders with images found; {remedy}{first}")
    paths = [item.relative_to(root) for item in images.items if isinstance(item, Path)]
    if not series and _are_parts(classes, paths):
        # Suggest training images, not test images.
        tests = ("test", "val")
        part = min(classes, key=lambda name: (name != "train", name.lower().startswith(tests)))
        raise DataError(
            f"{shown(root)}: its folders look like parts of a dataset, not like classes; "
            f"give one of them, such as {shown(root / part)}; "
            "if they are classes that hold series of images, --group-by folder learns them"
        )
    return Intake(shown(root), images, tuple(shown(path) for path in paths), problems)


def _are_parts(folders: Sequence[str], paths: Sequence[Path]) -> bool:
    """Return whether folders look like parts of a dataset: by their names, or because folders in them have equal names."""
    if any(len(path.parts) < 3 for path in paths):
        return False
    subfolders = {path.parts[:2] for path in paths}
    counts = Counter(name for _, name in subfolders)
    usual = all(folder.lower() in PARTS for folder in folders)
    return usual or len(folders) == 1 or counts.most_common(1)[0][1] > 1


def _own(images: Images) -> Intake:
    """Return ArrayImages or FileImages as an Intake; classes without names are named by their numbers."""
    low, high = (int(images.labels.min()), int(images.labels.max())) if len(images) else (0, -1)
    if low < 0:
        raise DataError(f"label {low}: labels are numbers from 0")
    if images.names and high >= len(images.names):
        raise DataError(f"label {high} has no name: {count(len(images.names), 'class name')} given")
    named = replace(images, names=class_names(images.names or range(high + 1)))
    return Intake("images", named, _origins(named))


def _dataset(source: Any, classes: Sequence[str] | None) -> Intake:
    """Return a torch Dataset as an Intake; its class names are `classes`, or its own as in torchvision's datasets."""
    kind = type(source).__name__
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise DataError(
            f"images: expected a folder, arrays with labels or a torch Dataset, got {kind}"
        )
    try:
        pairs = [source[i] for i in range(len(source))]
    except Exception as error:  # a user's own code, or no dataset at all
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"the {kind} cannot be read as a dataset ({reason})") from error
    if any(not isinstance(pair, tuple | list) or len(pair) < 2 for pair in pairs):
        raise DataError(
            "expected a dataset of (image, label) pairs; images without labels need `labels`"
        )
    own = getattr(source, "classes", None)
    if not isinstance(own, list | tuple) or not all(isinstance(name, str) for name in own):
        own = None
    images = _unlabelled(tuple(_png(pair[0]) for pair in pairs))
    return _named("dataset", images, plain_labels([pair[1] for pair in pairs]), classes or own)


def _named(title: str, images: Images, labels: list[Any], classes: Sequence[str] | None) -> Intake:
    """Return images with labels as an Intake; its classes are those that have images, in the order of their names."""
    rows, names = numbered(labels, classes)
    if not labels:
        raise DataError(f"{title}: no images given")
    if classes is not None:
        rows, names = numbered([names[row] for row in rows.tolist()])
    named = replace(images, labels=rows, names=names)
    return Intake(title, named, _origins(named))


def _origins(images: Images) -> tuple[str, ...]:
    """Return names for images without files: class and position."""
    labels = enumerate(images.labels.tolist())
    return tuple(f"{images.names[label]}/image {i}" for i, label in labels)


# ------------------------------------------------------------------------------------------- images without labels


def as_images(source: Any) -> tuple[Images, list[str], Skipped]:
    """Return unlabelled images from files, folders (with everything in them), arrays or PIL images; their names; skipped files."""
    if isinstance(source, ArrayImages | FileImages):
        return source, [f"image {i}" for i in range(len(source))], ()
    if isinstance(source, np.ndarray | Tensor):
        pixels = as_pixels(source)
        if source.ndim == 3 and 3 in (source.shape[0], source.shape[2]):
            either = f"one color image or {source.shape[0]} gray ones"
            remedy = "add an axis: (1, 3, H, W) or (1, H, W, 3), or (N, 1, H, W)"
            raise DataError(f"an array of shape {tuple(source.shape)} may be {either}; {remedy}")
        return _unlabelled(pixels), [f"image {i}" for i in range(len(pixels))], ()
    items: list[Item] = []
    names: list[str] = []
    skipped: Skips = []
    for i, part in enumerate(_parts(source)):
        if isinstance(part, str | Path):
            paths = _files(Path(part), skipped)
            items += paths
            names += [shown(path) for path in paths]
        else:
            items.append(_png(part))
            names.append(f"image {i}")
    return _unlabelled(tuple(items)), names, tuple(skipped)


def _parts(source: Any) -> list[Any]:
    if isinstance(source, str | Path | Image.Image):
        return [source]
    kind = type(source).__name__
    if not isinstance(source, Iterable):
        raise DataError(f"images: expected files, folders, arrays or PIL images, got {kind}")
    try:
        return list(source)
    except Exception as error:  # a user's own object
        reason = type(error).__name__
        raise DataError(f"images: the {kind} cannot be iterated over ({reason})") from error


def _unlabelled(content: Tensor | tuple[Item, ...]) -> Images:
    labels = torch.zeros(len(content), dtype=torch.int64)
    if isinstance(content, Tensor):
        return ArrayImages(content, labels)
    return FileImages(content, labels)


def _files(path: Path, skipped: Skips) -> list[Path]:
    """Return a file, or all files below a folder; unreadable ones are added to `skipped`."""
    if os.path.isfile(path):  # noqa: PTH113  # Path.is_file raises if a name is too long
        return [path]
    if not is_folder(path):  # opening a pipe or a device could block
        exists = os.path.lexists(path)
        skipped.append((shown(path), "not a regular file" if exists else "no such file or folder"))
        return []
    inside: Skips = []
    files = list(walk(path, path, {identity(path)}, inside))
    skipped += [(shown(path / name), reason) for name, reason in inside]
    return files


def _png(image: Any) -> bytes:
    """Encode an image in memory, a PIL image or an array of one image, as PNG."""
    if isinstance(image, Image.Image):
        try:
            image = upright_rgb(image)
        except Exception as error:  # for a closed file or missing pixels, Pillow raises any error
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise DataError(f"a PIL image cannot be used ({reason})") from error
    else:
        image = Image.fromarray(as_pixels(image, one=True)[0].permute(1, 2, 0).contiguous().numpy())
    return png_of(image, compression=1)
