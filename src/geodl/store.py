"""Run and model directories: every write is atomic, every tensor file verified, nothing is pickled.

- `config.json`: what the directory was made with: configuration, environment, number of phases;
- `phases/NN/`: `model.safetensors`, `memory.safetensors`, `metrics.json`, `extra.json` of one complete phase;
- `progress/checkpoint.safetensors`: where the unfinished phase stands;
- `events.jsonl`: what happened when (the only file with times);
- `report.html`: written by the report;
- `lock`: held by the one writer.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor

from geodl.errors import StoreError
from geodl.files import (
    TEMPORARY,
    canonical_json,
    is_locked,
    json_file,
    locked,
    move,
    read_json,
    read_tensors,
    remove,
    remove_temporaries,
    sync_directory,
    temporary_for,
    tensor_file,
    unlink,
    write_json,
    write_synced,
    write_tensors,
    writing,
)

FORMAT = 1


class Phase(NamedTuple):
    """What is kept of a completed phase."""

    model: dict[str, Tensor]
    memory: dict[str, Tensor]
    metrics: dict[str, Any]
    extra: dict[str, Any]


class RunDirectory:
    """An existing directory of a run or of a model; reading needs no lock, writing needs `lock()`.

    Attributes: `path`; `config` and `environment` as given to `create_or_open`; `phases`, how many phases the
    complete run has (None: any number, as for a model that goes on learning).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record = _read_record(path)
        self.config: dict[str, Any] = self._record["config"]
        self.environment: dict[str, Any] = self._record["environment"]
        self.phases: int | None = self._record["phases"]
        self._writable = False

    @property
    def kind(self) -> str:
        """What the directory is of: a run, or a model."""
        return str(self.config.get("kind", "run"))

    @classmethod
    def create_or_open(
        cls,
        path: Path,
        config: Mapping[str, Any],
        *,
        environment: Mapping[str, Any] | None = None,
        must_match: Sequence[str] = (),
        phases: int | None = None,
        fresh: bool = False,
        allow_environment_change: bool = False,
    ) -> Self:
        """Make the directory, or open the one that this configuration made before.

        Another configuration is an error, and so is another value of an environment key in `must_match` (something
        that changes the last digits of results, such as the number of threads) unless `allow_environment_change`, which records
        the new environment. `fresh` starts over: it removes what geodl wrote there, and nothing else.
        """
        wanted = {"config": config, "environment": environment or {}, "format": FORMAT, "phases": phases}
        record: dict[str, Any] = json.loads(canonical_json(wanted))  # as it reads back: tuples become lists
        _refuse_foreign(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        with locked(path):
            run = cls(path) if (path / "config.json").exists() else None
            if run is not None and run.kind != record["config"].get("kind", "run"):  # not even --fresh removes a model
                raise StoreError(f"{path} is the directory of a {run.kind}; use another one")
            if run is None or fresh:
                _start_over(path, record)
                return cls(path)
            _refuse_difference(path, "configuration", _differences(run.config, record["config"]), "--fresh")
            then, now = ({key: env.get(key) for key in must_match} for env in (run.environment, record["environment"]))
            drift = _differences(then, now)
            if drift and not allow_environment_change:
                _refuse_difference(
                    path, "environment", drift, "--allow-environment-change to continue all the same, or --fresh"
                )
            if drift:
                run._append_event("drift", {"differences": drift})
                write_json(path / "config.json", run._record | {"environment": record["environment"]})
            return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; a second one gets a StoreError naming the first. Removes leftovers of a killed writer."""
        with locked(self.path):
            if _read_record(self.path) != self._record:
                raise StoreError(f"{self.path} was replaced by another process: run the same command again")
            for directory in (self.path, self.path / "phases", self.path / "progress"):
                remove_temporaries(directory)
            self._writable = True
            try:
                yield
            finally:
                self._writable = False

    def _require_lock(self) -> None:
        if not self._writable:
            raise StoreError(f"{self.path} can only be written by the holder of its lock")

    def completed(self) -> int:
        """Count the complete phases; they are 0, 1, ..., without a gap."""
        numbers = _phase_numbers(self.path)
        if numbers != list(range(len(numbers))):
            missing = min(set(range(len(numbers))) - set(numbers))
            raise StoreError(f"{_phase_path(self.path, missing)} is missing, although a later phase is there")
        return len(numbers)

    def save_phase(
        self,
        t: int,
        model: Mapping[str, Tensor],
        memory: Mapping[str, Tensor],
        metrics: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        """Add phase `t`, the next one, whole or not at all, and drop the progress that led to it.

        `metrics` may hold a `headline`: a short text that `list_runs` shows as the result.
        """
        self._require_lock()
        if t != self.completed():
            raise StoreError(f"{self.path}: phase {t} cannot be saved, the next one is {self.completed()}")
        contents = {
            "model.safetensors": tensor_file(model, {}),
            "memory.safetensors": tensor_file(memory, {}),
            "metrics.json": json_file(metrics),
            "extra.json": json_file(extra),
        }
        target = _phase_path(self.path, t)
        temporary = temporary_for(target)
        with writing(target, temporary):
            target.parent.mkdir(exist_ok=True)
            sync_directory(self.path)
            temporary.mkdir()
            for name, data in contents.items():
                write_synced(temporary / name, data)
            sync_directory(temporary)
            move(temporary, target)
        self.clear_progress()

    def load_phase(self, t: int) -> Phase:
        """Read phase `t`, verified."""
        path = _phase_path(self.path, t)
        model, _ = read_tensors(path / "model.safetensors")
        memory, _ = read_tensors(path / "memory.safetensors")
        return Phase(model, memory, read_json(path / "metrics.json"), read_json(path / "extra.json"))

    def drop_last_phase(self) -> None:
        """Take the last phase back: it disappears in one instant, and the progress beyond it with it."""
        self._require_lock()
        done = self.completed()
        if not done:
            raise StoreError(f"{self.path} has no phase that could be taken back")
        self.clear_progress()
        target = _phase_path(self.path, done - 1)
        doomed = temporary_for(target)
        with writing(target):
            move(target, doomed)
            remove(doomed)

    def forget_phase(self, t: int) -> None:
        """Remove all of an old phase, which is not the last one, but its metrics: extra may name a person's files."""
        self._require_lock()
        if not 0 <= t < self.completed() - 1:
            raise StoreError(f"{self.path}: phase {t} cannot be forgotten; allowed are those before the last one")
        for name in ("memory.safetensors", "model.safetensors", "extra.json"):
            unlink(_phase_path(self.path, t) / name)

    def remembers(self, t: int) -> bool:
        """Say whether phase `t` is there with its model and memory."""
        files = ("memory.safetensors", "model.safetensors")
        return all((_phase_path(self.path, t) / name).exists() for name in files)

    def load_memory(self, t: int) -> dict[str, Tensor]:
        """Read the memory of phase `t` alone, verified."""
        return read_tensors(_phase_path(self.path, t) / "memory.safetensors")[0]

    def load_extra(self, t: int) -> dict[str, Any]:
        """Read what was kept beside the tensors and metrics of phase `t`."""
        return dict(read_json(_phase_path(self.path, t) / "extra.json"))

    def stamp(self) -> tuple[int, int, int] | None:
        """Give what tells the last complete phase from any other, also from one that was taken back; None: there is none."""
        while done := self.completed():
            with suppress(FileNotFoundError):  # another process has taken it back just now: count again
                status = _phase_path(self.path, done - 1).stat()
                return done, status.st_ino, status.st_mtime_ns
        return None

    def load_metrics(self, t: int) -> dict[str, Any]:
        """Read the metrics of phase `t` alone."""
        return dict(read_json(_phase_path(self.path, t) / "metrics.json"))

    @property
    def _checkpoint(self) -> Path:
        return self.path / "progress" / "checkpoint.safetensors"

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint of the phase in work; `state` is JSON-ready."""
        self._require_lock()
        with writing(self._checkpoint):
            self._checkpoint.parent.mkdir(exist_ok=True)
        # Tensors and state in one file: one rename replaces both.
        write_tensors(
            self._checkpoint, tensors, {"phase": str(self.completed()), "state": canonical_json(state).decode()}
        )

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the last checkpoint of the phase in work, verified; None where there is none."""
        if not self._checkpoint.exists():
            return None
        tensors, metadata = read_tensors(self._checkpoint)
        if metadata["phase"] != str(self.completed()):
            return None  # killed after its phase was saved and before it was removed
        return tensors, json.loads(metadata["state"])

    def clear_progress(self) -> None:
        """Remove the checkpoint of the phase in work, so that the phase starts again."""
        self._require_lock()
        unlink(self._checkpoint)

    def events(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl: the time, the kind, the fields."""
        self._require_lock()
        self._append_event(kind, fields)

    def _append_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        event = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind} | finite
        path = self.path / "events.jsonl"
        # Not fsynced: a kill loses nothing, and a lost line after a power failure harms nothing.
        with writing(path), path.open("a+b") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a line torn by a kill or a full disk stays alone on its line
                    file.write(b"\n")
            file.write(canonical_json(event) + b"\n")

    def read_events(self) -> list[dict[str, Any]]:
        """Read all events, oldest first, without torn lines."""
        path = self.path / "events.jsonl"
        events = []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
        return events

    def times(self, kind: str) -> dict[int, str]:
        """Tell when events of a kind were written: phase -> time."""
        return {event["phase"]: event["time"] for event in self.read_events() if event["kind"] == kind}


def _phase_path(path: Path, t: int) -> Path:
    return path / "phases" / f"{t:02d}"


def _phase_numbers(path: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (path / "phases").glob("[0-9]*") if entry.name.isdecimal())


def _read_record(path: Path) -> dict[str, Any]:
    record = read_json(path / "config.json") if (path / "config.json").exists() else None
    if not isinstance(record, dict) or not {"config", "environment", "format", "phases"} <= record.keys():
        raise StoreError(f"{path} is not a directory of geodl's: it has no config.json that geodl wrote")
    if record["format"] != FORMAT:
        raise StoreError(f"{path} has format {record['format']}; this version of geodl reads format {FORMAT}")
    return record


def _refuse_foreign(path: Path) -> None:
    """Refuse a directory with things in it that is not geodl's: nothing of a user's is ever mixed or overwritten."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file; a directory is needed")
    if any(e.name != "lock" and not e.name.startswith(TEMPORARY) for e in path.glob("*")):
        _read_record(path)


def _start_over(path: Path, record: Mapping[str, Any]) -> None:
    """Remove what geodl wrote, newest first, so that a kill on the way leaves a shorter but sound run."""
    for name in ("progress/checkpoint.safetensors", "events.jsonl", "report.html"):
        unlink(path / name)
    for curves in (path / "tensorboard").glob("events.out.tfevents.*"):
        unlink(curves)
    for t in reversed(_phase_numbers(path)):
        with writing(path):
            target = _phase_path(path, t)
            doomed = temporary_for(target)
            move(target, doomed)
            remove(doomed)
    write_json(path / "config.json", record)


def _differences(then: Any, now: Any, key: str = "") -> list[str]:
    """Name each (nested, dotted) key whose values differ, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            line
            for name in sorted(then.keys() | now.keys())
            for line in _differences(then.get(name), now.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if then == now else [f"{key} is {json.dumps(then)} there and {json.dumps(now)} now"]


def _refuse_difference(path: Path, what: str, differences: Sequence[str], remedy: str) -> None:
    if differences:
        raise StoreError(
            f"{path} was made with another {what}: {'; '.join(differences)}. Use another directory, or {remedy} to start over"
        )


# The runs below a directory.


State = Literal["complete", "running", "interrupted", "damaged"]


@dataclass(frozen=True)
class RunSummary:
    """One line of the list of runs; `size` in bytes."""

    path: Path
    name: str
    state: State
    done: int
    total: int | None
    result: str | None
    size: int


def summarise(path: Path) -> RunSummary:
    """Say how far a run is, and its result so far."""
    run = RunDirectory(path)
    done, result = 0, None
    state: State = "damaged"
    try:
        done = run.completed()
        if done:
            result = read_json(_phase_path(path, done - 1) / "metrics.json").get("headline")
        finished = done == run.phases if run.phases is not None else done > 0 and run.load_progress() is None
        state = "running" if is_locked(path) else "complete" if finished else "interrupted"
    except StoreError:
        pass
    return RunSummary(path, path.name, state, done, run.phases, result, directory_size(path))


def directory_size(path: Path) -> int:
    """Count the bytes of all files below a directory."""
    total = 0
    for folder, _, files in os.walk(path):  # which passes over folders that are gone
        for file in files:
            with suppress(FileNotFoundError):  # a running writer renames and removes its temporary files
                total += (Path(folder) / file).stat().st_size
    return total


def list_runs(root: Path) -> list[RunSummary]:
    """Summarise every run directly below `root`, by name."""
    runs = (entry.parent for entry in sorted(root.glob("*/config.json")) if not entry.parent.name.startswith(TEMPORARY))
    return [summarise(path) for path in runs if _is_run(path)]


def _is_run(path: Path) -> bool:
    try:
        _read_record(path)
    except StoreError:
        return False
    return True


def remove_run(path: Path) -> None:
    """Remove a run's directory with all that is in it; one that is being written, or is no run, is refused."""
    path = path.resolve()
    _read_record(path)
    with locked(path), writing(path):
        move(path, temporary_for(path))  # it disappears in one instant; a kill leaves no half of it
    for doomed in path.parent.glob(f"{TEMPORARY}*/"):  # also one whose removal was killed earlier
        remove(doomed)
