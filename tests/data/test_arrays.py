"""Arrays in memory and npz files."""

import os

import numpy as np
import pytest
import torch
from tests.helpers.pictures import noise

from geodl.core.errors import DataError
from geodl.data import load


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
    variants += [torch.from_numpy(x), torch.from_numpy(x / 255).float()]
    variants += [x.astype(np.int64), x / 255]
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
        ({"y_train": ["pear", "apple", "pear", "fig"], "classes": ["apple", "pear"]}, "'fig'"),
        ({"y_train": [0, 1, 2, 2], "classes": ["apple", "pear"]}, "label 2 has no name"),
        ({"classes": ["a", "a", "b"]}, "two classes are called 'a'"),
        ({"x_test": X}, "x_test and y_test come together"),
        ({"y_train": [0, 1]}, "4 images with 2 labels given"),
        ({"y_train": np.zeros((4, 3), int)}, "class list: a name or a number"),
        ({"y_train": np.int64(0)}, "one name or number per image"),
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
