"""The two containers of images: selecting, joining, hashing, storing."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.pictures import encode, noise

from geodl.core.decoding import Reference, open_image, read_bytes
from geodl.core.errors import DataError
from geodl.data.images import ArrayImages, FileImages, concat, from_tensors, pack, to_tensors


def arrays(count=3, size=(5, 7), seed=0):
    return ArrayImages(torch.from_numpy(noise(count, 3, *size, seed=seed)), torch.arange(count))


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
    with pytest.raises(DataError, match=r"expected int64 \(2,\)"):
        ArrayImages(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match=r"expected int64 \(1,\)"):
        FileImages((b"",), torch.zeros(1))


@pytest.fixture(params=["arrays", "files"])
def images(request, tmp_path):
    return arrays() if request.param == "arrays" else files(tmp_path)


def test_select_and_relabel(images):
    images = replace(images, clues=torch.arange(15).reshape(3, 5), digests=("a", "b", "c"))
    for chosen in ([2, 0], torch.tensor([2, 0]), torch.tensor([True, False, True])):
        part = images.select(chosen)
        rows = part.labels.tolist()
        assert rows == ([0, 2] if torch.as_tensor(chosen).dtype == torch.bool else [2, 0])
        assert np.array_equal(part.decode(0), images.decode(rows[0]))
        assert part.clues[:, 0].tolist() == [5 * row for row in rows]
        assert part.item_digests() == ["abc"[row] for row in rows]
    assert images.relabel(torch.tensor([7, 8, 9])).labels.tolist() == [7, 8, 9]
    assert len(images.select([])) == 0
    assert type(images.select([])) is type(images)


def test_digests_see_contents_labels_and_order(images):
    assert images.digest() == replace(images, names=("a", "b", "c")).digest()
    turned, less = images.select([1, 0, 2]), images.select([0, 1])
    other = images.relabel(torch.tensor([0, 2, 1]))
    assert len({each.digest() for each in (images, turned, less, other)}) == 4
    assert turned.item_digests() == [images.item_digests()[i] for i in (1, 0, 2)]
    assert len(set(images.item_digests())) == 3


def test_encoded_images_have_the_same_pixels_and_files_the_same_digests(images):
    encoded = FileImages(tuple(images.encoded(i) for i in range(3)), images.labels)
    for i in range(3):
        assert np.array_equal(encoded.decode(i), images.decode(i))
    assert encoded.item_digests()[0] == hashlib.sha256(images.encoded(0)).hexdigest()
    if isinstance(images, FileImages):
        assert images.encoded(1) == images.items[1].read_bytes()
        assert images.digest() == encoded.digest()


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


def test_pack_does_not_change_rotated_images():
    exif = Image.Exif()
    exif[0x0112] = 6
    items = tuple(encode(Image.new("RGB", (4, 6)), exif=e) for e in (Image.Exif(), exif))
    turned = FileImages(items, torch.tensor([0, 1]))
    assert pack(turned) is turned


# --------------------------------------------------------------------------------------------------------- tensors


def test_stored_images_do_not_need_the_original_files(images):
    for each in (images, images.select([])):
        digest, tensors = each.digest(), to_tensors(each)
        for path in getattr(each, "items", ()):
            path.unlink()
        back = from_tensors(tensors)
        assert type(back) is type(each)
        assert back.digest() == digest


def test_references_below_the_data_directory_are_checked(tmp_path):
    images = files(tmp_path)
    mixed = FileImages((*images.items[:2], images.encoded(2)), images.labels)
    tensors = to_tensors(mixed, store_images=False)
    assert from_tensors(tensors, tmp_path).items == mixed.items
    images.items[1].write_bytes(b"something else")
    with pytest.raises(DataError, match=r"1\.png: the file has changed"):
        from_tensors(tensors, tmp_path)
    images.items[1].unlink()
    with pytest.raises(DataError, match=r"1\.png: the file is missing"):
        from_tensors(tensors, tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("data_dir", [None, "other", "."])
def test_references_of_a_stranger_are_never_read(tmp_path, monkeypatch, data_dir):
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "private").write_bytes(png := encode(Image.new("RGB", (4, 4))))
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "other" / ".." / "private"):
        stranger = FileImages((Reference(path, hashlib.sha256(png).digest()),), torch.tensor([0]))
        tensors = to_tensors(stranger)
        if data_dir == ".":  # in the data directory, only regular files are opened
            if path.name == "pipe":
                with pytest.raises(DataError, match="not a regular file"):
                    from_tensors(tensors, tmp_path)
            continue
        found = from_tensors(tensors, data_dir and tmp_path / data_dir)
        assert found.digest() == stranger.digest()  # known without reading
        assert {**to_tensors(found)}.keys() == tensors.keys()  # it can be stored again
        for read in (read_bytes, open_image):
            with pytest.raises(DataError, match="outside the data directory; set data_dir"):
                read(found.items[0])


def test_paths_with_undecodable_bytes_are_stored_and_shown(tmp_path):
    # The byte E9, as an old system would have written é.
    path = Path(str(tmp_path) + "/caf\udce9.png")
    path.write_bytes(encode(Image.new("RGB", (4, 4))))
    tensors = to_tensors(FileImages((path,), torch.tensor([0])), store_images=False)
    assert from_tensors(tensors, tmp_path).items == (path,)
    path.unlink()
    with pytest.raises(DataError) as caught:
        open_image(path)
    str(caught.value).encode()
    assert "caf\\xe9.png" in str(caught.value)
