"""Images in memory or on disk, with their labels: decoding any picture to RGB, and two containers with one interface."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from geodl.errors import DataError
from geodl.text import one_line, printable

T = TypeVar("T")

Item = Path | bytes
"""One picture: a file, or the contents of one."""

PIXEL_LIMIT = 89_478_485
"""Larger pictures are refused before they are decoded (Pillow's own threshold: 256 MB of RGB)."""


# ---------------------------------------------------------------------------------------------------------- decoding


def shown(item: Item) -> str:
    """Name an item in a message: its path, printable even where the file name is not valid text."""
    if isinstance(item, bytes):
        return f"an embedded image of {len(item)} bytes"
    return printable(os.fsencode(item).decode("utf-8", "backslashreplace"))


def open_image(item: Item, *, at_least: int | None = None) -> Image.Image:
    """Decode a picture to RGB, upright as its EXIF orientation says; the first frame of an animation.

    `at_least` lets the JPEG decoder skip detail: it may return a picture reduced by 2, 4 or 8 as long as both sides
    keep that many pixels. Anything that cannot be decoded completely is a DataError that names the file.
    """
    return _guarded(item, lambda image: upright_rgb(image, at_least))


def check_header(item: Item) -> tuple[int, int]:
    """Return (width, height) without decoding the pixels; a DataError if it is no picture or far too large."""
    return _guarded(item, lambda image: image.size)


def read_bytes(item: Item) -> bytes:
    """Return the encoded picture."""
    if isinstance(item, bytes):
        return item
    try:
        return item.read_bytes()
    except OSError as error:
        raise DataError(f"{shown(item)}: {_reason(error)}") from None


def _guarded(item: Item, use: Callable[[Image.Image], T]) -> T:
    """Open an item and use it, with every failure turned into a DataError of one plain line."""
    try:
        with Image.open(io.BytesIO(item) if isinstance(item, bytes) else item) as image:
            if image.width * image.height > PIXEL_LIMIT:
                raise DataError(f"{image.width} x {image.height} pixels are over the limit of {PIXEL_LIMIT}")
            return use(image)
    except Exception as error:  # decoders raise whatever a damaged file leads them to: struct.error, KeyError, ...
        raise DataError(f"{shown(item)}: {_reason(error, item)}") from None


def _reason(error: Exception, item: Item = b"-") -> str:
    """Say in plain words why a picture cannot be used."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"the picture is larger than the limit of {PIXEL_LIMIT} pixels"
    if isinstance(error, FileNotFoundError):
        return "the file is missing"
    if isinstance(error, PermissionError):
        return "no permission to read the file"
    if isinstance(error, UnidentifiedImageError):
        return _unidentified(item[:12] if isinstance(item, bytes) else _head(item))
    detail = one_line(error)
    return "the file is truncated" if "truncated" in detail.lower() else f"the file is damaged ({detail})"


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(12)


def _unidentified(head: bytes) -> str:
    """Say what a file is that Pillow does not know, by its first bytes."""
    if not head:
        return "the file is empty"
    if head[4:8] == b"ftyp":  # HEIC, as telephones write it, and films
        return f"a format that cannot be read ({head[8:12].decode('latin-1').strip()}); save it as JPEG or PNG"
    if head.lstrip().startswith((b"<svg", b"<?xml")):
        return "a drawing without pixels (SVG); save it as PNG"
    return "not an image"


def upright_rgb(image: Image.Image, at_least: int | None = None) -> Image.Image:
    """Return a picture of any mode as RGB, turned as its EXIF orientation says; `at_least` as for `open_image`."""
    if at_least is not None:
        image.draft(None, (at_least, at_least))  # None keeps the mode
    image.load()
    rgb = _to_rgb(image)
    rgb.info = {}  # of all that came with the pixels the orientation alone is kept: the rest may be damaged
    with suppress(Exception):  # damaged EXIF data are no reason to lose the picture
        rgb.getexif()[ExifTags.Base.Orientation] = image.getexif()[ExifTags.Base.Orientation]
        ImageOps.exif_transpose(rgb, in_place=True)
    return rgb


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode: deep images are scaled to 8 bits, transparency is laid on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Scale a 16-bit, 32-bit or floating grey image (H, W) to 0..255 by the full scale its values imply.

    Pillow's own conversion clips at 255, which turns most 16-bit pictures white.
    """
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    peak = max(float(values.max()), 0.0)
    if image.mode.startswith("I;16"):
        full = 65535.0
    elif image.mode == "I":
        full = 65535.0 if peak <= 65535 else 2.0**32 - 1
    else:
        full = next((scale for scale in (1.0, 255.0, 65535.0) if peak <= scale), peak)
    return np.rint(values.clip(0, full) * (255.0 / full)).astype(np.uint8)


# -------------------------------------------------------------------------------------------------------- containers


def _positions(indices: Tensor | Sequence[int]) -> Tensor:
    """Turn a list, an index tensor or a boolean mask into int64 positions."""
    positions = torch.as_tensor(indices)
    return positions.nonzero().flatten() if positions.dtype == torch.bool else positions.to(torch.int64)


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images of one size in memory. pixels: uint8 (N, 3, H, W); labels: int64 (N,); names: those of the labels, if known."""

    pixels: Tensor
    labels: Tensor
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4 or self.pixels.shape[1] != 3:
            raise DataError(f"pixels: {self.pixels.dtype} {tuple(self.pixels.shape)} given, uint8 (N, 3, H, W) needed")
        _check_labels(self.labels, len(self.pixels))

    def __len__(self) -> int:
        return len(self.pixels)

    def select(self, indices: Tensor | Sequence[int]) -> ArrayImages:
        """Return the images at these positions (or under this mask), in this order."""
        positions = _positions(indices)
        return ArrayImages(self.pixels[positions], self.labels[positions], self.names)

    def relabel(self, mapping: Tensor, names: Sequence[str] = ()) -> ArrayImages:
        """Replace each label l by mapping[l]. mapping: int64 (old classes,); names: those of the new labels."""
        return replace(self, labels=mapping[self.labels], names=tuple(names))

    def decode(self, i: int) -> Image.Image:
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
        """Hash each image's size and pixels (sha256)."""
        size = repr(tuple(self.pixels.shape[1:])).encode()
        return [_hash(size, _raw(image)) for image in self.pixels]


@dataclass(frozen=True, eq=False)
class FileImages:
    """Encoded images of any size: files, or their contents. items: N of them; labels and names as for ArrayImages."""

    items: tuple[Item, ...]
    labels: Tensor
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.items))

    def __len__(self) -> int:
        return len(self.items)

    def select(self, indices: Tensor | Sequence[int]) -> FileImages:
        """Return the images at these positions (or under this mask), in this order."""
        positions = _positions(indices)
        return FileImages(tuple(self.items[i] for i in positions.tolist()), self.labels[positions], self.names)

    def relabel(self, mapping: Tensor, names: Sequence[str] = ()) -> FileImages:
        """Replace each label l by mapping[l]. mapping: int64 (old classes,); names: those of the new labels."""
        return replace(self, labels=mapping[self.labels], names=tuple(names))

    def decode(self, i: int) -> Image.Image:
        """Return image i as an RGB picture."""
        return open_image(self.items[i])

    def encoded(self, i: int) -> bytes:
        """Return image i as it was found: the bytes of the original file."""
        return read_bytes(self.items[i])

    def digest(self) -> str:
        """Hash all file contents and labels, in order (sha256)."""
        return _hash("".join(self.item_digests()).encode(), _raw(self.labels))

    def item_digests(self) -> list[str]:
        """Hash each file's contents (sha256)."""
        return [_hash(read_bytes(item)) for item in self.items]


Images = ArrayImages | FileImages


def _check_labels(labels: Tensor, count: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise DataError(f"labels: {labels.dtype} {tuple(labels.shape)} given, int64 ({count},) needed")


def concat(parts: Sequence[Images]) -> Images:
    """Join images in order: one array if all are arrays of one size, otherwise files (arrays become PNG)."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    if not filled:
        raise DataError("concat: no images given, at least one part needed")
    labels = torch.cat([part.labels for part in filled])
    names = max((part.names for part in filled), key=len)
    arrays = [part.pixels for part in filled if isinstance(part, ArrayImages)]
    if len(arrays) == len(filled) and len({pixels.shape[2:] for pixels in arrays}) == 1:
        return ArrayImages(torch.cat(arrays), labels, names)
    items: list[Item] = []
    for part in filled:
        items += part.items if isinstance(part, FileImages) else (part.encoded(i) for i in range(len(part)))
    return FileImages(tuple(items), labels, names)


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
    for i, item in enumerate(items):  # one thread: small pictures spend their time under the interpreter lock
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
    referenced = [isinstance(item, Path) and not store_images for item in images.items]
    blobs = [
        os.fsencode(item.absolute()) if isinstance(item, Path) and not store_images else read_bytes(item)
        for item in images.items
    ]
    offsets = np.cumsum([0, *(len(blob) for blob in blobs)], dtype=np.int64)
    tensors = {
        "blobs": torch.from_numpy(np.frombuffer(b"".join(blobs), dtype=np.uint8).copy()),
        "offsets": torch.from_numpy(offsets),
        "labels": images.labels,
    }
    if any(referenced):
        hashes = b"".join(
            hashlib.sha256(read_bytes(item)).digest() if by_path else bytes(32)
            for item, by_path in zip(images.items, referenced, strict=True)
        )
        tensors["referenced"] = torch.tensor(referenced)
        tensors["sha256"] = torch.from_numpy(np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32).copy())
    return tensors


def from_tensors(tensors: dict[str, Tensor]) -> Images:
    """Undo `to_tensors`; a referenced file that is missing or has changed is a DataError that names it."""
    if "pixels" in tensors:
        return ArrayImages(tensors["pixels"], tensors["labels"])
    blobs, offsets = tensors["blobs"].numpy().tobytes(), tensors["offsets"].tolist()
    items: list[Item] = [blobs[a:b] for a, b in pairwise(offsets)]
    if "referenced" in tensors:
        for i in tensors["referenced"].nonzero().flatten().tolist():
            items[i] = path = Path(os.fsdecode(items[i]))
            if hashlib.sha256(read_bytes(path)).digest() != _raw(tensors["sha256"][i]):
                raise DataError(f"{shown(path)}: the file has changed since it was stored")
    return FileImages(tuple(items), tensors["labels"])
