"""CIFAR-100 from the parquet files of the Hugging Face hub or from the official python archive."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geodl.core.errors import DataError, GeodlError, MissingExtraError
from geodl.core.files import open_regular, read_file
from geodl.core.text import one_line
from geodl.data.dataset import Dataset, fingerprint_of, need_root, source
from geodl.data.images import ArrayImages, stack_pixels

PER_CLASS = {"train": 500, "test": 100}
"""Images of each of the 100 classes in the complete dataset."""

_LAYOUTS = "train-*.parquet and test-*.parquet, or cifar-100-python (train, test, meta), or cifar-100-python.tar.gz"

Part = tuple[ArrayImages, tuple[str, ...]]


@source("cifar100")
def read_cifar100(root: Path | None) -> Dataset:
    """CIFAR-100 from a folder with the hub's parquet files or the official python archive."""
    root = need_root(root, "cifar100", f"a folder with {_LAYOUTS}", shared=True)
    kind, read = _find(root)
    (train, names), (test, _) = read("train"), read("test")
    for split, part in (("train", train), ("test", test)):
        _check(root, split, part, names)
    fingerprint = fingerprint_of(train, test)
    return Dataset("cifar100", train, test, names, fingerprint, split=f"official ({kind})")


def _find(root: Path) -> tuple[str, Callable[[str], Part]]:
    """Return the layout that is in the folder itself or in its usual subfolder, and its reader."""
    for folder in (root, root / "cifar100") if root.is_dir() else ():
        shards = {split: sorted(folder.glob(f"{split}-*.parquet")) for split in PER_CLASS}
        if all(shards.values()):
            return "parquet", partial(_read_parquet, shards)
    for folder in (root, root / "cifar-100-python", root / "cifar100" / "cifar-100-python"):
        if all((folder / part).is_file() for part in ("train", "test", "meta")):
            return "python archive", partial(_read_folder, folder)
    archive = Path("cifar-100-python.tar.gz")
    for file in (root, root / archive, root / "cifar100" / archive):
        if file.is_file():
            return "python archive", partial(_read_archive, file)
    raise DataError(f"{root}: no CIFAR-100 found; needed: {_LAYOUTS}")


def _check(root: Path, split: str, images: ArrayImages, names: tuple[str, ...]) -> None:
    """Refuse an incomplete copy, whose results could be mistaken for those of CIFAR-100."""
    counts = torch.bincount(images.labels, minlength=100).tolist()
    expected, shape = PER_CLASS[split], images.pixels.shape[1:]
    if len(names) != 100 or counts != [expected] * 100 or shape != (3, 32, 32):
        actual = f"{len(images)} images of {tuple(shape[1:])} pixels in {len(names)} classes"
        complete = f"CIFAR-100 has {expected} of 32 x 32 in each of 100"
        raise DataError(f"{root}: the {split} part has {actual}, {complete}")


def _read_parquet(shards_by_split: dict[str, list[Path]], split: str) -> Part:
    shards = shards_by_split[split]
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError("parquet", "reading parquet files") from None
    tables = []
    try:
        for shard in shards:
            with open_regular(shard) as file:
                tables.append(parquet.read_table(file, columns=["img", "fine_label"]))
        encoded = [picture["bytes"] for table in tables for picture in table["img"].to_pylist()]
        labels = np.concatenate([table["fine_label"].to_numpy() for table in tables])
        metadata = json.loads(tables[0].schema.metadata[b"huggingface"])
        names = metadata["info"]["features"]["fine_label"]["names"]
    except Exception as error:  # pyarrow's own for damaged files, KeyError for other columns
        reason = one_line(error)
        raise DataError(f"{shards[0]}: not CIFAR-100 in the hub's layout ({reason})") from None
    pixels = stack_pixels(encoded, (32, 32))
    if pixels is None:
        raise DataError(f"{shards[0]}: not CIFAR-100: an image is not 32 x 32 pixels")
    return ArrayImages(pixels, torch.from_numpy(labels.astype(np.int64))), tuple(names)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists, dictionaries and NumPy arrays; refuses everything else that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        # The archive was written with an old NumPy, hence the old module name.
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # the same function, wherever NumPy has it now
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-100 file needs")


def _unpickle(data: bytes, name: str) -> dict[bytes, Any]:
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name}: not a CIFAR-100 file: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise DataError(f"{name}: not a CIFAR-100 file (no dictionary in it)")
    return content


def _read_folder(folder: Path, split: str) -> Part:
    return _read_pickles(lambda name: read_file(folder / name), split)


def _read_archive(archive: Path, split: str) -> Part:
    def part(name: str) -> bytes:
        member = tar.getmember(f"cifar-100-python/{name}")
        if not member.isreg():  # a link may lead to itself
            raise tarfile.TarError(f"{name} is not a regular file")
        content = tar.extractfile(member)
        return content.read() if content else b""

    try:
        with open_regular(archive) as file, tarfile.open(fileobj=file) as tar:
            content = _read_pickles(part, split)
            while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                pass  # to the end, where the checksum is
            return content
    except GeodlError:
        raise
    except Exception as error:  # each kind of compression has its own exceptions
        reason = one_line(error)
        raise DataError(f"{archive}: not the CIFAR-100 python archive ({reason})") from None


def _read_pickles(part: Callable[[str], bytes], split: str) -> Part:
    content, meta = (_unpickle(part(name), name) for name in (split, "meta"))
    try:
        pixels = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        labels = torch.tensor(content[b"fine_labels"], dtype=torch.int64)
        names = tuple(name.decode() for name in meta[b"fine_label_names"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"{split}: not a CIFAR-100 file ({reason})") from None
    return ArrayImages(torch.from_numpy(pixels.copy()), labels), names
