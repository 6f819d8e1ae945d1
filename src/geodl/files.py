"""Files that are whole or not there: atomic writes, JSON and tensors with equal bytes for equal values, locks."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from geodl.errors import StoreError

TEMPORARY = ".geodl-tmp-"  # beginning of the names of unfinished files, so that leftovers of a kill are recognised


def _crash_point(step: str, path: Path) -> None:
    """Do nothing; tests replace this function to stop a write after any of its steps."""


@contextmanager
def writing(target: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn a failure of the disk into a StoreError about `target`, and remove the unfinished `temporary`."""
    try:
        yield
    except OSError as error:
        if temporary is not None:
            remove(temporary)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; make room and run the same command again"
        else:
            reason = error.strerror or str(error)
        raise StoreError(f"cannot write {target} (the last good state is kept): {reason}") from error


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove the unfinished files that killed writers left in a directory."""
    for leftover in directory.glob(f"{TEMPORARY}*"):
        remove(leftover)


def temporary_for(path: Path) -> Path:
    """Give a new name beside `path`, for what shall be renamed to it."""
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
        _crash_point("created", path)
        file.write(data)
        file.flush()
        _crash_point("written", path)
        os.fsync(file.fileno())
    _crash_point("synced", path)


def move(source: Path, target: Path) -> None:
    """Rename a finished file or directory: the one instant at which the old state becomes the new one."""
    source.replace(target)
    _crash_point("renamed", target)
    sync_directory(target.parent)
    _crash_point("settled", target)


def unlink(path: Path) -> None:
    """Remove a file, if it is there, so that it stays removed."""
    with writing(path):
        if path.exists():
            path.unlink()
            _crash_point("removed", path)
            sync_directory(path.parent)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that at any instant, and after any kill, it holds either its old content or all of the new."""
    temporary = temporary_for(path)
    with writing(path, temporary):
        write_synced(temporary, data)
        move(temporary, path)


def canonical_json(value: Any, indent: int | None = None) -> bytes:
    """Give the one JSON form of a value; not-a-number and infinity have none."""
    return json.dumps(value, sort_keys=True, indent=indent, ensure_ascii=False, allow_nan=False).encode()


def json_file(value: Any) -> bytes:
    """Give the content of a JSON file, indented for people."""
    return canonical_json(value, indent=2) + b"\n"


def fingerprint(value: Any) -> str:
    """Give the SHA-256 of a JSON-ready value, in hexadecimal: equal values, equal fingerprints."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; equal values give equal bytes."""
    atomic_write(path, json_file(value))


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{path} is damaged: it is not complete JSON ({error})") from error


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Hash names, types, shapes, contents and metadata; the tensors are contiguous and on the CPU."""
    digest = hashlib.sha256(canonical_json(dict(metadata)))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Give the content of a safetensors file with a checksum; equal values give equal bytes."""
    # Copies, because safetensors wants each tensor dense and sharing memory with no other.
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    # One entry only: safetensors writes several in random order. It has no checksum of its own either.
    envelope = {"metadata": dict(metadata), "sha256": _checksum(plain, metadata)}
    return to_safetensors(plain, {"geodl": canonical_json(envelope).decode()})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors of any shape, type and device atomically as safetensors; equal values give equal bytes."""
    atomic_write(path, tensor_file(tensors, metadata or {}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote, onto the CPU, and verify it: a single changed bit is an error."""
    try:
        data = path.read_bytes()
        tensors = parse_safetensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        envelope = json.loads(header["__metadata__"]["geodl"])
        metadata, expected = envelope["metadata"], envelope["sha256"]
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StoreError(f"{path} is damaged, or not a file of geodl's: {error}") from error
    if _checksum(tensors, metadata) != expected:
        raise StoreError(f"{path} is damaged: its content does not have the checksum it was written with")
    return tensors, metadata


def _holder(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError):
        return "another process"  # which is just taking the lock, and has not yet written its name


def _acquire(path: Path) -> int:
    """Take the lock at `path`; the kernel frees it when the process ends, however that happens."""
    for _ in range(10):  # a few tries, because `list_runs` holds each lock for an instant
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            time.sleep(0.02)
        except FileNotFoundError:
            pass  # removed, with its directory, between opening and locking it
        os.close(descriptor)
    raise StoreError(f"{path.parent} is being written by {_holder(path)}: wait until it ends, or stop it")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory; where another process holds it, the StoreError names that process."""
    path = directory / "lock"
    with writing(path):
        descriptor = _acquire(path)
    try:
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, canonical_json({"pid": os.getpid(), "host": socket.gethostname()}), 0)
        yield
    finally:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Say whether some process holds the lock of a directory."""
    try:
        with (directory / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def readable(count: int) -> str:
    """Write a number of bytes for people."""
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
