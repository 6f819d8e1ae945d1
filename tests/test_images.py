import hashlib
import io
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from geodl.data import images as module
from geodl.data.images import (
    ArrayImages,
    FileImages,
    check_header,
    concat,
    from_tensors,
    open_image,
    pack,
    to_tensors,
    upright_rgb,
)
from geodl.errors import DataError


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def noise(*shape, seed=0, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def arrays(count=3, size=(5, 7), seed=0):
    pixels = torch.from_numpy(noise(count, 3, *size, seed=seed))
    return ArrayImages(pixels, torch.arange(count))


def rgb(item):
    image = open_image(item)
    assert image.mode == "RGB"
    return np.asarray(image)


# ------------------------------------------------------------------------------------------------ decoding to RGB


def test_rgb_and_grey_keep_their_values():
    colour, grey = noise(4, 6, 3), noise(4, 6)
    assert np.array_equal(rgb(encode(Image.fromarray(colour))), colour)
    assert np.array_equal(rgb(encode(Image.fromarray(grey))), np.stack([grey] * 3, axis=2))


def test_black_and_white():
    bits = noise(4, 9) > 127
    assert np.array_equal(rgb(encode(Image.fromarray(bits)))[:, :, 1], bits * np.uint8(255))


def test_palette_and_its_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    assert rgb(encode(image)).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert rgb(encode(image, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_alpha_is_laid_on_white():
    pixels = np.array([[[200, 100, 0, 255], [200, 100, 0, 0], [200, 100, 0, 51]]], dtype=np.uint8)
    blended = np.rint(np.array([200, 100, 0]) * 0.2 + 255 * 0.8)
    found = rgb(encode(Image.fromarray(pixels))).astype(int)
    assert found[0, 0].tolist() == [200, 100, 0]
    assert found[0, 1].tolist() == [255, 255, 255]
    assert np.abs(found[0, 2] - blended).max() <= 1


def test_grey_with_alpha():
    found = rgb(encode(Image.fromarray(np.array([[[90, 255], [90, 0]]], dtype=np.uint8))))
    assert found.tolist() == [[[90] * 3, [255] * 3]]


def test_rgb_with_a_transparent_colour():
    image = Image.fromarray(np.array([[[1, 2, 3], [9, 9, 9]]], dtype=np.uint8))
    assert rgb(encode(image, transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [9, 9, 9]]]


def test_cmyk():
    ink = np.array([[[0, 0, 0, 0], [0, 0, 0, 255], [255, 0, 0, 0]]], dtype=np.uint8).repeat(16, 0).repeat(16, 1)
    found = rgb(encode(Image.frombytes("CMYK", (48, 16), ink.tobytes()), "TIFF"))
    assert found[8, ::16].tolist() == [[255, 255, 255], [0, 0, 0], [0, 255, 255]]


def test_adobe_cmyk_jpeg_is_not_a_negative():
    white = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    assert rgb(encode(white, "JPEG")).min() >= 250


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    deep = noise(5, 6, dtype=np.uint16)
    expected = np.rint(deep.astype(np.float64) * 255 / 65535)
    assert np.array_equal(rgb(encode(Image.fromarray(deep), kind))[:, :, 0], expected)


def test_a_dark_sixteen_bit_picture_stays_dark():
    assert rgb(encode(Image.fromarray(np.full((3, 3), 255, dtype=np.uint16)))).max() == 1


@pytest.mark.parametrize(("values", "expected"), [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 51.0, 204.0], [0, 51, 204])])
def test_floating_point_pictures(values, expected):
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert rgb(encode(image, "TIFF"))[0, :, 2].tolist() == expected


def test_thirty_two_bit_integers():
    image = Image.fromarray(np.array([[0, 2**31 - 1]], dtype=np.int32))
    assert rgb(encode(image, "TIFF"))[0, :, 0].tolist() == [0, 127]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation(orientation, kind):
    image = Image.fromarray(noise(16, 24, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(image, kind, exif=exif)
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


# --------------------------------------------------------------------------------------------------- bad pictures


SOUND = encode(Image.fromarray(noise(12, 12, 3)))


def bomb() -> bytes:
    """Write a tiny PNG that claims to hold 400 million pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + SOUND[33:]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.jpg", b"", "the file is empty"),
        ("text.png", b"no picture at all", "not an image"),
        ("short.jpg", encode(Image.fromarray(noise(64, 64, 3)), "JPEG")[:-900], "the file is truncated"),
        ("short.png", encode(Image.fromarray(noise(64, 64, 3)))[:4000], "the file is truncated"),
        ("bomb.png", bomb(), "larger than the limit"),
    ],
)
def test_bad_files_are_named_with_a_plain_reason(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_image(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"gone.png: the file is missing"):
        open_image(tmp_path / "gone.png")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.Image, "open", refuse)
    with pytest.raises(DataError, match=r"secret.png: no permission"):
        open_image(tmp_path / "secret.png")


def test_a_large_picture_below_pillows_own_limit_is_refused(monkeypatch):
    monkeypatch.setattr(module, "PIXEL_LIMIT", 100)
    assert check_header(encode(Image.new("RGB", (10, 10)))) == (10, 10)
    with pytest.raises(DataError, match="10 x 11 pixels"):
        open_image(encode(Image.new("RGB", (10, 11))))


def test_damaged_exif_does_not_lose_the_picture(monkeypatch):
    def fail(self):
        raise SyntaxError("not a TIFF file")

    monkeypatch.setattr(Image.Image, "getexif", fail)
    assert rgb(encode(Image.new("RGB", (3, 2), "red"))).shape == (2, 3, 3)


def test_an_orientation_that_is_readable_counts_whatever_else_is_damaged(monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encode(Image.new("RGB", (3, 2), "red"), "JPEG", exif=exif)

    def fail(self, offset=8):
        raise ValueError("a tag of an unknown type")

    monkeypatch.setattr(Image.Exif, "tobytes", fail)
    assert open_image(content).size == (2, 3)


def test_a_picture_in_memory_is_left_as_it_is():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encode(Image.new("RGB", (3, 2), "red"), "JPEG", exif=exif)))
    assert upright_rgb(image).size == (2, 3)
    assert image.size == (3, 2)
    assert image.getexif()[0x0112] == 6


@settings(max_examples=60)
@given(position=st.integers(0, len(SOUND) - 1), value=st.integers(0, 255), cut=st.integers(0, len(SOUND)))
@pytest.mark.filterwarnings("ignore")
def test_damage_anywhere_gives_a_picture_or_a_data_error(position, value, cut):
    damaged = bytearray(SOUND)
    damaged[position] = value
    for content in (bytes(damaged), SOUND[:cut]):
        with suppress(DataError):
            assert open_image(content).mode == "RGB"


# ------------------------------------------------------------------------------------------------------ containers


def files(tmp_path, count=3):
    paths = []
    for i in range(count):
        path = tmp_path / f"{i}.png"
        path.write_bytes(encode(Image.fromarray(noise(4 + i, 5, 3, seed=i))))
        paths.append(path)
    return FileImages(tuple(paths), torch.arange(count))


def test_arrays_check_their_shapes():
    with pytest.raises(DataError, match="uint8"):
        ArrayImages(torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DataError, match=r"int64 \(2,\) needed"):
        ArrayImages(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match=r"int64 \(1,\) needed"):
        FileImages((b"",), torch.zeros(1))


@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_select_and_relabel(tmp_path, kind):
    images = arrays() if kind == "arrays" else files(tmp_path)
    for chosen in ([2, 0], torch.tensor([2, 0])):
        part = images.select(chosen)
        assert part.labels.tolist() == [2, 0]
        assert np.array_equal(part.decode(0), images.decode(2))
    masked = images.select(torch.tensor([True, False, True]))
    assert masked.labels.tolist() == [0, 2]
    assert np.array_equal(masked.decode(1), images.decode(2))
    assert images.relabel(torch.tensor([7, 8, 9])).labels.tolist() == [7, 8, 9]
    assert len(images.select([])) == 0
    assert type(images.select([])) is type(images)


def test_encoded_bytes(tmp_path):
    some, stored = arrays(), files(tmp_path)
    assert np.array_equal(open_image(some.encoded(1)), some.pixels[1].permute(1, 2, 0))
    assert stored.encoded(1) == stored.items[1].read_bytes()
    embedded = FileImages((stored.encoded(1),), torch.tensor([0]))
    assert np.array_equal(embedded.decode(0), stored.decode(1))


@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_digests_see_contents_labels_and_order(tmp_path, kind):
    images = arrays() if kind == "arrays" else files(tmp_path)
    same = images.select([0, 1, 2])
    assert images.digest() == same.digest()
    assert images.item_digests() == same.item_digests()
    others = [images.select([1, 0, 2]), images.select([0, 1]), images.relabel(torch.tensor([0, 2, 1]))]
    assert len({images.digest(), *(other.digest() for other in others)}) == 4
    assert others[0].item_digests() == [images.item_digests()[i] for i in (1, 0, 2)]
    assert len(set(images.item_digests())) == 3


def test_file_digests_are_those_of_the_contents(tmp_path):
    stored = files(tmp_path)
    embedded = FileImages(tuple(stored.encoded(i) for i in range(3)), stored.labels)
    assert stored.digest() == embedded.digest()
    assert stored.item_digests()[0] == hashlib.sha256(stored.encoded(0)).hexdigest()


def test_array_digest_sees_the_shape():
    tall = ArrayImages(torch.zeros(1, 3, 4, 2, dtype=torch.uint8), torch.tensor([0]))
    wide = ArrayImages(torch.zeros(1, 3, 2, 4, dtype=torch.uint8), torch.tensor([0]))
    assert tall.digest() != wide.digest()
    assert tall.item_digests() != wide.item_digests()


def test_concat(tmp_path):
    a, b, other, stored = arrays(2), arrays(3, seed=1), arrays(1, size=(2, 2)), files(tmp_path)
    joined = concat([a, b])
    assert isinstance(joined, ArrayImages)
    assert torch.equal(joined.pixels, torch.cat([a.pixels, b.pixels]))
    assert joined.labels.tolist() == [0, 1, 0, 1, 2]
    for parts in ([a, other], [a, stored]):
        mixed = concat(parts)
        assert isinstance(mixed, FileImages)
        assert mixed.labels.tolist() == torch.cat([part.labels for part in parts]).tolist()
        assert np.array_equal(mixed.decode(1), a.pixels[1].permute(1, 2, 0))
        assert np.array_equal(mixed.decode(len(mixed) - 1), parts[1].decode(len(parts[1]) - 1))
    assert isinstance(concat([a, stored.select([])]), ArrayImages)  # nothing to add changes nothing
    assert len(concat([a.select([])])) == 0
    with pytest.raises(DataError, match="concat"):
        concat([])


def test_pack_decodes_small_pictures_of_one_size(tmp_path):
    some = arrays(3)
    encoded = FileImages(tuple(some.encoded(i) for i in range(3)), some.labels)
    packed = pack(encoded)
    assert isinstance(packed, ArrayImages)
    assert packed.digest() == some.digest()
    assert pack(encoded, side=6) is encoded
    mixed = files(tmp_path)
    assert pack(mixed) is mixed
    assert pack(some) is some


def test_pack_leaves_pictures_that_exif_turns():
    exif = Image.Exif()
    exif[0x0112] = 6
    items = tuple(encode(Image.new("RGB", (4, 6)), exif=e) for e in (Image.Exif(), exif))
    turned = FileImages(items, torch.tensor([0, 1]))
    assert pack(turned) is turned


# --------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("kind", ["arrays", "files", "none"])
def test_tensors_give_the_images_back(tmp_path, kind):
    stored = files(tmp_path)
    images = {"arrays": arrays(), "files": stored, "none": stored.select([])}[kind]
    back = from_tensors(to_tensors(images))
    assert type(back) is type(images)
    assert back.digest() == images.digest()
    assert all(isinstance(item, bytes) for item in getattr(back, "items", ()))


def test_embedded_files_survive_the_originals(tmp_path):
    images = files(tmp_path)
    digest, tensors = images.digest(), to_tensors(images)
    for path in images.items:
        path.unlink()
    assert from_tensors(tensors).digest() == digest


def test_references_are_checked(tmp_path):
    images = files(tmp_path)
    mixed = FileImages((*images.items[:2], images.encoded(2)), images.labels)
    tensors = to_tensors(mixed, store_images=False)
    back = from_tensors(tensors)
    assert back.items == mixed.items
    images.items[1].write_bytes(b"something else")
    with pytest.raises(DataError, match=r"1\.png: the file has changed"):
        from_tensors(tensors)
    images.items[1].unlink()
    with pytest.raises(DataError, match=r"1\.png: the file is missing"):
        from_tensors(tensors)


def test_paths_that_are_not_text_can_be_stored_and_named(tmp_path):
    path = Path(str(tmp_path) + "/caf\udce9.png")  # the byte E9, as an old system would have written é
    path.write_bytes(SOUND)
    back = from_tensors(to_tensors(FileImages((path,), torch.tensor([0])), store_images=False))
    assert back.items == (path,)
    path.unlink()
    with pytest.raises(DataError) as caught:
        open_image(path)
    str(caught.value).encode()
    assert "caf\\xe9.png" in str(caught.value)
