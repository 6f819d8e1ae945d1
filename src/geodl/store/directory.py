"""One directory of a run or of a model."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor

from geodl import files
from geodl.errors import StoreError
from geodl.locks import locked
from geodl.store.events import append_event, read_events
from geodl.store.phases import (
    FILES,
    MANIFEST,
    STATISTICS,
    describe,
    manifest_file,
    phase_numbers,
    phase_path,
    read_listed,
    read_manifest,
)
from geodl.store.progress import drop_checkpoint, load_checkpoint, save_checkpoint, set_aside
from geodl.store.record import (
    FORMAT,
    differences,
    has_record,
    read_record,
    refuse_difference,
    refuse_foreign,
    start_over,
    write_record,
)
from geodl.store.undone import NAME as UNDONE
from geodl.store.undone import bring_back, drop_undone, set_undone, undone_phases

FORMS = "tensors"
"""Where extra.json keeps the form of the tensors beside it."""
T = TypeVar("T")
_log = logging.getLogger("geodl")


class Phase(NamedTuple):
    """What is kept of a completed phase, and where it was read."""

    model: dict[str, Tensor]
    memory: dict[str, Tensor]
    metrics: dict[str, Any]
    extra: dict[str, Any]
    statistics: dict[str, Tensor]
    """Large sums that only the next phase needs; empty where there are none, or no longer."""
    path: Path


class RunDirectory:
    """An existing directory of a run or of a model; reading needs no lock, writing needs `lock()`.

    Attributes: `path`; `config` and `environment` as given to `create_or_open`; `phases`, how many phases the
    complete run has (None: any number, as for a model that goes on learning).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record = read_record(path)
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
        that changes the last digits of results, such as the number of threads) unless `allow_environment_change`, which
        records the new one. `fresh` starts over: it removes what geodl wrote there, and nothing else.
        """
        wanted = {"config": config, "environment": environment or {}, "format": FORMAT, "phases": phases}
        record: dict[str, Any] = json.loads(files.canonical_json(wanted))  # as it reads back: tuples become lists
        refuse_foreign(path)
        files.make_directory(path)
        with locked(path):
            run = cls(path) if has_record(path) else None
            if run is not None and run.kind != record["config"].get("kind", "run"):  # not even --fresh removes a model
                raise StoreError(f"{path} is the directory of a {run.kind}; use another one")
            if run is None or fresh:
                start_over(path, record)
                return cls(path)
            refuse_difference(path, "configuration", differences(run.config, record["config"]), "--fresh")
            then, now = ({key: env.get(key) for key in must_match} for env in (run.environment, record["environment"]))
            changed = differences(then, now)
            if changed and not allow_environment_change:
                remedy = "--allow-environment-change to continue all the same, or --fresh"
                refuse_difference(path, "environment", changed, remedy)
            if changed:
                append_event(path / "events.jsonl", "environment changed", {"differences": changed})
                write_record(path, run._record | {"environment": record["environment"]})
            return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; a second one gets a StoreError naming the first. Removes leftovers of a killed writer."""
        with locked(self.path):
            if read_record(self.path) != self._record:
                raise StoreError(f"{self.path} was replaced by another process: run the same command again")
            phases = [phase_path(self.path, t) for t in phase_numbers(self.path)]
            for directory in (self.path, self.path / "phases", self.path / "progress", *phases):
                files.remove_temporaries(directory)
            if not self.undone():
                drop_undone(self.path)
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
        numbers = phase_numbers(self.path)
        if numbers != list(range(len(numbers))):
            missing = min(set(range(len(numbers))) - set(numbers))
            raise StoreError(f"{phase_path(self.path, missing)} is missing, although a later phase is there")
        return len(numbers)

    def save_phase(
        self,
        t: int,
        model: Mapping[str, Tensor],
        memory: Mapping[str, Tensor],
        metrics: Mapping[str, Any],
        extra: Mapping[str, Any],
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add phase `t`, the next one, whole or not at all; drop the progress that led to it and what was taken back."""
        self._require_lock()
        if t != self.completed():
            raise StoreError(f"{self.path}: phase {t} cannot be saved, the next one is {self.completed()}")
        forms = {FORMS: [form(part) for part in (model, memory, statistics or {})]}
        tensors, facts = map(files.tensor_file, (model, memory)), map(files.json_file, (metrics, dict(extra) | forms))
        contents = dict(zip(FILES, (*tensors, *facts), strict=True))
        if statistics:
            contents[STATISTICS] = files.tensor_file(statistics)
        contents[MANIFEST] = manifest_file(t, describe(contents))
        target = phase_path(self.path, t)
        temporary = files.temporary_for(target)
        with files.writing(target, temporary):
            target.parent.mkdir(exist_ok=True)
            files.sync_directory(self.path)
            temporary.mkdir()
            for name, data in contents.items():
                files.write_synced(temporary / name, data)
            files.sync_directory(temporary)
            files.move(temporary, target)
        drop_undone(self.path)
        self.clear_progress()

    def load_phase(self, t: int) -> Phase:
        """Read phase `t`, verified."""
        folder, contents = phase_path(self.path, t), self._read(t, *FILES, optional=(STATISTICS,))
        found = {name: _parsed(data, folder / name) for name, data in contents.items()}
        forms = found["extra.json"].pop(FORMS, None)
        # Signed anew, tensors of other shapes would pass for sound, and break whatever computes with them.
        tensors = [part for name, part in found.items() if name.endswith(".safetensors")]
        if forms is not None and [form(part) for part in tensors] != forms[: len(tensors)]:
            raise StoreError(f"{folder} is damaged: its tensors have other names, types or shapes than were saved")
        model, memory, metrics, extra, statistics = (found.get(name, {}) for name in (*FILES, STATISTICS))
        return Phase(model, memory, metrics, extra, statistics, folder)

    def verify(self) -> None:
        """Verify every file of every complete phase: all that a result rests on."""
        for t in range(self.completed()):
            self._verify(t)

    def _verify(self, t: int) -> None:
        self._read(t)  # the manifest
        for name in read_manifest(phase_path(self.path, t), t):
            self._read(t, name)

    def _read(self, t: int, *names: str, optional: Sequence[str] = ()) -> dict[str, bytes]:
        """Read files of phase `t`, verified, the optional ones where they are there; the error says what to do."""
        folder = phase_path(self.path, t)
        for attempt in (1, 2):
            try:
                manifest = read_manifest(folder, t)
                wanted = [*names, *(name for name in optional if name in manifest)]
                return {name: read_listed(folder, name, manifest) for name in wanted}
            except StoreError as error:
                # Another process may have taken the phase back and saved another one in its place, between two reads.
                if attempt == 2:
                    raise StoreError(f"{error}{self._remedy(t, error)}") from error
        raise AssertionError("unreachable")

    def _remedy(self, t: int, error: StoreError) -> str:
        done = self.completed()
        if t >= done or _unreadable(error):
            return ""
        if self.kind != "model":
            which = f"{phase_path(self.path, t)}{' and the phases after it' if t < done - 1 else ''}"
            return f"; remove {which}, and the same command computes what is missing, or start over with --fresh"
        if t < done - 1:
            return "; the model does not need it: it is of an earlier step"
        return f"; `geodl undo {self.path}` goes back to the last good state"

    def is_damaged(self, t: int) -> bool:
        """Return whether phase `t` is not as it was written; what cannot be read here and now may well be sound."""
        try:
            self._verify(t)
        except StoreError as error:
            return not _unreadable(error.__cause__)
        return False

    def drop_last_phase(self, *, keep: bool = False) -> None:
        """Take the last phase back: it disappears in one instant, and the progress beyond it with it.

        keep: it is moved aside, from where `redo_phase` brings it back until another phase is saved.
        """
        self._require_lock()
        done = self.completed()
        if not done:
            raise StoreError(f"{self.path} has no phase that could be taken back")
        self.clear_progress()
        if keep:
            set_undone(self.path, done - 1)
        else:
            drop_undone(self.path)
            files.drop_folder(phase_path(self.path, done - 1))

    def undone(self) -> list[int]:
        """Return the numbers of the phases that were taken back and can be brought back, in that order."""
        return undone_phases(self.path, self.completed()) if os.path.lexists(self.path / UNDONE) else []

    def redo_phase(self) -> None:
        """Bring the phase back that was taken back last, verified; the progress beyond the one before it is dropped."""
        self._require_lock()
        if not (found := self.undone()):
            raise StoreError(f"{self.path}: nothing to bring back; only what was taken back last and not changed since")
        self.clear_progress()
        bring_back(self.path, found[0])

    def load_undone(self, t: int) -> dict[str, Any]:
        """Read what was kept beside the tensors and metrics of a phase that was taken back, verified."""
        folder = phase_path(self.path, t, UNDONE)
        found = files.parse_object(read_listed(folder, "extra.json", read_manifest(folder, t)), folder / "extra.json")
        return {key: entry for key, entry in found.items() if key != FORMS}

    def forget_phase(self, t: int) -> None:
        """Remove all of an old phase, which is not the last one, but its metrics: extra may name a person's files."""
        self._forget(t, {*FILES, STATISTICS} - {"metrics.json"})

    def forget_statistics(self, t: int) -> None:
        """Remove the statistics of an old phase: only the phase after it needed them."""
        self._forget(t, {STATISTICS})

    def _forget(self, t: int, forgotten: set[str]) -> None:
        self._require_lock()
        if not 0 <= t < self.completed() - 1:
            raise StoreError(f"{self.path}: phase {t} cannot be forgotten; allowed are those before the last one")
        folder = phase_path(self.path, t)
        try:
            manifest = read_manifest(folder, t)
        except StoreError:
            manifest = {}  # a damaged manifest stays as it is: nothing unverified is signed anew
        if forgotten & manifest.keys():  # first, so that no manifest ever names a file that is gone
            kept = {name: entry for name, entry in manifest.items() if name not in forgotten}
            files.atomic_write(folder / MANIFEST, manifest_file(t, kept))
        for name in sorted(forgotten):
            files.unlink(folder / name)

    def remembers(self, t: int) -> bool:
        """Return whether phase `t` is there with its model and memory."""
        folder = phase_path(self.path, t)
        try:
            manifest = read_manifest(folder, t)
        except StoreError:
            return False
        return all(name in manifest and os.path.lexists(folder / name) for name in FILES[:2])

    def load_memory(self, t: int) -> dict[str, Tensor]:
        """Read the memory of phase `t` alone, verified."""
        return self._load(t, "memory.safetensors")

    def load_extra(self, t: int) -> dict[str, Any]:
        """Read what was kept beside the tensors and metrics of phase `t`, verified."""
        return {key: entry for key, entry in self._load(t, "extra.json").items() if key != FORMS}

    def load_metrics(self, t: int) -> dict[str, Any]:
        """Read the metrics of phase `t` alone, verified."""
        return self._load(t, "metrics.json")

    def _load(self, t: int, name: str) -> dict[str, Any]:
        return _parsed(self._read(t, name)[name], phase_path(self.path, t) / name)

    def stamp(self) -> tuple[int, int, int] | None:
        """Return what tells the last complete phase from any other, also from one taken back; None: there is none."""
        for _ in range(10):
            done = self.completed()
            if not done:
                return None
            with suppress(FileNotFoundError):  # another process has taken it back just now: count again
                status = phase_path(self.path, done - 1).stat()
                return done, status.st_ino, status.st_mtime_ns
        raise StoreError(f"{self.path} is being changed by another process all the time: run the same command again")

    @property
    def _checkpoint(self) -> Path:
        return self.path / "progress" / "checkpoint.safetensors"

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint of the phase in work; `state` is JSON-ready."""
        self._require_lock()
        save_checkpoint(self._checkpoint, self.completed(), tensors, state)

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the last checkpoint of the phase in work, verified; None where there is none that is sound.

        A damaged one can always be computed again: whoever holds the lock sets it aside and says so.
        """
        phase = self.completed()
        try:
            return load_checkpoint(self._checkpoint, phase)
        except files.MissingFileError:
            return None
        except StoreError as error:
            if self._writable:
                set_aside(self._checkpoint)
                self.events("progress set aside", reason=str(error))
                _log.warning("%s; it was set aside, and the work goes on from the last complete phase", error)
            return None

    def clear_progress(self) -> None:
        """Remove the checkpoint of the phase in work, so that the phase starts again."""
        self._require_lock()
        drop_checkpoint(self._checkpoint)

    def events(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl: the time, the kind, the fields."""
        self._require_lock()
        append_event(self.path / "events.jsonl", kind, fields)

    def read_events(self) -> list[dict[str, Any]]:
        """Read all events, oldest first, without torn and damaged lines."""
        return read_events(self.path / "events.jsonl")

    def times(self, *kinds: str) -> dict[int, str]:
        """Tell when events of these kinds were written last: phase -> time."""
        found = (event for event in self.read_events() if event["kind"] in kinds)
        return {event["phase"]: event["time"] for event in found if isinstance(event.get("phase"), int)}


def form(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types and shapes of tensors."""
    return files.fingerprint({name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()})


def read_steadily(path: Path, read: Callable[[RunDirectory], T]) -> T:
    """Return what `read` gives of a directory, read again where another process took a phase back or saved one meanwhile."""
    last = ""
    for _ in range(10):
        store = RunDirectory(path)
        before = store.stamp()
        try:
            found = read(store)
        except StoreError as error:
            # A phase that was taken back and brought back meanwhile has the same stamp: missing is what stays missing.
            gone = isinstance(error.__cause__, files.MissingFileError) and str(error) != last
            if store.stamp() == before and not gone:
                raise
            last = str(error)
        else:
            if store.stamp() == before:
                return found
    raise StoreError(f"{path} is being changed by another process all the time: run the same command again")


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    return files.parse_tensors(data, path) if path.suffix == ".safetensors" else files.parse_object(data, path)


def _unreadable(error: BaseException | None) -> bool:
    """Return whether a file could not be read here and now: it may well be sound."""
    return isinstance(getattr(error, "__cause__", None), OSError | MemoryError) and not isinstance(
        error, files.MissingFileError
    )
