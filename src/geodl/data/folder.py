"""Folders of class folders: a user's images, ImageNet, its subset of 100 classes. They are only read."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from geodl.core.decoding import image_problem, read_bytes, shown
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
from geodl.data.images import FileImages, with_rows
from geodl.data.names import fault, natural_key

TEST_NAMES = ("test", "val", "validation")
PARTS = (*TEST_NAMES, "train", "training", "testing", "valid", "dev", "eval")
"""Names of the parts of a dataset."""
OUTSIDE = "not inside a class folder"
TWICE = "a link to a folder that is read already"
AHEAD = 256
"""Files that threads may check in advance."""

Skips = list[tuple[str, str]]
ClassFiles = dict[str, list[Path]]
"""The files of each class; classes and files are in natural order."""


def scan_folder(
    root: Path, strict: bool = False, *, verify: bool = False
) -> tuple[FileImages, tuple[str, ...], Skipped]:
    """Find the images of a folder of class folders.

    Folders inside a class folder belong to the class. Hidden files and folders (with a leading dot) are ignored. The
    content of a file determines its format, not its name. Unusable files are skipped, each with a reason.

    Args:
        root: the folder.
        strict: raise a DataError for the first file that would be skipped.
        verify: decode every image completely instead of reading only its header.

    Returns:
        The images (labels are positions in the class names), the class names in natural order (2 before 10), and the
        skipped files.
    """
    skipped: Skips = []

    def check() -> None:
        insist(strict, [(shown(root / what), reason) for what, reason in skipped[:1]])

    files = _class_files(root, skipped)
    check()
    bad = set()
    check_image = partial(image_problem, verify=verify)
    tasks = ((path, [(path,)]) for paths in files.values() for path in paths)
    for path, (reason,) in in_threads(check_image, tasks, os.cpu_count() or 1, AHEAD):
        if reason is not None:
            bad.add(path)
            skipped.append((_relative(root, path), reason))
            check()  # immediately: the rest is not read
    files = _without(files, bad)
    files = _without(files, _in_several_classes(root, files, skipped))
    skipped += [(name, "no images in this class folder") for name in files if not files[name]]
    check()
    images = _labelled(files)
    return images, images.names, tuple(skipped)


def _labelled(files: ClassFiles) -> FileImages:
    """Return the files with their classes as labels; empty classes are left out."""
    filled = {name: paths for name, paths in files.items() if paths}
    counts = torch.tensor([len(paths) for paths in filled.values()], dtype=torch.int64)
    labels = torch.arange(len(filled)).repeat_interleave(counts)
    return FileImages(tuple(chain(*filled.values())), labels, tuple(filled))


def _without(files: ClassFiles, excluded: set[Path]) -> ClassFiles:
    remaining = {}
    for name, paths in files.items():
        remaining[name] = [path for path in paths if path not in excluded]
    return remaining


def _class_files(root: Path, skipped: Skips) -> ClassFiles:
    if not is_folder(root):
        raise DataError(f"{shown(root)}: not a folder; a folder of class folders is needed")
    files: ClassFiles = {}
    entries = _entries(root)
    # No folder is read twice. Class folders count as visited from the start, so that no link to one replaces it.
    visited = {identity(folder) for folder in (root, *root.resolve().parents)}
    visited |= {identity(entry) for entry in entries if entry.is_dir() and not entry.is_symlink()}
    for entry in entries:
        # Unicode has two forms of é, and systems differ in the one they use: both are the same class.
        name = unicodedata.normalize("NFC", entry.name)
        where = shown(Path(entry.name))
        if name.startswith("."):
            continue
        if not entry.is_dir():
            skipped.append((where, OUTSIDE))
        elif reason := fault(name):
            skipped.append((where, f"not a class name: {reason}"))
        elif entry.is_symlink() and identity(entry) in visited:
            skipped.append((where, TWICE))
        else:
            visited.add(identity(entry))
            files.setdefault(name, []).extend(walk(root, entry, visited, skipped))
    first: dict[str, str] = {}
    for name in files:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            note = f"differs from class {other!r} only in upper and lower case; both are kept"
            skipped.append((name, note))
    return files


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: (natural_key(path.name), path.name))
    except OSError as error:
        raise DataError(f"{shown(folder)}: the folder cannot be read ({error.strerror})") from None


def identity(path: Path) -> tuple[int, int]:
    """Return device and inode of a folder, which are the same along every path to it."""
    status = path.stat()
    return status.st_dev, status.st_ino


def walk(root: Path, folder: Path, visited: set[tuple[int, int]], skipped: Skips) -> Iterator[Path]:
    """Yield all files below a folder in natural order, without hidden ones; links are followed, but no folder is read twice."""
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
        except OSError as error:  # no permission
            skipped.append((where, f"cannot be read ({error.strerror})"))


def _relative(root: Path, path: Path) -> str:
    return shown(path.relative_to(root))


def _in_several_classes(root: Path, files: ClassFiles, skipped: Skips) -> set[Path]:
    """Return the images that are in several classes: at least one of their labels is wrong."""
    by_size: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    for name, paths in files.items():
        for path in paths:
            by_size[path.stat().st_size].append((name, path))
    equal: dict[bytes, list[tuple[str, Path]]] = defaultdict(list)
    for candidates in by_size.values():
        if len({name for name, _ in candidates}) > 1:  # only files of equal size can be equal
            for name, path in candidates:
                equal[hashlib.sha256(read_bytes(path)).digest()].append((name, path))
    duplicates: set[Path] = set()
    for same in equal.values():
        for name, path in same:
            twin = next((other for label, other in same if label != name), None)
            if twin is not None:
                duplicates.add(path)
                reason = f"the same image as {_relative(root, twin)} in another class"
                skipped.append((_relative(root, path), reason))
    return duplicates


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
        held_out, test_skipped = _scanned(root, tests[0], strict)
        classes, part = train.names, tests[0].name
        unknown = [name for name in held_out.names if name not in classes]
        foreign = tuple((f"{part}/{name}", "no such class in train/") for name in unknown)
        insist(strict, foreign)
        known = with_rows(held_out, classes)
        test = known.select(known.labels >= 0)
        skipped, split = skipped + test_skipped + foreign, f"train/ and {part}/"
    else:
        entries = [entry for entry in _entries(root) if not entry.name.startswith(".")]
        folders = [entry.name for entry in entries if entry.is_dir()]
        # train/ alone is a dataset without a test part; beside other folders it is a class (of vehicles).
        base = root / "train" if folders == ["train"] else root
        images, skipped = _scanned(root, base, strict)
        classes = images.names
        train, test, split = drawn(images, classes, test_fraction, split_seed)
    fingerprint = fingerprint_of(train, test, "/".join(classes))
    return Dataset(root.resolve().name, *packed(train, test), classes, fingerprint, skipped, split)


def _scanned(root: Path, part: Path, strict: bool) -> tuple[FileImages, Skipped]:
    images, _, skipped = scan_folder(part, strict, verify=True)
    inside = part.relative_to(root)
    return images, tuple((str(inside / what), reason) for what, reason in skipped)


@source("imagenet")
def read_imagenet(root: Path | None) -> Dataset:
    """ImageNet: train/ and val/ folders of class folders named by synset."""
    return _imagenet(root, "imagenet", np.arange(1000))


@source("imagenet-subset")
def read_imagenet_subset(root: Path | None) -> Dataset:
    """100 of ImageNet's 1000 classes: the first ones, in order, of permutation(1000) with seed 1993."""
    return _imagenet(root, "imagenet-subset", np.random.RandomState(1993).permutation(1000)[:100])


def _imagenet(root: Path | None, name: str, chosen: NDArray[np.int64]) -> Dataset:
    """Read names and sizes of 1.3 million files; none is opened."""
    root = need_root(root, name, "a folder with train/ and val/", shared=True)
    base = root if (root / "train").is_dir() else root / "imagenet"
    base = base if (base / "train").is_dir() else root
    parts: list[FileImages] = []
    skipped: Skips = []
    for part in ("train", "val"):
        files = _class_files(base / part, skipped)
        files = {synset: paths for synset, paths in files.items() if paths}
        if len(files) != 1000:
            found = f"{len(files)} class folders with files found"
            raise DataError(f"{base / part}: {found}, ImageNet has 1000")
        synsets = sorted(files)
        parts.append(_labelled({synsets[i]: files[synsets[i]] for i in chosen}))
    train, test = parts
    if train.names != test.names:
        raise DataError(f"{base}: train/ and val/ do not have the same classes")
    digest = hashlib.sha256()
    for path in (*train.items, *test.items):
        assert isinstance(path, Path)
        digest.update(f"{path.relative_to(base)} {path.stat().st_size}\n".encode())
    fingerprint = digest.hexdigest()
    return Dataset(name, train, test, train.names, fingerprint, tuple(skipped), "train/ and val/")
