"""The status of the runs of a sweep, read from their directories only."""

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
"""Metrics that a search can use, in %; 1: higher is better, -1: lower."""


def status_of(job: Job) -> RunSummary:
    """Read the status of a run."""
    error = _error(job)
    if not exists(job.out):
        return RunSummary(job.out, "failed" if error else "waiting", error=error)
    summary = summarize(job.out)
    if summary.state in ("damaged", "unreadable"):
        return replace(summary, state="failed")
    if summary.state == "interrupted" and error:
        return replace(summary, state="failed", error=error)
    if summary.state == "interrupted" and job.file("stopped").exists():
        return replace(summary, state="stopped early")
    if summary.state == "running":
        events = Directory(job.out).read_events()
        waits = bool(events) and events[-1]["kind"] == "waiting"
        left = Progress.of(events).seconds_left(time.time())
        return replace(summary, state="waiting for base" if waits else "running", seconds_left=left)
    return summary


def _error(job: Job) -> str | None:
    with suppress(StoreError):
        return read_file(job.file("error"), limit=10_000).decode(errors="replace")
    return None


def rank(out: Path, metric: str) -> float:
    """Return a sort key of runs by a metric: the best first, those without a value last."""
    value = value_of(out, metric)
    return -METRICS[metric] * (worst(metric) if value is None else value)


def worst(metric: str) -> float:
    """Return the worst value of a metric, used for runs whose value is unknown."""
    return 0.0 if METRICS[metric] > 0 else 100.0


def value_of(out: Path, metric: str, phases: int | None = None) -> float | None:
    """Return a metric of a run over its first `phases` phases (None: all complete ones); None if unknown."""
    results = results_of(Directory(out))
    if not results:
        return None
    result = results[default_classifier(results)]
    if phases is not None:
        result = replace(result, confusions=result.confusions[:phases])
    value = getattr(result, metric)
    return None if value is None else float(value)
