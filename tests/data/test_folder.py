"""Folders of class folders: scanning, skipped files, splits, ImageNet."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.pictures import png, tree

from geodl.core.errors import DataError
from geodl.data import ArrayImages, FileImages, folder, load, scan_folder
from geodl.data.names import natural_key


def snapshot(root):
    return {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}


def test_scan_folder(tmp_path):
    wanted = ["class 2/b9.png", "class 2/b10.png", "class 2/deep/er/c.dat", "class 10/a.png"]
    tree(tmp_path, dict.fromkeys([*reversed(wanted), "Ünï/x.jpg"], 1) | {"Ünï/x.jpg": 2})
    (tmp_path / "class 10" / "a.png").write_bytes(png(3))
    before = snapshot(tmp_path)
    images, classes, odd = scan_folder(tmp_path, strict=True)
    assert classes == images.names == ("class 2", "class 10", "Ünï")
    assert [str(item.relative_to(tmp_path)) for item in images.items] == [*wanted, "Ünï/x.jpg"]
    assert images.labels.tolist() == [0, 0, 0, 1, 2]
    assert odd == ()
    assert snapshot(tmp_path) == before


ODD = {
    "cat/notes.txt": "not an image",
    "cat/zero.png": "empty",
    "cat/short.png": "truncated",
    "cat": "case",
    "cat/1.png": "the same image as dog/copy of cat.png",
    "dog/copy of cat.png": "the same image as cat/1.png",
    "also dog": "read already",
    "dog/loop": "read already",
    "dog/up": "read already",
    "dog/gone.png": "broken link",
    "dog/self.png": "broken link",
    "dog/pipe.png": "not a regular file",
    "empty": "no images",
    "hopeless/a.png": "not an image",
    "hopeless": "no images",
    "stray.png": "not inside a class folder",
    "caf\\xe9": "not valid text",
}


def test_unusable_files_are_named_and_the_rest_is_read(tmp_path):
    good = {"cat/1.png": 1, "cat/7.png": 7, "Cat/2.png": 2, "dog/3.png": 3, "dog/wrong.jpg": 4}
    bad = {"cat/notes.txt": b"hello", "cat/zero.png": b"", "hopeless/a.png": b"no", "empty": None}
    bad |= {"dog/copy of cat.png": 1, "stray.png": 5, "cat/short.png": png(9, (40, 40))[:2000]}
    hidden = {".secret/6.png": 6, "cat/.hidden.png": b"ignored", "cat/.thumbs/x.png": b"ignored"}
    tree(tmp_path, good | bad | hidden | {"caf\udce9/2.png": 8})
    dog = tmp_path / "dog"
    for name, target in (("loop", dog), ("up", tmp_path), ("self.png", dog / "self.png")):
        (dog / name).symlink_to(target)
    (tmp_path / "also dog").symlink_to(dog)
    (dog / "gone.png").symlink_to(tmp_path / "nothing.png")
    os.mkfifo(dog / "pipe.png")
    images, classes, odd = scan_folder(tmp_path, verify=True)
    assert set(classes) == {"Cat", "cat", "dog"}
    assert sorted(item.name for item in images.items) == ["2.png", "3.png", "7.png", "wrong.jpg"]
    reasons = dict(odd)
    assert len(reasons) == len(odd)
    assert set(reasons) == set(ODD)
    for name, words in ODD.items():
        assert words in reasons[name]


def test_strict_stops_at_the_first_problem(tmp_path, monkeypatch):
    tree(tmp_path, {"a/1.png": 1, "a/bad.png": b"no", "b/2.png": 2, "c": None})
    tree(tmp_path, {f"b/{i}.png": 3 for i in range(3, 1500)})
    read = []
    check = folder.image_problem
    monkeypatch.setattr(
        folder,
        "image_problem",
        lambda path, **options: (read.append(path), check(path, **options))[1],
    )
    with pytest.raises(DataError, match=r"a/bad\.png: not an image$"):
        scan_folder(tmp_path, strict=True)
    assert len(read) < 1000  # the others were not read
    (tmp_path / "a" / "bad.png").unlink()
    with pytest.raises(DataError, match=r"c: no images in this class folder$"):
        scan_folder(tmp_path, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_files_that_are_not_skipped(tmp_path, strict):
    """Hidden files, copies inside a class, linked class folders, names composed differently."""
    tree(tmp_path, {"root/a/1.png": 1, "root/a/again.png": 1, "root/.cache/x.png": b"no"})
    tree(tmp_path, {"root/.DS_Store": b"no", "root/a/.x.png": b"no", "elsewhere/3.png": 3})
    tree(tmp_path, {"root/caf\u00e9/1.png": 4, "root/cafe\u0301/2.png": 5})
    (tmp_path / "root" / "b").symlink_to(tmp_path / "elsewhere")
    images, classes, skipped = scan_folder(tmp_path / "root", strict)
    assert (len(images), classes, skipped) == (5, ("a", "b", "caf\u00e9"), ())


def test_headers_are_enough_unless_verified(tmp_path):
    tree(tmp_path, {"a/1.png": 1, "a/short.png": png(0, (40, 40))[:2000]})
    assert len(scan_folder(tmp_path)[0]) == 2
    assert len(scan_folder(tmp_path, verify=True)[0]) == 1


def test_unreadable_folders(tmp_path, monkeypatch):
    tree(tmp_path, {"a/1.png": 1, "b/2.png": 2})
    listing = Path.iterdir

    def iterdir(self):
        if self.name == "b":
            raise PermissionError(13, "Permission denied")
        return listing(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    _, classes, odd = scan_folder(tmp_path)
    assert classes == ("a",)
    assert odd[0] == ("b", "the folder cannot be read")
    with pytest.raises(DataError, match=r"b: the folder cannot be read \(Permission denied\)"):
        scan_folder(tmp_path / "b")
    with pytest.raises(DataError, match=r"1\.png: not a folder"):
        scan_folder(tmp_path / "a" / "1.png")


def test_natural_order():
    names = ["10", "9", "a10", "a9", "A1", "b", "", "9a", "²"]
    assert sorted(names, key=natural_key) == ["", "9", "9a", "10", "A1", "a9", "a10", "b", "²"]


# ---------------------------------------------------------------------------------------------------------- datasets


def fruit(count):
    """Return names and seeds of `count` images of each of two classes."""
    return {
        f"{name}/{i}.png": k + i for k, name in ((0, "fig"), (50, "kiwi")) for i in range(count)
    }


def test_one_folder_is_split(tmp_path):
    root = tree(tmp_path / "fruit", fruit(10) | {"fig/bad.png": b"no"})
    tree(root, {f"fig/{i}.txt": b"no" for i in range(30)})
    data = load("folder", root, test_fraction=0.3, split_seed=5)
    assert (data.name, data.classes) == ("fruit", ("fig", "kiwi"))
    assert data.train.names == data.test.names == data.classes
    assert torch.bincount(data.test.labels).tolist() == [3, 3]
    assert isinstance(data.train, ArrayImages)  # all of one small size
    assert ("fig/bad.png", "not an image") in data.skipped
    assert "30% of each class drawn as test images (split seed 5)" in data.summary()
    assert data.summary(most=4).count("not an image") == 4  # a long list is cut
    assert "and 27 more" in data.summary(most=4)
    assert len({*data.train.item_digests(), *data.test.item_digests()}) == 20
    assert load("folder", root, test_fraction=0.3, split_seed=6).fingerprint != data.fingerprint
    with pytest.raises(DataError, match="not an image"):
        load("folder", root, strict=True)


@pytest.mark.parametrize("name", ["test", "val"])
def test_train_and_test_folders(tmp_path, name):
    tree(tmp_path, {"train/a/1.png": 1, "train/b/2.png": 2, "train/c/3.png": 3})
    tree(tmp_path, {"train/b/big.png": png(7, (100, 80)), f"{name}/a/5.png": 5})
    tree(tmp_path, {f"{name}/c/4.png": 4, f"{name}/z/6.png": 6, f"{name}/a/bad.png": b""})
    data = load("folder", tmp_path)
    assert data.classes == data.train.names == data.test.names == ("a", "b", "c")
    assert isinstance(data.train, FileImages)
    assert isinstance(data.test, FileImages)  # both kinds alike
    assert data.train.labels.tolist() == [0, 1, 1, 2]
    assert data.test.labels.tolist() == [0, 2]
    assert [what for what, _ in data.skipped] == [f"{name}/a/bad.png", f"{name}/z"]
    assert f"train/ and {name}/" in data.summary()
    assert "size: 6 x 5 to 100 x 80 pixels, in files" in data.summary()


def test_train_alone_is_split_unless_it_is_a_class(tmp_path):
    tree(tmp_path / "train", fruit(5) | {"fig/bad.png": b""})
    data = load("folder", tmp_path, test_fraction=0.2)
    assert data.classes == ("fig", "kiwi")
    assert torch.bincount(data.test.labels).tolist() == [1, 1]
    assert data.skipped == (("train/fig/bad.png", "the file is empty"),)
    tree(tmp_path, {"bus/1.png": 30, "bus/2.png": 31})
    assert load("folder", tmp_path).classes == ("bus", "train")


def test_imagenet_and_its_subset(tmp_path):
    synsets = [f"n{i:08d}" for i in range(5000, 5000 + 7 * 1000, 7)]
    for part in ("train", "val"):
        tree(tmp_path / part, {f"{synset}/{synset}_1.JPEG": b"x" for synset in synsets})
    full, subset = load("imagenet", tmp_path), load("imagenet-subset", tmp_path)
    assert full.classes == tuple(synsets)
    assert (len(full.train), len(full.test)) == (1000, 1000)
    chosen = np.random.RandomState(1993).permutation(1000)[:100]
    assert subset.classes == tuple(synsets[i] for i in chosen)
    for part in (subset.train, subset.test):
        folders = [item.parent.name for item in part.items]
        assert [subset.classes[label] for label in part.labels] == folders
    assert full.fingerprint != subset.fingerprint
    (tmp_path / "val" / synsets[3] / f"{synsets[3]}_1.JPEG").unlink()
    with pytest.raises(DataError, match="val: 999 class folders with files found"):
        load("imagenet", tmp_path)
