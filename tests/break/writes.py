"""Writes that do not come to their end: killed, or on a disk that fails."""

import errno
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.directories import Killed, break_at, save_progress

from geodl.core import files
from geodl.store import Directory

from .directories import KINDS, answers, comparable, put, save, sound
from .harness import Refused, attempt, family

WRITES: dict[str, Callable[[Directory], Any]] = {
    "save progress": lambda run: save_progress(run, 8),
    "clear progress": Directory.clear_progress,
    "commit": save,
    "undo": Directory.undo,
    "redo": lambda run: run.redo() if run.undone() else run.undo(),  # a run has nothing to redo
    "forget": lambda run: run.commit({}, {}, states=1),
}


def write(name: str, path: Path) -> None:
    """Do a write as a new process would, which takes the lock."""
    run = Directory(path)
    with run.lock():
        WRITES[name](run)


@family("kills")
def kills(draw: random.Random, folder: Path) -> None:
    """Killed at any step of any write, with what was not yet on the disk torn: old or new, and the same write goes on."""
    _stopped(draw, folder, Killed(), tear=draw.random() < 0.5)


@family("failing disk")
def failing_disk(draw: random.Random, folder: Path) -> None:
    """A disk that is full, read-only or broken at any step, also while cleaning up: one line, and old or new."""
    failure = OSError(
        draw.choice([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT]), "a failure"
    )

    def remove(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    cleaning = mock.patch.object(files, "remove", remove) if draw.random() < 0.5 else nullcontext()
    _stopped(draw, folder, failure, cleaning)


def _stopped(
    draw: random.Random,
    folder: Path,
    failure: BaseException,
    also: Any = None,
    *,
    tear: bool = False,
) -> None:
    kind, name = draw.choice(KINDS), draw.choice(list(WRITES))
    path = folder / "it"
    put(kind, folder / "whole")
    put(kind, path)
    steps: list[str] = []
    with mock.patch.object(files, "crash_point", lambda step, _: steps.append(step)):
        write(name, folder / "whole")
    old, new = comparable(sound(kind)), comparable(answers(folder / "whole"))
    crash = break_at(draw.randrange(len(steps)), failure, tear)
    with mock.patch.object(files, "crash_point", crash), also or nullcontext():
        result = _caught(lambda: write(name, path))
    assert isinstance(result, Refused | Killed), f"{name} was not stopped"
    found = comparable(answers(path))
    assert found in (old, new), f"{name}: neither old nor new"
    if found != new:
        write(name, path)
    with Directory(path).lock():
        pass
    assert comparable(answers(path)) == new
    assert not list(path.rglob(f"{files.TEMPORARY}*")), "leftovers"


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return attempt(call)
    except Killed as killed:
        return killed
