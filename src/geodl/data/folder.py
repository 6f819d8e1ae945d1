"""Folders of class folders: a user's images, ImageNet, its subset of 100 classes. Nothing is ever written into them."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from geodl.data.batches import in_threads
from geodl.data.dataset import Dataset, Skipped, drawn, fingerprint_of, insist, need_root, packed, source
from geodl.data.images import FileImages, check_header, open_image, read_bytes, shown
from geodl.data.names import fault
from geodl.errors import DataError
from geodl.files import is_folder

TEST_NAMES = ("test", "val", "validation")
TWICE = "a link to a folder that is read already"
AHEAD = 256
"""Files that the threads may be ahead of the one that is looked at."""

Skips = list[tuple[str, str]]


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
    usable = set()
    tasks = ((path, [(path, verify)]) for _, paths in found for path in paths)
    for path, (reason,) in in_threads(_problem, tasks, os.cpu_count() or 1, AHEAD):
        if reason is None:
            usable.add(path)
        else:
            skipped.append((_relative(root, path), reason))
            check()  # at once: the rest is not read
    found = [(name, [path for path in paths if path in usable]) for name, paths in found]
    found = _without_duplicates(root, found, skipped)
    skipped += [(name, "no images in this class folder") for name, paths in found if not paths]
    check()
    images, classes = _labelled([(name, paths) for name, paths in found if paths])
    return images, classes, tuple(skipped)


def natural_key(name: str) -> list[str | int]:
    """Sort numbers inside names by value: "class 2" before "class 10"."""
    parts = re.split(r"(\d+)", name)  # text and digits in turn, so that like is compared with like
    return [int(part) if i % 2 else part.casefold() for i, part in enumerate(parts)]


def _labelled(found: list[tuple[str, list[Path]]]) -> tuple[FileImages, tuple[str, ...]]:
    counts = torch.tensor([len(paths) for _, paths in found], dtype=torch.int64)
    labels = torch.arange(len(found)).repeat_interleave(counts)
    return FileImages(tuple(path for _, paths in found for path in paths), labels), tuple(name for name, _ in found)


def _class_files(root: Path, skipped: Skips) -> list[tuple[str, list[Path]]]:
    """List the files of each class, classes and files in natural order."""
    if not is_folder(root):
        raise DataError(f"{shown(root)}: not a folder; a folder of class folders is needed")
    files: dict[str, list[Path]] = {}
    entries = _entries(root)
    # No folder is read twice, nor entered from within itself; class folders are read as such before any link leads to them.
    visited = {identity(folder) for folder in (root, *root.resolve().parents)}
    visited |= {identity(entry) for entry in entries if entry.is_dir() and not entry.is_symlink()}
    for entry in entries:
        # A name typed on another system may be composed differently (é as one sign or two): it is the same class.
        name = unicodedata.normalize("NFC", entry.name)
        if name.startswith("."):
            continue
        if not entry.is_dir():
            skipped.append((shown(Path(entry.name)), "not inside a class folder"))
        elif reason := fault(name):
            skipped.append((shown(Path(entry.name)), f"no name of a class: {reason}"))
        elif entry.is_symlink() and identity(entry) in visited:
            skipped.append((shown(Path(entry.name)), TWICE))
        else:
            visited.add(identity(entry))
            files.setdefault(name, []).extend(walk(root, entry, visited, skipped))
    _name_case_clashes(list(files), skipped)
    return list(files.items())


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: (natural_key(path.name), path.name))
    except OSError as error:
        raise DataError(f"{shown(folder)}: the folder cannot be read ({error.strerror})") from None


def _name_case_clashes(names: list[str], skipped: Skips) -> None:
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            skipped.append((name, f"differs from class {other!r} only in upper and lower case; both are kept"))


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
        try:
            if entry.is_dir():
                if identity(entry) in visited:
                    skipped.append((_relative(root, entry), TWICE))
                    continue
                visited.add(identity(entry))
                yield from walk(root, entry, visited, skipped)
            elif entry.is_file():
                yield entry
            else:
                skipped.append(
                    (_relative(root, entry), "a broken link" if entry.is_symlink() else "not a regular file")
                )
        except OSError as error:  # no permission to look at it
            skipped.append((_relative(root, entry), f"cannot be read ({error.strerror})"))


def _relative(root: Path, path: Path) -> str:
    return shown(path.relative_to(root))


def _problem(path: Path, verify: bool) -> str | None:
    """Return the reason why a file is no image; None where it is one."""
    try:
        open_image(path) if verify else check_header(path)
    except DataError as error:
        return str(error).removeprefix(f"{shown(path)}: ")
    return None


def _without_duplicates(
    root: Path, found: list[tuple[str, list[Path]]], skipped: Skips
) -> list[tuple[str, list[Path]]]:
    """Leave out images that stand in several classes: one of their labels is wrong, and nobody knows which."""
    by_size: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    for name, paths in found:
        for path in paths:
            by_size[path.stat().st_size].append((name, path))
    doubles: set[Path] = set()
    for candidates in by_size.values():
        if len({name for name, _ in candidates}) < 2:  # equal files have equal sizes: few need to be read
            continue
        equal: dict[str, list[tuple[str, Path]]] = defaultdict(list)
        for name, path in candidates:
            equal[hashlib.sha256(read_bytes(path)).hexdigest()].append((name, path))
        for same in equal.values():
            for name, path in same:
                twin = next((other for label, other in same if label != name), None)
                if twin is not None:
                    doubles.add(path)
                    skipped.append(
                        (_relative(root, path), f"the same image as {_relative(root, twin)} in another class")
                    )
    return [(name, [path for path in paths if path not in doubles]) for name, paths in found]


# ----------------------------------------------------------------------------------------------------------- sources


@source("folder")
def read_folder(root: Path | None, *, test_fraction: float = 0.2, split_seed: int = 0, strict: bool = False) -> Dataset:
    """Folder of class folders, or train/ and test/ (or val/) folders of class folders."""
    root = need_root(root, "folder", "a folder of class folders")
    tests = [root / name for name in TEST_NAMES if (root / name).is_dir()]
    if (root / "train").is_dir() and tests:
        train, classes, skipped = _scanned(root, root / "train", strict)
        test, test_classes, test_skipped = _scanned(root, tests[0], strict)
        test, unknown = _aligned(test, test_classes, classes, tests[0].name, strict)
        skipped, split = skipped + test_skipped + unknown, f"train/ and {tests[0].name}/"
    else:
        folders = [entry.name for entry in _entries(root) if entry.is_dir() and not entry.name.startswith(".")]
        # train/ alone is a dataset without its test part; beside other folders it is a class of vehicles.
        images, classes, skipped = _scanned(root, root / "train" if folders == ["train"] else root, strict)
        train, test, split = drawn(images, classes, test_fraction, split_seed)
    fingerprint = fingerprint_of(train, test, "/".join(classes))
    return Dataset(root.resolve().name, *packed(train, test), classes, fingerprint, skipped, split)


def _scanned(root: Path, part: Path, strict: bool) -> tuple[FileImages, tuple[str, ...], Skipped]:
    images, classes, skipped = scan_folder(part, strict, verify=True)
    return images, classes, tuple((str(part.relative_to(root) / what), reason) for what, reason in skipped)


def _aligned(
    images: FileImages, theirs: tuple[str, ...], classes: tuple[str, ...], part: str, strict: bool
) -> tuple[FileImages, Skipped]:
    """Give test images the labels of the training classes; leave out classes that training does not have."""
    unknown = tuple((f"{part}/{name}", "no such class in train/") for name in theirs if name not in classes)
    insist(strict, unknown)
    mapping = torch.tensor([classes.index(name) if name in classes else -1 for name in theirs], dtype=torch.int64)
    known = images.select(mapping[images.labels] >= 0)
    return known.relabel(mapping), unknown


@source("imagenet")
def read_imagenet(root: Path | None) -> Dataset:
    """ImageNet: train/ and val/ folders of class folders named by synset."""
    return _imagenet(root, "imagenet", slice(None))


@source("imagenet-subset")
def read_imagenet_subset(root: Path | None) -> Dataset:
    """100 of ImageNet's 1000 classes, those that permutation(1000) with seed 1993 puts first."""
    # the classes keep the order of the permutation
    return _imagenet(root, "imagenet-subset", np.random.RandomState(1993).permutation(1000)[:100])


def _imagenet(root: Path | None, name: str, chosen: slice | np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Dataset:
    """Read 1.3 million names, but no file: neither the check nor the fingerprint opens them."""
    root = need_root(root, name, "a folder with train/ and val/", shared=True)
    base = next((folder for folder in (root, root / "imagenet") if (folder / "train").is_dir()), root)
    parts: list[list[tuple[str, list[Path]]]] = []
    skipped: Skips = []
    for part in ("train", "val"):
        found = {synset: paths for synset, paths in _class_files(base / part, skipped) if paths}
        if len(found) != 1000:
            raise DataError(f"{base / part}: {len(found)} class folders with files found, ImageNet has 1000")
        parts.append([(synset, found[synset]) for synset in np.array(sorted(found))[chosen].tolist()])
    (train, classes), (test, test_classes) = (_labelled(part) for part in parts)
    if classes != test_classes:
        raise DataError(f"{base}: train/ and val/ do not have the same classes")
    digest = hashlib.sha256()
    for path in (*train.items, *test.items):
        assert isinstance(path, Path)
        digest.update(f"{path.relative_to(base)} {path.stat().st_size}\n".encode())
    return Dataset(name, train, test, classes, digest.hexdigest(), tuple(skipped), "train/ and val/")
