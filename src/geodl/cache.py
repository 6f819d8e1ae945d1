"""The content-addressed cache of trained base phases: runs that agree on what determines one share it."""

import fcntl
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from torch import Tensor

from geodl import files
from geodl.errors import StoreError


def _default_root() -> Path:
    if own := os.environ.get("GEODL_CACHE"):
        return Path(own).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "geodl"


class Cache:
    """Tensor files by key, where a key is the `geodl.files.fingerprint` of all that determines the tensors.

    The cache lives in `root`, else in $GEODL_CACHE, $XDG_CACHE_HOME/geodl, or ~/.cache/geodl. Any number of processes
    may use it at once: entries appear whole, and two writers of one key write the same.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _default_root()
        self._entries = self.root / "entries"  # a folder of its own: `clear` touches nothing else

    def _path(self, key: str) -> Path:
        return self._entries / f"{key}.safetensors"

    def load(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of an entry, verified; a damaged entry is dropped."""
        path = self._path(key)
        try:
            return files.read_tensors(path)[0]
        except files.MissingFileError:
            return None
        except StoreError:
            with suppress(OSError):  # another process may have dropped it already, or own it
                path.unlink()
            return None

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> bool:
        """Keep tensors for the runs to come; False where the disk does not let us, which must not stop a run."""
        try:
            files.make_directory(self._entries)
            files.write_tensors(self._path(key), tensors)
        except StoreError:
            return False
        return True

    def claim(self, key: str, held: ExitStack) -> bool:
        """Become the only process that makes an entry, until `held` is closed; False while another one is.

        The kernel ends a claim with its process. Where the disk has no locks, everybody may make what they need.
        """
        try:
            files.make_directory(self._entries)
            lock = held.enter_context(os.fdopen(files.open_in_place(self._entries / f"{key}.lock", 0), "r+b"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.close()
            return False
        except (OSError, StoreError):
            pass
        return True

    def size(self) -> int:
        """Return the number of bytes in use, leftovers of killed writers included."""
        return files.directory_size(self._entries)

    def clear(self) -> int:
        """Remove all entries; return the number of bytes freed."""
        freed = self.size()
        files.remove_temporaries(self._entries)
        for path in [*self._entries.glob("*.safetensors"), *self._entries.glob("*.lock")]:
            with files.writing(path):
                path.unlink(missing_ok=True)
        return freed
