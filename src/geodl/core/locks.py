"""The lock of a directory: one writer at a time, on every operating system."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from geodl.core.content import canonical_json, interpreting, read_json
from geodl.core.errors import StoreError
from geodl.core.files import open_in_place, writing

NAME, WRITER = "lock", "writer.json"
"""The lock file, and beside it its holder: some systems do not let others read a locked file."""
PATIENCE = 0.2
"""Seconds to wait for a lock: `is_locked` holds it for an instant."""


def acquire(path: Path, timeout: float = PATIENCE) -> FileLock:
    """Acquire the lock file at `path`, which the system releases when the process ends; `Timeout` if it is held.

    A pipe, a link or a folder in its place is a StoreError.
    """
    if os.path.lexists(path):
        open_in_place(path, "r+b").close()
    lock = FileLock(path)
    lock.acquire(timeout, poll_interval=0.02)
    return lock


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory; if another process holds it, the StoreError names that process."""
    path, writer = directory / NAME, directory / WRITER
    with writing(path):
        try:
            lock = acquire(path)
        except Timeout:
            raise StoreError(
                f"{directory} is being written by {_holder(writer)}: wait until it ends, or stop it"
            ) from None
    try:
        with writing(writer), open_in_place(writer, "wb") as file:
            file.write(canonical_json({"pid": os.getpid(), "host": socket.gethostname()}))
        yield
    finally:
        with suppress(OSError):  # a stale name blocks nobody
            writer.unlink()
        lock.release()


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of a directory."""
    if os.path.lexists(directory / NAME):
        try:
            acquire(directory / NAME, timeout=0).release()
        except Timeout:
            return True
        except (OSError, StoreError):
            pass
    return False


def _holder(writer: Path) -> str:
    with suppress(StoreError), interpreting(writer):
        owner = read_json(writer)
        return f"process {owner['pid']:d} on {owner['host']:s}"
    return "another process"  # it has the lock, but has not yet written its name
