"""Files that are whole or not there: atomic writes, guarded reads, equal bytes for equal JSON and tensors."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from geodl.errors import ConfigError, StoreError

TEMPORARY = ".geodl-tmp-"  # beginning of the names of unfinished files, so that leftovers of a kill are recognized
JSON_LIMIT = 64 * 2**20  # bytes
DAMAGED = "is damaged: its content does not have the checksum it was written with"


class MissingFileError(StoreError):
    """A file that is not there."""


def crash_point(step: str, path: Path) -> None:
    """Do nothing; tests replace this function to stop a write after any of its steps."""


@contextmanager
def writing(target: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn a failure of the disk into a StoreError about `target`, and remove the unfinished `temporary`."""
    try:
        yield
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):  # where nothing can be written, nothing can be removed either
                remove(temporary)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; make room and run the same command again"
        else:
            reason = _reason(error)
        raise StoreError(f"cannot write {target} (what was there before is kept): {reason}") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def as_path(given: Any, what: str) -> Path:
    """Return a path that a user gave; `what` names it in the error about anything else."""
    if isinstance(given, str | os.PathLike) and "\0" not in os.fspath(given):
        return Path(given)
    raise ConfigError(f"{what}: {type(given).__name__} given that is no path")


def is_folder(path: Path) -> bool:
    """Return whether a folder is at a path or at the end of a link; a path that cannot be is none."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises where a name is too long


def make_directory(path: Path) -> None:
    """Make a directory and those above it, where they are not there yet."""
    with writing(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise StoreError(f"{path} is a file; a directory is needed") from error


def is_directory(path: Path) -> bool:
    """Return whether a directory is at `path` itself, not at the end of a link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def names_in(directory: Path) -> list[str]:
    """Return the sorted names of what is in a directory; of none where it is not there."""
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise StoreError(f"{directory} is a file; a directory is needed") from error
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {_reason(error)}") from error


def directory_size(path: Path) -> int:
    """Count the bytes of all files below a directory."""
    total = 0
    for folder, _, names in os.walk(path):  # which passes over folders that are gone
        for name in names:
            with suppress(OSError):  # a running writer renames and removes its temporary files
                total += (Path(folder) / name).lstat().st_size
    return total


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it is there."""
    if is_directory(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove the unfinished files that killed writers left in a directory; behind a link nothing is touched."""
    if is_directory(directory):
        with writing(directory):
            for leftover in directory.glob(f"{TEMPORARY}*"):
                remove(leftover)


def temporary_for(path: Path) -> Path:
    """Return a new name beside `path`, for what shall be renamed to it."""
    return path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory last through a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file down to the disk."""
    with path.open("xb") as file:
        crash_point("created", path)
        file.write(data)
        file.flush()
        crash_point("written", path)
        os.fsync(file.fileno())
    crash_point("synced", path)


def move(source: Path, target: Path) -> None:
    """Rename a finished file or directory: the one instant at which the old state becomes the new one."""
    source.replace(target)
    crash_point("renamed", target)
    sync_directory(target.parent)
    crash_point("settled", target)


def unlink(path: Path) -> None:
    """Remove a file, if it is there, so that it stays removed."""
    with writing(path):
        if os.path.lexists(path):
            path.unlink()
            crash_point("removed", path)
            sync_directory(path.parent)


def drop_folder(target: Path) -> None:
    """Remove a folder, or whatever is there under its name: it disappears in one instant."""
    doomed = temporary_for(target)
    with writing(target):
        move(target, doomed)
        remove(doomed)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that at any instant, and after any kill, it holds either its old content or all of the new."""
    temporary = temporary_for(path)
    with writing(path, temporary):
        write_synced(temporary, data)
        move(temporary, path)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; a pipe, a device or a directory, also at the end of a link, is a StoreError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # so that a pipe does not block
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(f"cannot read {path}: {_reason(error)}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {_reason(error)}") from error
    _insist_regular(descriptor, path)
    return os.fdopen(descriptor, "rb")


def open_in_place(path: Path, flags: int) -> int:
    """Open a file that is written in place, making it if need be; behind a link nothing is written."""
    descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    _insist_regular(descriptor, path)
    return descriptor


def _insist_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoreError(f"{path} is not a regular file")


def read_file(path: Path, *, limit: int | None = None, size: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes, or of exactly `size`; its size is looked at before it is read."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if size is not None and found != size:
            raise StoreError(f"{path} is damaged: it has {found} bytes, and was written with {size}")
        if limit is not None and found > limit:
            raise StoreError(f"{path} is too large: {readable(found)}, where at most {readable(limit)} are read")
        return read_from(file, path, found)  # not more: it may be growing


def read_from(file: BinaryIO, path: Path, size: int) -> bytes:
    """Read at most `size` bytes of an open file; what goes wrong is a StoreError that names its `path`."""
    try:
        return file.read(size)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {_reason(error)}") from error
    except MemoryError as error:
        raise StoreError(f"cannot read {path}: {readable(size)} do not fit into the memory") from error


@contextmanager
def interpreting(path: Path) -> Iterator[None]:
    """Turn what content of another form than expected does to its reader into a StoreError that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        words = f"{type(error).__name__}: {error}".encode("unicode_escape").decode()  # it may quote the file
        raise StoreError(f"{path} is damaged, or not a file of geodl's ({words[:200]})") from error


def canonical_json(value: Any, indent: int | None = None) -> bytes:
    """Return the one JSON form of a value; not-a-number and infinity have none."""
    return json.dumps(value, sort_keys=True, indent=indent, ensure_ascii=False, allow_nan=False).encode()


def json_file(value: Any) -> bytes:
    """Return the content of a JSON file, indented for people; one that could not be read again is refused."""
    data = canonical_json(value, indent=2) + b"\n"
    if len(data) > JSON_LIMIT:
        raise StoreError(f"a JSON file of {readable(len(data))} is not written: the limit is {readable(JSON_LIMIT)}")
    return data


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON-ready value, in hexadecimal: equal values, equal fingerprints."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; equal values give equal bytes."""
    atomic_write(path, json_file(value))


def parse_json(data: bytes, path: Path) -> Any:
    """Return the value of JSON that was read from `path`."""
    try:
        value = json.loads(data.decode())
        canonical_json(value)  # what has no such form was never written: not-a-number, halves of characters
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: it is not complete JSON ({error})") from error
    return value


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object that was read from `path`."""
    value = parse_json(data, path)
    if not isinstance(value, dict):
        raise StoreError(f"{path} is damaged, or not a file of geodl's: it does not hold a JSON object")
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return parse_json(read_file(path, limit=JSON_LIMIT), path)


def signed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the checksum of all its other entries in it."""
    return dict(value) | {"sha256": fingerprint(value)}


def verified(value: Any, path: Path) -> dict[str, Any]:
    """Return the object that `signed` was given; `path` is where it was read."""
    if not isinstance(value, dict) or "sha256" not in value:
        raise StoreError(f"{path} is damaged, or not a file of geodl's: it has no checksum")
    content = {key: entry for key, entry in value.items() if key != "sha256"}
    if fingerprint(content) != value["sha256"]:
        raise StoreError(f"{path} {DAMAGED}")
    return content


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Hash names, types, shapes, contents and metadata; the tensors are contiguous and on the CPU."""
    digest = hashlib.sha256(canonical_json(dict(metadata)))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a safetensors file, with a checksum if it has metadata; equal values give equal bytes."""
    # Copies, because safetensors wants each tensor dense and sharing memory with no other.
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    if metadata is None:
        return to_safetensors(plain)
    # One entry only: safetensors writes several in random order. It has no checksum of its own either.
    envelope = {"metadata": dict(metadata), "sha256": _checksum(plain, metadata)}
    return to_safetensors(plain, {"geodl": canonical_json(envelope).decode()})


def parse_tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors, on the CPU, of a safetensors file that was read from `path`."""
    with interpreting(path):
        try:
            return parse_safetensors(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from error


def part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `name` and a dot, without that."""
    return {key[len(name) + 1 :]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors of any shape, type and device atomically, with a checksum; equal values give equal bytes."""
    atomic_write(path, tensor_file(tensors, metadata or {}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote, onto the CPU, and verify it: a single changed bit is an error."""
    with open_regular(path) as file, interpreting(path):
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_from(file, path, 8), "little")
        header = json.loads(read_from(file, path, min(length, JSON_LIMIT)))
        envelope = json.loads(header.pop("__metadata__")["geodl"])
        if 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0) != size:
            raise ValueError("its size is not that of its tensors")
        file.seek(0)
        tensors = parse_tensors(read_from(file, path, size), path)
        metadata, sound = envelope["metadata"], _checksum(tensors, envelope["metadata"]) == envelope["sha256"]
    if not sound:
        raise StoreError(f"{path} {DAMAGED}")
    return tensors, metadata


def readable(count: int) -> str:
    """Write a number of bytes for people."""
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
