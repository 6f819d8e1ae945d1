"""`events.jsonl`: a log with one JSON object a line. Damaged lines are skipped."""

import math
import os
import re
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from geodl.core.content import canonical_json, parse_object
from geodl.core.errors import StoreError
from geodl.core.files import MissingFileError, open_in_place, read_file, writing

LIMIT = 2**30  # bytes


def append_event(path: Path, kind: str, fields: Mapping[str, Any]) -> None:
    """Append one line: time, kind, fields, and a checksum of the line."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = canonical_json({"time": time, "kind": kind} | _spelled(fields))
    line = line[:-1] + f', "crc32": "{zlib.crc32(line):08x}"}}\n'.encode()
    # Without fsync: a kill loses nothing, and losing a line in a power failure does no harm.
    with writing(path), open_in_place(path, "a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the last line was torn by a kill or a full disk
                file.write(b"\n")
        file.write(line)


def _spelled(value: Any) -> Any:
    """Return a value with the numbers that JSON cannot represent as text: nan, inf."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {key: _spelled(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_spelled(entry) for entry in value]
    return value


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events, oldest first, without torn and damaged lines."""
    try:
        lines = read_file(path, limit=LIMIT).split(b"\n")
    except MissingFileError:
        return []
    return [event for line in lines if (event := _parse(line, path)) is not None]


def _parse(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is damaged or no event."""
    match = re.fullmatch(rb'(.*), "crc32": "([0-9a-f]{8})"}', line)
    if match is None or int(match[2], 16) != zlib.crc32(match[1] + b"}"):
        return None
    try:
        event = parse_object(match[1] + b"}", path)
        valid = isinstance(event["kind"], str) and datetime.fromisoformat(event["time"]).tzinfo
    except (StoreError, KeyError, TypeError, ValueError):
        return None
    return event if valid else None
