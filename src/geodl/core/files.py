"""Atomic writes, and reads of regular files only."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from geodl.core.errors import ConfigError, StoreError
from geodl.core.text import readable

TEMPORARY = ".geodl-tmp-"  # prefix of unfinished files, so that leftovers of a kill are recognized
# Opening a loop of links, or a socket, fails with these: waiting does not help.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP)

# Opening a pipe must not block, a terminal must not become the controlling one. Windows has neither.
_READING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_IN_PLACE = _READING | getattr(os, "O_NOFOLLOW", 0)


class MissingFileError(StoreError):
    """A file does not exist."""


def crash_point(step: str, path: Path) -> None:
    """Do nothing; tests replace this function to interrupt a write after any of its steps."""


@contextmanager
def writing(target: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a StoreError about `target`, and remove the unfinished `temporary`."""
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
        raise StoreError(
            f"cannot write {target} (what was there before is kept): {reason}"
        ) from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def as_path(value: Any, option: str) -> Path:
    """Return a user's value as a path; anything else is a ConfigError that names the option."""
    if isinstance(value, str | os.PathLike) and "\0" not in os.fspath(value):
        return Path(value)
    raise ConfigError(f"{option}: expected a path, got {type(value).__name__}")


def is_folder(path: Path) -> bool:
    """Return whether a path, or the target of a link, is a folder; False for impossible paths."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises if a name is too long


def make_directory(path: Path) -> None:
    """Make a directory and its parents if they do not exist."""
    with writing(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise StoreError(f"{path} is a file; a directory is needed") from error


def make_below(root: Path, *names: str) -> Path:
    """Make a folder below a user's directory if it does not exist; below `root`, links are refused."""
    make_directory(root)
    path = root
    for name in names:
        path = path / name
        with writing(path):
            try:
                path.mkdir()
            except FileExistsError:
                insist_on_directory(path)
            else:
                sync_directory(path.parent)
    return path


def insist_on_directory(path: Path) -> None:
    """Raise a StoreError if anything but a directory is at `path`; a link to one is refused."""
    if os.path.lexists(path) and not is_directory(path):
        raise StoreError(f"{path} is a link or a file where geodl keeps a directory: remove it")


def is_directory(path: Path) -> bool:
    """Return whether `path` itself, not the target of a link, is a directory."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def names_in(directory: Path) -> list[str]:
    """Return the sorted names of the entries of a directory; [] if it does not exist."""
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise StoreError(f"{directory} is a file; a directory is needed") from error
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {_reason(error)}") from error


def directory_size(path: Path) -> int:
    """Return the total size in bytes of the files below a directory."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # a running writer renames and removes its temporary files
                total += (Path(folder) / name).lstat().st_size
    return total


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it exists."""
    if is_directory(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove the unfinished files that killed writers left in a directory; links are not followed."""
    if is_directory(directory):
        with writing(directory):
            for leftover in directory.glob(f"{TEMPORARY}*"):
                remove(leftover)


def temporary_for(path: Path) -> Path:
    """Return a new temporary name beside `path`."""
    return path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")


def sync_directory(directory: Path) -> None:
    """Flush renames and removals in a directory to the disk; Windows cannot."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """Rename a finished file or directory and flush the rename to the disk."""
    source.replace(target)
    crash_point("renamed", target)
    sync_directory(target.parent)
    crash_point("settled", target)


def unlink(path: Path) -> None:
    """Remove a file, if it exists, and flush the removal to the disk."""
    with writing(path):
        if os.path.lexists(path):
            path.unlink()
            crash_point("removed", path)
            sync_directory(path.parent)


def remove_all(folder: Path, names: Sequence[str]) -> None:
    """Remove files of a folder and flush the removals to the disk."""
    with writing(folder):
        for name in names:
            remove(folder / name)
            crash_point("removed", folder / name)
        if names:
            sync_directory(folder)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file atomically: after any interruption it has its old content or all of the new.

    A pipe, a socket or a device, also behind a link, is not replaced.
    """
    with suppress(OSError):
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise StoreError(f"{path} is a pipe, a socket or a device: no file replaces it")
    temporary = temporary_for(path)
    with writing(path, temporary):
        with temporary.open("xb") as file:
            crash_point("created", temporary)
            file.write(data)
            file.flush()
            crash_point("written", temporary)
            os.fsync(file.fileno())
        crash_point("synced", temporary)
        move(temporary, path)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe, a device or a directory, also behind a link, is a StoreError."""
    try:
        return _regular(path, "rb", _READING)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(f"cannot read {path}: {_reason(error)}") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise StoreError(f"{path} is not a regular file") from None
        raise StoreError(f"cannot read {path}: {_reason(error)}") from error


def open_in_place(path: Path, mode: str) -> BinaryIO:
    """Open a regular file for writing in place; links are refused."""
    return _regular(path, mode, _IN_PLACE)


def _regular(path: Path, mode: str, more: int) -> BinaryIO:
    def opened(name: str, flags: int) -> int:
        # A file is truncated only after it is known to be a regular one.
        descriptor = os.open(name, (flags | more) & ~os.O_TRUNC, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StoreError(f"{path} is not a regular file")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        return descriptor

    return cast(BinaryIO, open(path, mode, opener=opened))  # Path.open has no opener


def read_file(path: Path, *, limit: int | None = None, size: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes, or of exactly `size`; the size is checked before reading."""
    with open_regular(path) as file:
        actual = os.fstat(file.fileno()).st_size
        if size is not None and actual != size:
            sizes = f"it has {actual} bytes, and was written with {size}"
            raise StoreError(f"{path} is damaged: {sizes}")
        if limit is not None and actual > limit:
            sizes = f"{readable(actual)}, where at most {readable(limit)} are read"
            raise StoreError(f"{path} is too large: {sizes}")
        try:
            return file.read(actual)  # not more: it may be growing
        except OSError as error:
            raise StoreError(f"cannot read {path}: {_reason(error)}") from error
        except MemoryError as error:
            reason = f"{readable(actual)} do not fit into the memory"
            raise StoreError(f"cannot read {path}: {reason}") from error
