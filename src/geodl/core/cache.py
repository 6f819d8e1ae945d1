"""The content-addressed cache: trained base phases, which runs that agree on what determines one share, and converted models."""

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
"""The endings of entries: trained base phases, the claims of those who train them, converted models."""


def _default_root() -> Path:
    if own := os.environ.get("GEODL_CACHE"):
        return Path(own).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "geodl"


class Cache:
    """Tensor files by key, where a key is the `geodl.core.content.fingerprint` of all that determines the tensors.

    The cache lives in `root`, else in $GEODL_CACHE, $XDG_CACHE_HOME/geodl, or ~/.cache/geodl. Any number of processes
    may use it at once: entries appear whole, and two writers of one key write the same. A cache that other users can
    write, or whose folder is a link, is not used.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _default_root()
        self._entries = self.root / "entries"  # a folder of its own: `clear` touches nothing else

    def load(self, key: str) -> "dict[str, Tensor] | None":
        """Return the tensors of an entry, verified."""
        from geodl.core.tensors import parse_tensors

        data = self.read(f"{key}.safetensors")
        return None if data is None else parse_tensors(data, self._entries / key)

    def put(self, key: str, tensors: "Mapping[str, Tensor]") -> bool:
        """Keep tensors for the runs to come; False where the disk does not let us, which must not stop a run."""
        from geodl.core.tensors import tensor_file

        try:
            self.write(f"{key}.safetensors", tensor_file(tensors))
        except StoreError as error:
            _log.warning("%s; the base phase is not cached", error)
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return the content of an entry, verified; a damaged entry is dropped."""
        if self._problem():
            return None
        try:
            return read_sealed(self._entries / name)
        except files.MissingFileError:
            return None
        except StoreError:
            with suppress(OSError):  # another process may have dropped it already, or own it
                (self._entries / name).unlink()
            return None

    def write(self, name: str, data: bytes) -> None:
        """Keep the content of an entry."""
        self._make()
        write_sealed(self._entries / name, data)

    def keep_latest(self, suffix: str, most: int) -> None:
        """Remove all but the latest entries of one kind."""
        with suppress(OSError):  # another process may remove the same
            found = sorted(self._entries.glob(f"*{suffix}"), key=lambda path: -path.stat().st_mtime)
            for path in found[most:]:
                path.unlink()

    def claim(self, key: str, held: ExitStack) -> bool:
        """Become the only process that makes an entry, until `held` is closed; False while another one is.

        A claim ends with its process. Where the disk has no locks, everybody may make what they need.
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
        """Return the number of bytes in use, leftovers of killed writers included."""
        return files.directory_size(self._entries) if files.is_directory(self._entries) else 0

    def clear(self, kinds: tuple[str, ...] = KINDS) -> int:
        """Remove all entries of some kinds; return the number of bytes freed. Behind a link nothing is removed."""
        before = self.size()
        if files.is_directory(self._entries):
            files.remove_temporaries(self._entries)
            names = files.names_in(self._entries)
            files.remove_all(self._entries, [name for name in names if name.endswith(kinds)])
        return before - self.size()

    def _make(self) -> None:
        """Make the folder of the entries for this user alone, where it is not there."""
        for folder in (self.root, self._entries):
            if not os.path.lexists(folder):
                files.make_directory(folder.parent)
                with files.writing(folder):
                    folder.mkdir(mode=0o700, exist_ok=True)
        if problem := self._problem():
            raise StoreError(problem)

    def _problem(self) -> str | None:
        """Return why the cache is not used: its folder is a link, or others can write it."""
        if os.path.lexists(self._entries) and not files.is_directory(self._entries):
            return f"{self._entries} is a link or a file where geodl keeps a directory"
        if os.name == "nt":  # where a folder belongs to its user by other means
            return None
        for folder in (self.root, self._entries):
            with suppress(OSError):
                found = folder.stat()
                public = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
                # Above the entries a sticky folder, such as /tmp, will do: only their owner can replace them.
                sticky = folder == self.root and found.st_mode & stat.S_ISVTX
                if (public and not sticky) or found.st_uid not in (os.geteuid(), 0):
                    return f"{folder} can be written by other users: `chmod go-w` it, or set GEODL_CACHE"
        return None
