"""Images in memory or on disk with their labels: two containers with one interface, and how they are stored."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
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

T = TypeVar("T")


def positions_of(indices: Tensor | Sequence[int]) -> Tensor:
    """Turn a list, an index tensor or a boolean mask into int64 positions."""
    positions = torch.as_tensor(indices)
    if positions.dtype == torch.bool:
        return positions.nonzero().flatten()
    return positions.to(torch.int64)


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


def _picked(clues: Tensor | None, positions: Tensor) -> Tensor | None:
    return None if clues is None else clues[positions]


def _chosen(given: tuple[T, ...], positions: Tensor) -> tuple[T, ...]:
    return tuple(given[i] for i in positions.tolist()) if given else ()


def _check_labels(labels: Tensor, count: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != (count,):
        given = f"{labels.dtype} {tuple(labels.shape)}"
        raise DataError(f"labels: {given} given, int64 ({count},) needed")


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images of one size in memory.

    pixels: uint8 (N, 3, H, W); labels: int64 (N,), positions in the class `names`, if these are known; clues: int64 (N, 5),
    to which images are of one series (`geodl.closed_form.series`), if there are any; digests: hashes of the squares that a
    network sees of them, by which it knows an image, if these are known.
    """

    pixels: Tensor
    labels: Tensor
    names: tuple[str, ...] = ()
    clues: Tensor | None = None
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4 or self.pixels.shape[1] != 3:
            given = f"{self.pixels.dtype} {tuple(self.pixels.shape)}"
            raise DataError(f"pixels: {given} given, uint8 (N, 3, H, W) needed")
        _check_labels(self.labels, len(self.pixels))

    def __len__(self) -> int:
        return len(self.pixels)

    def select(self, indices: Tensor | Sequence[int]) -> ArrayImages:
        """Return the images at these positions (or under this mask), in this order."""
        positions = positions_of(indices)
        if torch.equal(positions, torch.arange(len(self))):  # all of them: not copied
            return self
        labels, clues = self.labels[positions], _picked(self.clues, positions)
        digests = _chosen(self.digests, positions)
        return ArrayImages(self.pixels[positions], labels, self.names, clues, digests)

    def relabel(self, mapping: Tensor, names: Sequence[str] = ()) -> ArrayImages:
        """Replace each label l by mapping[l]. mapping: int64 (old classes,); names: those of the new labels."""
        return replace(self, labels=mapping[self.labels], names=tuple(names))

    def decode(self, i: int, *, at_least: int | None = None) -> Image.Image:
        """Return image i as an RGB picture."""
        return Image.fromarray(self.pixels[i].permute(1, 2, 0).contiguous().numpy())

    def encoded(self, i: int) -> bytes:
        """Return image i as a PNG file."""
        buffer = io.BytesIO()
        self.decode(i).save(buffer, format="PNG")
        return buffer.getvalue()

    def digest(self) -> str:
        """Hash all pixels and labels, in order (sha256)."""
        return _hash(repr(tuple(self.pixels.shape)).encode(), _raw(self.pixels), _raw(self.labels))

    def item_digests(self) -> list[str]:
        """Return the hashes of the squares, or those of each image's size and pixels (sha256)."""
        if self.digests:
            return list(self.digests)
        size = repr(tuple(self.pixels.shape[1:])).encode()
        return [_hash(size, _raw(image)) for image in self.pixels]


@dataclass(frozen=True, eq=False)
class FileImages:
    """Encoded images of any size: files, their contents, or functions that read these. items: N of them; all else as for ArrayImages."""

    items: tuple[Item, ...]
    labels: Tensor
    names: tuple[str, ...] = ()
    clues: Tensor | None = None
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.items))

    def __len__(self) -> int:
        return len(self.items)

    def select(self, indices: Tensor | Sequence[int]) -> Self:
        """Return the images at these positions (or under this mask), in this order."""
        positions = positions_of(indices)
        return replace(
            self,
            items=_chosen(self.items, positions),
            labels=self.labels[positions],
            clues=_picked(self.clues, positions),
            digests=_chosen(self.digests, positions),
        )

    def relabel(self, mapping: Tensor, names: Sequence[str] = ()) -> Self:
        """Replace each label l by mapping[l]. mapping: int64 (old classes,); names: those of the new labels."""
        return replace(self, labels=mapping[self.labels], names=tuple(names))

    def decode(self, i: int, *, at_least: int | None = None) -> Image.Image:
        """Return image i as an RGB picture; `at_least` as for `open_image`."""
        return open_image(self.items[i], at_least=at_least)

    def encoded(self, i: int) -> bytes:
        """Return image i as it was found: the bytes of the original file."""
        return read_bytes(self.items[i])

    def digest(self) -> str:
        """Hash all file contents and labels, in order (sha256)."""
        return _hash("".join(self.item_digests()).encode(), _raw(self.labels))

    def item_digests(self) -> list[str]:
        """Return the hashes of the squares, or those of each file's contents (sha256)."""
        return list(self.digests) or [_sha256(item).hex() for item in self.items]


Images = ArrayImages | FileImages
Some = TypeVar("Some", ArrayImages, FileImages)


def insist_on_images(given: Any) -> None:
    """Raise a DataError for anything but images of geodl's; `geodl.data.intake` makes them of other things."""
    if not isinstance(given, ArrayImages | FileImages):
        kind = type(given).__name__
        raise DataError(f"images: {kind} given; ArrayImages or FileImages are needed")


def _sha256(item: Item) -> bytes:
    """Return the hash of a file's contents; that of a reference is known."""
    return item.sha256 if isinstance(item, Reference) else hashlib.sha256(read_bytes(item)).digest()


def concat(parts: Sequence[Images]) -> Images:
    """Join images in order: one array if all are arrays of one size, otherwise files (arrays become PNG)."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    if not filled:
        raise DataError("concat: no images given, at least one part needed")
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
    """Return images whose labels are positions in `classes`, found by their names; -1 where there is none."""
    position = {name: i for i, name in enumerate(classes)}
    mapping = torch.tensor([position.get(name, -1) for name in images.names], dtype=torch.int64)
    return images.relabel(mapping, classes)


def pack(images: Images, *, side: int = 64) -> Images:
    """Decode files into memory if they are all of one small size (no side above `side`); otherwise leave them."""
    if isinstance(images, ArrayImages) or not images.items:
        return images
    size = check_header(images.items[0])
    if max(size) > side or any(check_header(item) != size for item in images.items):
        return images
    pixels = stack_pixels(images.items, size)
    return images if pixels is None else ArrayImages(pixels, images.labels, images.names)


def stack_pixels(items: Sequence[Item], size: tuple[int, int]) -> Tensor | None:
    """Decode pictures of one size (width, height) to uint8 (N, 3, H, W); None if one of them is not of that size."""
    pixels = np.empty((len(items), size[1], size[0], 3), dtype=np.uint8)
    # One thread: small pictures spend their time under the interpreter lock.
    for i, item in enumerate(items):
        image = open_image(item)
        if image.size != size:  # turned by its EXIF orientation
            return None
        pixels[i] = np.asarray(image)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


# ----------------------------------------------------------------------------------------------------------- tensors


def to_tensors(images: Images, *, store_images: bool = True) -> dict[str, Tensor]:
    """Lay images out as tensors for a safetensors file.

    Files are stored as their contents, or with `store_images=False` as a path with the sha256 of the contents.
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

    A referenced file is read only below `data_dir`, which the user names; one that is missing or has changed is a
    DataError that names it. Any other stays a Reference, and reading it is the DataError: the file that names it may be
    a stranger's.
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
    """Return the file of a reference below the data directory (links in there are the user's own), else the reference."""
    path = Path(os.path.normpath(reference.path))
    if data_dir is None or not path.is_relative_to(os.path.normpath(data_dir.absolute())):
        return reference
    if _sha256(path) != reference.sha256:
        raise DataError(f"{shown(path)}: the file has changed since it was stored")
    return path
