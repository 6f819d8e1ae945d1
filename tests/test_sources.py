import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from geodl.data import ArrayImages, Dataset, FileImages, cifar, folder, load, scan_folder, sources
from geodl.data.dataset import stratified
from geodl.data.folder import natural_key
from geodl.errors import ConfigError, DataError, MissingExtraError


def picture(seed=0, size=(6, 5)):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write(root, files):
    """Write files {path: contents}; contents None makes a folder, an integer a picture of that seed."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(picture(content) if isinstance(content, int) else content)
    return root


def snapshot(root):
    return {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}


# --------------------------------------------------------------------------------------------------------- general


def test_names_of_the_sources():
    found = sources()
    assert set(found) == {"digits", "folder", "cifar100", "hub", "imagenet", "imagenet-subset", "arrays"}
    assert all(line and "\n" not in line for line in found.values())


def test_unknown_names_and_options():
    with pytest.raises(ConfigError, match="unknown source 'mnist', allowed: arrays, cifar100, digits"):
        load("mnist")
    with pytest.raises(
        ConfigError, match="folder has no option 'fraction', allowed: test_fraction, split_seed, strict"
    ):
        load("folder", ".", fraction=0.1)
    with pytest.raises(ConfigError, match="data_dir: folder needs a folder of class folders"):
        load("folder")
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        load("folder", "nowhere")


def test_a_dataset_checks_its_labels():
    images = ArrayImages(torch.zeros(2, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="labels go from 0 to 2, 0 to 1 allowed"):
        Dataset("odd", images, images, ("a", "b"), "")
    with pytest.raises(DataError, match="0 training images"):
        Dataset("none", images.select([]), images, ("a", "b"), "")


def test_stratified_split():
    labels = torch.tensor([0] * 10 + [1] * 5 + [2] * 2 + [3])
    train, test = stratified(labels, "abcd", 0.2, 0)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(18))
    assert torch.bincount(labels[test], minlength=4).tolist() == [2, 1, 1, 0]
    assert test.tolist() == sorted(test.tolist())
    assert not torch.equal(test, stratified(labels, "abcd", 0.2, 1)[1])
    alone = stratified(labels[:10], "a", 0.2, 0)[1]
    assert torch.equal(alone, test[test < 10])  # other classes do not matter
    assert len(stratified(labels, "abcd", 0.0, 0)[1]) == 0
    with pytest.raises(ConfigError, match=r"test_fraction: 1\.5"):
        stratified(labels, "abcd", 1.5, 0)


# ---------------------------------------------------------------------------------------------------------- digits


def test_digits(digits):
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.classes == tuple("0123456789")
    assert digits.train.pixels.shape[1:] == (3, 8, 8)
    for part in (digits.train, digits.test):
        assert torch.equal(part.pixels[:, 0], part.pixels[:, 2])
    # Runs are told apart by it, so it must never change; it is that of the digits as scikit-learn has them.
    assert digits.fingerprint == "75ee60481dd4837f780bad01f000328f254a103ac112afd71c8ff4870870b3f0"
    counts = [torch.bincount(part.labels) for part in (digits.test, digits.train)]
    assert (counts[0] / sum(counts) - 0.2).abs().max() < 0.01


def test_the_digits_are_those_of_scikit_learn():
    bunch = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed").load_digits()
    with np.load(resources.files("geodl.data") / "digits.npz") as stored:
        assert np.array_equal(stored["images"], bunch.images)
        assert np.array_equal(stored["labels"], bunch.target)


def test_digits_are_always_the_same(digits):
    again = load("digits")
    assert again.fingerprint == digits.fingerprint
    assert again.train.digest() == digits.train.digest()
    assert "10 classes, 1438 training and 359 test images" in digits.summary()
    assert "20% of each class" in digits.summary()


# ---------------------------------------------------------------------------------------------------------- arrays


def test_arrays_in_memory():
    x, y = np.random.default_rng(0).integers(0, 256, (10, 4, 5, 3), dtype=np.uint8), np.arange(10) % 2
    data = load("arrays", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4], classes=["cat", "dog"])
    assert data.classes == ("cat", "dog")
    assert np.array_equal(data.train.pixels.permute(0, 2, 3, 1), x)
    assert data.test.labels.tolist() == [0, 1, 0, 1]
    split = load("arrays", x_train=x, y_train=y, test_fraction=0.4)
    assert (len(split.train), len(split.test)) == (6, 4)
    assert split.classes == ("0", "1")
    assert data.fingerprint != split.fingerprint


def test_array_layouts_and_types():
    x = np.random.default_rng(0).integers(0, 256, (4, 6, 5), dtype=np.uint8)
    variants = [
        x,
        x[..., None],
        x[:, None],
        np.stack([x] * 3, axis=1),
        np.stack([x] * 3, axis=3),
        torch.from_numpy(x),
        x.astype(np.int64),
        x / 255,
        torch.from_numpy(x / 255).float(),
    ]
    found = {load("arrays", x_train=v, y_train=[0, 1, 0, 1]).train.digest() for v in variants}
    assert len(found) == 1
    for bad, message in [
        (x[0], "shape"),
        (x[:, :, :, None].repeat(2, 3), "shape"),
        (x * 2.0, "0..1"),
        (x.astype(int) * 2, "0..255"),
    ]:
        with pytest.raises(DataError, match=message):
            load("arrays", x_train=bad, y_train=[0, 1, 0, 1])
    with pytest.raises(DataError, match="nan"):
        load("arrays", x_train=np.full((4, 2, 2), np.nan), y_train=[0, 1, 0, 1])


def test_array_labels_by_name():
    x = np.zeros((4, 2, 2), dtype=np.uint8)
    data = load("arrays", x_train=x, y_train=["pear", "apple", "pear", "apple"], test_fraction=0)
    assert data.classes == ("apple", "pear")
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    numbers = load("arrays", x_train=x, y_train=[10, 2, 10, 2], test_fraction=0)
    assert numbers.classes == ("2", "10")
    with pytest.raises(DataError, match="'fig' is not one"):
        load("arrays", x_train=x, y_train=["pear", "apple", "pear", "fig"], classes=["apple", "pear"])
    with pytest.raises(DataError, match="x_test and y_test come together"):
        load("arrays", x_train=x, y_train=[0, 1, 0, 1], x_test=x)
    with pytest.raises(DataError, match="labels"):
        load("arrays", x_train=x, y_train=[0, 1])


def test_npz(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (10, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "shapes.npz", x=x, y=np.arange(10) % 2, classes=np.array(["a", "b"]))
    data = load("arrays", tmp_path / "shapes.npz", test_fraction=0)
    assert (data.name, data.classes) == ("shapes", ("a", "b"))
    assert np.array_equal(data.train.pixels[:, 1], x)
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"bad\.npz: not a readable npz file"):
        load("arrays", tmp_path / "bad.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([{}]), y=np.array([0]))
    with pytest.raises(DataError, match=r"objects\.npz"):  # they would be unpickled
        load("arrays", tmp_path / "objects.npz")


def test_omniglot(omniglot):
    assert (len(omniglot.classes), len(omniglot.train), len(omniglot.test)) == (1623, 24345, 8115)
    assert omniglot.classes[0] == "Alphabet_of_the_Magi/character01"


# ----------------------------------------------------------------------------------------------------- class folders


def test_scan_folder(tmp_path):
    write(
        tmp_path,
        {"class 10/a.png": 0, "class 2/b10.png": 1, "class 2/b9.png": 2, "class 2/deep/er/c.dat": 3, "Ünï/x.jpg": 4},
    )
    before = snapshot(tmp_path)
    images, classes, odd = scan_folder(tmp_path, strict=True)
    assert classes == ("class 2", "class 10", "Ünï")
    assert [str(item.relative_to(tmp_path)) for item in images.items] == [
        "class 2/b9.png",
        "class 2/b10.png",
        "class 2/deep/er/c.dat",
        "class 10/a.png",
        "Ünï/x.jpg",
    ]
    assert images.labels.tolist() == [0, 0, 0, 1, 2]
    assert odd == ()
    assert snapshot(tmp_path) == before


def test_everything_odd_is_named_and_the_rest_goes_on(tmp_path):
    short = picture(9, (40, 40))[:2000]
    write(
        tmp_path,
        {
            "cat/1.png": 1,
            "cat/7.png": 7,
            "cat/notes.txt": b"hello",
            "cat/zero.png": b"",
            "cat/short.png": short,
            "cat/.hidden.png": b"ignored",
            "cat/.thumbs/x.png": b"ignored",
            "Cat/2.png": 2,
            "dog/copy of cat.png": 1,
            "dog/3.png": 3,
            "dog/wrong.jpg": 4,
            "empty": None,
            "hopeless/a.png": b"no",
            "stray.png": 5,
            ".secret/6.png": 6,
        },
    )
    (tmp_path / "dog" / "loop").symlink_to(tmp_path / "dog")
    (tmp_path / "dog" / "up").symlink_to(tmp_path)
    (tmp_path / "dog" / "gone.png").symlink_to(tmp_path / "nothing.png")
    (tmp_path / "dog" / "self.png").symlink_to(tmp_path / "dog" / "self.png")
    os.mkfifo(tmp_path / "dog" / "pipe.png")
    images, classes, odd = scan_folder(tmp_path, verify=True)
    assert set(classes) == {"Cat", "cat", "dog"}
    assert sorted(item.name for item in images.items) == ["2.png", "3.png", "7.png", "wrong.jpg"]
    reasons = dict(odd)
    assert len(reasons) == len(odd)
    expected = {
        "cat/notes.txt": "not an image",
        "cat/zero.png": "empty",
        "cat/short.png": "truncated",
        "cat": "case",
        "cat/1.png": "the same image as dog/copy of cat.png",
        "dog/copy of cat.png": "the same image as cat/1.png",
        "dog/loop": "read already",
        "dog/up": "read already",
        "dog/gone.png": "broken link",
        "dog/self.png": "broken link",
        "dog/pipe.png": "not a regular file",
        "empty": "no images",
        "hopeless/a.png": "not an image",
        "hopeless": "no images",
        "stray.png": "not inside a class folder",
    }
    assert set(reasons) == set(expected)
    for name, words in expected.items():
        assert words in reasons[name]


def test_strict_stops_at_the_first(tmp_path, monkeypatch):
    write(tmp_path, {"a/1.png": 1, "a/bad.png": b"no", "b/2.png": 2, "c": None})
    with pytest.raises(DataError, match=r"a/bad\.png: not an image$"):
        scan_folder(tmp_path, strict=True)
    write(tmp_path, {f"b/{i}.png": 3 for i in range(3000)})
    read = []
    check = folder.check_header
    monkeypatch.setattr(folder, "check_header", lambda path: (read.append(path), check(path)))
    with pytest.raises(DataError, match="not an image"):
        scan_folder(tmp_path, strict=True)
    assert len(read) < 1500  # the others were not read
    for i in range(3000):
        (tmp_path / "b" / f"{i}.png").unlink(missing_ok=True)
    write(tmp_path, {"b/2.png": 2})
    (tmp_path / "a" / "bad.png").unlink()
    with pytest.raises(DataError, match=r"c: no images in this class folder$"):
        scan_folder(tmp_path, strict=True)


def test_what_is_hidden_is_ignored_whether_strict_or_not(tmp_path):
    write(tmp_path, {"a/1.png": 1, "b/2.png": 2, ".cache/x.png": b"no", ".DS_Store": b"no", "a/.x.png": b"no"})
    for strict in (False, True):
        images, classes, skipped = scan_folder(tmp_path, strict)
        assert (len(images), classes, skipped) == (2, ("a", "b"), ())


def test_headers_are_enough_unless_verified(tmp_path):
    write(tmp_path, {"a/1.png": 1, "a/short.png": picture(0, (40, 40))[:2000]})
    assert len(scan_folder(tmp_path)[0]) == 2
    assert len(scan_folder(tmp_path, verify=True)[0]) == 1


def test_duplicates_inside_a_class_are_left_alone(tmp_path):
    write(tmp_path, {"a/1.png": 1, "a/again.png": 1, "b/2.png": 2})
    assert len(scan_folder(tmp_path, strict=True)[0]) == 3


def test_linked_class_folders_are_followed(tmp_path):
    write(tmp_path, {"elsewhere/1.png": 1, "root/b/2.png": 2})
    (tmp_path / "root" / "a").symlink_to(tmp_path / "elsewhere")
    images, classes, _ = scan_folder(tmp_path / "root", strict=True)
    assert classes == ("a", "b")
    assert len(images) == 2


def test_names_composed_differently_are_one_class(tmp_path):
    write(tmp_path, {"caf\u00e9/1.png": 1, "cafe\u0301/2.png": 2})
    images, classes, _ = scan_folder(tmp_path, strict=True)
    assert classes == ("caf\u00e9",)
    assert len(images) == 2


def test_a_class_name_that_is_no_text(tmp_path):
    write(tmp_path, {"a/1.png": 1, "caf\udce9/2.png": 2})
    _, classes, odd = scan_folder(tmp_path)
    assert classes == ("a",)
    assert odd == (
        ("caf\\xe9", "no name of a class: it is not valid text (a control character, or bytes that are none)"),
    )


def test_unreadable_folders(tmp_path, monkeypatch):
    write(tmp_path, {"a/1.png": 1, "b/2.png": 2})
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


def test_not_a_folder(tmp_path):
    write(tmp_path, {"file.png": 1})
    with pytest.raises(DataError, match=r"file\.png: not a folder"):
        scan_folder(tmp_path / "file.png")


def test_thousands_of_classes(tmp_path):
    write(tmp_path, {f"c{i}/x.png": picture() + str(i).encode() for i in range(2000)})
    images, classes, odd = scan_folder(tmp_path)
    assert classes == tuple(f"c{i}" for i in range(2000))
    assert (len(images), odd) == (2000, ())


def test_natural_order():
    names = ["10", "9", "a10", "a9", "A1", "b", "", "9a", "²"]
    assert sorted(names, key=natural_key) == ["", "9", "9a", "10", "A1", "a9", "a10", "b", "²"]


def test_one_folder_is_split(tmp_path):
    root = write(
        tmp_path / "fruit", {f"{name}/{i}.png": 10 * k + i for k, name in enumerate(["fig", "kiwi"]) for i in range(10)}
    )
    write(root, {"fig/bad.png": b"no"})
    data = load("folder", root, test_fraction=0.3, split_seed=5)
    assert (data.name, data.classes) == ("fruit", ("fig", "kiwi"))
    assert torch.bincount(data.test.labels).tolist() == [3, 3]
    assert isinstance(data.train, ArrayImages)  # all of one small size
    assert data.skipped == (("fig/bad.png", "not an image"),)
    assert "30% of each class drawn as test images (split seed 5)" in data.summary()
    assert "fig/bad.png: not an image" in data.summary()
    everything = sorted(data.train.item_digests() + data.test.item_digests())
    assert len(set(everything)) == 20
    assert load("folder", root, test_fraction=0.3, split_seed=6).fingerprint != data.fingerprint
    with pytest.raises(DataError, match=r"bad\.png"):
        load("folder", root, strict=True)


@pytest.mark.parametrize("name", ["test", "val"])
def test_train_and_test_folders(tmp_path, name):
    write(
        tmp_path,
        {"train/a/1.png": 1, "train/b/2.png": 2, "train/c/3.png": 3, f"{name}/c/4.png": 4, f"{name}/a/5.png": 5},
    )
    write(tmp_path, {f"{name}/z/6.png": 6, f"{name}/a/bad.png": b""})
    (tmp_path / "train" / "b" / "big.png").write_bytes(picture(7, (100, 80)))
    data = load("folder", tmp_path)
    assert data.classes == ("a", "b", "c")
    assert isinstance(data.train, FileImages)
    assert isinstance(data.test, FileImages)  # both kinds alike
    assert data.train.labels.tolist() == [0, 1, 1, 2]
    assert data.test.labels.tolist() == [0, 2]
    assert data.skipped == ((f"{name}/a/bad.png", "the file is empty"), (f"{name}/z", "no such class in train/"))
    assert f"train/ and {name}/" in data.summary()
    assert "size: 6 x 5 to 100 x 80 pixels, in files" in data.summary()


def test_train_alone_is_split_unless_it_is_a_class(tmp_path):
    pictures = {f"train/{name}/{i}.png": 10 * k + i for k, name in enumerate(["fig", "kiwi"]) for i in range(5)}
    write(tmp_path, pictures | {"train/fig/bad.png": b""})
    data = load("folder", tmp_path, test_fraction=0.2)
    assert data.classes == ("fig", "kiwi")
    assert torch.bincount(data.test.labels).tolist() == [1, 1]
    assert data.skipped == (("train/fig/bad.png", "the file is empty"),)
    write(tmp_path, {"bus/1.png": 30, "bus/2.png": 31})
    assert load("folder", tmp_path).classes == ("bus", "train")


def test_a_long_list_of_odd_things_is_cut(tmp_path):
    write(tmp_path, {"a/1.png": 1, **{f"a/{i}.txt": b"no" for i in range(30)}})
    summary = load("folder", tmp_path, test_fraction=0).summary(most=4)
    assert summary.count("not an image") == 4
    assert "and 26 more" in summary


# --------------------------------------------------------------------------------------------------------- imagenet


def test_imagenet_and_its_subset(tmp_path):
    synsets = [f"n{i:08d}" for i in range(5000, 5000 + 7 * 1000, 7)]
    write(tmp_path, {f"{part}/{synset}/{synset}_1.JPEG": b"x" for part in ("train", "val") for synset in synsets})
    full, subset = load("imagenet", tmp_path), load("imagenet-subset", tmp_path)
    assert full.classes == tuple(synsets)
    assert (len(full.train), len(full.test)) == (1000, 1000)
    chosen = np.random.RandomState(1993).permutation(1000)[:100]
    assert subset.classes == tuple(synsets[i] for i in chosen)
    for part in (subset.train, subset.test):
        assert [subset.classes[label] for label in part.labels] == [item.parent.name for item in part.items]
    assert full.fingerprint != subset.fingerprint
    (tmp_path / "val" / synsets[3] / f"{synsets[3]}_1.JPEG").unlink()
    with pytest.raises(DataError, match="val: 999 class folders with files found, ImageNet has 1000"):
        load("imagenet", tmp_path)


# ---------------------------------------------------------------------------------------------------------- cifar-100


NAMES = [f"class {i:02d}" for i in range(100)]


class OldPickler(pickle._Pickler):
    """Writes what Python 2 wrote: byte strings as STRING, arrays by the module's old name."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes

    def save_global(self, obj, name=None):
        if getattr(obj, "__name__", "") == "_reconstruct":
            self.write(pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    dispatch[type(np.empty(0).__reduce__()[0])] = save_global


def old_pickle(value):
    buffer = io.BytesIO()
    OldPickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def cifar_parts(per_class):
    random = np.random.default_rng(0)
    parts = {"meta": {b"fine_label_names": [name.encode() for name in NAMES]}}
    for split, count in per_class.items():
        labels = random.permutation(np.repeat(np.arange(100), count)).tolist()
        parts[split] = {b"data": random.integers(0, 256, (100 * count, 3072), dtype=np.uint8), b"fine_labels": labels}
    return parts


@pytest.fixture
def tiny(monkeypatch):
    per_class = {"train": 2, "test": 1}
    monkeypatch.setattr(cifar, "PER_CLASS", per_class)
    return cifar_parts(per_class)


def check_cifar(data, parts):
    assert data.classes == tuple(NAMES)
    for part, images in (("train", data.train), ("test", data.test)):
        assert np.array_equal(images.pixels.numpy().reshape(-1, 3072), parts[part][b"data"])
        assert images.labels.tolist() == parts[part][b"fine_labels"]


@pytest.mark.parametrize("dump", [old_pickle, lambda value: pickle.dumps(value, protocol=4)])
@pytest.mark.parametrize("inside", ["cifar-100-python", "cifar100/cifar-100-python", "."])
def test_cifar_python_folder(tmp_path, tiny, dump, inside):
    write(tmp_path, {f"{inside}/{name}": dump(value) for name, value in tiny.items()})
    check_cifar(load("cifar100", tmp_path), tiny)


def test_cifar_python_archive(tmp_path, tiny, monkeypatch):
    write(tmp_path, {f"cifar-100-python/{name}": old_pickle(value) for name, value in tiny.items()})
    root = tmp_path / "data"
    root.mkdir()
    with tarfile.open(root / "cifar-100-python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "cifar-100-python", "cifar-100-python")
    check_cifar(load("cifar100", root), tiny)
    check_cifar(load("cifar100", root / "cifar-100-python.tar.gz"), tiny)
    monkeypatch.setenv("GEODL_DATA", str(root))
    data = load("cifar100")
    assert data.split == "official (python archive)"
    (root / "cifar-100-python.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="not the CIFAR-100 python archive"):
        load("cifar100")


class Malicious:
    """A pickle that would write a file when it is loaded."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("dump", [old_pickle, lambda value: pickle.dumps(value, protocol=4)])
def test_a_malicious_pickle_is_refused(tmp_path, tiny, dump):
    mark = tmp_path / "mark"
    attacks = {
        "system": Malicious(os.system, f"touch {mark}"),
        "eval": Malicious(eval, f"open({str(mark)!r}, 'w')"),
        "getattr": Malicious(getattr, np.ndarray, "tofile"),
        "Popen": Malicious(subprocess.Popen, ["touch", str(mark)]),
    }
    for name, attack in attacks.items():
        tiny["train"][b"filenames"] = attack
        write(tmp_path, {f"cifar-100-python/{part}": dump(value) for part, value in tiny.items()})
        with pytest.raises(DataError, match=rf"train: .* it asks for \w+\.{name}, which no CIFAR-100 file needs"):
            load("cifar100", tmp_path)
    assert not mark.exists()


def test_incomplete_cifar_is_refused(tmp_path, tiny):
    tiny["test"][b"fine_labels"][0] = tiny["test"][b"fine_labels"][1]
    write(tmp_path, {f"cifar-100-python/{name}": old_pickle(value) for name, value in tiny.items()})
    with pytest.raises(DataError, match="the test part has 100 images"):
        load("cifar100", tmp_path)
    del tiny["train"][b"data"]
    write(tmp_path, {"cifar-100-python/train": old_pickle(tiny["train"])})
    with pytest.raises(DataError, match="train: not a CIFAR-100 file"):
        load("cifar100", tmp_path)
    write(tmp_path, {"cifar-100-python/train": pickle.dumps([1, 2])})
    with pytest.raises(DataError, match="no dictionary"):
        load("cifar100", tmp_path)


def test_no_cifar_there(tmp_path):
    with pytest.raises(DataError, match="no CIFAR-100 found"):
        load("cifar100", tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        load("cifar100", tmp_path / "nowhere")


def write_parquet(path, part, names=NAMES):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    encoded = []
    for row in part[b"data"]:
        buffer = io.BytesIO()
        Image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).save(buffer, format="PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    table = arrow.table({"img": encoded, "fine_label": part[b"fine_labels"]})
    features = {
        "info": {"features": {"img": {"_type": "Image"}, "fine_label": {"names": names, "_type": "ClassLabel"}}}
    }
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), path)


@pytest.fixture
def parquet_dir(tmp_path, tiny):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", tiny[split])
    return tmp_path


def test_cifar_parquet(parquet_dir, tiny):
    data = load("cifar100", parquet_dir)
    check_cifar(data, tiny)
    assert data.split == "official (parquet)"


def test_damaged_parquet(parquet_dir):
    shard = parquet_dir / "test-00000-of-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DataError, match="not CIFAR-100 in the hub's layout"):
        load("cifar100", parquet_dir)


def test_without_pyarrow_a_line_says_what_to_install(parquet_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"geodl\[parquet\]"):
        load("cifar100", parquet_dir)


@pytest.mark.slow
def test_the_real_cifar(cifar100_dir):
    data = load("cifar100", cifar100_dir)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert (data.classes[0], data.classes[68], data.classes[99]) == ("apple", "road", "worm")
    mean = data.train.pixels.double().mean(dim=(0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor([0.5071, 0.4866, 0.4409], dtype=torch.float64), atol=1e-4)


# --------------------------------------------------------------------------------------------------------------- hub


class Value: ...


class ClassLabel:
    def __init__(self, names):
        self.names = names


class FakeImage:
    def __init__(self, decode=True):
        self.decode = decode


FakeImage.__name__ = "Image"


class Split:
    """As much of a split of the `datasets` package as is used."""

    def __init__(self, columns, features):
        self.columns, self.features = columns, features

    def __getitem__(self, column):
        feature = self.features[column]
        assert not isinstance(feature, FakeImage) or not feature.decode, "pictures should not be decoded here"
        return self.columns[column]

    def cast_column(self, column, feature):
        return Split(self.columns, self.features | {column: feature})


@pytest.fixture
def hub(monkeypatch):
    module = ModuleType("datasets")
    module.Image = FakeImage
    module.calls = []
    module.splits = {}
    module.load_dataset = lambda name: module.calls.append(("load_dataset", name)) or module.splits
    module.load_from_disk = lambda name: module.calls.append(("load_from_disk", name)) or module.splits
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def hub_split(labels, seed=0, size=(6, 5), **features):
    pictures = [{"bytes": picture(seed + i, size), "path": None} for i in range(len(labels))]
    return Split(
        {"photo": pictures, "label": labels}, {"photo": FakeImage(), "label": ClassLabel(["a", "b"])} | features
    )


def test_hub_by_name(hub):
    hub.splits = {"train": hub_split([0, 1, 0]), "test": hub_split([1], seed=9)}
    data = load("hub", "someone/something")
    assert hub.calls == [("load_dataset", "someone/something")]
    assert data.classes == ("a", "b")
    assert data.train.labels.tolist() == [0, 1, 0]
    assert isinstance(data.train, ArrayImages)
    assert np.array_equal(data.train.decode(1), Image.open(io.BytesIO(picture(1))))
    assert len(data.test) == 1
    assert "splits train and test; columns photo, label" in data.summary()


def test_hub_local_and_split(hub, tmp_path):
    hub.splits = {"train": hub_split([0, 1] * 5, size=(70, 80))}
    data = load("hub", tmp_path)
    assert (len(data.train), len(data.test)) == (8, 2)
    assert isinstance(data.train, FileImages)
    (tmp_path / "dataset_dict.json").write_text("{}")
    load("hub", tmp_path)
    assert hub.calls == [("load_dataset", str(tmp_path)), ("load_from_disk", str(tmp_path))]


def test_hub_columns(hub, tmp_path):
    path = tmp_path / "p.png"
    path.write_bytes(picture(3, (70, 80)))
    split = hub_split(["x", "y", "x"], size=(70, 80), label=Value())
    split.columns |= {"photo": [{"bytes": None, "path": str(path)}] * 3, "kind": ["k", "k", "j"]}
    split.features |= {"kind": Value()}
    hub.splits = {"train": split, "validation": split}
    data = load("hub", "d")
    assert data.classes == ("x", "y")
    assert data.train.items == (path,) * 3
    assert load("hub", "d", label_column="kind").classes == ("j", "k")
    with pytest.raises(ConfigError, match="label_column: no column 'lable', allowed: photo, label, kind"):
        load("hub", "d", label_column="lable")
    split.features |= {"second": FakeImage()}
    with pytest.raises(ConfigError, match="image_column: 2 image columns found"):
        load("hub", "d")
    assert load("hub", "d", image_column="photo").classes == ("x", "y")


def test_hub_unknown_test_labels(hub):
    hub.splits = {"train": hub_split(["x", "y"], label=Value()), "test": hub_split(["z"], label=Value())}
    with pytest.raises(DataError, match="not among the 2 training classes"):
        load("hub", "d")
    hub.splits = {"test": hub_split([0])}
    with pytest.raises(DataError, match="no split 'train', only test"):
        load("hub", "d")


def test_hub_errors(hub, monkeypatch):
    with pytest.raises(ConfigError, match="data_dir: hub needs the name of a dataset, or a local folder"):
        load("hub")

    def fail(name):
        raise ConnectionError("no\nnetwork")

    hub.load_dataset = fail
    with pytest.raises(DataError, match=r"d: cannot be loaded \(no network\)"):
        load("hub", "d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"geodl\[hub\]"):
        load("hub", "d")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((4, 8, 8), (5,), "4 images with 5 labels given"),
        ((4, 8, 8), (4, 3), r"labels of shape \(4, 3\) given"),
        ((4, 8, 8), (), "4 images with 1 label given"),
    ],
)
def test_labels_that_do_not_fit_the_images_are_refused(x, y, message):
    with pytest.raises(DataError, match=message):
        load("arrays", x_train=np.zeros(x, np.uint8), y_train=np.zeros(y, np.int64))


@pytest.mark.parametrize("kind", ["u1", "<u2", ">u2", "u4", "u8", ">i4", "f2", ">f4", "f8", "g"])
def test_arrays_of_any_width_and_order_of_bytes(kind):
    floating = np.dtype(kind).kind == "f"
    x = (np.arange(4 * 64).reshape(4, 8, 8) % 256).astype("f8")
    data = load("arrays", x_train=(x / 255 if floating else x).astype(kind), y_train=[0, 0, 1, 1], test_fraction=0.5)
    pixels = torch.cat([data.train.pixels, data.test.pixels])
    assert sorted(pixels[:, 0].flatten().tolist()) == sorted(x.astype("u1").flatten().tolist())


@pytest.mark.parametrize("kind", ["bool", "c16", "U3", "M8[s]"])
def test_arrays_that_are_no_images(kind):
    with pytest.raises(DataError, match=r"images of type .* given; allowed: integers 0..255, floats 0..1"):
        load("arrays", x_train=np.zeros((4, 8, 8)).astype(kind), y_train=[0, 0, 1, 1])


def test_two_classes_of_one_name_are_refused():
    with pytest.raises(DataError, match="two classes are called 'a'"):
        load("arrays", x_train=np.zeros((3, 8, 8), np.uint8), y_train=[0, 1, 2], classes=["a", "a", "b"])
