"""The lock of a directory: one writer at a time."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from geodl.errors import StoreError
from geodl.files import canonical_json, interpreting, open_in_place, open_regular, read_json, writing


def _holder(path: Path) -> str:
    with suppress(StoreError), interpreting(path):
        owner = read_json(path)
        return f"process {owner['pid']:d} on {owner['host']:s}"
    return "another process"  # which is just taking the lock, and has not yet written its name


def _acquire(path: Path) -> int:
    """Take the lock at `path` and return its open file; the kernel frees it when the process ends, however that happens."""
    # A few tries, because `is_locked` holds the lock for an instant.
    for _ in range(10):
        descriptor = open_in_place(path, 0)
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
        with suppress(OSError):  # nothing hangs on it: a name that stays there blocks nobody
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Return whether some process holds the lock of a directory."""
    try:
        with open_regular(directory / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, StoreError):
        return False
    return False
