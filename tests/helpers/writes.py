"""Writes to directories of every kind, and what must be there after one was stopped at any of its steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from tests.helpers.directories import (
    CONFIG,
    Killed,
    break_at,
    commit,
    contents,
    make,
    make_model,
    save_progress,
    state,
    write_old,
)

from geodl.bench.sweep import shipping
from geodl.core import files
from geodl.core.errors import StoreError
from geodl.store import Directory, exists


class Write(NamedTuple):
    """How a directory is made, and what is then done to it."""

    before: Callable[[Path], Any]
    operation: Callable[[Path], Any]


def three_steps(path: Path) -> None:
    """Make a model of three steps, one more undone, and one begun."""
    model = make_model(path)
    with model.lock():
        for _ in range(4):
            commit(model)
        model.undo()
        save_progress(model, 7)


def begun_run(path: Path) -> None:
    """Make a run of two phases of three, with one begun."""
    run = make(path)
    with run.lock():
        commit(run)
        commit(run)
        save_progress(run, 7)
        run.events("started")
    (path / "report.html").write_text("old")


def old_model(path: Path) -> None:
    """Make a model as version 0.2 did."""
    write_old(path, 2, model=True, undone=1)


def run_elsewhere(path: Path) -> None:
    """Make a run on another machine, as it were."""
    other = path.parent / "elsewhere"
    if not exists(other):
        run = make(other)
        with run.lock():
            for _ in range(3):
                commit(run)
            save_progress(run, 9)


def earlier_copy(path: Path) -> None:
    """Make a run on another machine, and an earlier state of it here."""
    run_elsewhere(path)
    run = make(path)
    with run.lock():
        commit(run)
        save_progress(run, 3)


def from_elsewhere(path: Path) -> None:
    """Put what the other machine has in the place of what is here."""
    found, seen = shipping.changed(path.parent / "elsewhere", {})
    shipping.receive(path, found, set(seen))


def locking(write: Callable[[Directory], Any]) -> Callable[[Path], None]:
    """Open the directory as a new process would, take the lock, write."""

    def operation(path: Path) -> None:
        store = Directory(path)
        with store.lock():
            write(store)

    return operation


def fresh(path: Path) -> None:
    """Start a run over."""
    make(path, config=CONFIG | {"seed": 1}, fresh=True)


def elsewhere_continued(path: Path) -> None:
    """Continue a run with another number of threads."""
    make(path, environment={"threads": 2}, allow_environment_change=True)


CHANGES = {
    "checkpoint": lambda store: save_progress(store, 8),
    "drop checkpoint": Directory.clear_progress,
    "commit": commit,
    "forget": lambda store: commit(store, states=1, lasting=["extra.json"]),
    "undo": Directory.undo,
}
WRITES = {
    **{name: Write(three_steps, locking(change)) for name, change in CHANGES.items()},
    **{f"{name}, run": Write(begun_run, locking(change)) for name, change in CHANGES.items()},
    "redo": Write(three_steps, locking(Directory.redo)),
    "first commit": Write(make_model, locking(commit)),
    "conversion": Write(old_model, locking(lambda store: None)),
    "conversion and commit": Write(old_model, locking(commit)),
    "fresh": Write(begun_run, fresh),
    "environment": Write(begun_run, elsewhere_continued),
    "first arrival": Write(run_elsewhere, from_elsewhere),
    "arrival": Write(earlier_copy, from_elsewhere),
}


def facts(path: Path) -> dict[str, Any]:
    """Return what a directory tells its readers, if there is one."""
    return state(Directory(path)) if exists(path) else {}


@dataclass(frozen=True)
class Whole:
    """A write that nothing disturbs: its steps, what is read before and after it, and the final bytes."""

    write: Write
    read: Callable[[Path], dict[str, Any]]
    steps: int
    old: dict[str, Any]
    new: dict[str, Any]
    final: dict[str, bytes]

    @classmethod
    def of(
        cls, write: Write, path: Path, read: Callable[[Path], dict[str, Any]] = facts
    ) -> "Whole":
        """Do it once."""
        write.before(path)
        old, steps = read(path), []
        with mock.patch.object(files, "crash_point", lambda step, _: steps.append(step)):
            write.operation(path)
        return cls(write, read, len(steps), old, read(path), contents(path))

    def stopped(
        self,
        path: Path,
        n: int,
        failure: BaseException,
        *,
        tear: bool = False,
        also: AbstractContextManager[Any] | None = None,
        words: str | None = None,
    ) -> bool:
        """Do it again, stop at the n-th step, check what is there, do the rest; return whether all was there already.

        A conversion and a start over give up the checkpoint first, which is disposable.
        """
        self.write.before(path)
        crash = break_at(n, failure, tear)
        with mock.patch.object(files, "crash_point", crash), also or nullcontext():
            check_refused(lambda: self.write.operation(path), failure, words)
        found = self.read(path)
        allowed = (self.old, self.new, self.old | {"progress": None})
        assert found in allowed, f"a mixture after step {n}"
        if found != self.new:
            self.write.operation(path)
        with Directory(path).lock():
            pass
        assert self.read(path) == self.new
        assert contents(path) == self.final, "the same bytes as undisturbed, and no leftovers"
        assert not list(path.rglob(f"{files.TEMPORARY}*"))
        return found == self.new


def check_refused(operation: Callable[[], Any], failure: BaseException, words: str | None) -> None:
    """Check that a failure ends an operation: a kill as it is, an error of the disk in one line."""
    killed = isinstance(failure, Killed)
    with pytest.raises(Killed if killed else StoreError, match=words) as caught:
        operation()
    said = str(caught.value)
    assert killed or (said and said.isprintable()), f"not one clean line: {said!r}"
