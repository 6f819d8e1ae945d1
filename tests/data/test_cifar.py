"""CIFAR-100 in all layouts, and files that only look like it."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image
from tests.helpers.pictures import encode, tree

from geodl.core.errors import DataError, MissingExtraError
from geodl.data import cifar, load

NAMES = [f"class {i:02d}" for i in range(100)]


class OldPickler(pickle._Pickler):
    """Writes pickles as Python 2 did: byte strings as STRING, arrays with the old module name."""

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
        pixels = random.integers(0, 256, (100 * count, 3072), dtype=np.uint8)
        parts[split] = {b"data": pixels, b"fine_labels": labels}
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


def write_parts(root, parts, dump=old_pickle, inside="cifar-100-python"):
    tree(root, {f"{inside}/{name}": dump(value) for name, value in parts.items()})


dumps = pytest.mark.parametrize(
    "dump", [old_pickle, lambda value: pickle.dumps(value, protocol=4)], ids=["old", "new"]
)


@dumps
@pytest.mark.parametrize("inside", ["cifar100/cifar-100-python", "."])
def test_cifar_python_folder(tmp_path, tiny, dump, inside):
    write_parts(tmp_path, tiny, dump, inside)
    check_cifar(load("cifar100", tmp_path), tiny)


def archive(folder, path, kind="gz"):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, f"w:{kind}") as tar:
        tar.add(folder, "cifar-100-python")


def test_cifar_python_archive(tmp_path, tiny, monkeypatch):
    write_parts(tmp_path, tiny)
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
    write_parts(tmp_path, tiny)
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


@dumps
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
        write_parts(tmp_path, tiny, dump)
        with pytest.raises(DataError, match=rf"train: .* it asks for \w+\.{name}, which no"):
            load("cifar100", tmp_path)
    assert not mark.exists()


def test_incomplete_cifar_is_refused(tmp_path, tiny):
    tiny["test"][b"fine_labels"][0] = tiny["test"][b"fine_labels"][1]
    write_parts(tmp_path, tiny)
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
    assert mean.tolist() == pytest.approx([0.5071, 0.4866, 0.4409], abs=1e-4)
