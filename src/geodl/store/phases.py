"""The folders of complete phases: their names, and the manifest that every read of a file checks."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geodl.errors import StoreError
from geodl.files import DAMAGED, interpreting, is_directory, json_file, names_in, read_file, read_json, signed, verified

FILES = ("model.safetensors", "memory.safetensors", "metrics.json", "extra.json")
STATISTICS = "statistics.safetensors"
"""A file that only some methods need, and only in the newest phase."""
MANIFEST = "manifest.json"
Manifest = Mapping[str, Mapping[str, Any]]
"""The files of a phase by name: `bytes` and `sha256` of each."""


def phase_path(path: Path, t: int, where: str = "phases") -> Path:
    """Return the folder of phase `t` of the run at `path`."""
    return path / where / f"{t:02d}"


def phase_numbers(path: Path, where: str = "phases") -> list[int]:
    """Return the numbers of the phases that are there; other names than 00, 01, ..., 99, 100, ... are not geodl's."""
    folder = path / where
    if not os.path.lexists(folder):
        return []
    _insist_on_directory(folder)
    numbers = [int(name) for name in names_in(folder) if re.fullmatch("[0-9]{2}|[1-9][0-9]{2,}", name)]
    for t in numbers:
        _insist_on_directory(phase_path(path, t, where))
    return sorted(numbers)


def _insist_on_directory(path: Path) -> None:
    if not is_directory(path) and os.path.lexists(path):  # it may have been taken back just now
        raise StoreError(f"{path} is a link or a file where geodl keeps a directory: remove it")


def manifest_file(t: int, manifest: Manifest) -> bytes:
    """Return the content of the manifest of phase `t`."""
    return json_file(signed({"phase": t, "files": manifest}))


def describe(contents: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of files with these contents."""
    return {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}


def read_manifest(folder: Path, t: int) -> Manifest:
    """Read the manifest in the folder of phase `t`, verified."""
    path = folder / MANIFEST
    content = verified(read_json(path), path)
    with interpreting(path):
        files = {
            name: {"bytes": int(each["bytes"]), "sha256": each["sha256"]} for name, each in content["files"].items()
        }
        if content["phase"] != t or not files.keys() <= {*FILES, STATISTICS}:
            raise ValueError("it is of another phase, or of other files")
    return files


def read_listed(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Read a file of a phase, verified."""
    if name not in manifest:
        raise StoreError(f"{folder / name} is no longer kept")
    data = read_file(folder / name, size=manifest[name]["bytes"])
    if hashlib.sha256(data).hexdigest() != manifest[name]["sha256"]:
        raise StoreError(f"{folder / name} {DAMAGED}")
    return data
