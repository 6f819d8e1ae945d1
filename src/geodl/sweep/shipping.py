"""A run's directory between machines that share no disk: what changed is sent, and put in place so that a kill harms nothing."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from geodl.files import TEMPORARY, atomic_write, make_directory, move, temporary_for, unlink, write_synced, writing

Files = dict[str, bytes]
"""The content of files by their names below the directory, with / between the parts."""
Seen = dict[str, tuple[int, int]]
"""Size and time of change of files: what tells whether one was changed."""


def look(directory: Path) -> Seen:
    """Return what is in a directory, without unfinished files and the lock."""
    found = {}
    for folder, _, names in os.walk(directory):  # which passes over folders that are gone
        for path in (Path(folder) / name for name in names):
            name = path.relative_to(directory).as_posix()
            if TEMPORARY not in name and name != "lock" and path.is_file():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found[name] = (status.st_size, status.st_mtime_ns)
    return found


def changed(directory: Path, before: Seen) -> tuple[Files, Seen]:
    """Return the files that are not as they were, and all there are; of one instant, though a run is writing them."""
    while True:
        now = look(directory)
        try:
            files = {name: (directory / name).read_bytes() for name, seen in now.items() if before.get(name) != seen}
        except FileNotFoundError:
            continue
        if look(directory) == now:
            return files, now


def receive(directory: Path, files: Mapping[str, bytes], names: set[str]) -> None:
    """Make a directory have these files: `files` are new, and what is not among `names` goes."""
    make_directory(directory)
    folders = {name.rpartition("/")[0] for name in files if name.startswith("phases/")}
    whole = {folder for folder in folders if not (directory / folder).exists()}
    for folder in sorted(whole):  # a phase is there with all of its files, or not at all
        _write_folder(directory / folder, {n: data for n, data in files.items() if n.rpartition("/")[0] == folder})
    # The manifest of a phase first: it must never name a file that is gone.
    for name in sorted(files, key=lambda name: not name.endswith("manifest.json")):
        if name.rpartition("/")[0] not in whole:
            make_directory((directory / name).parent)
            atomic_write(directory / name, files[name])
    for name in look(directory).keys() - names:
        unlink(directory / name)


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    temporary = temporary_for(folder)
    with writing(folder, temporary):
        make_directory(temporary)
        for name, data in files.items():
            write_synced(temporary / name.rpartition("/")[2], data)
        move(temporary, folder)
