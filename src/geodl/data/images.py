"""Labelled images in memory or in files: two containers with one interface, and their form in model files."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from geodl.core.decoding import Item, Reference, check_header, open_image, read_bytes, shown
from geodl.core.errors import DataError


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def short_hashes(digests: Sequence[str]) -> Tensor:
    """Return the first 63 bits of hexadecimal digests: int64 (N,)."""
    return torch.tensor([int(digest[:16], 16) >> 1 for digest in digests], dtype=torch.int64)


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def png_of(image: Image.Image, compression: int = -1) -> bytes:
    """Return an image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=compression)
    return buffer.getvalue()


class _Labelled:
    """What both containers share: selecting and relabelling."""

    labels: Tensor
    names: tuple[str, ...]
    clues: Tensor | None
    digests: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def _check_labels(self, count: int) -> None:
        if self.labels.dtype != torch.int64 or self.labels.shape != (count,):
            actual = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise DataError(f"labels: expected int64 ({count},), got {actual}")

    def select(self, indices: Tensor | Sequence[int]) -> Self:
        """Return the images at these positions, or under this boolean mask, in this order."""
        positions = torch.as_tensor(indices)
        if positions.dtype == torch.bool:
            positions = positions.nonzero().flatten()
        positions = positions.to(torch.int64)
        if torch.equal(positions, torch.arange(len(self))):  # all of them: not copied
            return self
        digests = tuple(self.digests[i] for i in positions.tolist()) if self.digests else ()
        clues = None if self.clues is None else self.clues[positions]
        changed = {"labels": self.labels[positions], "clues": clues, "digests": digests}
        return replace(self, **self._content_at(positions), **changed)  # type: ignore[type-var]

    def relabel(self, mapping: Tensor, names: Sequence[str] = ()) -> Self:
        """Replace each label l by mapping[l]. mapping: int64 (old classes,); names: those of the new labels."""
        return replace(self, labels=mapping[self.labels], names=tuple(names))  # type: ignore[type-var]

    def _content_at(self, positions: Tensor) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class ArrayImages(_Labelled):
    """Images of one size in memory.

    pixels: uint8 (N, 3, H, W); labels: int64 (N,), positions in `names`, the names of the classes, if these are known;
    clues: int64 (N, 5), by which images of one series are detected (`geodl.closed_form.series`), or None; digests: hashes of
    the squares that a network sees, by which images are recognized, or empty.
    """

    pixels: Tensor
    labels: Tensor
    names: tuple[str, ...] = ()
    clues: Tensor | None = None
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4 or self.pixels.shape[1] != 3:
            actual = f"{self.pixels.dtype} {tuple(self.pixels.shape)}"
            raise DataError(f"pixels: expected uint8 (N, 3, H, W), got {actual}")
        self._check_labels(len(self.pixels))

    def _content_at(self, positions: Tensor) -> dict[str, Any]:
        return {"pixels": self.pixels[positions]}

    def decode(self, i: int, *, at_least: int | None = None) -> Image.Image:
        """Return image i as an RGB image of PIL."""
        return Image.fromarray(self.pixels[i].permute(1, 2, 0).contiguous().numpy())

    def encoded(self, i: int) -> bytes:
        """Return image i as a PNG file."""
        return png_of(self.decode(i))

    def digest(self) -> str:
        """Return a SHA-256 of all pixels and labels, in order."""
        return _hash(repr(tuple(self.pixels.shape)).encode(), _raw(self.pixels), _raw(self.labels))

    def item_digests(self) -> list[str]:
        """Return `digests`, or the SHA-256 of size and pixels of each image."""
        if self.digests:
            return list(self.digests)
        size = repr(tuple(self.pixels.shape[1:])).encode()
        return [_hash(size, _raw(image)) for image in self.pixels]


@dataclass(frozen=True, eq=False)
class FileImages(_Labelled):
    """Encoded images of any size: N `items`, each a file, its content, or a function that reads it. The rest as in ArrayImages."""

    items: tuple[Item, ...]
    labels: Tensor
    names: tuple[str, ...] = ()
    clues: Tensor | None = None
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_labels(len(self.items))

    def _content_at(self, positions: Tensor) -> dict[str, Any]:
        return {"items": tuple(self.items[i] for i in positions.tolist())}

    def decode(self, i: int, *, at_least: int | None = None) -> Image.Image:
        """Return image i as an RGB image of PIL; `at_least` as for `open_image`."""
        return open_image(self.items[i], at_least=at_least)

    def encoded(self, i: int) -> bytes:
        """Return the bytes of the original file of image i."""
        return read_bytes(self.items[i])

    def digest(self) -> str:
        """Return a SHA-256 of all file contents and labels, in order."""
        return _hash("".join(self.item_digests()).encode(), _raw(self.labels))

    def item_digests(self) -> list[str]:
        """Return `digests`, or the SHA-256 of the content of each file."""
        return list(self.digests) or [_sha256(item).hex() for item in self.items]


Images = ArrayImages | FileImages
Some = TypeVar("Some", ArrayImages, FileImages)


def insist_on_images(value: Any) -> None:
    """Raise a DataError for anything but ArrayImages and FileImages; `geodl.data.intake` converts other images."""
    if not isinstance(value, ArrayImages | FileImages):
        raise DataError(f"images: expected ArrayImages or FileImages, got {type(value).__name__}")


def _sha256(item: Item) -> bytes:
    """Return the SHA-256 of the content of a file; a reference has it already."""
    return item.sha256 if isinstance(item, Reference) else hashlib.sha256(read_bytes(item)).digest()


def concat(parts: Sequence[Images]) -> Images:
    """Join images in order: to one array if all are arrays of one size, else to files (arrays become PNG)."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    if not filled:
        raise DataError("concat: expected at least one part, got none")
    labels = torch.cat([part.labels for part in filled])
    names = max((part.names for part in filled), key=len)
    known = filled if any(part.digests for part in filled) else []
    digests = tuple(chain.from_iterable(part.item_digests() for part in known))
    arrays = [part.pixels for part in filled if isinstance(part, ArrayImages)]
    if len(arrays) == len(filled) and len({pixels.shape[2:] for pixels in arrays}) == 1:
        return ArrayImages(torch.cat(arrays), labels, names, digests=digests)
    items: list[Item] = []
    for part in filled:
        if isinstance(part, FileImages):
            items += part.items
        else:
            items += (part.encoded(i) for i in range(len(part)))
    return FileImages(tuple(items), labels, names, digests=digests)


def with_rows(images: Images, classes: Sequence[str]) -> Images:
    """Return images whose labels are positions of their class names in `classes`, -1 for other classes."""
    position = {name: i for i, name in enumerate(classes)}
    mapping = torch.tensor([position.get(name, -1) for name in images.names], dtype=torch.int64)
    return images.relabel(mapping, classes)


def pack(images: Images, *, side: int = 64) -> Images:
    """Decode files into memory if all have one small size (no side above `side`); else return them unchanged."""
    if isinstance(images, ArrayImages) or not images.items:
        return images
    size = check_header(images.items[0])
    if max(size) > side or any(check_header(item) != size for item in images.items):
        return images
    pixels = stack_pixels(images.items, size)
    return images if pixels is None else ArrayImages(pixels, images.labels, images.names)


def stack_pixels(items: Sequence[Item], size: tuple[int, int]) -> Tensor | None:
    """Decode images of one size (width, height) to uint8 (N, 3, H, W); None if one has another size."""
    pixels = np.empty((len(items), size[1], size[0], 3), dtype=np.uint8)
    # One thread: small images spend their time under the interpreter lock.
    for i, item in enumerate(items):
        image = open_image(item)
        if image.size != size:  # rotated by its EXIF orientation
            return None
        pixels[i] = np.asarray(image)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def sampled_sizes(images: Images, most: int = 500) -> list[tuple[int, int]]:
    """Return (width, height) of images: one for all images in memory, an evenly spread sample of many files."""
    if isinstance(images, ArrayImages):
        return [(images.pixels.shape[3], images.pixels.shape[2])]
    sizes = []
    for item in images.items[:: max(1, len(images) // most)]:
        with suppress(DataError):  # reported when it is decoded
            sizes.append(check_header(item, reduced=True))
    return sizes


# ----------------------------------------------------------------------------------------------------------- tensors


def to_tensors(images: Images, *, store_images: bool = True) -> dict[str, Tensor]:
    """Return images as tensors for a safetensors file.

    Files are stored as their content, or with `store_images=False` as path and SHA-256.
    """
    if isinstance(images, ArrayImages):
        return {"pixels": images.pixels.contiguous(), "labels": images.labels}
    blobs, hashes, referenced = [], [], []
    for item in images.items:
        if isinstance(item, Path) and not store_images:
            item = Reference(item.absolute(), _sha256(item))
        referenced.append(isinstance(item, Reference))
        blobs.append(os.fsencode(item.path) if isinstance(item, Reference) else read_bytes(item))
        hashes.append(list(item.sha256 if isinstance(item, Reference) else bytes(32)))
    tensors = {
        "blobs": torch.from_numpy(np.frombuffer(b"".join(blobs), dtype=np.uint8).copy()),
        "offsets": torch.tensor([0, *map(len, blobs)]).cumsum(0),
        "labels": images.labels,
    }
    if any(referenced):
        tensors["referenced"] = torch.tensor(referenced)
        tensors["sha256"] = torch.tensor(hashes, dtype=torch.uint8)
    return tensors


def from_tensors(tensors: dict[str, Tensor], data_dir: Path | None = None) -> Images:
    """Undo `to_tensors`.

    A referenced file is read only below `data_dir`, which the user names; a missing or changed one is a DataError that
    names it. Any other stays a Reference, and reading it is a DataError: the model may be a stranger's.
    """
    if "pixels" in tensors:
        return ArrayImages(tensors["pixels"], tensors["labels"])
    blobs, offsets = tensors["blobs"].numpy().tobytes(), tensors["offsets"].tolist()
    items: list[Item] = [blobs[a:b] for a, b in pairwise(offsets)]
    if "referenced" in tensors:
        for i in tensors["referenced"].nonzero().flatten().tolist():
            path = Path(os.fsdecode(blobs[offsets[i] : offsets[i + 1]]))
            items[i] = _resolved(Reference(path, _raw(tensors["sha256"][i])), data_dir)
    return FileImages(tuple(items), tensors["labels"])


def _resolved(reference: Reference, data_dir: Path | None) -> Item:
    """Return the path of a reference below the data directory (whose links are the user's own), else the reference."""
    path = Path(os.path.normpath(reference.path))
    if data_dir is None or not path.is_relative_to(os.path.normpath(data_dir.absolute())):
        return reference
    if _sha256(path) != reference.sha256:
        raise DataError(f"{shown(path)}: the file has changed since it was stored")
    return path
