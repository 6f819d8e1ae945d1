"""One directory of a run or of a model."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from geodl.core import files
from geodl.core.content import canonical_json, json_file
from geodl.core.errors import StoreError
from geodl.core.locks import NAME as LOCK
from geodl.core.locks import WRITER, locked
from geodl.core.text import count
from geodl.store import old_format
from geodl.store.events import append_event, read_events
from geodl.store.head import (
    COPY,
    HEAD,
    OBJECTS,
    ChangedError,
    DamagedError,
    File,
    Head,
    SavedPhase,
    exists,
    read_head,
    write_head,
)
from geodl.store.progress import (
    drop_checkpoints,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

if TYPE_CHECKING:
    from torch import Tensor

TRIES = 10
"""So often a reader starts again where a writer removes what it reads."""
T = TypeVar("T")
_log = logging.getLogger("geodl")


class Directory:
    """An existing directory of a run or of a model, as it was when it was opened; writing needs `lock()`.

    Attributes: `path`; `kind`, run or model; `config` and `environment` as given to `create_or_open`; `phases`, how
    many phases the complete run has (None: any number, as for a model that goes on learning).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = read_head(path)
        self.kind, record = self._head.kind, self._head.record
        self.config: dict[str, Any] = dict(record["config"])
        self.environment: dict[str, Any] = dict(record["environment"])
        self.phases: int | None = record["phases"]
        self._writable = False

    # --------------------------------------------------------------------------------------------- making and opening

    @classmethod
    def create_or_open(
        cls,
        path: Path,
        config: Mapping[str, Any],
        *,
        kind: str = "run",
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
        wanted = {"config": config, "environment": environment or {}, "phases": phases}
        record = json.loads(canonical_json(wanted))  # as it reads back: tuples become lists
        refuse_foreign(path)
        files.make_directory(path)
        with locked(path):
            if not exists(path):
                write_head(path, Head(kind, record))
                return cls(path)
            store = cls(path)
            if store.kind != kind:  # not even --fresh removes a model
                raise StoreError(f"{path} is the directory of a {store.kind}; use another one")
            if fresh:
                store._start_over(record)
            else:
                store._resume(record, must_match, allow_environment_change)
            return cls(path)

    def _start_over(self, record: dict[str, Any]) -> None:
        drop_checkpoints(self.path)
        for name in ("events.jsonl", "report.html"):
            files.unlink(self.path / name)
        if files.is_directory(self.path / "tensorboard"):
            for curves in (self.path / "tensorboard").glob("events.out.tfevents.*"):
                files.unlink(curves)
        self._head = replace(self._head.next(()), record=record)
        self._settle()

    def _resume(self, record: dict[str, Any], must_match: Sequence[str], allowed: bool) -> None:
        self._refuse("configuration", differences(self.config, record["config"]), "--fresh")
        changed = []
        for key in must_match:
            then, now = self.environment.get(key), record["environment"].get(key)
            changed += differences(then, now, key)
        if not allowed:
            self._refuse("environment", changed, "--allow-environment-change to continue, --fresh")
        elif changed:
            kept = {"differences": changed}
            append_event(self.path / "events.jsonl", "environment changed", kept)
            record = {**self._head.record, "environment": record["environment"]}
            self._head = replace(self._head, record=record)
            self._settle()

    def _refuse(self, what: str, found: Sequence[str], remedy: str) -> None:
        if found:
            raise StoreError(
                f"{self.path} was made with another {what}: {'; '.join(found)}. "
                f"Use another directory, or {remedy} to start over"
            )

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def version(self) -> tuple[int, str] | None:
        """What tells the last complete phase from any other state; None: there is none."""
        last = self._head.phases[-1:]
        return (self._head.generation, last[0].id) if last else None

    def completed(self) -> int:
        """Count the complete phases."""
        return len(self._head.phases)

    def phase(self, number: int) -> SavedPhase:
        """Return a complete phase; -1: the last one."""
        done = self.completed()
        if not -done <= number < done:
            raise StoreError(
                f"{self.path} has no phase {number}: {count(done, 'phase')} complete, counted from 0"
            )
        return self._head.phases[number]

    def undone(self) -> list[dict[str, Any]]:
        """Return the actions that can be redone, the next one first."""
        return [dict(phase.action) for phase in self._head.undone]

    def verify(self) -> None:
        """Verify every file of every complete phase: all that a result rests on."""
        for phase in self._head.phases:
            if problem := phase.damage():
                raise DamagedError(problem)

    # -------------------------------------------------------------------------------------------------------- writing

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; a second one gets a StoreError naming the first. Completes what a killed writer began."""
        with locked(self.path):
            head = read_head(self.path)
            if (head.kind, head.record) != (self._head.kind, self._head.record):
                raise StoreError(
                    f"{self.path} was replaced by another process: run the same command again"
                )
            self._head = head
            self._settle()
            self._writable = True
            try:
                yield
            finally:
                self._writable = False

    def commit(
        self,
        contents: "Mapping[str, bytes | File | Mapping[str, Any]]",
        action: Mapping[str, Any],
        *,
        newest_only: Collection[str] = (),
        states: int | None = None,
        lasting: Collection[str] = (),
    ) -> None:
        """Add a phase, whole or not at all; drop the progress that led to it and what was undone.

        Args:
            contents: its files by name: bytes; tensors by name (.safetensors); an object (.json); or a value of
                `SavedPhase.files`, to share a file with another phase.
            action: what led to it, ready for JSON; `undo` and `redo` return it. It is kept while the phase is whole.
            newest_only: names of files that are removed from all phases before it.
            states: so many phases are kept whole; None: all.
            lasting: names of files that are kept of the others.
        """
        self._require_lock()
        done = self._head.phases
        facts = json.loads(canonical_json(action))  # as it reads back
        newest = SavedPhase.after(self.path, done, facts, self._stored(contents))
        forgotten = range(0 if states is None else len(done) + 1 - states)
        older = []
        for phase in done:
            gone = phase.forgotten or phase.number in forgotten
            kept = {
                name: file
                for name, file in phase.files.items()
                if name not in newest_only and (name in lasting or not gone)
            }
            step = {} if gone else phase.action  # which may name an image
            older.append(replace(phase, action=step, files=kept, forgotten=gone))
        self._advance(self._head.next([*older, newest]))

    def undo(self) -> dict[str, Any]:
        """Take the last phase back and return its action; `redo` brings it back until another one is committed.

        A damaged one is dropped; its action is then ``{"action": "damaged"}``.
        """
        self._require_lock()
        done = self._head.phases
        if not done:
            raise StoreError(f"{self.path}: nothing to undo")
        if len(done) > 1 and done[-2].forgotten:
            raise StoreError(
                f"{self.path}: the state before the last step is no longer kept, it cannot be undone"
            )
        if done[-1].damage():
            self._advance(self._head.next(done[:-1]))
            return {"action": "damaged"}
        self._advance(self._head.next(done[:-1], [done[-1], *self._head.undone]))
        return dict(done[-1].action)

    def redo(self) -> dict[str, Any]:
        """Bring the phase back that was undone last, verified; return its action."""
        self._require_lock()
        if not self._head.undone:
            raise StoreError(f"{self.path}: nothing to redo")
        first, *rest = self._head.undone
        if problem := first.damage():
            raise DamagedError(problem)
        self._advance(self._head.next([*self._head.phases, first], rest))
        return dict(first.action)

    def drop_damaged(self) -> str | None:
        """Drop the first damaged phase and those after it, which a run computes again; return what is wrong with it."""
        self._require_lock()
        for phase in self._head.phases:
            if problem := phase.damage():
                self._advance(self._head.next(self._head.phases[: phase.number]))
                self.events("damaged", phase=phase.number, reason=problem)
                return problem
        return None

    def _advance(self, head: Head) -> None:
        """Replace the head, which is the commit; then drop what nobody needs any more."""
        write_head(self.path, head)
        self._head = head
        self._collect()

    def _settle(self) -> None:
        """Convert an old directory, and repeat what a killed writer may have left to be done."""
        phases = [*self._head.phases, *self._head.undone]
        if any(phase.folder for phase in phases):
            phases = old_format.convert(self.path, phases)
            self._head = self._head.next(phases[: self.completed()], phases[self.completed() :])
        if not all(_holds(self.path / name, self._head.content()) for name in (HEAD, COPY)):
            write_head(self.path, self._head)
        old_format.clean(self.path)
        self._collect()

    def _collect(self) -> None:
        """Remove leftovers, checkpoints of other generations, and objects that the head does not name."""
        drop_checkpoints(self.path, but=self._head.generation)
        folder, needed = self.path / OBJECTS, self._head.objects()
        files.insist_on_directory(folder)
        for each in (self.path, folder):
            files.remove_temporaries(each)
        names = (name for name in files.names_in(folder) if re.fullmatch("[0-9a-f]{64}", name))
        files.remove_all(folder, [name for name in names if name not in needed])

    def _stored(self, contents: Mapping[str, Any]) -> dict[str, File]:
        """Write files as objects; return their digests and sizes by name."""
        folder, found = files.make_below(self.path, OBJECTS), {}
        for name, content in contents.items():
            if isinstance(content, tuple):
                found[name] = content
                continue
            data = _encoded(name, content)
            digest = hashlib.sha256(data).hexdigest()
            if not _holds(folder / digest, data):
                files.atomic_write(folder / digest, data)
            found[name] = (digest, len(data))
        return found

    def _require_lock(self) -> None:
        if not self._writable:
            raise StoreError(f"{self.path} can only be written by the holder of its lock")

    # ------------------------------------------------------------------------------------------- progress and events

    def save_progress(self, tensors: "Mapping[str, Tensor]", state: Mapping[str, Any]) -> None:
        """Replace the checkpoint of the phase in work; `state` is ready for JSON."""
        self._require_lock()
        save_checkpoint(self.path, self._head.generation, tensors, state)

    @property
    def unfinished(self) -> bool:
        """Whether there is a checkpoint of the phase in work, which may turn out to be damaged."""
        return has_checkpoint(self.path, self._head.generation)

    def load_progress(self) -> "tuple[dict[str, Tensor], dict[str, Any]] | None":
        """Read the last checkpoint of the phase in work, verified; None where there is none that is sound.

        A damaged one can always be computed again: whoever holds the lock removes it.
        """
        head = self._head if self._writable else read_head(self.path)
        try:
            return load_checkpoint(self.path, head.generation)
        except StoreError as error:
            if self._writable:
                drop_checkpoints(self.path)
                self.events("progress dropped", reason=str(error))
                _log.warning("%s; removed, work resumes from the last complete phase", error)
            return None

    def clear_progress(self) -> None:
        """Remove the checkpoint of the phase in work, so that the phase starts again."""
        self._require_lock()
        drop_checkpoints(self.path)

    def events(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl: the time, the kind, the fields."""
        self._require_lock()
        append_event(self.path / "events.jsonl", kind, fields)

    def read_events(self) -> list[dict[str, Any]]:
        """Read all events, oldest first, without torn and damaged lines."""
        return read_events(self.path / "events.jsonl")

    def times(self, *kinds: str) -> dict[int, str]:
        """Return when events of these kinds were written last: phase -> time."""
        found = (event for event in self.read_events() if event["kind"] in kinds)
        return {
            event["phase"]: event["time"] for event in found if isinstance(event.get("phase"), int)
        }


def reading(path: Path, read: Callable[[Directory], T]) -> T:
    """Return what `read` gives of a directory, read again where a writer removed what it was reading."""
    for _ in range(TRIES - 1):
        with suppress(ChangedError):
            return read(Directory(path))
    return read(Directory(path))


def remove_directory(path: Path, *, unless_learned: bool = False) -> None:
    """Remove a directory and all it holds; refuse one that is being written or is not geodl's.

    unless_learned: leave one that has a complete phase as it is.
    """
    path = path.resolve()
    read_head(path)
    with locked(path), files.writing(path):
        if unless_learned and read_head(path).phases:
            return
        # It disappears in one instant: a kill leaves no half of it.
        files.move(path, files.temporary_for(path))
    with files.writing(path.parent):
        # Also one whose removal was killed earlier.
        for doomed in path.parent.glob(f"{files.TEMPORARY}*/"):
            files.remove(doomed)


def refuse_foreign(path: Path) -> None:
    """Refuse a directory with things in it that is not geodl's: nothing of a user's is ever mixed or overwritten."""
    ours = (LOCK, WRITER)
    if any(not name.startswith((files.TEMPORARY, *ours)) for name in files.names_in(path)):
        read_head(path)


def differences(then: Any, now: Any, key: str = "") -> list[str]:
    """Name each (nested, dotted) key whose values differ, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        found, above = [], f"{key}." if key else ""
        for name in sorted(then.keys() | now.keys()):
            found += differences(then.get(name), now.get(name), above + name)
        return found
    return [] if then == now else [f"{key} is {json.dumps(then)} there and {json.dumps(now)} now"]


def _encoded(name: str, content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    if not name.endswith(".safetensors"):
        return json_file(content)
    from geodl.core.tensors import tensor_file

    return tensor_file(content)


def _holds(path: Path, data: bytes) -> bool:
    """Return whether a sound object is there already: a damaged one is written again."""
    try:
        return not path.is_symlink() and files.read_file(path, size=len(data)) == data
    except StoreError:
        return False
