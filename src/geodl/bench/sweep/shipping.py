"""A run's directory between machines that share no disk: what changed is sent, and put in place so that a kill harms nothing."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from geodl.core.files import TEMPORARY, atomic_write, make_below, make_directory, unlink
from geodl.core.locks import NAME as LOCK
from geodl.core.locks import WRITER

Files = dict[str, bytes]
"""The content of files by their names below the directory, with / between the parts."""
Seen = dict[str, tuple[int, int]]
"""Size and time of change of files: what tells whether one was changed."""


def look(directory: Path) -> Seen:
    """Return what is in a directory, without unfinished files and what belongs to the lock."""
    found = {}
    for folder, _, names in os.walk(directory):  # which passes over folders that are gone
        for path in (Path(folder) / name for name in names):
            name = path.relative_to(directory).as_posix()
            if TEMPORARY not in name and name not in (LOCK, WRITER) and path.is_file():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found[name] = (status.st_size, status.st_mtime_ns)
    return found


def changed(directory: Path, before: Seen) -> tuple[Files, Seen]:
    """Return the files that are not as they were, and all there are; of one instant, though a run is writing them."""
    while True:
        now = look(directory)
        try:
            files = {
                name: (directory / name).read_bytes()
                for name, seen in now.items()
                if before.get(name) != seen
            }
        except FileNotFoundError:
            continue
        if look(directory) == now:
            return files, now


def receive(directory: Path, files: Mapping[str, bytes], names: set[str]) -> None:
    """Make a directory have these files: `files` are new, and what is not among `names` goes."""
    make_directory(directory)
    # The head comes last, as a writer does it: that is the commit.
    for name in sorted(files, key=lambda name: (name.startswith("head"), name == "head.json")):
        make_below(directory, *name.split("/")[:-1])
        atomic_write(directory / name, files[name])
    for name in look(directory).keys() - names:
        unlink(directory / name)
