"""A content-addressed cache of trained base phases, shared by runs with equal options, and of converted models."""

import logging
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import Timeout

from geodl.core import files
from geodl.core.content import read_sealed, write_sealed
from geodl.core.errors import StoreError
from geodl.core.locks import acquire

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("geodl")
CONVERTED = ".onnx"
KINDS = (".safetensors", ".lock", CONVERTED)
"""Suffixes of entries: trained base phases, locks of processes that train them, converted models."""


def _default_root() -> Path:
    if root := os.environ.get("GEODL_CACHE"):
        return Path(root).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "geodl"


class Cache:
    """Tensor files by key; a key is the `geodl.core.content.fingerprint` of everything that determines the tensors.

    The cache is in `root`, by default $GEODL_CACHE, $XDG_CACHE_HOME/geodl or ~/.cache/geodl. Any number of processes
    may use it at the same time: entries are written atomically, and two writers of one key write the same bytes. A
    cache that other users can write to, or whose folder is a link, is not used.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _default_root()
        self._entries = self.root / "entries"  # `clear` removes nothing outside this folder

    def load(self, key: str) -> "dict[str, Tensor] | None":
        """Return the verified tensors of an entry, or None."""
        from geodl.core.tensors import parse_tensors

        data = self.read(f"{key}.safetensors")
        return None if data is None else parse_tensors(data, self._entries / key)

    def put(self, key: str, tensors: "Mapping[str, Tensor]") -> bool:
        """Store tensors and return whether that worked: a full disk must not stop a run."""
        from geodl.core.tensors import tensor_file

        try:
            self.write(f"{key}.safetensors", tensor_file(tensors))
        except StoreError as error:
            _log.warning("%s; the base phase is not cached", error)
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return the verified content of an entry, or None; a damaged entry is removed."""
        if self._problem():
            return None
        try:
            return read_sealed(self._entries / name)
        except files.MissingFileError:
            return None
        except StoreError:
            with suppress(OSError):  # another process may have removed it, or own it
                (self._entries / name).unlink()
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write the content of an entry."""
        self._make()
        write_sealed(self._entries / name, data)

    def keep_latest(self, suffix: str, most: int) -> None:
        """Remove all but the `most` latest entries with a suffix."""
        with suppress(OSError):  # another process may remove the same files
            entries = sorted(
                self._entries.glob(f"*{suffix}"), key=lambda path: -path.stat().st_mtime
            )
            for path in entries[most:]:
                path.unlink()

    def claim(self, key: str, held: ExitStack) -> bool:
        """Lock an entry until `held` is closed; return False if another process has locked it.

        The lock ends with its process. On a disk without locks, every process may make every entry.
        """
        try:
            self._make()
            held.callback(acquire(self._entries / f"{key}.lock").release)
        except Timeout:
            return False
        except (OSError, StoreError):
            pass
        return True

    def size(self) -> int:
        """Return the number of bytes in use, including leftovers of killed writers."""
        return files.directory_size(self._entries) if files.is_directory(self._entries) else 0

    def clear(self, kinds: tuple[str, ...] = KINDS) -> int:
        """Remove all entries of some kinds and return the number of bytes freed; links are not followed."""
        before = self.size()
        if files.is_directory(self._entries):
            files.remove_temporaries(self._entries)
            names = files.names_in(self._entries)
            files.remove_all(self._entries, [name for name in names if name.endswith(kinds)])
        return before - self.size()

    def _make(self) -> None:
        """Make the folder of the entries, accessible to this user only, if it does not exist."""
        for folder in (self.root, self._entries):
            if not os.path.lexists(folder):
                files.make_directory(folder.parent)
                with files.writing(folder):
                    folder.mkdir(mode=0o700, exist_ok=True)
        if problem := self._problem():
            raise StoreError(problem)

    def _problem(self) -> str | None:
        """Return why the cache cannot be trusted: its folder is a link, or others can write to it."""
        if os.path.lexists(self._entries) and not files.is_directory(self._entries):
            return f"{self._entries} is a link or a file where geodl keeps a directory"
        if os.name == "nt":  # permissions work differently there
            return None
        for folder in (self.root, self._entries):
            with suppress(OSError):
                status = folder.stat()
                public = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
                # The root may be a sticky folder such as /tmp: only their owner can replace the entries in it.
                sticky = folder == self.root and status.st_mode & stat.S_ISVTX
                if (public and not sticky) or status.st_uid not in (os.geteuid(), 0):
                    return f"{folder} can be written by other users: `chmod go-w` it, or set GEODL_CACHE"
        return None
