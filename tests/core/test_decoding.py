"""Decoding of images in all formats and modes, formats that are never opened, damaged files."""

import io
import os
import stat
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tests.helpers.pictures import bomb, encode, noise

from geodl.core import decoding
from geodl.core.decoding import check_header, open_image, read_bytes, upright_rgb
from geodl.core.errors import DataError


def rgb(item):
    return np.asarray(open_image(item))


def turned(orientation):
    """Return EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


# ------------------------------------------------------------------------------------------------ decoding to RGB


def test_plain_modes_keep_their_values():
    colour, grey, bits = noise(4, 6, 3), noise(4, 6), noise(4, 9) > 127
    assert np.array_equal(rgb(encode(Image.fromarray(colour))), colour)
    assert np.array_equal(rgb(encode(Image.fromarray(grey))), np.stack([grey] * 3, axis=2))
    assert np.array_equal(rgb(encode(Image.fromarray(bits)))[:, :, 1], bits * np.uint8(255))


def test_transparent_images_are_put_on_white():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    assert rgb(encode(palette)).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert rgb(encode(palette, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    grey = Image.fromarray(np.array([[[90, 255], [90, 0]]], dtype=np.uint8))
    assert rgb(encode(grey)).tolist() == [[[90] * 3, [255] * 3]]
    key = Image.fromarray(np.array([[[1, 2, 3], [9, 9, 9]]], dtype=np.uint8))
    assert rgb(encode(key, transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [9, 9, 9]]]
    pixels = np.array([[[200, 100, 0, 255], [200, 100, 0, 0], [200, 100, 0, 51]]], dtype=np.uint8)
    opaque, clear, mixed = rgb(encode(Image.fromarray(pixels))).astype(int)[0]
    assert (opaque.tolist(), clear.tolist()) == ([200, 100, 0], [255, 255, 255])
    blended = np.rint(np.array([200, 100, 0]) * 0.2 + 255 * 0.8)
    assert np.abs(mixed - blended).max() <= 1


def test_cmyk_is_not_a_negative():
    ink = np.array([[[0, 0, 0, 0], [0, 0, 0, 255], [255, 0, 0, 0]]], dtype=np.uint8)
    picture = Image.frombytes("CMYK", (48, 16), ink.repeat(16, 0).repeat(16, 1).tobytes())
    found = rgb(encode(picture, "TIFF"))
    assert found[8, ::16].tolist() == [[255, 255, 255], [0, 0, 0], [0, 255, 255]]
    assert rgb(encode(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), "JPEG")).min() >= 250


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("TIFF", np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        ("TIFF", np.array([[0.0, 51.0, 204.0]], np.float32), [0, 51, 204]),
        ("TIFF", np.array([[0, 2**31 - 1]], np.int32), [0, 127]),
        ("PNG", np.array([[0, 255, 65535]], np.uint16), [0, 1, 255]),
        ("TIFF", np.array([[0, 255, 65535]], np.uint16), [0, 1, 255]),
    ],
)
def test_deep_images_are_scaled_not_clipped(kind, values, expected):
    assert rgb(encode(Image.fromarray(values), kind))[0, :, 2].tolist() == expected


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation(orientation, kind):
    image = Image.fromarray(noise(16, 24, 3))
    content = encode(image, kind, exif=turned(orientation))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(rgb(content), np.asarray(expected))
    assert open_image(content).size == ((24, 16) if orientation < 5 else (16, 24))


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (6, 6), colour) for colour in ("red", "blue")]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert rgb(content)[0, 0].tolist() == [255, 0, 0]


def test_reduced_decoding_keeps_enough_pixels():
    content = encode(Image.fromarray(noise(160, 240, 3)), "JPEG")
    assert open_image(content, at_least=40).size == (60, 40)
    assert open_image(content, at_least=41).size == (120, 80)
    assert open_image(content, at_least=500).size == (240, 160)
    assert open_image(encode(Image.new("RGB", (64, 64))), at_least=8).size == (64, 64)


# --------------------------------------------------------------------------------------------------- -- bad images


SOUND = encode(Image.fromarray(noise(12, 12, 3)))


BAD = {
    "empty": (b"", "the file is empty"),
    "text": (b"no picture at all", "not an image"),
    "drawing": (b"<svg/>", "without pixels"),
    "page": (b"%PDF-1.7", "never opened"),
    "film": (b"\0\0\0\x18ftypqt  ", "a format that cannot be read"),
    "short jpeg": (encode(Image.fromarray(noise(64, 64, 3)), "JPEG")[:-900], "truncated"),
    "short png": (encode(Image.fromarray(noise(64, 64, 3)))[:4000], "truncated"),
    "bomb": (bomb(), "larger than the limit"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_with_a_plain_reason(tmp_path, name):
    content, reason = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    for item in (path, content):
        with pytest.raises(DataError, match=reason) as caught:
            open_image(item)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=f"^{path}: "):
        open_image(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [open_image, check_header, read_bytes])
def test_missing_irregular_and_unreadable_files(tmp_path, monkeypatch, read):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    for name in ("pipe.png", "zero.png"):
        with pytest.raises(DataError, match=f"{name}: not a regular file"):
            read(tmp_path / name)
    with pytest.raises(DataError, match=r"gone.png: the file is missing"):
        read(tmp_path / "gone.png")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataError, match=r"secret.png: no permission"):
        read(tmp_path / "secret.png")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) show\n%%EOF\n"


def test_no_image_starts_a_program(tmp_path, monkeypatch):
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "photo.jpg").write_bytes(EPS)
    for item in (EPS, tmp_path / "photo.jpg"):
        for read in (open_image, check_header):
            with pytest.raises(DataError, match="EPS"):
                read(item)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("kind", ["ICO", "TGA"])
def test_other_formats_are_not_read(kind):
    with pytest.raises(DataError, match="not an image"):
        open_image(encode(Image.new("RGB", (16, 16)), kind))


@pytest.mark.parametrize("kind", sorted({*decoding.FORMATS} - {"HEIF"}))
def test_listed_formats_are_read(kind):
    if kind not in decoding.formats():
        pytest.skip(f"this Pillow does not read {kind}")
    found = rgb(encode(Image.new("RGB", (16, 12), (200, 100, 50)), kind))
    assert np.abs(found.astype(int) - [200, 100, 50]).max() <= 8


def test_heic_is_read_if_its_package_is_installed(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(decoding, "formats", lambda: ("JPEG",))
        with pytest.raises(DataError, match=r"\[heif\]"):
            open_image(b"\0\0\0\x18ftypheic" + bytes(20))
    heif = pytest.importorskip("pillow_heif", reason="the extra `heif` is not installed")
    content = io.BytesIO()
    heif.from_pillow(Image.new("RGB", (64, 48), (200, 100, 50))).save(content)
    assert np.abs(rgb(content.getvalue()).astype(int) - [200, 100, 50]).max() <= 8


def test_large_jpegs_are_reduced_while_they_are_decoded(monkeypatch):
    monkeypatch.setattr(decoding, "PIXEL_LIMIT", 2000)
    monkeypatch.setattr(decoding, "JPEG_LIMIT", 20_000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    photo = Image.fromarray(noise(100, 150, 3))
    jpeg = encode(photo, "JPEG")
    assert check_header(jpeg, reduced=True) == (150, 100)
    assert open_image(jpeg, at_least=20).size == (38, 25)
    for read in (
        lambda: check_header(jpeg),
        lambda: open_image(jpeg),
        lambda: open_image(jpeg, at_least=60),  # which it cannot be reduced to
        lambda: open_image(encode(photo, "JPEG", progressive=True), at_least=20),
        lambda: open_image(encode(photo), at_least=20),
        lambda: check_header(encode(photo.resize((150, 150)), "JPEG"), reduced=True),
    ):
        with pytest.raises(DataError, match="limit"):
            read()


def with_more_scans(jpeg, number):
    """Return a JPEG file with more copies of the first scan."""
    start = jpeg.index(b"\xff\xda\0\x08")
    end = jpeg.index(b"\xff\xc4", start)
    return jpeg[:end] + jpeg[start:end] * number + jpeg[end:]


def test_a_jpeg_file_with_too_many_scans_is_refused():
    """A file of a megabyte can hold 40,000 scans, each of which takes as long to decode as the whole image."""
    progressive = encode(Image.fromarray(noise(64, 64)), "JPEG", progressive=True)
    assert open_image(with_more_scans(progressive, 80), at_least=8).size == (8, 8)
    bomb = with_more_scans(progressive, 100)
    arithmetic = bomb.replace(b"\xff\xc2\0\x0b", b"\xff\xc9\0\x0b")
    for content in (bomb, arithmetic):
        with pytest.raises(DataError, match="more than 100 scans"):
            open_image(content, at_least=8)


def color_by_color(scans, *, before=b"", tables=b"", hidden=b""):
    """Return a JPEG file, not progressive, with a number of scans, most of them of ten bytes.

    before, tables: what comes before it and before its frame; hidden: what comes in the first of these scans.
    """
    jpeg = encode(Image.new("RGB", (64, 64)), "JPEG", subsampling=0)
    one, *two = (b"\xff\xda\0\x08\x01%c%c\0\x3f\0" % color for color in ((1, 0), (2, 17), (3, 17)))
    head = jpeg[:2] + tables + jpeg[2 : jpeg.index(b"\xff\xda")]
    return before + head + one + hidden + one * (scans - 3) + b"".join(two) + b"\xff\xd9"


RESTART = b"\xff\xdd\0\x04\0\x01"
"""With it, decoders pass over markers that they do not know among the pixels."""


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 64, decoding.BLOCK])
@pytest.mark.parametrize(
    "odd",
    [{}, {"before": b"\xff\xd8\xff\xd9"}, {"tables": RESTART, "hidden": b"\xff\x02\xf0\xf0"}],
    ids=["plain", "after the end of a file of tables", "behind a marker without a meaning"],
)
def test_scans_are_counted_in_every_jpeg(odd, block, monkeypatch):
    monkeypatch.setattr(decoding, "BLOCK", block)
    assert open_image(color_by_color(100, **odd)).size == (64, 64)
    with pytest.raises(DataError, match="more than 100 scans"):
        open_image(color_by_color(101, **odd))


@pytest.mark.parametrize("ended", [True, False])
def test_a_very_large_jpeg_file_is_never_held_in_memory(ended, tmp_path):
    content, file = encode(Image.fromarray(noise(64, 64)), "JPEG"), tmp_path / "large.jpg"
    file.write_bytes(content if ended else content.removesuffix(b"\xff\xd9"))
    os.truncate(file, 1 << 26)
    tracemalloc.start()
    try:
        with suppress(DataError):
            open_image(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("progressive", [True, False])
def test_scan_markers_in_comments_and_after_the_end_are_not_counted(progressive):
    photo, odd = Image.fromarray(noise(64, 64)), b"\xff\xda" * 200
    content = encode(photo, "JPEG", progressive=progressive, comment=odd) + odd
    assert open_image(content).size == (64, 64)


def test_a_large_image_below_pillows_own_limit_is_refused(monkeypatch):
    monkeypatch.setattr(decoding, "PIXEL_LIMIT", 100)
    assert check_header(encode(Image.new("RGB", (10, 10)))) == (10, 10)
    with pytest.raises(DataError, match="10 x 11 pixels"):
        open_image(encode(Image.new("RGB", (10, 11))))


@pytest.mark.parametrize(
    ("owner", "method", "size"),
    [(Image.Image, "getexif", (3, 2)), (Image.Exif, "tobytes", (2, 3))],
    ids=["all of it", "all but the orientation"],
)
def test_damaged_exif_does_not_lose_the_image(monkeypatch, owner, method, size):
    content = encode(Image.new("RGB", (3, 2), "red"), "JPEG", exif=turned(6))

    def fail(*arguments, **options):
        raise ValueError("a tag of an unknown type")

    monkeypatch.setattr(owner, method, fail)
    assert open_image(content).size == size


def test_an_image_in_memory_is_not_changed():
    content = encode(Image.new("RGB", (3, 2), "red"), "JPEG", exif=turned(6))
    image = Image.open(io.BytesIO(content))
    assert upright_rgb(image).size == (2, 3)
    assert image.size == (3, 2)
    assert image.getexif()[0x0112] == 6


@settings(max_examples=60)
@given(
    position=st.integers(0, len(SOUND) - 1),
    value=st.integers(0, 255),
    cut=st.integers(0, len(SOUND)),
)
@pytest.mark.filterwarnings("ignore")
def test_any_damage_results_in_an_image_or_a_data_error(position, value, cut):
    damaged = bytearray(SOUND)
    damaged[position] = value
    for content in (bytes(damaged), SOUND[:cut]):
        with suppress(DataError):
            assert open_image(content).mode == "RGB"
