"""Datasets of the hub, with a stand-in for the `datasets` package."""

import io
import sys
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from tests.helpers.pictures import png

from geodl.core.errors import ConfigError, DataError, MissingExtraError
from geodl.data import ArrayImages, FileImages, load


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
        assert not getattr(feature, "decode", False), "pictures should not be decoded here"
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
    with pytest.raises(ConfigError, match=r"label_column: no column 'lable', .*photo, label, kind"):
        load("hub", "d", label_column="lable")
    split.features |= {"second": FakeImage()}
    with pytest.raises(ConfigError, match="image_column: 2 image columns found"):
        load("hub", "d")
    assert load("hub", "d", image_column="photo").classes == ("x", "y")


def test_hub_unknown_test_labels(hub):
    for names, strange in ((["x", "y"], "z"), ([5, 7], 0), ([5, 7], 1)):  # numbers are names, too
        given = {"train": names, "test": [strange]}
        hub.splits = {part: hub_split(each, label=Value()) for part, each in given.items()}
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
