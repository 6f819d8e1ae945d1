"""JSON in one canonical form, checksums, and one kind of error for files with unexpected content."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from geodl.core.errors import StoreError
from geodl.core.files import atomic_write, read_file
from geodl.core.text import readable

JSON_LIMIT = 64 * 2**20  # bytes
DAMAGED = "is damaged: its content does not have the checksum it was written with"
FOREIGN = "is damaged, or not a geodl file"


@contextmanager
def interpreting(path: Path) -> Iterator[None]:
    """Turn errors from unexpected content into a StoreError that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as e:
        reason = f"{type(e).__name__}: {e}".encode("unicode_escape").decode()  # may quote the file
        raise StoreError(f"{path} {FOREIGN} ({reason[:200]})") from e


# ------------------------------------------------------------------------------------------------------------- JSON


def canonical_json(value: Any, indent: int | None = None) -> bytes:
    """Return the canonical JSON of a value: equal values give equal bytes; NaN and infinity are refused."""
    text = json.dumps(value, sort_keys=True, indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode()


def json_file(value: Any) -> bytes:
    """Return the content of a JSON file, indented; one that `read_json` would refuse is an error."""
    data = canonical_json(value, indent=2) + b"\n"
    if len(data) > JSON_LIMIT:
        raise StoreError(
            f"a JSON file of {readable(len(data))} is not written: the limit is {readable(JSON_LIMIT)}"
        )
    return data


def fingerprint(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a JSON-ready value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in `data`, which was read from `path`."""
    try:
        value = json.loads(data.decode())
        canonical_json(value)  # refuses NaN and lone surrogates, which geodl never writes
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: it is not complete JSON ({error})") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} {FOREIGN}: it does not hold a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    return parse_object(read_file(path, limit=JSON_LIMIT), path)


# -------------------------------------------------------------------------------------------------------- checksums


def signed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the checksum of its other entries added."""
    return dict(value) | {"sha256": fingerprint(value)}


def verified(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the object without its checksum, which must match; `path` is the file it was read from."""
    content = {key: entry for key, entry in value.items() if key != "sha256"}
    if "sha256" not in value:
        raise StoreError(f"{path} {FOREIGN}: it has no checksum")
    if fingerprint(content) != value["sha256"]:
        raise StoreError(f"{path} {DAMAGED}")
    return content


def write_sealed(path: Path, data: bytes) -> None:
    """Write a file atomically, preceded by its SHA-256."""
    atomic_write(path, hashlib.sha256(data).digest() + data)


def read_sealed(path: Path) -> bytes:
    """Read a file that `write_sealed` wrote and verify its checksum."""
    data = read_file(path)
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise StoreError(f"{path} {DAMAGED}")
    return data[32:]
