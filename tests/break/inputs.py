"""Odd input: pictures, archives, arrays, options, command lines. Read correctly, or refused in one clean line."""

import contextlib
import io
import os
import random
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.helpers.pictures import encode, noise

from geodl.config import RunConfig, all_options, file_layers
from geodl.data import load, scan_folder
from geodl.data.images import ArrayImages, open_image
from geodl.data.intake import as_images, take
from geodl.data.names import class_name, fault
from geodl.methods import configure

from . import damage
from .commands import geodl
from .harness import Refused, attempt, family

# Pictures.

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA", "PCX")


@cache
def pictures() -> list[bytes]:
    """Return small pictures of many formats and modes."""
    pixels = noise(13, 17, 4)
    found = []
    for kind in FORMATS:
        for mode in ("RGB", "L", "P", "RGBA", "I;16", "CMYK", "1"):
            image = Image.fromarray(pixels).convert("I" if mode == "I;16" else mode)
            with contextlib.suppress(OSError, ValueError, KeyError):  # a format has some modes
                found.append(encode(image, kind))
    return found


@family("pictures")
def damaged_pictures(draw: random.Random, folder: Path) -> None:
    """A damaged picture is decoded whole, as RGB, or named; those beside it are read."""
    (folder / "a").mkdir()
    file = folder / "a" / "odd.png"
    file.write_bytes(draw.choice(pictures()))
    for _ in range(draw.randint(1, 3)):
        if file.stat().st_size:
            (damage.flip if draw.random() < 0.6 else damage.tear)(draw, file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = attempt(lambda: open_image(file))
        assert isinstance(found, Refused) or (found.mode == "RGB" and min(found.size) > 0)
        (folder / "a" / "sound.png").write_bytes(pictures()[0])
        images, classes, skipped = scan_folder(folder, verify=True)
    assert classes == ("a",)
    assert len(images) == 2 - isinstance(found, Refused)
    assert all(line.isprintable() for pair in skipped for line in pair)


# Archives.


@family("archives")
def damaged_archives(draw: random.Random, folder: Path) -> None:
    """A damaged npz or parquet file gives images of the right form, or one line."""
    generator = np.random.default_rng(draw.randrange(100))
    if draw.random() < 0.6:
        file = folder / "data.npz"
        arrays: dict[str, Any] = {
            "x_train": generator.integers(0, 256, (6, 5, 5), dtype=np.uint8),
            "y_train": [0, 1] * 3,
        }
        if draw.random() < 0.3:
            key = draw.choice(["x_train", "y_train", "classes", "x_test"])
            arrays[key] = draw.choice(
                [[], [None, "a"], np.zeros(3), ["a"] * 6, np.zeros((6, 5, 5), complex), "x"]
            )
        np.savez(file, **arrays)
        source, root = "arrays", file
    else:
        for part in ("train", "test"):
            (folder / f"{part}-0.parquet").write_bytes(_parquet())
        source, root = "cifar100", folder
        file = folder / "train-0.parquet"
    if draw.random() < 0.8:
        (damage.flip if draw.random() < 0.5 else damage.tear)(draw, file)
    found = attempt(lambda: load(source, root))
    assert isinstance(found, Refused) or (
        found.train.pixels.dtype == torch.uint8 and len(found.train) > 0
    )


@cache
def _parquet() -> bytes:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        return b"PAR1 no pyarrow here PAR1"
    rows = arrow.table(
        {"img": [{"bytes": pictures()[0], "path": None}] * 3, "fine_label": [0, 1, 2]}
    )
    buffer = io.BytesIO()
    parquet.write_table(rows, buffer)
    return buffer.getvalue()


PLACES = ("a/0.png", "b/1.png", "../0.png", "/dev/zero", "/etc/passwd", "nowhere.png", "pipe.png")
PLACES += ("=cmd|' /C calc'!A0", "\0", "a\x1b[31m", '"', "", ".", "é" * 300, "x" * 200_000)


@family("listings")
def listings(draw: random.Random, folder: Path) -> None:
    """A damaged zip archive, and a table of odd places and labels: the images that are sound, or one line."""
    for place in ("a/0.png", "b/1.png"):
        (folder / place).parent.mkdir()
        (folder / place).write_bytes(encode(Image.fromarray(noise(9, 9, 3, seed=ord(place[0])))))
    os.mkfifo(folder / "pipe.png")
    if draw.random() < 0.6:
        file, kinds = folder / "data.zip", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
        kind = draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, *kinds])
        with zipfile.ZipFile(file, "w", kind) as archive:
            for place in ("a/0.png", "b/1.png"):
                archive.write(folder / place, place)
        for _ in range(draw.randint(1, 3)):
            if file.stat().st_size:
                (damage.flip if draw.random() < 0.8 else damage.tear)(draw, file)
    else:
        file = folder / f"data.{draw.choice(['csv', 'tsv'])}"
        labels = [*map(str, NAMES), "=1+1", "../a"]
        rows = [f"{draw.choice(PLACES)},{draw.choice(labels)}" for _ in range(draw.randint(0, 6))]
        file.write_bytes("\n".join(rows).encode("utf-8", "surrogatepass"))
    found = attempt(lambda: take(file))
    if isinstance(found, Refused):
        return
    assert 0 < len(found.images) == len(found.names)
    assert all(fault(name) is None for name in found.classes)
    lines = [*found.names, *(part for pair in found.problems for part in pair)]
    assert all(line.isprintable() for line in lines)


# Arrays and labels.

KINDS = (torch.uint8, torch.int8, torch.int64, torch.bool)
KINDS += (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NAMES = ("cat", "dog", "", " ", "a\nb", "\ud800", "x" * 300, "ne\u0301", "n\u00e9", b"cat")
NAMES += (None, 3, -1, 2.5, float("nan"), True)
NO_IMAGES = (5, None, "nowhere.png", {}, [], [[1, 2], [3]], object(), range(3), b"x", [None])


def odd_array(draw: random.Random) -> Any:
    """Return something that may be images."""
    shape = [draw.choice([0, 1, 2, 3, 3, 8]) for _ in range(draw.choice([0, 2, 3, 4, 4, 4, 5]))]
    tensor = (torch.rand(shape) * draw.choice([1, 1, 2, 255, 300, -1])).to(draw.choice(KINDS))
    what = draw.randrange(9)
    if what == 0:
        return tensor.to_sparse() if tensor.ndim else tensor
    if what == 1:
        return tensor.to("meta")
    if what == 2:
        return tensor.to(torch.complex64)
    if what == 3:
        return tensor.float().numpy().astype(draw.choice("f2 f4 f8 O U3 c8 >i2 u8 m8[s]".split()))
    if what == 4:
        return draw.choice([*NO_IMAGES, iter([3])])
    if what == 5:
        return tensor.float().flatten().requires_grad_()
    return tensor


@family("arrays")
def odd_arrays(draw: random.Random, folder: Path) -> None:
    """Odd arrays and labels become pixels and names of the right form, or one line."""
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = odd_array(draw)
        found = attempt(lambda: as_images(given))
        if isinstance(found, tuple) and isinstance(found[0], ArrayImages):
            assert found[0].pixels.ndim == 4
            assert min(found[0].pixels.shape[2:]) > 0
        count = draw.choice([0, 1, 2, 3])
        pixels = torch.randint(0, 256, (count, 3, 5, 5), dtype=torch.uint8)
        labels: Any = [draw.choice(NAMES) for _ in range(draw.choice([count, count, count, 1]))]
        if draw.random() < 0.2:
            arrays = [np.arange(count)[:, None], torch.zeros(count, device="meta")]
            labels = draw.choice([None, 5, "ab", {}, torch.arange(count), *arrays])
        some = [["cat", "dog"], ["a", "a"], "ab", 5, [], list(NAMES[:3])]
        classes = draw.choice([None, None, None, *some])
        taken = attempt(lambda: take(pixels, labels, classes))
    if not isinstance(taken, Refused):
        assert all(fault(name) is None and class_name(name) == name for name in taken.classes)
        assert len(taken.images) == len(taken.names) == count


# Options.


TYPED = (
    *"1 0 -1 2.5 1e999 nan x true ../.. /dev/zero lucir geodesic digits -- - [1,2]".split(),
    *("", " ", "a\nb", "\x1b[31m", "\u202e", '{"a": 1}'),
    *("9" * 30, "9" * 5000, "é" * 300, "y" * 2000),
)
"""Values as they may be typed."""


@family("toml")
def odd_toml(draw: random.Random, folder: Path) -> None:
    """A file of random options is read or refused in one line."""
    raw = [value for value in damage.VALUES if draw.random() < 0.3] or ["1"]
    tables = ["", "", "[lucir]", "[distillation.geodesic]", "[nosuch]", "[[a]]", "[distillation]"]
    names = [*all_options(), "preset", "no such", "a.b.c", '"\\n"', "méthode", "seed.x"]
    values = [*raw, "'cifar100'", '"lucir"', "1", "2024-01-01", "[1, 'a']", "{a = 1}"]
    lines = []
    for _ in range(draw.randint(1, 6)):
        value = draw.choice([*values, draw.choice(TYPED)])
        lines += [draw.choice([*tables, "[bic.x]"]), f"{draw.choice(names)} = {value}"]
    file = folder / "odd.toml"
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    if draw.random() < 0.2:
        damage.tear(draw, file)
    found = attempt(lambda: configure(file_layers(file)))
    assert isinstance(found, Refused) or isinstance(found.config, RunConfig)


FAST = (
    *"info predict evaluate undo redo rename remove methods".split(),
    *("config show", "config presets", "runs list", "runs show"),
)
"""Commands that end at once, whatever their arguments."""


@family("command lines")
def odd_command_lines(draw: random.Random, folder: Path) -> None:
    """Random words after `geodl`: exit 0 or 2, one clean line of error, and nothing is made."""
    words = draw.choice([*FAST, "", "nosuch", draw.choice(TYPED)]).split()
    names = [*all_options(), *"top json strict csv threshold preset nosuch".split()]
    for _ in range(draw.randint(0, 5)):
        name = draw.choice(names)
        typed = [f"--{name.replace('_', '-')}", f"--{name}={draw.choice(TYPED)}", "-x"]
        words.append(draw.choice([*typed, draw.choice(TYPED), str(folder / "nowhere")]))
    words = [word.replace("\0", "") for word in words]
    if draw.random() < 0.1:
        words.append("--help")
    with contextlib.chdir(folder), warnings.catch_warnings():
        geodl(*words)
    assert not list(folder.iterdir()), "something was made"
