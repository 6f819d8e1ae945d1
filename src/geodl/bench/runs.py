"""Summaries of runs: state, progress and result so far."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geodl.core.content import interpreting
from geodl.core.errors import StoreError
from geodl.core.files import TEMPORARY, directory_size, names_in
from geodl.core.locks import is_locked
from geodl.core.text import count
from geodl.model.classifiers import default_classifier, titles
from geodl.store import Directory, exists


@dataclass(frozen=True)
class RunSummary:
    """The state of a run.

    state:        complete, running, interrupted, damaged or unreadable; in a sweep also waiting, waiting for base, failed or
                  stopped early.
    done, total:  numbers of complete phases and of all phases.
    result:       the accuracy so far in a few words.
    error:        why it failed, is damaged or cannot be read.
    seconds_left: in a sweep: estimated at the current speed; None if unknown.
    """

    path: Path
    state: str
    done: int = 0
    total: int | None = None
    result: str | None = None
    error: str | None = None
    seconds_left: float | None = None

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.name

    @property
    def size(self) -> int:
        """The size of its directory in bytes."""
        return directory_size(self.path)


def summarize(path: Path) -> RunSummary:
    """Read the state and the result of a run."""
    done, result = 0, None
    try:
        run = Directory(path)
    except StoreError as error:
        return RunSummary(path, "unreadable", error=str(error))
    try:
        done = run.completed()
        if done:
            result = _headline(run.phase(-1).json("metrics.json"), path)
        finished = done == run.phases
        if run.phases is None:
            finished = done > 0 and not run.unfinished
    except StoreError as error:
        return RunSummary(path, "damaged", done, run.phases, result, str(error))
    state = "complete" if finished else "interrupted"
    return RunSummary(path, "running" if is_locked(path) else state, done, run.phases, result)


def _headline(metrics: Mapping[str, Any], path: Path) -> str | None:
    """Return the accuracy after a phase in a few words; None if it was not measured."""
    with interpreting(path):
        accuracy, classes = metrics.get("accuracy") or {}, len(metrics.get("classes", ()))
        known = {name: value for name, value in accuracy.items() if value is not None}
        if not known:
            return None
        name = default_classifier(known)
        return f"{known[name]:.1f} % on {count(classes, 'class')} ({titles().get(name, name)})"


def list_runs(root: Path) -> list[RunSummary]:
    """Summarize the run at `root`, or every run directly below it, by name."""
    below = [root / name for name in names_in(root) if not name.startswith(TEMPORARY)]
    paths = [root] if exists(root) else below
    summaries = [summarize(path) for path in paths if exists(path)]
    return [run for run in summaries if run.state != "unreadable" or _looks_like_run(run.path)]


def _looks_like_run(path: Path) -> bool:
    """Tell an unreadable run from a directory that merely has a file of the same name."""
    return os.path.lexists(path / "lock") or os.path.lexists(path / "phases")
