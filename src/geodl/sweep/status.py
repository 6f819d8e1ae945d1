"""How far a run is, from its directory alone: nothing but files passes between a run and who watches it."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from geodl.errors import StoreError
from geodl.experiment import results_of
from geodl.files import read_file
from geodl.predictors import default_classifier
from geodl.store import RunDirectory, has_record, summarize
from geodl.sweep.jobs import Job

METRICS = {"average": 1, "average_incremental": 1, "final": 1, "forgetting": -1}
"""What a search may go by, in %; 1: more is better, -1: less."""


@dataclass(frozen=True)
class Status:
    """One line about a run.

    phases: complete, of how many; result: the accuracy so far in a few words; part: of its work that is over;
    seconds_left: at the speed of this start, None where that cannot be told yet.
    """

    state: str
    done: int = 0
    phases: int | None = None
    result: str = ""
    part: float = 0.0
    seconds_left: float | None = None


def status_of(job: Job) -> Status:
    """Read how far a run is."""
    if not has_record(job.out):
        error = _error(job)
        return Status("failed", result=error) if error else Status("waiting")
    try:
        found = summarize(job.out)
        events = RunDirectory(job.out).read_events()
    except StoreError as damage:
        return Status("failed", result=str(damage))
    part, left = progress(events, time.time())
    state: str = found.state
    if state == "interrupted" and (error := _error(job)):
        return Status("failed", found.done, found.total, error, part)
    if state == "interrupted" and job.file("stopped").exists():
        state = "stopped early"
    elif state == "running" and events and events[-1]["kind"] == "waiting":
        state = "waiting for base"
    return Status(state, found.done, found.total, found.result or found.error or "", part, left)


def _error(job: Job) -> str:
    with suppress(StoreError):
        return read_file(job.file("error"), limit=10_000).decode(errors="replace")
    return ""


def progress(events: Sequence[dict[str, Any]], now: float) -> tuple[float, float | None]:
    """Return the part of a run's work that is over, and the seconds left at the speed since it was last started."""
    reached, began, since, work = 0.0, 0.0, now, [1.0]
    with suppress(LookupError, TypeError, ValueError, ZeroDivisionError):  # a line that somebody else wrote
        for event in events:
            kind, phase = event["kind"], event.get("phase", 0)
            if kind == "run":
                work, reached = event["work"], sum(event["work"][: event["done"]])
            elif kind in ("stage", "epoch") and event["stage"] == "train":
                reached = sum(work[:phase]) + work[phase] * event["epoch"] / event["epochs"]
            elif kind in ("evaluated", "cached"):
                reached = sum(work[: phase + 1])
            if kind in ("run", "cached") or (kind == "stage" and event["epoch"]):  # what was there before took no time
                began, since = reached, datetime.fromisoformat(event["time"]).timestamp()
    total = sum(work)
    left = (now - since) * (total - reached) / (reached - began) if reached > began else None
    return (reached / total if total else 1.0), left


def worst(metric: str) -> float:
    """Return the worst value of a metric, which a run counts with whose value is not known."""
    return 0.0 if METRICS[metric] > 0 else 100.0


def value_of(store: RunDirectory, metric: str, phases: int | None = None) -> float | None:
    """Return a metric of a run after its first phases, all that are complete if unset; None where it is not known yet."""
    found = results_of(store)
    if not found:
        return None
    best = found[default_classifier(found)]
    if phases is not None:
        best = replace(best, confusions=best.confusions[:phases])
    value = getattr(best, metric)
    return None if value is None else float(value)
