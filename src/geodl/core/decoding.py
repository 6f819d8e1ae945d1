"""Decoding of image files to RGB pixels. The only place that opens images, and only those of the formats in `FORMATS`."""

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
    """A file that a model refers to instead of storing it; `geodl.data.images.from_tensors` decides whether it is read."""

    path: Path
    sha256: bytes


Item = Path | bytes | Reference | Callable[[], bytes]
"""One image: a file, the content of one, a reference to one, or a function that reads the content."""

SMALLEST = 4
"""Images with a side of fewer pixels are refused."""
PIXEL_LIMIT = 89_478_485
"""Larger images are refused before they are decoded (Pillow's own threshold: 256 MB of RGB)."""
JPEG_LIMIT = 4 * PIXEL_LIMIT
"""The limit for JPEG files that are reduced while they are decoded; progressive ones cannot be."""

DETAIL = 2
"""A JPEG file is reduced while it is decoded, but to no less than this multiple of the side that the network needs."""
SCANS = 100
"""Maximum number of scans of a JPEG file. Each can take as long as the whole image, in 10 bytes; programs write about ten."""
BLOCK = 1 << 16
"""Bytes that are read at a time to count the scans."""
GRAY = (128, 128, 128)
"""The padding around a letterboxed image."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF")
"""Formats that are read, by Pillow's names. Never EPS and the like: Pillow starts programs to read them."""

# The end mark of a JPEG file, or a segment and its length; not the markers that decoders skip among the pixels.
_SEGMENT = re.compile(rb"\xff(\xd9|[\xc0-\xcf\xda-\xfe](?=(..)))", re.DOTALL)
_PLUGINS = ("Jpeg", "Png", "WebP", "Gif", "Bmp", "Tiff", "Ppm", "Jpeg2K", "Avif")


@cache
def formats() -> tuple[str, ...]:
    """Return the formats that this installation can read: AVIF depends on Pillow, HEIC on the extra `heif`."""
    for plugin in _PLUGINS:
        with suppress(ImportError):
            import_module(f"PIL.{plugin}ImagePlugin")
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def shown(item: Item) -> str:
    """Return the name of an item for a message: its path, printable even if it is not valid text."""
    if isinstance(item, bytes):
        return f"an embedded image of {len(item)} bytes"
    if callable(item):
        return "a stored image"
    path = item.path if isinstance(item, Reference) else item
    return printable(os.fsencode(path).decode("utf-8", "backslashreplace"))


def open_image(item: Item, *, at_least: int | None = None) -> Image.Image:
    """Decode an image to RGB, rotated by its EXIF orientation; of an animation, the first frame.

    `at_least` allows the JPEG decoder to reduce the image by 2, 4 or 8 as long as both sides keep that many pixels.
    An image that cannot be decoded completely is a DataError that names the file.
    """

    def decode(image: Image.Image) -> Image.Image:
        if isinstance(image, JpegImageFile):
            _check_scans(image.fp)
        return upright_rgb(image, at_least)

    return _with_image(item, decode, PIXEL_LIMIT if at_least is None else JPEG_LIMIT)


def check_header(item: Item, *, reduced: bool = False) -> tuple[int, int]:
    """Return (width, height) without decoding the pixels; a DataError if the item is no image or too large.

    reduced: allow the larger JPEG files that `open_image` can reduce.
    """
    return _with_image(item, lambda image: image.size, JPEG_LIMIT if reduced else PIXEL_LIMIT)


def image_problem(item: Item, *, verify: bool = False) -> str | None:
    """Return why an item cannot be used as an image, or None; `verify` decodes it instead of reading only its header."""
    try:
        open_image(item) if verify else check_header(item, reduced=True)
    except DataError as error:
        return str(error).removeprefix(f"{shown(item)}: ")
    return None


def megapixels(item: Item) -> float:
    """Return the number of pixels to decode, in millions: an eighth of a reducible JPEG file, 0 if it is no image."""

    def size(image: Image.Image) -> float:
        reduced = isinstance(image, JpegImageFile) and "progressive" not in image.info
        return image.width * image.height / (8e6 if reduced else 1e6)

    try:
        return _with_image(item, size, JPEG_LIMIT)
    except DataError:
        return 0.0


def taken(item: Item) -> int:
    """Return when a photograph was taken according to its EXIF data, in seconds; -1 if unknown."""

    def second(image: Image.Image) -> int:
        exif = image.getexif()
        text = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal)
        text = text or exif.get(ExifTags.Base.DateTime) or ""
        time = datetime.strptime(str(text).strip("\0 "), "%Y:%m:%d %H:%M:%S")
        return int(time.replace(tzinfo=UTC).timestamp())

    try:
        return _with_image(item, second, JPEG_LIMIT)
    except DataError:
        return -1


def read_bytes(item: Item) -> bytes:
    """Return the encoded image."""
    if isinstance(item, bytes):
        return item
    if callable(item):
        return item()
    return _with_file(item, lambda file: file.read())


def _with_file(item: Item, use: Callable[[BinaryIO], T]) -> T:
    """Open an item and pass it to `use`; every failure becomes a DataError of one line."""
    if callable(item):
        item = item()  # its errors are those of the store
    try:
        if isinstance(item, Reference):
            raise DataError("a reference to a file outside the data directory; set data_dir to it")
        with io.BytesIO(item) if isinstance(item, bytes) else open_regular(item) as file:
            return use(file)
    except Exception as error:  # from damaged files decoders raise struct.error, KeyError, ...
        raise DataError(f"{shown(item)}: {_reason(error)}") from None


def _with_image(item: Item, use: Callable[[Image.Image], T], most: int) -> T:
    """Open an item as an image and pass it to `use`; it has at most PIXEL_LIMIT pixels, or `most` if a reducible JPEG."""

    def decode(file: BinaryIO) -> T:
        head = file.read(12)
        file.seek(0)
        try:
            # Pillow's own limit is a setting of the whole process; opening a JPEG file directly bypasses it.
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
    """Refuse a JPEG file with too many scans; the file is read in blocks, up to the end mark after the scans."""
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
    """Return why an image cannot be used, in plain words."""
    if isinstance(error, StoreError):
        if error.__cause__ is None:
            return "not a regular file"
        error = error.__cause__
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"the image is larger than the limit of {PIXEL_LIMIT} pixels"
    if isinstance(error, FileNotFoundError):
        return "the file is missing"
    if isinstance(error, PermissionError):
        return "no permission to read the file"
    detail = one_line(error)
    if "truncated" in detail.lower():
        return "the file is truncated"
    return f"the file is damaged ({detail})"


def _unidentified(head: bytes) -> str:
    """Return what an unreadable file is, judging by its first bytes."""
    if not head:
        return "the file is empty"
    if head[4:8] == b"ftyp":  # HEIC from phones, and videos
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
    """Return an image of any mode as RGB, rotated by its EXIF orientation; `at_least` as for `open_image`."""
    if at_least is not None:
        image.draft(None, (at_least, at_least))  # None keeps the mode
        _check_size(image, PIXEL_LIMIT)
    image.load()
    rgb = _to_rgb(image)
    rgb.info = {}  # of the metadata only the orientation is used: the rest may be damaged
    with suppress(Exception):  # an image with damaged EXIF data is still usable
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
    """Return the square of an image that a network sees: (size, size, 3).

    By default the center crop after the shorter side is resized to `shorter_side` (default: `size`); with `whole` the
    letterboxed image. `decode` opens the image; its argument is `at_least` of `open_image`.
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
    """Return the whole image in a square: the longer side resized to `size`, centered on gray."""
    width, height = (max(1, round(size * side / max(image.size))) for side in image.size)
    square = Image.new("RGB", (size, size), GRAY)
    part = image.resize((width, height), Image.Resampling.BILINEAR)
    square.paste(part, ((size - width) // 2, (size - height) // 2))
    return square


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode: deep images are scaled to 8 bits, transparent ones are put on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Scale a 16-bit, 32-bit or floating-point gray image (H, W) to 0..255, by the full scale its values imply.

    Pillow's own conversion clips at 255, which turns most 16-bit images white.
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
