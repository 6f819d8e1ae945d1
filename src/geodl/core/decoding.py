"""From an encoded picture to RGB pixels. Pictures are opened here and nowhere else, in the formats of one list."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from geodl.core.errors import DataError, StoreError, install
from geodl.core.files import open_regular
from geodl.core.text import one_line, printable

T = TypeVar("T")


class Reference(NamedTuple):
    """A file that a model names instead of storing it. It is read only as `from_tensors` allows."""

    path: Path
    sha256: bytes


Item = Path | bytes | Reference | Callable[[], bytes]
"""One picture: a file, the contents of one, a reference to one, or a function that reads the contents."""

SMALLEST = 4
"""Pictures with a side below this many pixels show nothing that could be learned."""
PIXEL_LIMIT = 89_478_485
"""Larger pictures are refused before they are decoded (Pillow's own threshold: 256 MB of RGB)."""
JPEG_LIMIT = 4 * PIXEL_LIMIT
"""The same for JPEG files that are reduced while they are decoded; progressive ones cannot be."""

DETAIL = 2
"""How many times as long as in the square that is made of it the shorter side of a picture stays at least while it is decoded."""
SCANS = 100
"""Scans of a JPEG file: each may take as long as the whole picture and no more than 10 bytes. Programs write about ten."""
BLOCK = 1 << 16
"""Bytes that are read at once where they are counted."""
GRAY = (128, 128, 128)
"""What fills the square around a whole picture."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF")
"""What is read, under Pillow's names. Never EPS and the like: Pillow starts programs to read them."""

# The end of a JPEG file, or a segment of it and its length. What decoders pass over among the pixels is none.
_SEGMENT = re.compile(rb"\xff(\xd9|[\xc0-\xcf\xda-\xfe](?=(..)))", re.DOTALL)
_PLUGINS = ("Jpeg", "Png", "WebP", "Gif", "Bmp", "Tiff", "Ppm", "Jpeg2K", "Avif")


@cache
def formats() -> tuple[str, ...]:
    """Return those of FORMATS that can be read here: AVIF depends on Pillow, HEIC on the extra `heif`."""
    for plugin in _PLUGINS:
        with suppress(ImportError):
            import_module(f"PIL.{plugin}ImagePlugin")
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def shown(item: Item) -> str:
    """Name an item in a message: its path, printable even where the file name is not valid text."""
    if isinstance(item, bytes):
        return f"an embedded image of {len(item)} bytes"
    if callable(item):
        return "a stored picture"
    path = item.path if isinstance(item, Reference) else item
    return printable(os.fsencode(path).decode("utf-8", "backslashreplace"))


def open_image(item: Item, *, at_least: int | None = None) -> Image.Image:
    """Decode a picture to RGB, upright as its EXIF orientation says; the first frame of an animation.

    `at_least` lets the JPEG decoder skip detail: it may return a picture reduced by 2, 4 or 8 as long as both sides
    keep that many pixels. Anything that cannot be decoded completely is a DataError that names the file.
    """

    def decode(image: Image.Image) -> Image.Image:
        if isinstance(image, JpegImageFile):
            _check_scans(image.fp)
        return upright_rgb(image, at_least)

    return _with_image(item, decode, PIXEL_LIMIT if at_least is None else JPEG_LIMIT)


def check_header(item: Item, *, reduced: bool = False) -> tuple[int, int]:
    """Return (width, height) without decoding the pixels; a DataError if it is no picture or far too large.

    reduced: larger JPEG files are let through, as `open_image` can reduce them.
    """
    return _with_image(item, lambda image: image.size, JPEG_LIMIT if reduced else PIXEL_LIMIT)


def megapixels(item: Item) -> float:
    """Return how much there is to decode: a JPEG file that can be reduced counts an eighth, what is no picture nothing."""

    def size(image: Image.Image) -> float:
        reduced = isinstance(image, JpegImageFile) and "progressive" not in image.info
        return image.width * image.height / (8e6 if reduced else 1e6)

    try:
        return _with_image(item, size, JPEG_LIMIT)
    except DataError:
        return 0.0


def taken(item: Item) -> int:
    """Return the second in which a photograph was taken, as its EXIF data say it; -1 where they do not."""
    try:
        return _with_image(item, _second, JPEG_LIMIT)
    except DataError:
        return -1


def _second(image: Image.Image) -> int:
    """Return when a picture was taken, in seconds; -1 where it is not known."""
    exif = image.getexif()
    text = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal)
    text = text or exif.get(ExifTags.Base.DateTime) or ""
    time = datetime.strptime(str(text).strip("\0 "), "%Y:%m:%d %H:%M:%S")
    return int(time.replace(tzinfo=UTC).timestamp())


def read_bytes(item: Item) -> bytes:
    """Return the encoded picture."""
    if isinstance(item, bytes):
        return item
    if callable(item):
        return item()
    return _with_file(item, lambda file: file.read())


def _with_file(item: Item, use: Callable[[BinaryIO], T]) -> T:
    """Open an item and use it, with every failure turned into a DataError of one plain line."""
    if callable(item):
        item = item()  # what cannot be read there is the error of whoever stored it
    try:
        if isinstance(item, Reference):
            raise DataError("a reference to a file outside the data directory; set data_dir to it")
        with io.BytesIO(item) if isinstance(item, bytes) else open_regular(item) as file:
            return use(file)
    except Exception as error:  # damaged files lead decoders to struct.error, KeyError, ...
        raise DataError(f"{shown(item)}: {_reason(error)}") from None


def _with_image(item: Item, use: Callable[[Image.Image], T], most: int) -> T:
    """Use an item as a picture of at most PIXEL_LIMIT pixels, or of `most` where it is a JPEG file that can be reduced."""

    def decode(file: BinaryIO) -> T:
        head = file.read(12)
        file.seek(0)
        try:
            # Pillow's own limit is a setting for the whole process: it is passed by for JPEG files alone.
            jpeg = head.startswith(b"\xff\xd8\xff") and most > PIXEL_LIMIT
            image = JpegImageFile(file) if jpeg else Image.open(file, formats=formats())
        except UnidentifiedImageError:
            raise DataError(_unidentified(head)) from None
        with image:
            _check_size(image, most if jpeg and "progressive" not in image.info else PIXEL_LIMIT)
            return use(image)

    return _with_file(item, decode)


def _check_size(image: Image.Image, most: int) -> None:
    if image.width * image.height > most:
        raise DataError(f"{image.width} x {image.height} pixels are over the limit of {most}")


def _check_scans(file: Any) -> None:
    """Refuse a JPEG file of very many scans; it is read block by block, to the end mark that follows them."""
    file.seek(0)
    scans, place, content = 0, 0, b""
    while block := file.read(BLOCK):
        content += block
        while found := _SEGMENT.search(content, place):
            kind, length = found.groups()
            if kind == b"\xd9" and scans:
                return
            scans += kind == b"\xda"
            if scans > SCANS:
                raise DataError(f"a JPEG file of more than {SCANS} scans")
            place = found.end() + int.from_bytes(length or b"")
        done = max(place, len(content) - 3)  # the last three bytes may begin a segment
        place, content = max(done - len(content), 0), content[done:]


def _reason(error: BaseException) -> str:
    """Say in plain words why a picture cannot be used."""
    if isinstance(error, StoreError):
        if error.__cause__ is None:
            return "not a regular file"
        error = error.__cause__
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"the picture is larger than the limit of {PIXEL_LIMIT} pixels"
    if isinstance(error, FileNotFoundError):
        return "the file is missing"
    if isinstance(error, PermissionError):
        return "no permission to read the file"
    detail = one_line(error)
    if "truncated" in detail.lower():
        return "the file is truncated"
    return f"the file is damaged ({detail})"


def _unidentified(head: bytes) -> str:
    """Say what a file is that is not read, by its first bytes."""
    if not head:
        return "the file is empty"
    if head[4:8] == b"ftyp":  # HEIC, as telephones write it, and films
        kind = head[8:12].decode("latin-1").strip()
        if kind[:3] in ("hei", "hev", "mif") and "HEIF" not in formats():
            return f"HEIC ({kind}) needs an optional package: {install('heif')}"
        return f"a format that cannot be read ({kind}); save it as JPEG or PNG"
    if head.lstrip().startswith((b"<svg", b"<?xml")):
        return "a drawing without pixels (SVG); save it as PNG"
    if head.startswith((b"%!PS", b"%PDF", b"\xc5\xd0\xd3\xc6")):
        return "a page description (EPS, PDF), which is never opened; save it as PNG"
    return "not an image"


def upright_rgb(image: Image.Image, at_least: int | None = None) -> Image.Image:
    """Return a picture of any mode as RGB, turned as its EXIF orientation says; `at_least` as for `open_image`."""
    if at_least is not None:
        image.draft(None, (at_least, at_least))  # None keeps the mode
        _check_size(image, PIXEL_LIMIT)
    image.load()
    rgb = _to_rgb(image)
    rgb.info = {}  # only the orientation is kept of the metadata: the rest may be damaged
    with suppress(Exception):  # damaged EXIF data are no reason to lose the picture
        rgb.getexif()[ExifTags.Base.Orientation] = image.getexif()[ExifTags.Base.Orientation]
        ImageOps.exif_transpose(rgb, in_place=True)
    return rgb


def as_square(
    decode: Callable[[int], Image.Image],
    size: int,
    shorter_side: int | None = None,
    *,
    whole: bool = False,
) -> NDArray[np.uint8]:
    """Return a picture as a network sees it, (size, size, 3); decode: opens it `at_least` so large.

    That is its center, the shorter side resized to `shorter_side`, unset: `size`; or all of it, letterboxed.
    """
    side = shorter_side or size
    image = decode(DETAIL * side)
    if image.size == (size, size) and side == size:
        return np.asarray(image)
    if whole:
        return np.asarray(letterboxed(image, size))
    length = min(image.size) * size / side
    left, top = (image.width - length) / 2, (image.height - length) / 2
    box = (left, top, left + length, top + length)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def letterboxed(image: Image.Image, size: int) -> Image.Image:
    """Return all of a picture as a square: its longer side resized to `size`, in the middle, on gray."""
    width, height = (max(1, round(size * side / max(image.size))) for side in image.size)
    square = Image.new("RGB", (size, size), GRAY)
    part = image.resize((width, height), Image.Resampling.BILINEAR)
    square.paste(part, ((size - width) // 2, (size - height) // 2))
    return square


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
