"""The pictures that a model in closed form keeps to show: encoded files, shared by all states that keep them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geodl.core.errors import DataError
from geodl.data.batches import resized
from geodl.data.images import ArrayImages, FileImages, Images
from geodl.data.squares import square
from geodl.store import File, SavedPhase

KINDS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png"}
"""The first bytes of the formats in which pictures are kept, and the suffixes of their files."""


@dataclass(frozen=True)
class Stored:
    """A picture in a directory, whose content is read and verified when it is needed."""

    phase: SavedPhase
    name: str

    def __call__(self) -> bytes:
        """Return the encoded picture."""
        return self.phase.read(self.name)


@dataclass(frozen=True, eq=False)
class Pictures(FileImages):
    """Encoded pictures, with the hashes of the squares that the network sees."""

    items: tuple[bytes | Stored, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of all files."""
        stored = [item.phase.files[item.name][1] for item in self.items if isinstance(item, Stored)]
        return sum(stored) + sum(len(item) for item in self.items if isinstance(item, bytes))


def pictures_of(
    originals: Images, learned: Images, size: int, *, as_they_came: bool, whole: bool = False
) -> Pictures:
    """Return images as pictures to keep.

    A JPEG or PNG file is kept unchanged if it is smaller than a PNG file of the square that the network sees, and is
    decoded to the same pixels; otherwise the square is kept. So a large photograph takes little space.

    Args:
        originals: the images as they were given.
        learned: the same images as they were learned.
        size: of the square, in pixels.
        as_they_came: False keeps only squares.
        whole: the network sees all of an image, not its center square.
    """
    seen = resized(learned, size, whole=whole)
    items = []
    for i in range(len(seen)):
        png = seen.encoded(i)
        came = _original(originals, i) if as_they_came else None
        keeps = came is not None and len(came) < len(png) and _shows(came, seen.pixels[i], whole)
        items.append(came if came is not None and keeps else png)
    return Pictures(tuple(items), learned.labels, digests=tuple(seen.item_digests()))


def _original(images: Images, i: int) -> bytes | None:
    """Return image i as it came; None if the file is gone, or in a format that is not kept."""
    with suppress(DataError):
        content = images.encoded(i)
        if content.startswith(tuple(KINDS)):
            return content
    return None


def _shows(content: bytes, pixels: Tensor, whole: bool) -> bool:
    """Return whether an encoded picture is decoded to a square, (3, size, size)."""
    images = FileImages((content,), torch.zeros(1, dtype=torch.int64))
    found = square(images, 0, pixels.shape[1], whole, reduced=True)
    return isinstance(found, Tensor) and torch.equal(found, pixels)


def as_pictures(images: Images) -> Pictures:
    """Return what is kept to show as pictures; the squares of version 0.2 become PNG files."""
    if isinstance(images, Pictures):
        return images
    assert isinstance(images, ArrayImages)
    return pictures_of(images, images, images.pixels.shape[2], as_they_came=False)


def together(parts: Sequence[Pictures]) -> Pictures:
    """Join pictures, sorted by class."""
    items = [item for part in parts for item in part.items]
    digests = [digest for part in parts for digest in part.digests]
    labels = torch.cat([part.labels for part in parts])
    joined = Pictures(tuple(items), labels, digests=tuple(digests))
    return joined.select(labels.argsort(stable=True))


def to_files(pictures: Pictures) -> tuple[list[dict[str, Any]], dict[str, bytes | File]]:
    """Return the record of pictures, and their files by name."""
    record: list[dict[str, Any]] = []
    files: dict[str, bytes | File] = {}
    rows = zip(pictures.items, pictures.labels.tolist(), pictures.digests, strict=True)
    for i, (item, label, digest) in enumerate(rows):
        content: bytes | File
        if isinstance(item, Stored):
            kind, content = item.name.rpartition(".")[2], item.phase.files[item.name]
        else:
            kind = next(kind for start, kind in KINDS.items() if item.startswith(start))
            content = item
        files[name := f"pictures/{i:04d}.{kind}"] = content
        record.append({"file": name, "label": label, "image": digest})
    return record, files


def from_files(phase: SavedPhase, record: Sequence[Mapping[str, Any]]) -> Pictures:
    """Undo `to_files`."""
    items = [Stored(phase, each["file"]) for each in record]
    labels = torch.tensor([each["label"] for each in record], dtype=torch.int64)
    return Pictures(tuple(items), labels, digests=tuple(each["image"] for each in record))
