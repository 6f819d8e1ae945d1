"""Writes that do not come to their end: killed, or on a disk that fails."""

import errno
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.directories import Killed, break_at

from geodl import files
from geodl.store import RunDirectory

from .directories import KINDS, answers, comparable, put, save, sound
from .harness import Refused, attempt, family

WRITES: dict[str, Callable[[Path], Any]] = {}


def write(operation: Callable[[RunDirectory], Any]) -> Callable[[RunDirectory], Any]:
    """Register a write that takes the lock, as a new process would."""

    def locking(path: Path) -> None:
        run = RunDirectory(path)
        with run.lock():
            operation(run)

    WRITES[operation.__name__] = locking
    return operation


@write
def save_progress(run: RunDirectory) -> None:
    run.save_progress({"weight": torch.ones(4)}, {"step": 8})


@write
def clear_progress(run: RunDirectory) -> None:
    run.clear_progress()


@write
def save_phase(run: RunDirectory) -> None:
    save(run, run.completed())


@write
def undo(run: RunDirectory) -> None:
    run.drop_last_phase()


@write
def undo_and_keep(run: RunDirectory) -> None:
    run.drop_last_phase(keep=True)


@write
def redo(run: RunDirectory) -> None:
    run.redo_phase() if run.undone() else run.drop_last_phase(keep=True)  # a run has nothing to bring back


@write
def forget(run: RunDirectory) -> None:
    run.forget_phase(run.completed() - 2)


@family("kills")
def kills(draw: random.Random, folder: Path) -> None:
    """Killed at any step of any write, with what was not yet on the disk torn: old or new, and the same write goes on."""
    _stopped(draw, folder, Killed(), tear=draw.random() < 0.5)


@family("failing disk")
def failing_disk(draw: random.Random, folder: Path) -> None:
    """A disk that is full, read-only or broken at any step, also while cleaning up: one line, and old or new."""
    failure = OSError(draw.choice([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT]), "a failure")

    def remove(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    cleaning = mock.patch.object(files, "remove", remove) if draw.random() < 0.5 else nullcontext()
    _stopped(draw, folder, failure, cleaning)


def _stopped(
    draw: random.Random, folder: Path, failure: BaseException, also: Any = None, *, tear: bool = False
) -> None:
    kind, name = draw.choice(KINDS), draw.choice(list(WRITES))
    path = folder / "it"
    put(kind, folder / "whole")
    put(kind, path)
    steps: list[str] = []
    with mock.patch.object(files, "crash_point", lambda step, _: steps.append(step)):
        WRITES[name](folder / "whole")
    old, new = comparable(sound(kind)), comparable(answers(folder / "whole"))
    crash = break_at(draw.randrange(len(steps)), failure, tear)
    with mock.patch.object(files, "crash_point", crash), also or nullcontext():
        result = _caught(lambda: WRITES[name](path))
    assert isinstance(result, Refused | Killed), f"{name} was not stopped"
    found = comparable(answers(path))
    # Taking a phase back gives up the progress beyond it first: it must not be there if another phase is saved instead.
    given_up = [old | {"progress": None}, old | {"progress": None, "undone": []}]
    allowed = [old, new, *(given_up if name in ("undo", "undo_and_keep", "redo") else [])]
    assert found in allowed, f"{name}: neither old nor new"
    if found != new:
        WRITES[name](path)
    with RunDirectory(path).lock():
        pass
    assert comparable(answers(path)) == new
    assert not list(path.rglob(f"{files.TEMPORARY}*")), "leftovers"


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return attempt(call)
    except Killed as killed:
        return killed
