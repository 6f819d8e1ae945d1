"""Results of runs as small JSON files, one per run, in place of large run directories."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from geodl.bench.report.published import FILES, REPETITION, same
from geodl.bench.report.results import read_run
from geodl.core.content import fingerprint, interpreting, json_file, read_json
from geodl.core.errors import StoreError
from geodl.core.files import atomic_write, make_directory
from geodl.store import Directory

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """The result of one run.

    machine:    the environment at the end of the run; "changed" lists differences at earlier starts, if any.
    seconds:    the time of each phase, training and evaluation.
    cached:     whether phase 0 came from the cache, so that its time means nothing.
    results:    classifier -> average, average_incremental, final, forgetting, accuracy (a list by phase).
    similarity: measure -> similarity to the features of phase 0 by phase; empty in older files.
    """

    config: Mapping[str, Any]
    seed: int
    commit: str | None
    machine: Mapping[str, Any]
    seconds: Sequence[float]
    cached: bool
    results: Mapping[str, Mapping[str, Any]]
    similarity: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def training(self) -> tuple[str, str]:
        """Method and distillation; equal trainings have the same."""
        method, distill = same(self.config["method"], self.config["distill"])
        on_grid = self.config.get("cosine_features") == "grid"
        return method, f"{distill} on the grid" if on_grid else distill

    @property
    def file_name(self) -> str:
        """The name of its file: METHOD-DISTILLATION-HASH-seedN.json."""
        config = self.config
        return f"{config.get('method')}-{config.get('distill')}-{fingerprint(dict(config))[:8]}-seed{self.seed}.json"

    def value(self, classifier: str, measure: str) -> float | None:
        """Return one result, or None."""
        found: float | None = self.results.get(classifier, {}).get(measure)
        return found


def record(path: Path) -> Record:
    """Read a complete run directory."""
    run = read_run(path)
    if not run.complete:
        raise StoreError(
            f"{path}: {run.done} of {run.total} phases are complete; only complete runs have a result"
        )
    events = Directory(path).read_events()
    with interpreting(path):
        kept = ("average", "average_incremental", "final", "forgetting", "accuracy")
        results = {name: {key: result[key] for key in kept} for name, result in run.results.items()}
        machine = dict(run.environment)
        commit = machine.pop("commit", None)
        moves = [event for event in events if event["kind"] == "environment changed"]
        if moves:
            machine["changed"] = [line for event in moves for line in event["differences"]]
        return Record(
            {key: value for key, value in run.config.items() if key not in (*FILES, *REPETITION)},
            int(run.config["seed"]),
            commit,
            machine,
            phase_seconds(events, run.done),
            any(event["kind"] == "cached" for event in events),
            results,
            {name: run.similarities(name) for name in ("svcca", "cka") if run.similarities(name)},
        )


def phase_seconds(events: Sequence[Mapping[str, Any]], phases: int) -> list[float]:
    """Return the seconds of each phase, without the time from the last event before an interruption to the next start."""
    seconds, phase = [0.0] * phases, None
    last: datetime | None = None
    for event in events:
        now = datetime.fromisoformat(event["time"])
        if event["kind"] == "run":
            phase = None  # until the next phase event
        elif last is not None and phase is not None and phase < phases:
            seconds[phase] += (now - last).total_seconds()
        if event["kind"] == "phase":
            phase = event.get("phase")
        elif event["kind"] == "evaluated":
            phase = None
        last = now
    return [round(each, 1) for each in seconds]


def add(paths: Sequence[Path], to: Path) -> list[Path]:
    """Write the record of each run into a directory; return the files."""
    make_directory(to)
    written = []
    for path in paths:
        found = record(path)
        # Names of parts in a foreign run must not lead out of the directory.
        if not re.fullmatch(r"[\w.+-]+", found.file_name):
            raise StoreError(f"{path}: its method or distillation has a name that no file can have")
        written.append(to / found.file_name)
        atomic_write(written[-1], json_file({"format": FORMAT, **vars(found)}))
    return written


def read(directory: Path) -> list[Record]:
    """Read all records in a directory."""
    if not directory.is_dir():
        raise StoreError(
            f"{directory}: no such directory; `python -m studies.results add` makes it"
        )
    found = []
    for path in sorted(directory.glob("*.json")):
        content = read_json(path)
        version = content.pop("format", None)
        if version != FORMAT:
            raise StoreError(f"{path}: format {version}; this version reads format {FORMAT}")
        try:
            found.append(Record(**content))
        except TypeError:
            raise StoreError(f"{path}: not a record of `python -m studies.results add`") from None
    return found
