"""The layout of version 0.2 (`config.json`, `phases/NN/`, `undone/NN/`, a manifest in each folder): reading and conversion.

The first writer turns the files into objects, commits a head and removes the rest. Checkpoints are not converted: an
unfinished phase starts again.
"""

import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from geodl.core import files
from geodl.core.content import interpreting, parse_object, read_json, verified
from geodl.core.errors import StoreError
from geodl.store.head import OBJECTS, OLD, File, Head, SavedPhase, check_record


def read(path: Path) -> Head:
    """Return the verified head of a directory in the old layout."""
    record = _record(path)
    config = dict(record["config"])
    kind = config.pop("kind", "run")
    facts = {"config": config, "environment": record["environment"], "phases": record["phases"]}
    phases: tuple[SavedPhase, ...] = ()
    for folder in _folders(path / "phases"):
        if folder.name != f"{len(phases):02d}":
            raise StoreError(f"{path}: phase {len(phases)} is missing, a later one is there")
        phases = (*phases, _phase(path, folder, phases))
    undone: tuple[SavedPhase, ...] = ()
    with suppress(StoreError):
        for folder in _folders(path / "undone"):
            undone = (*undone, _phase(path, folder, (*phases, *undone)))
    return Head(kind, facts, 0, phases, undone)


def _record(path: Path) -> dict[str, Any]:
    file = path / OLD
    value = read_json(file)
    if "config" not in value:
        raise StoreError(f"{path} is not a geodl directory: it has no head.json")
    if value.get("format") == 1 and "sha256" not in value:
        raise StoreError(f"{path} was written by geodl 0.1 and cannot be opened by this version")
    value = verified(value, file)
    with interpreting(file):
        check_record(value, value["config"].get("kind", "run"))
    version = value.get("format")
    if version != 2:
        raise StoreError(
            f"{path} has format {version!r}; this version of geodl reads formats 2 and 3"
        )
    return value


def _folders(folder: Path) -> list[Path]:
    """Return the folders of phases, in order."""
    files.insist_on_directory(folder)
    names = filter(re.compile("[0-9]{2}|[1-9][0-9]{2,}").fullmatch, files.names_in(folder))
    folders = [folder / name for name in sorted(names, key=int)]
    for path in folders:
        files.insist_on_directory(path)
    return folders


def _phase(path: Path, folder: Path, before: tuple[SavedPhase, ...]) -> SavedPhase:
    file = folder / "manifest.json"
    try:
        content = verified(read_json(file), file)
        with interpreting(file):
            listed = {
                name: [entry["sha256"], entry["bytes"]] for name, entry in content["files"].items()
            }
            if any("/" in name for name in listed):
                raise ValueError("a name outside the folder")
            parsed = SavedPhase.parsed(path, 0, {"id": "", "action": {}, "files": listed})
    except StoreError:
        # Reading this phase reports the damage; the others stay readable.
        damaged = {file.name: ("0" * 64, 0)}
        return replace(
            SavedPhase.after(path, before, {"action": "damaged"}, damaged), folder=folder
        )
    whole = {"model.safetensors", "memory.safetensors"} <= listed.keys()
    phase = SavedPhase.after(path, before, _action(folder, parsed.files), parsed.files)
    return replace(phase, folder=folder, forgotten=not whole)


def _action(folder: Path, listed: Mapping[str, File]) -> dict[str, Any]:
    """Return the record of the step that made a phase of a model; a saved learner has none."""
    with suppress(StoreError), interpreting(folder):
        digest, size = listed["extra.json"]
        data = files.read_file(folder / "extra.json", size=size)
        if hashlib.sha256(data).hexdigest() == digest:
            return dict(parse_object(data, folder)["history"][-1])
    return {"action": "save"}


def convert(path: Path, phases: Sequence[SavedPhase]) -> list[SavedPhase]:
    """Turn the files of phases into objects; the caller then commits a head with the returned phases, and calls `clean`."""
    objects = files.make_below(path, OBJECTS)
    for phase in phases:
        for name, (digest, _) in phase.files.items():
            if phase.folder is not None and not os.path.lexists(objects / digest):
                _linked(phase.folder / name, objects / digest)
    files.sync_directory(objects)
    return [replace(phase, folder=None) for phase in phases]


def _linked(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it on a disk without links; missing and irregular files are left out."""
    try:
        if not stat.S_ISREG(source.lstat().st_mode):
            return
    except OSError:
        return
    with files.writing(target):
        try:
            os.link(source, target)
        except OSError:
            files.atomic_write(target, files.read_file(source))
        files.crash_point("linked", target)


def clean(path: Path) -> None:
    """Remove the old layout; the record comes last, so that an interrupted removal is repeated."""
    try:
        _record(path)
    except StoreError:
        return  # already converted, or a user's own file
    if files.is_directory(path / "progress"):
        files.unlink(path / "progress" / "checkpoint.safetensors")
    files.remove_temporaries(path / "phases")
    for folder in (path / "undone", path / "damaged-progress", *_folders(path / "phases")):
        with files.writing(folder):
            files.remove(folder)
            files.crash_point("removed", folder)
        if os.path.lexists(folder):
            raise StoreError(f"{folder} cannot be removed; remove it yourself: it may hold images")
    with suppress(OSError):  # not empty
        (path / "phases").rmdir()
    files.unlink(path / OLD)
