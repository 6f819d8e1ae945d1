"""How far the runs of a sweep are, from their directories alone: nothing but files passes between a run and who watches it."""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from geodl.bench.experiment import results_of
from geodl.bench.runs import RunSummary, summarize
from geodl.bench.sweep.jobs import Job
from geodl.bench.work import Progress
from geodl.core.errors import StoreError
from geodl.core.files import read_file
from geodl.model.classifiers import default_classifier
from geodl.store import Directory, exists

METRICS = {"average": 1, "average_incremental": 1, "final": 1, "forgetting": -1}
"""What a search may compare runs by, in %; 1: more is better, -1: less."""


def status_of(job: Job) -> RunSummary:
    """Read how far a run is."""
    error = _error(job)
    if not exists(job.out):
        return RunSummary(job.out, "failed" if error else "waiting", error=error)
    found = summarize(job.out)
    if found.state in ("damaged", "unreadable"):
        return replace(found, state="failed")
    if found.state == "interrupted" and error:
        return replace(found, state="failed", error=error)
    if found.state == "interrupted" and job.file("stopped").exists():
        return replace(found, state="stopped early")
    if found.state == "running":
        events = Directory(job.out).read_events()
        waits = bool(events) and events[-1]["kind"] == "waiting"
        left = Progress.of(events).seconds_left(time.time())
        return replace(found, state="waiting for base" if waits else "running", seconds_left=left)
    return found


def _error(job: Job) -> str | None:
    with suppress(StoreError):
        return read_file(job.file("error"), limit=10_000).decode(errors="replace")
    return None


def rank(out: Path, metric: str) -> float:
    """Return what sorts runs by a metric, the best first and those without a value last."""
    value = value_of(out, metric)
    return -METRICS[metric] * (worst(metric) if value is None else value)


def worst(metric: str) -> float:
    """Return the worst value of a metric, which a run counts with whose value is not known."""
    return 0.0 if METRICS[metric] > 0 else 100.0


def value_of(out: Path, metric: str, phases: int | None = None) -> float | None:
    """Return a metric of a run after its first phases, all that are complete if unset; None where it is not known yet."""
    found = results_of(Directory(out))
    if not found:
        return None
    best = found[default_classifier(found)]
    if phases is not None:
        best = replace(best, confusions=best.confusions[:phases])
    value = getattr(best, metric)
    return None if value is None else float(value)
