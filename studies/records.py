"""Results of runs as small tidy JSON files, one a run, to be kept where run directories are too large."""

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
    """What one file holds of one run.

    machine:  what the run ended on; "changed" names what was different before, where something was.
    seconds:  time of each phase, training and evaluation.
    cached:   whether phase 0 was taken from the cache, so that its time says nothing.
    results:  classifier -> average, average_incremental, final, forgetting, accuracy (a list: after each phase).
    similarity: to the features of phase 0, a list over the phases for each measure; empty in older files.
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
        """Method and distillation, by the one name that equal trainings have."""
        method, distill = same(self.config["method"], self.config["distill"])
        return method, f"{distill} on the grid" if self.config.get(
            "cosine_features"
        ) == "grid" else distill

    @property
    def file_name(self) -> str:
        """The name of its file: METHOD-DISTILLATION-HASH-seedN.json."""
        config = self.config
        return f"{config.get('method')}-{config.get('distill')}-{fingerprint(dict(config))[:8]}-seed{self.seed}.json"

    def value(self, classifier: str, measure: str) -> float | None:
        """Return one figure; None where the run has none."""
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
        changed = [
            line
            for event in events
            if event["kind"] == "environment changed"
            for line in event["differences"]
        ]
        return Record(
            {key: value for key, value in run.config.items() if key not in (*FILES, *REPETITION)},
            int(run.config["seed"]),
            run.environment.get("commit"),
            {key: value for key, value in run.environment.items() if key != "commit"}
            | ({"changed": changed} if changed else {}),
            phase_seconds(events, run.done),
            any(event["kind"] == "cached" for event in events),
            results,
            {name: run.similarities(name) for name in ("svcca", "cka") if run.similarities(name)},
        )


def phase_seconds(events: Sequence[Mapping[str, Any]], phases: int) -> list[float]:
    """Return the seconds of each phase from its events.

    The time between the last event before an interruption and the start after it is not counted, whether something was
    computed in it or not.
    """
    seconds, phase = [0.0] * phases, None
    last: datetime | None = None
    for event in events:
        now = datetime.fromisoformat(event["time"])
        if event["kind"] == "run":
            phase = None  # until it says which phase it goes on with
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
        # The names in a config.json from elsewhere must not lead out of the directory.
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
        try:
            version = content.pop("format")
            found.append(Record(**content))
            kinds = {"config": dict, "seed": int, "machine": dict, "seconds": list, "results": dict}
            if not all(isinstance(content[key], kind) for key, kind in kinds.items()):
                raise TypeError
        except (AttributeError, KeyError, TypeError):
            raise StoreError(f"{path}: not a record of `python -m studies.results add`") from None
        if version != FORMAT:
            raise StoreError(f"{path}: format {version}; this version reads format {FORMAT}")
    return found
