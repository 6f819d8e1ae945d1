"""`config.json`: what a directory was made with; and whether that is what somebody wants now."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geodl import files
from geodl.errors import StoreError
from geodl.store.phases import phase_numbers, phase_path
from geodl.store.progress import drop_checkpoint

FORMAT = 2
NAME = "config.json"


def read_record(path: Path) -> dict[str, Any]:
    """Read `config`, `environment`, `format` and `phases` of the directory at `path`, verified."""
    file = path / NAME
    try:
        record = files.read_json(file)
    except files.MissingFileError:
        record = None
    if not isinstance(record, dict) or "config" not in record:
        raise StoreError(f"{path} is not a directory of geodl's: it has no config.json that geodl wrote")
    if record.get("format") == 1 and "sha256" not in record:
        raise StoreError(f"{path} was written by geodl 0.1 and cannot be opened by this version")
    record = files.verified(record, file)
    if record.get("format") != FORMAT:
        raise StoreError(f"{path} has format {record.get('format')!r}; this version of geodl reads format {FORMAT}")
    kinds = {"config": dict, "environment": dict, "phases": int | None}
    sound = all(isinstance(record.get(key, ""), kind) for key, kind in kinds.items())
    if not sound or record["config"].get("kind", "run") not in ("run", "model"):
        raise StoreError(f"{file} is damaged, or not a file of geodl's")
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write it with its checksum."""
    files.write_json(path / NAME, files.signed(record))


def has_record(path: Path) -> bool:
    """Return whether something is there under its name."""
    return os.path.lexists(path / NAME)


def refuse_foreign(path: Path) -> None:
    """Refuse a directory with things in it that is not geodl's: nothing of a user's is ever mixed or overwritten."""
    if any(name != "lock" and not name.startswith(files.TEMPORARY) for name in files.names_in(path)):
        read_record(path)


def differences(then: Any, now: Any, key: str = "") -> list[str]:
    """Name each (nested, dotted) key whose values differ, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            line
            for name in sorted(then.keys() | now.keys())
            for line in differences(then.get(name), now.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if then == now else [f"{key} is {json.dumps(then)} there and {json.dumps(now)} now"]


def refuse_difference(path: Path, what: str, found: Sequence[str], remedy: str) -> None:
    """Refuse to go on where something differs; `remedy` says what starts over."""
    if found:
        raise StoreError(
            f"{path} was made with another {what}: {'; '.join(found)}. Use another directory, or {remedy} to start over"
        )


def start_over(path: Path, record: dict[str, Any]) -> None:
    """Write the record of a new run, what geodl wrote before being removed.

    Newest first, so that a kill on the way leaves a shorter but sound run.
    """
    drop_checkpoint(path / "progress" / "checkpoint.safetensors")
    for name in ("events.jsonl", "report.html"):
        files.unlink(path / name)
    if files.is_directory(path / "tensorboard"):
        for curves in (path / "tensorboard").glob("events.out.tfevents.*"):
            files.unlink(curves)
    for t in reversed(phase_numbers(path)):
        files.drop_folder(phase_path(path, t))
    write_record(path, record)
