"""What is in files: JSON in one form, checksums, and one kind of error for content of another form than expected."""

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
    """Turn what content of another form than expected does to its reader into a StoreError that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as e:
        words = f"{type(e).__name__}: {e}".encode("unicode_escape").decode()  # may quote the file
        raise StoreError(f"{path} {FOREIGN} ({words[:200]})") from e


# ------------------------------------------------------------------------------------------------------------- JSON


def canonical_json(value: Any, indent: int | None = None) -> bytes:
    """Return the one JSON form of a value; not-a-number and infinity have none."""
    text = json.dumps(value, sort_keys=True, indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode()


def json_file(value: Any) -> bytes:
    """Return the content of a JSON file, indented for people; one that could not be read again is refused."""
    data = canonical_json(value, indent=2) + b"\n"
    if len(data) > JSON_LIMIT:
        sizes = f"{readable(len(data))} is not written: the limit is {readable(JSON_LIMIT)}"
        raise StoreError(f"a JSON file of {sizes}")
    return data


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON-ready value, in hexadecimal: equal values, equal fingerprints."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; equal values give equal bytes."""
    atomic_write(path, json_file(value))


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object that was read from `path`."""
    try:
        value = json.loads(data.decode())
        canonical_json(value)  # not-a-number and halves of characters were never written
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
    """Return a JSON object with the checksum of all its other entries in it."""
    return dict(value) | {"sha256": fingerprint(value)}


def verified(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the object that `signed` was given; `path` is where it was read."""
    content = {key: entry for key, entry in value.items() if key != "sha256"}
    if "sha256" not in value:
        raise StoreError(f"{path} {FOREIGN}: it has no checksum")
    if fingerprint(content) != value["sha256"]:
        raise StoreError(f"{path} {DAMAGED}")
    return content


def write_sealed(path: Path, data: bytes) -> None:
    """Write a file that stands alone atomically, with its SHA-256 in front."""
    atomic_write(path, hashlib.sha256(data).digest() + data)


def read_sealed(path: Path) -> bytes:
    """Read what `write_sealed` wrote; a single changed bit is an error."""
    data = read_file(path)
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise StoreError(f"{path} {DAMAGED}")
    return data[32:]
