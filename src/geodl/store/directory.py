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
"""Attempts to read while a writer removes the files that are read."""
T = TypeVar("T")
_log = logging.getLogger("geodl")


class Directory:
    """An existing directory of a run or a model, in the state in which it was opened; writing needs `lock()`.

    Attributes: `path`; `kind`, run or model; `config` and `environment` as passed to `create_or_open`; `phases`, the
    number of phases of the complete run (None: any number, as for a model).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = read_head(path)
        self.kind, record = self._head.kind, self._head.record
        self.config: dict[str, Any] = dict(record["config"])
        self.environment: dict[str, Any] = dict(record["environment"])
        self.phases: int | None = record["phases"]
        self._writable = False

    # ------------------------------------------------------------------------------------------- creating and opening

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
        """Create the directory, or open the one that was created with this configuration.

        Another configuration is an error. So is another value of an environment key in `must_match` (one that changes
        the last digits of results, such as the number of threads); with `allow_environment_change` the new value is
        recorded instead. `fresh` starts over: it removes the files that geodl wrote, and nothing else.
        """
        parts = {"config": config, "environment": environment or {}, "phases": phases}
        record = json.loads(canonical_json(parts))  # as it reads back: tuples become lists
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
        then = {key: self.environment.get(key) for key in must_match}
        now = {key: record["environment"].get(key) for key in must_match}
        changed = differences(then, now)
        if not allowed:
            self._refuse("environment", changed, "--allow-environment-change to continue, --fresh")
        elif changed:
            fields = {"differences": changed}
            append_event(self.path / "events.jsonl", "environment changed", fields)
            record = {**self._head.record, "environment": record["environment"]}
            self._head = replace(self._head, record=record)
            self._settle()

    def _refuse(self, what: str, changed: Sequence[str], remedy: str) -> None:
        if changed:
            raise StoreError(
                f"{self.path} was made with another {what}: {'; '.join(changed)}. "
                f"Use another directory, or {remedy} to start over"
            )

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def version(self) -> tuple[int, str] | None:
        """A value that is different in every state of the directory; None without a complete phase."""
        last = self._head.phases[-1:]
        return (self._head.generation, last[0].id) if last else None

    def completed(self) -> int:
        """Return the number of complete phases."""
        return len(self._head.phases)

    def phase(self, number: int) -> SavedPhase:
        """Return a complete phase; -1 is the last one."""
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
        """Verify every file of every complete phase."""
        for phase in self._head.phases:
            if problem := phase.damage():
                raise DamagedError(problem)

    # -------------------------------------------------------------------------------------------------------- writing

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; a second one gets a StoreError that names the first. Cleans up after killed writers."""
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
        """Add a phase atomically; its checkpoint and the undone phases are dropped.

        Args:
            contents: the files by name: bytes; tensors by name (.safetensors); an object (.json); or a value of
                `SavedPhase.files`, to share a file with another phase.
            action: the action that made the phase, ready for JSON; `undo` and `redo` return it.
            newest_only: names of files that are removed from all earlier phases.
            states: number of phases that are kept complete, None for all; earlier ones are forgotten: they lose their
                action and most files.
            lasting: names of files that forgotten phases keep.
        """
        self._require_lock()
        done = self._head.phases
        facts = json.loads(canonical_json(action))  # as it reads back
        newest = SavedPhase.after(self.path, done, facts, self._stored(contents))
        older = []
        for phase in done:
            forgotten = phase.forgotten or (
                states is not None and phase.number <= len(done) - states
            )
            kept = {
                name: file
                for name, file in phase.files.items()
                if name not in newest_only and (name in lasting or not forgotten)
            }
            step = {} if forgotten else phase.action  # an action may name an image
            older.append(replace(phase, action=step, files=kept, forgotten=forgotten))
        self._advance(self._head.next([*older, newest]))

    def undo(self) -> dict[str, Any]:
        """Undo the last phase and return its action; `redo` restores it until another phase is committed.

        A damaged phase is dropped; its action is then ``{"action": "damaged"}``.
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
        """Restore the phase that was undone last, after verifying it; return its action."""
        self._require_lock()
        if not self._head.undone:
            raise StoreError(f"{self.path}: nothing to redo")
        first, *rest = self._head.undone
        if problem := first.damage():
            raise DamagedError(problem)
        self._advance(self._head.next([*self._head.phases, first], rest))
        return dict(first.action)

    def drop_damaged(self) -> str | None:
        """Drop the first damaged phase and those after it, which a run computes again; return what is damaged."""
        self._require_lock()
        for phase in self._head.phases:
            if problem := phase.damage():
                self._advance(self._head.next(self._head.phases[: phase.number]))
                self.events("damaged", phase=phase.number, reason=problem)
                return problem
        return None

    def _advance(self, head: Head) -> None:
        """Replace the head, which is the commit; then remove files that are no longer needed."""
        write_head(self.path, head)
        self._head = head
        self._collect()

    def _settle(self) -> None:
        """Convert an old directory, and finish the cleaning up of a killed writer."""
        phases = [*self._head.phases, *self._head.undone]
        if any(phase.folder for phase in phases):
            phases = old_format.convert(self.path, phases)
            self._head = self._head.next(phases[: self.completed()], phases[self.completed() :])
        if not all(_holds(self.path / name, self._head.content()) for name in (HEAD, COPY)):
            write_head(self.path, self._head)
        old_format.clean(self.path)
        self._collect()

    def _collect(self) -> None:
        """Remove temporary files, checkpoints of other generations, and objects that the head does not name."""
        drop_checkpoints(self.path, but=self._head.generation)
        folder, needed = self.path / OBJECTS, self._head.objects()
        files.insist_on_directory(folder)
        files.remove_temporaries(self.path)
        files.remove_temporaries(folder)
        names = filter(re.compile("[0-9a-f]{64}").fullmatch, files.names_in(folder))
        files.remove_all(folder, [name for name in names if name not in needed])

    def _stored(self, contents: Mapping[str, Any]) -> dict[str, File]:
        """Write files as objects; return their digests and sizes by name."""
        folder, stored = files.make_below(self.path, OBJECTS), {}
        for name, content in contents.items():
            if isinstance(content, tuple):
                stored[name] = content
                continue
            data = _encoded(name, content)
            digest = hashlib.sha256(data).hexdigest()
            if not _holds(folder / digest, data):
                files.atomic_write(folder / digest, data)
            stored[name] = (digest, len(data))
        return stored

    def _require_lock(self) -> None:
        if not self._writable:
            raise StoreError(f"{self.path} can only be written by the holder of its lock")

    # ------------------------------------------------------------------------------------------- progress and events

    def save_progress(self, tensors: "Mapping[str, Tensor]", state: Mapping[str, Any]) -> None:
        """Replace the checkpoint of the unfinished phase; `state` is ready for JSON."""
        self._require_lock()
        save_checkpoint(self.path, self._head.generation, tensors, state)

    @property
    def unfinished(self) -> bool:
        """Whether there is a checkpoint of the unfinished phase; it may turn out to be damaged."""
        return has_checkpoint(self.path, self._head.generation)

    def load_progress(self) -> "tuple[dict[str, Tensor], dict[str, Any]] | None":
        """Return the verified checkpoint of the unfinished phase, or None; the holder of the lock removes a damaged one."""
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
        """Remove the checkpoint of the unfinished phase, so that the phase starts again."""
        self._require_lock()
        drop_checkpoints(self.path)

    def events(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl: time, kind, fields."""
        self._require_lock()
        append_event(self.path / "events.jsonl", kind, fields)

    def read_events(self) -> list[dict[str, Any]]:
        """Return all events, oldest first, without torn and damaged lines."""
        return read_events(self.path / "events.jsonl")

    def times(self, *kinds: str) -> dict[int, str]:
        """Return the time of the last event of these kinds for each phase."""
        return {
            event["phase"]: event["time"]
            for event in self.read_events()
            if event["kind"] in kinds and isinstance(event.get("phase"), int)
        }


def reading(path: Path, read: Callable[[Directory], T]) -> T:
    """Return `read(directory)`; if a writer removes files meanwhile, the directory is opened and read again."""
    for _ in range(TRIES - 1):
        with suppress(ChangedError):
            return read(Directory(path))
    return read(Directory(path))


def remove_directory(path: Path, *, unless_learned: bool = False) -> None:
    """Remove a directory and its content; one that is being written, or is not geodl's, is refused.

    unless_learned: keep a directory that has a complete phase.
    """
    path = path.resolve()
    read_head(path)
    with locked(path), files.writing(path):
        if unless_learned and read_head(path).phases:
            return
        # A rename is atomic: a kill leaves no half of it.
        files.move(path, files.temporary_for(path))
    with files.writing(path.parent):
        # Also the remains of an earlier removal that was killed.
        for doomed in path.parent.glob(f"{files.TEMPORARY}*/"):
            files.remove(doomed)


def refuse_foreign(path: Path) -> None:
    """Raise a StoreError for a directory that is neither empty nor geodl's."""
    own = (files.TEMPORARY, LOCK, WRITER)
    if any(not name.startswith(own) for name in files.names_in(path)):
        read_head(path)


def differences(then: Any, now: Any, key: str = "") -> list[str]:
    """Return each (nested, dotted) key whose values differ, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        changed, prefix = [], f"{key}." if key else ""
        for name in sorted(then.keys() | now.keys()):
            changed += differences(then.get(name), now.get(name), prefix + name)
        return changed
    return [] if then == now else [f"{key} is {json.dumps(then)} there and {json.dumps(now)} now"]


def _encoded(name: str, content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    if not name.endswith(".safetensors"):
        return json_file(content)
    from geodl.core.tensors import tensor_file

    return tensor_file(content)


def _holds(path: Path, data: bytes) -> bool:
    """Return whether a file has this content already; a damaged object is written again."""
    try:
        return not path.is_symlink() and files.read_file(path, size=len(data)) == data
    except StoreError:
        return False
