"""Files that are whole or not there: atomic writes, and reads of regular files alone."""

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

TEMPORARY = ".geodl-tmp-"  # beginning of the names of unfinished files, so that leftovers of a kill are recognized
# What opening a loop of links, or a socket, fails with: there will be no file later either.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP)

# Opening a pipe or a device must not block or make a terminal ours. Windows has none of these.
_READING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_IN_PLACE = _READING | getattr(os, "O_NOFOLLOW", 0)


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
        raise StoreError(
            f"cannot write {target} (what was there before is kept): {reason}"
        ) from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def as_path(given: Any, what: str) -> Path:
    """Return a path that a user gave; `what` names it in the error about anything else."""
    if isinstance(given, str | os.PathLike) and "\0" not in os.fspath(given):
        return Path(given)
    raise ConfigError(f"{what}: expected a path, got {type(given).__name__}")


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


def make_below(root: Path, *names: str) -> Path:
    """Make a folder below a directory that the user named, where it is not there yet; a link on the way is refused."""
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
    """Raise a StoreError where something else than a directory is at `path`, a link too."""
    if os.path.lexists(path) and not is_directory(path):
        raise StoreError(f"{path} is a link or a file where geodl keeps a directory: remove it")


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
    """Make renames and removals in a directory last through a power failure; Windows cannot."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def remove_all(folder: Path, names: Sequence[str]) -> None:
    """Remove files of a folder so that they stay removed."""
    with writing(folder):
        for name in names:
            remove(folder / name)
            crash_point("removed", folder / name)
        if names:
            sync_directory(folder)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that at any instant, and after any kill, it holds either its old content or all of the new.

    A pipe, a socket or a device is not replaced.
    """
    if _is_special(path):
        raise StoreError(f"{path} is a pipe, a socket or a device: no file replaces it")
    write_own(path, data)


def write_own(path: Path, data: bytes) -> None:
    """Write a file of a directory of geodl's as `atomic_write` does, also where a pipe or the like has taken its place."""
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


def _is_special(path: Path) -> bool:
    """Return whether a pipe, a socket or a device is at a path, or at the end of a link."""
    try:
        kind = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind))


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; a pipe, a device or a directory, also at the end of a link, is a StoreError."""
    try:
        return _regular(path, "rb", _READING)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(f"cannot read {path}: {_reason(error)}") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise StoreError(f"{path} is not a regular file") from None
        raise StoreError(f"cannot read {path}: {_reason(error)}") from error


def open_in_place(path: Path, mode: str) -> BinaryIO:
    """Open a regular file that is written in place; behind a link nothing is written."""
    return _regular(path, mode, _IN_PLACE)


def _regular(path: Path, mode: str, more: int) -> BinaryIO:
    def opened(name: str, flags: int) -> int:
        # A file is emptied only after it is known to be a regular one.
        descriptor = os.open(name, (flags | more) & ~os.O_TRUNC, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StoreError(f"{path} is not a regular file")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        return descriptor

    return cast(BinaryIO, open(path, mode, opener=opened))  # Path.open has no opener


def read_file(path: Path, *, limit: int | None = None, size: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes, or of exactly `size`; its size is looked at before it is read."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if size is not None and found != size:
            sizes = f"it has {found} bytes, and was written with {size}"
            raise StoreError(f"{path} is damaged: {sizes}")
        if limit is not None and found > limit:
            sizes = f"{readable(found)}, where at most {readable(limit)} are read"
            raise StoreError(f"{path} is too large: {sizes}")
        try:
            return file.read(found)  # not more: it may be growing
        except OSError as error:
            raise StoreError(f"cannot read {path}: {_reason(error)}") from error
        except MemoryError as error:
            reason = f"{readable(found)} do not fit into the memory"
            raise StoreError(f"cannot read {path}: {reason}") from error
