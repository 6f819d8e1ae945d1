"""Synchronize a run's directory between machines that share no disk, safe against kills at any moment."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from geodl.core.files import TEMPORARY, atomic_write, make_below, make_directory, unlink
from geodl.core.locks import NAME as LOCK
from geodl.core.locks import WRITER

Files = dict[str, bytes]
"""File contents by path relative to the directory, with / as separator."""
Stamps = dict[str, tuple[int, int]]
"""Size and modification time of files, by which changes are noticed."""


def scan(directory: Path) -> Stamps:
    """Return the files in a directory, without temporary files and those of the lock."""
    stamps = {}
    for folder, _, names in os.walk(directory):  # skips folders that vanish meanwhile
        for path in (Path(folder) / name for name in names):
            name = path.relative_to(directory).as_posix()
            if TEMPORARY not in name and name not in (LOCK, WRITER) and path.is_file():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    stamps[name] = (status.st_size, status.st_mtime_ns)
    return stamps


def changed(directory: Path, before: Stamps) -> tuple[Files, Stamps]:
    """Return the changed files and the stamps of all files: a consistent snapshot even while a run writes."""
    while True:
        now = scan(directory)
        try:
            files = {
                name: (directory / name).read_bytes()
                for name, stamp in now.items()
                if before.get(name) != stamp
            }
        except FileNotFoundError:
            continue
        if scan(directory) == now:
            return files, now


def receive(directory: Path, files: Mapping[str, bytes], names: set[str]) -> None:
    """Update a directory: write `files`, and remove all files that are not in `names`."""
    make_directory(directory)
    # The head comes last: replacing it is the commit.
    for name in sorted(files, key=lambda name: (name.startswith("head"), name == "head.json")):
        make_below(directory, *name.split("/")[:-1])
        atomic_write(directory / name, files[name])
    for name in scan(directory).keys() - names:
        unlink(directory / name)
