"""Folders of class folders: a user's images, ImageNet, its subset of 100 classes. Nothing is ever written into them."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from geodl.core.decoding import check_header, open_image, read_bytes, shown
from geodl.core.errors import DataError
from geodl.core.files import is_folder
from geodl.data.batches import in_threads
from geodl.data.dataset import (
    Dataset,
    Skipped,
    drawn,
    fingerprint_of,
    insist,
    need_root,
    packed,
    source,
)
from geodl.data.images import FileImages, Images, with_rows
from geodl.data.names import fault, natural_key

TEST_NAMES = ("test", "val", "validation")
PARTS = (*TEST_NAMES, "train", "training", "testing", "valid", "dev", "eval")
"""Names of the parts of a dataset."""
OUTSIDE = "not inside a class folder"
TWICE = "a link to a folder that is read already"
AHEAD = 256
"""Files that the threads may be ahead of the one that is looked at."""

Skips = list[tuple[str, str]]
Found = dict[str, list[Path]]
"""The files of each class, classes and files in natural order."""


def scan_folder(
    root: Path, strict: bool = False, *, verify: bool = False
) -> tuple[FileImages, tuple[str, ...], Skipped]:
    """Find the images of a folder of class folders.

    Folders inside a class folder belong to the class; what is hidden (a dot first) is ignored; the content of a file decides what it
    is, not its name. Whatever cannot be used is skipped and named with a reason, or is a DataError if `strict`.

    Args:
        root: the folder.
        strict: raise a DataError for the first thing that would be skipped.
        verify: decode every image completely instead of looking at its header.

    Returns:
        The images (labels are positions in the class names), the class names in natural order (2 before 10), and what
        was skipped.
    """
    skipped: Skips = []

    def check() -> None:
        insist(strict, [(shown(root / what), reason) for what, reason in skipped[:1]])

    found = _class_files(root, skipped)
    check()
    bad = set()
    tasks = ((path, [(path, verify)]) for paths in found.values() for path in paths)
    for path, (reason,) in in_threads(_problem, tasks, os.cpu_count() or 1, AHEAD):
        if reason is not None:
            bad.add(path)
            skipped.append((_relative(root, path), reason))
            check()  # at once: the rest is not read
    found = _without(found, bad)
    found = _without(found, _in_several_classes(root, found, skipped))
    skipped += [(name, "no images in this class folder") for name in found if not found[name]]
    check()
    images = _labelled(found)
    return images, images.names, tuple(skipped)


def _labelled(found: Found) -> FileImages:
    """Return the files with their classes as labels; a class without any is left out."""
    filled = {name: paths for name, paths in found.items() if paths}
    counts = torch.tensor([len(paths) for paths in filled.values()], dtype=torch.int64)
    labels = torch.arange(len(filled)).repeat_interleave(counts)
    return FileImages(tuple(chain(*filled.values())), labels, tuple(filled))


def _without(found: Found, gone: set[Path]) -> Found:
    left = {}
    for name, paths in found.items():
        left[name] = [path for path in paths if path not in gone]
    return left


def _class_files(root: Path, skipped: Skips) -> Found:
    if not is_folder(root):
        raise DataError(f"{shown(root)}: not a folder; a folder of class folders is needed")
    files: Found = {}
    entries = _entries(root)
    # No folder is read twice, nor entered from within itself; class folders are read as such before any link leads to them.
    visited = {identity(folder) for folder in (root, *root.resolve().parents)}
    visited |= {identity(entry) for entry in entries if entry.is_dir() and not entry.is_symlink()}
    for entry in entries:
        # A name typed on another system may be composed differently (é as one sign or two): it is the same class.
        name = unicodedata.normalize("NFC", entry.name)
        where = shown(Path(entry.name))
        if name.startswith("."):
            continue
        if not entry.is_dir():
            skipped.append((where, OUTSIDE))
        elif reason := fault(name):
            skipped.append((where, f"no name of a class: {reason}"))
        elif entry.is_symlink() and identity(entry) in visited:
            skipped.append((where, TWICE))
        else:
            visited.add(identity(entry))
            files.setdefault(name, []).extend(walk(root, entry, visited, skipped))
    first: dict[str, str] = {}
    for name in files:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            words = f"differs from class {other!r} only in upper and lower case; both are kept"
            skipped.append((name, words))
    return files


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: (natural_key(path.name), path.name))
    except OSError as error:
        raise DataError(f"{shown(folder)}: the folder cannot be read ({error.strerror})") from None


def identity(path: Path) -> tuple[int, int]:
    """Tell a folder by what it is, not by the way to it."""
    status = path.stat()
    return status.st_dev, status.st_ino


def walk(root: Path, folder: Path, visited: set[tuple[int, int]], skipped: Skips) -> Iterator[Path]:
    """Yield all files under a folder in natural order, without hidden ones; links are followed, but no folder is entered twice."""
    try:
        entries = _entries(folder)
    except DataError:
        skipped.append((_relative(root, folder), "the folder cannot be read"))
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        where = _relative(root, entry)
        try:
            if entry.is_file():
                yield entry
            elif not entry.is_dir():
                reason = "a broken link" if entry.is_symlink() else "not a regular file"
                skipped.append((where, reason))
            elif identity(entry) in visited:
                skipped.append((where, TWICE))
            else:
                visited.add(identity(entry))
                yield from walk(root, entry, visited, skipped)
        except OSError as error:  # no permission to look at it
            skipped.append((where, f"cannot be read ({error.strerror})"))


def _relative(root: Path, path: Path) -> str:
    return shown(path.relative_to(root))


def _problem(path: Path, verify: bool) -> str | None:
    """Return the reason why a file is no image; None where it is one."""
    try:
        open_image(path) if verify else check_header(path, reduced=True)
    except DataError as error:
        return str(error).removeprefix(f"{shown(path)}: ")
    return None


def _in_several_classes(root: Path, found: Found, skipped: Skips) -> set[Path]:
    """Return the images that stand in several classes: one of their labels is wrong, and nobody knows which."""
    by_size: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    for name, paths in found.items():
        for path in paths:
            by_size[path.stat().st_size].append((name, path))
    equal: dict[bytes, list[tuple[str, Path]]] = defaultdict(list)
    for candidates in by_size.values():
        if len({name for name, _ in candidates}) > 1:  # equal files have equal sizes: few are read
            for name, path in candidates:
                equal[hashlib.sha256(read_bytes(path)).digest()].append((name, path))
    doubles: set[Path] = set()
    for same in equal.values():
        for name, path in same:
            twin = next((other for label, other in same if label != name), None)
            if twin is not None:
                doubles.add(path)
                words = f"the same image as {_relative(root, twin)} in another class"
                skipped.append((_relative(root, path), words))
    return doubles


# ----------------------------------------------------------------------------------------------------------- sources


@source("folder")
def read_folder(
    root: Path | None, *, test_fraction: float = 0.2, split_seed: int = 0, strict: bool = False
) -> Dataset:
    """Folder of class folders, or train/ and test/ (or val/) folders of class folders."""
    root = need_root(root, "folder", "a folder of class folders")
    tests = [root / name for name in TEST_NAMES if (root / name).is_dir()]
    if (root / "train").is_dir() and tests:
        train, skipped = _scanned(root, root / "train", strict)
        held, test_skipped = _scanned(root, tests[0], strict)
        classes = train.names
        test, unknown = _aligned(held, classes, tests[0].name, strict)
        skipped, split = skipped + test_skipped + unknown, f"train/ and {tests[0].name}/"
    else:
        entries = [entry for entry in _entries(root) if not entry.name.startswith(".")]
        folders = [entry.name for entry in entries if entry.is_dir()]
        # train/ alone is a dataset without its test part; beside other folders it is a class of vehicles.
        part = root / "train" if folders == ["train"] else root
        images, skipped = _scanned(root, part, strict)
        classes = images.names
        train, test, split = drawn(images, classes, test_fraction, split_seed)
    fingerprint = fingerprint_of(train, test, "/".join(classes))
    return Dataset(root.resolve().name, *packed(train, test), classes, fingerprint, skipped, split)


def _scanned(root: Path, part: Path, strict: bool) -> tuple[FileImages, Skipped]:
    images, _, skipped = scan_folder(part, strict, verify=True)
    inside = part.relative_to(root)
    return images, tuple((str(inside / what), reason) for what, reason in skipped)


def _aligned(
    images: FileImages, classes: tuple[str, ...], part: str, strict: bool
) -> tuple[Images, Skipped]:
    """Give test images the labels of the training classes; leave out classes that training does not have."""
    unknown = [name for name in images.names if name not in classes]
    skipped = tuple((f"{part}/{name}", "no such class in train/") for name in unknown)
    insist(strict, skipped)
    known = with_rows(images, classes)
    return known.select(known.labels >= 0), skipped


@source("imagenet")
def read_imagenet(root: Path | None) -> Dataset:
    """ImageNet: train/ and val/ folders of class folders named by synset."""
    return _imagenet(root, "imagenet", np.arange(1000))


@source("imagenet-subset")
def read_imagenet_subset(root: Path | None) -> Dataset:
    """100 of ImageNet's 1000 classes, those that permutation(1000) with seed 1993 puts first."""
    # the classes keep the order of the permutation
    return _imagenet(root, "imagenet-subset", np.random.RandomState(1993).permutation(1000)[:100])


def _imagenet(root: Path | None, name: str, chosen: NDArray[np.int64]) -> Dataset:
    """Read 1.3 million names, but no file: neither the check nor the fingerprint opens them."""
    root = need_root(root, name, "a folder with train/ and val/", shared=True)
    base = root if (root / "train").is_dir() else root / "imagenet"
    base = base if (base / "train").is_dir() else root
    parts: list[FileImages] = []
    skipped: Skips = []
    for part in ("train", "val"):
        found = _class_files(base / part, skipped)
        found = {synset: paths for synset, paths in found.items() if paths}
        if len(found) != 1000:
            given = f"{len(found)} class folders with files found"
            raise DataError(f"{base / part}: {given}, ImageNet has 1000")
        synsets = sorted(found)
        parts.append(_labelled({synsets[i]: found[synsets[i]] for i in chosen}))
    train, test = parts
    if train.names != test.names:
        raise DataError(f"{base}: train/ and val/ do not have the same classes")
    digest = hashlib.sha256()
    for path in (*train.items, *test.items):
        assert isinstance(path, Path)
        digest.update(f"{path.relative_to(base)} {path.stat().st_size}\n".encode())
    fingerprint = digest.hexdigest()
    return Dataset(name, train, test, train.names, fingerprint, tuple(skipped), "train/ and val/")
