"""`undone/`: phases that were taken back, each under its number, until another change is made."""

import os
from pathlib import Path

from geodl.errors import StoreError
from geodl.files import drop_folder, is_directory, make_directory, move, sync_directory, writing
from geodl.store.phases import phase_numbers, phase_path, read_listed, read_manifest

NAME = "undone"


def undone_phases(path: Path, done: int) -> list[int]:
    """Return the numbers of the phases that can be brought back after `done` complete ones, in that order.

    Numbers that do not go on where the complete phases end are left from before another change: none of them counts.
    """
    try:
        found = phase_numbers(path, NAME)
    except StoreError:
        return []
    return found if found == list(range(done, done + len(found))) else []


def set_undone(path: Path, t: int) -> None:
    """Move the complete phase `t` aside, in one instant."""
    if os.path.lexists(path / NAME) and not is_directory(path / NAME):
        drop_undone(path)
    make_directory(path / NAME)
    _rename(phase_path(path, t), phase_path(path, t, NAME))


def bring_back(path: Path, t: int) -> None:
    """Make phase `t`, which was moved aside, the last complete one again; a damaged one is refused."""
    folder = phase_path(path, t, NAME)
    manifest = read_manifest(folder, t)
    for name in manifest:
        read_listed(folder, name, manifest)
    _rename(folder, phase_path(path, t))


def drop_undone(path: Path) -> None:
    """Remove all that was moved aside: it disappears in one instant."""
    if os.path.lexists(path / NAME):
        drop_folder(path / NAME)


def _rename(source: Path, target: Path) -> None:
    with writing(target):
        move(source, target)
        sync_directory(source.parent)
