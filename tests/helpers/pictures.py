"""Pictures for tests: noise in any format, and a file that claims to be huge."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw


def noise(*shape: int, seed: int = 0, dtype: Any = np.uint8) -> NDArray[Any]:
    """Return random values over the whole range of a type."""
    random = np.random.default_rng(seed)
    return random.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def drawing(kind: str, seed: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    """Draw a disc, a square or stripes at some place, in some color."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", size, tuple(random.integers(180, 255, 3).tolist()))
    x, y, side = *random.integers(5, 25, 2).tolist(), int(random.integers(25, 40))
    box, color = (x + 10, y, x + 10 + side, y + side), tuple(random.integers(0, 120, 3).tolist())
    draw = ImageDraw.Draw(image)
    if kind == "stripes":
        for left in range(box[0], box[2], 8):
            draw.rectangle((left, y, left + 3, y + side), fill=color)
    else:
        (draw.ellipse if kind == "disc" else draw.rectangle)(box, fill=color)
    return image


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file of this kind."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def png(seed: int = 0, size: tuple[int, int] = (6, 5)) -> bytes:
    """Return a PNG of noise, size (width, height)."""
    return encode(Image.fromarray(noise(size[1], size[0], 3, seed=seed)))


def picture(path: Path, seed: int, size: tuple[int, int] = (16, 12), mode: str = "RGB") -> Path:
    """Write a picture of noise, in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(size[1], size[0], 3, seed=seed)).convert(mode).save(path)
    return path


def bomb() -> bytes:
    """Return a tiny PNG that claims to hold 400 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", b""), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tree(root: Path, files: dict[str, int | bytes | None]) -> Path:
    """Write files {path: contents}; contents None makes a folder, an integer a picture of that seed."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(png(content) if isinstance(content, int) else content)
    return root
