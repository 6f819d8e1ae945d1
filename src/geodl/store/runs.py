"""The runs below a directory."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from geodl.errors import StoreError
from geodl.files import TEMPORARY, directory_size, interpreting, move, names_in, remove, temporary_for, writing
from geodl.locks import is_locked, locked
from geodl.predictors import CLASSIFIERS, default_classifier
from geodl.store.directory import RunDirectory
from geodl.store.record import has_record, read_record
from geodl.text import count

State = Literal["complete", "running", "interrupted", "damaged", "unreadable"]


@dataclass(frozen=True)
class RunSummary:
    """One line of the list of runs; `size` in bytes; `error` says why a run is damaged or cannot be read."""

    path: Path
    name: str
    state: State
    done: int
    total: int | None
    result: str | None
    size: int
    error: str | None = None


def summarize(path: Path) -> RunSummary:
    """Say how far a run is, and its result so far."""
    run = RunDirectory(path)
    done, result, problem = 0, None, None
    state: State = "damaged"
    try:
        done = run.completed()
        if done:
            result = headline(run.load_metrics(done - 1), run.path / "phases" / f"{done - 1:02d}" / "metrics.json")
        finished = done == run.phases if run.phases is not None else done > 0 and run.load_progress() is None
        state = "running" if is_locked(path) else "complete" if finished else "interrupted"
    except StoreError as error:
        problem = str(error)
    return RunSummary(path, path.name, state, done, run.phases, result, directory_size(path), problem)


def headline(metrics: Mapping[str, Any], path: Path) -> str | None:
    """Say the accuracy after a phase in a few words; None where it was not measured."""
    with interpreting(path):
        accuracy, classes = metrics.get("accuracy") or {}, len(metrics.get("classes", ()))
        known = {name: value for name, value in accuracy.items() if value is not None}
        name = default_classifier(known) if known else None
        return f"{known[name]:.1f} % on {count(classes, 'class')} ({CLASSIFIERS[name]})" if name else None


def list_runs(root: Path) -> list[RunSummary]:
    """Summarize every run directly below `root`, by name; one that cannot be read is listed with its error."""
    found = []
    for path in (root / name for name in names_in(root) if not name.startswith(TEMPORARY)):
        if not has_record(path):
            continue
        try:
            found.append(summarize(path))
        except StoreError as error:
            # A config.json may be anybody's; one with a lock or phases beside it was geodl's.
            if os.path.lexists(path / "lock") or os.path.lexists(path / "phases"):
                found.append(RunSummary(path, path.name, "unreadable", 0, None, None, directory_size(path), str(error)))
    return found


def remove_run(path: Path) -> None:
    """Remove a run's directory with all that is in it; one that is being written, or is no run, is refused."""
    path = path.resolve()
    read_record(path)
    with locked(path), writing(path):
        move(path, temporary_for(path))  # it disappears in one instant; a kill leaves no half of it
    with writing(path.parent):
        for doomed in path.parent.glob(f"{TEMPORARY}*/"):  # also one whose removal was killed earlier
            remove(doomed)
