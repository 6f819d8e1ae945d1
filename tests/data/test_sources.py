"""Sources by name: digits, arrays, npz files, CIFAR-100 in all its layouts, datasets of the hub."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from importlib import resources
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.pictures import encode, noise, png, tree

from geodl.core.errors import ConfigError, DataError, MissingExtraError
from geodl.data import ArrayImages, Dataset, FileImages, cifar, load, sources
from geodl.data.dataset import stratified


def test_names_of_the_sources():
    found = sources()
    known = {"digits", "folder", "cifar100", "hub", "imagenet", "imagenet-subset", "arrays"}
    assert set(found) == known
    assert all(line and "\n" not in line for line in found.values())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (["mnist"], {}, ConfigError, "data = 'mnist': allowed values are arrays, cifar100, digits"),
        (["folder", "."], {"fraction": 1}, ConfigError, "no option 'fraction', allowed: test_f"),
        (["folder"], {}, ConfigError, "data_dir: folder needs a folder of class folders"),
        (["folder", "nowhere"], {}, DataError, "nowhere: no such file or folder"),
        (["cifar100", "nowhere"], {}, DataError, "no such file or folder"),
        (["cifar100", "."], {}, DataError, "no CIFAR-100 found"),
        (["hub"], {}, ConfigError, "data_dir: hub needs the name of a dataset"),
    ],
)
def test_unknown_names_and_options(tmp_path, monkeypatch, arguments, options, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        load(*arguments, **options)


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
    with pytest.raises(ConfigError, match=r"test_fraction = 1\.5"):
        stratified(labels, "abcd", 1.5, 0)


def test_digits(digits):
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.classes == digits.train.names == tuple("0123456789")
    assert digits.train.pixels.shape[1:] == (3, 8, 8)
    for part in (digits.train, digits.test):
        assert torch.equal(part.pixels[:, 0], part.pixels[:, 2])
    # Runs are told apart by it, so it must never change; it is that of the digits as scikit-learn has them.
    assert digits.fingerprint == "75ee60481dd4837f780bad01f000328f254a103ac112afd71c8ff4870870b3f0"
    assert load("digits").train.digest() == digits.train.digest()
    counts = [torch.bincount(part.labels) for part in (digits.test, digits.train)]
    assert (counts[0] / sum(counts) - 0.2).abs().max() < 0.01
    assert "10 classes, 1438 training and 359 test images" in digits.summary()
    assert "20% of each class" in digits.summary()


def test_the_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    bunch = datasets.load_digits()
    with np.load(resources.files("geodl.data") / "digits.npz") as stored:
        assert np.array_equal(stored["images"], bunch.images)
        assert np.array_equal(stored["labels"], bunch.target)


# ---------------------------------------------------------------------------------------------------------- arrays


def test_arrays_in_memory():
    x, y = noise(10, 4, 5, 3), np.arange(10) % 2
    data = load("arrays", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4], classes=["cat", "dog"])
    assert data.classes == data.test.names == ("cat", "dog")
    assert np.array_equal(data.train.pixels.permute(0, 2, 3, 1), x)
    assert data.test.labels.tolist() == [0, 1, 0, 1]
    split = load("arrays", x_train=x, y_train=y, test_fraction=0.4)
    assert (len(split.train), len(split.test)) == (6, 4)
    assert split.classes == ("0", "1")
    assert data.fingerprint != split.fingerprint


def test_array_layouts_and_types():
    x = noise(4, 6, 5)
    variants = [x, x[..., None], x[:, None], np.stack([x] * 3, axis=1), np.stack([x] * 3, axis=3)]
    variants += [
        torch.from_numpy(x),
        x.astype(np.int64),
        x / 255,
        torch.from_numpy(x / 255).float(),
    ]
    found = {load("arrays", x_train=v, y_train=[0, 1, 0, 1]).train.digest() for v in variants}
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["u1", "<u2", ">u2", "u4", "u8", ">i4", "f2", ">f4", "f8", "g"])
def test_arrays_of_any_width_and_order_of_bytes(kind):
    x = (np.arange(4 * 64).reshape(4, 8, 8) % 256).astype("f8")
    given = (x / 255 if np.dtype(kind).kind == "f" else x).astype(kind)
    data = load("arrays", x_train=given, y_train=[0, 0, 1, 1], test_fraction=0)
    assert np.array_equal(data.train.pixels[:, 0], x.astype("u1"))


X = np.zeros((4, 2, 2), dtype=np.uint8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"x_train": X[0]}, "shape"),
        ({"x_train": X[:, :, :, None].repeat(2, 3)}, "shape"),
        ({"x_train": X + 2.0}, "0..1"),
        ({"x_train": X.astype(int) + 256}, "0..255"),
        ({"x_train": np.full((4, 2, 2), np.nan)}, "nan"),
        *[({"x_train": X.astype(kind)}, "images of type") for kind in ("bool", "c16", "U3")],
        ({"y_train": ["pear", "apple", "pear", "fig"], "classes": ["apple", "pear"]}, "'fig'"),
        ({"y_train": [0, 1, 2, 2], "classes": ["apple", "pear"]}, "label 2 has no name"),
        ({"classes": ["a", "a", "b"]}, "two classes are called 'a'"),
        ({"x_test": X}, "x_test and y_test come together"),
        ({"y_train": [0, 1]}, "4 images with 2 labels given"),
        ({"y_train": np.zeros((4, 3), int)}, "class list: a name or a number"),
        ({"y_train": np.int64(0)}, "one name or number an image"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(options, words):
    with pytest.raises(DataError, match=words):
        load("arrays", **({"x_train": X, "y_train": [0, 1, 0, 1]} | options))


def test_npz(tmp_path):
    x = noise(10, 4, 4)
    np.savez(tmp_path / "shapes.npz", x=x, y=np.arange(10) % 2, classes=np.array(["a", "b"]))
    data = load("arrays", tmp_path / "shapes.npz", test_fraction=0)
    assert (data.name, data.classes) == ("shapes", ("a", "b"))
    assert np.array_equal(data.train.pixels[:, 1], x)
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"bad\.npz: not a readable npz file"):
        load("arrays", tmp_path / "bad.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="not a regular file"):
        load("arrays", tmp_path / "pipe.npz")
    # They would be unpickled; numpy's advice to allow that is not passed on.
    np.savez(tmp_path / "objects.npz", x=np.array([{}]), y=np.array([0]))
    with pytest.raises(DataError, match=r"objects\.npz: .* never loaded") as caught:
        load("arrays", tmp_path / "objects.npz")
    assert "allow_pickle" not in str(caught.value)


def test_omniglot(omniglot):
    assert (len(omniglot.classes), len(omniglot.train), len(omniglot.test)) == (1623, 24345, 8115)
    assert omniglot.classes[0] == "Alphabet_of_the_Magi/character01"


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
        parts[split] = {
            b"data": random.integers(0, 256, (100 * count, 3072), dtype=np.uint8),
            b"fine_labels": labels,
        }
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
    tree(tmp_path, {f"{inside}/{name}": dump(value) for name, value in tiny.items()})
    check_cifar(load("cifar100", tmp_path), tiny)


def archive(folder, path, kind="gz"):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, f"w:{kind}") as tar:
        tar.add(folder, "cifar-100-python")


def test_cifar_python_archive(tmp_path, tiny, monkeypatch):
    tree(tmp_path, {f"cifar-100-python/{name}": old_pickle(value) for name, value in tiny.items()})
    root = tmp_path / "data"
    archive(tmp_path / "cifar-100-python", root / "cifar-100-python.tar.gz")
    check_cifar(load("cifar100", root), tiny)
    check_cifar(load("cifar100", root / "cifar-100-python.tar.gz"), tiny)
    monkeypatch.setenv("GEODL_DATA", str(root))
    data = load("cifar100")
    assert data.split == "official (python archive)"
    (root / "cifar-100-python.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="not the CIFAR-100 python archive"):
        load("cifar100")
    member = tmp_path / "cifar-100-python" / "train"
    for target in ("train", "/etc/passwd"):  # a link may lead to itself, or out of the archive
        member.unlink()
        member.symlink_to(target)
        archive(tmp_path / "cifar-100-python", root / "cifar-100-python.tar.gz")
        with pytest.raises(DataError, match="train is not a regular file"):
            load("cifar100")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_damaged_compression_of_the_archive_is_refused(tmp_path, tiny, kind):
    tree(tmp_path, {f"cifar-100-python/{name}": old_pickle(value) for name, value in tiny.items()})
    path = tmp_path / "data" / "cifar-100-python.tar.gz"
    archive(tmp_path / "cifar-100-python", path, kind)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"not .*CIFAR-100"):
        load("cifar100", path)


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
        tree(tmp_path, {f"cifar-100-python/{part}": dump(value) for part, value in tiny.items()})
        with pytest.raises(
            DataError, match=rf"train: .* it asks for \w+\.{name}, which no CIFAR-100 file needs"
        ):
            load("cifar100", tmp_path)
    assert not mark.exists()


def test_incomplete_cifar_is_refused(tmp_path, tiny):
    tiny["test"][b"fine_labels"][0] = tiny["test"][b"fine_labels"][1]
    tree(tmp_path, {f"cifar-100-python/{name}": old_pickle(value) for name, value in tiny.items()})
    with pytest.raises(DataError, match="the test part has 100 images"):
        load("cifar100", tmp_path)
    del tiny["train"][b"data"]
    tree(tmp_path, {"cifar-100-python/train": old_pickle(tiny["train"])})
    with pytest.raises(DataError, match="train: not a CIFAR-100 file"):
        load("cifar100", tmp_path)
    tree(tmp_path, {"cifar-100-python/train": pickle.dumps([1, 2])})
    with pytest.raises(DataError, match="no dictionary"):
        load("cifar100", tmp_path)


def write_parquet(path, part, names=NAMES):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pictures = part[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    encoded = [{"bytes": encode(Image.fromarray(each)), "path": None} for each in pictures]
    table = arrow.table({"img": encoded, "fine_label": part[b"fine_labels"]})
    label = {"names": names, "_type": "ClassLabel"}
    features = {"info": {"features": {"img": {"_type": "Image"}, "fine_label": label}}}
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), path)


@pytest.fixture
def parquet_dir(tmp_path, tiny):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", tiny[split])
    return tmp_path


def test_cifar_parquet(parquet_dir, tiny, monkeypatch):
    data = load("cifar100", parquet_dir)
    check_cifar(data, tiny)
    assert data.split == "official (parquet)"
    shard = parquet_dir / "test-00000-of-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DataError, match="not CIFAR-100 in the hub's layout"):
        load("cifar100", parquet_dir)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"\[parquet\]"):
        load("cifar100", parquet_dir)


@pytest.mark.slow
def test_the_real_cifar(cifar100_dir):
    data = load("cifar100", cifar100_dir)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert (data.classes[0], data.classes[68], data.classes[99]) == ("apple", "road", "worm")
    mean = data.train.pixels.double().mean(dim=(0, 2, 3)) / 255
    assert torch.allclose(
        mean, torch.tensor([0.5071, 0.4866, 0.4409], dtype=torch.float64), atol=1e-4
    )


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
        assert not isinstance(feature, FakeImage) or not feature.decode, (
            "pictures should not be decoded here"
        )
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
    module.load_from_disk = lambda name: (
        module.calls.append(("load_from_disk", name)) or module.splits
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def hub_split(labels, seed=0, size=(6, 5), **features):
    pictures = [{"bytes": png(seed + i, size), "path": None} for i in range(len(labels))]
    kinds = {"photo": FakeImage(), "label": ClassLabel(["a", "b"])} | features
    return Split({"photo": pictures, "label": labels}, kinds)


def test_hub_by_name(hub):
    hub.splits = {"train": hub_split([0, 1, 0]), "test": hub_split([1], seed=9)}
    data = load("hub", "someone/something")
    assert hub.calls == [("load_dataset", "someone/something")]
    assert data.classes == ("a", "b")
    assert data.train.labels.tolist() == [0, 1, 0]
    assert isinstance(data.train, ArrayImages)
    assert np.array_equal(data.train.decode(1), Image.open(io.BytesIO(png(1))))
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
    path.write_bytes(png(3, (70, 80)))
    split = hub_split(["x", "y", "x"], size=(70, 80), label=Value())
    split.columns |= {"photo": [{"bytes": None, "path": str(path)}] * 3, "kind": ["k", "k", "j"]}
    split.features |= {"kind": Value()}
    hub.splits = {"train": split, "validation": split}
    data = load("hub", "d")
    assert data.classes == ("x", "y")
    assert data.train.items == (path,) * 3
    assert load("hub", "d", label_column="kind").classes == ("j", "k")
    with pytest.raises(
        ConfigError, match="label_column: no column 'lable', allowed: photo, label, kind"
    ):
        load("hub", "d", label_column="lable")
    split.features |= {"second": FakeImage()}
    with pytest.raises(ConfigError, match="image_column: 2 image columns found"):
        load("hub", "d")
    assert load("hub", "d", image_column="photo").classes == ("x", "y")


def test_hub_unknown_test_labels(hub):
    for names, strange in ((["x", "y"], "z"), ([5, 7], 0), ([5, 7], 1)):  # numbers are names, too
        hub.splits = {
            "train": hub_split(names, label=Value()),
            "test": hub_split([strange], label=Value()),
        }
        with pytest.raises(DataError, match=f"'label': label '{strange}' is not one"):
            load("hub", "d")
    hub.splits = {"test": hub_split([0])}
    with pytest.raises(DataError, match="no split 'train', only test"):
        load("hub", "d")


def test_hub_errors(hub, monkeypatch):
    def fail(name):
        raise ConnectionError("no\nnetwork")

    hub.load_dataset = fail
    with pytest.raises(DataError, match=r"d: cannot be loaded \(no network\)"):
        load("hub", "d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"\[hub\]"):
        load("hub", "d")
