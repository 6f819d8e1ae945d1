"""`head.json`, which points to everything in a directory, and the phases that it names."""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from geodl.core import files
from geodl.core.content import (
    DAMAGED,
    canonical_json,
    fingerprint,
    interpreting,
    parse_object,
    read_json,
    signed,
    verified,
)
from geodl.core.errors import StoreError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3
HEAD, COPY, OBJECTS = "head.json", "head-copy.json", "objects"
OLD = "config.json"  # of version 0.2
File = tuple[str, int]
"""Hexadecimal SHA-256, which is the name of the object, and number of bytes."""
_log = logging.getLogger("geodl")


class ChangedError(StoreError):
    """A writer removed a file that was being read: the head now names other files."""


class DamagedError(StoreError):
    """A file of a phase does not have the content it was written with."""


@dataclass(frozen=True)
class SavedPhase:
    """A complete phase: named files, each verified when it is read.

    root:      the directory; number: counted from 0.
    id:        a hash of the phase and the phases before it: equal runs have equal IDs.
    action:    the action that made the phase, ready for JSON; empty if the phase is forgotten.
    files:     by name; a value can be committed again as a file of another phase, without reading it.
    forgotten: whether most of its files were removed, so that no undo leads to it.
    folder:    its folder in the layout of version 0.2; None: its files are objects.
    """

    root: Path
    number: int
    id: str
    action: Mapping[str, Any]
    files: Mapping[str, File]
    forgotten: bool = False
    folder: Path | None = None

    @classmethod
    def after(
        cls, root: Path, before: "tuple[SavedPhase, ...]", action: Any, contents: Mapping[str, File]
    ) -> Self:
        """Return a new phase that follows the phases `before`."""
        key = fingerprint([before[-1].id if before else "", action, contents])
        return cls(root, len(before), key[:16], action, contents)

    @classmethod
    def parsed(cls, root: Path, number: int, value: Any) -> Self:
        """Undo `to_json`; errors are for `content.interpreting`."""
        contents = {
            str(name): (str(digest), int(size)) for name, (digest, size) in value["files"].items()
        }
        if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest, _ in contents.values()):
            raise ValueError("not a SHA-256")
        action, forgotten = dict(value["action"]), bool(value.get("forgotten"))
        return cls(root, number, str(value["id"]), action, contents, forgotten)

    def to_json(self) -> dict[str, Any]:
        """Return the phase ready for JSON."""
        facts = {"id": self.id, "action": self.action, "files": self.files}
        return facts | ({"forgotten": True} if self.forgotten else {})

    @property
    def path(self) -> Path:
        """The name of the phase in messages."""
        return self.root / f"phase {self.number}"

    def read(self, name: str) -> bytes:
        """Read and verify a file; the error about a damaged one has a remedy."""
        if name not in self.files:
            raise StoreError(f"{self.path / name} is not kept")
        digest, size = self.files[name]
        path = (self.root / OBJECTS / digest) if self.folder is None else self.folder / name
        try:
            files.insist_on_directory(path.parent)
            data = files.read_file(path, size=size)
            if hashlib.sha256(data).hexdigest() != digest:
                raise StoreError(f"{path} {DAMAGED}")
        except StoreError as error:
            raise self._explained(name, error) from error
        return data

    def json(self, name: str) -> dict[str, Any]:
        """Read a JSON object."""
        return parse_object(self.read(name), self.path / name)

    def tensors(self, name: str) -> "dict[str, Tensor]":
        """Read a file of tensors to the CPU."""
        from geodl.core.tensors import parse_tensors

        return parse_tensors(self.read(name), self.path / name)

    def damage(self) -> str | None:
        """Return which file is damaged, if any; one that cannot be read at the moment may be intact."""
        try:
            for name in self.files:
                self.read(name)
        except DamagedError as error:
            return str(error)
        except StoreError:
            pass
        return None

    def _explained(self, name: str, error: StoreError) -> StoreError:
        missing = isinstance(error, files.MissingFileError)
        if isinstance(error.__cause__, OSError | MemoryError) and not missing:
            return error  # it cannot be read at the moment, but may be intact
        head = read_head(self.root)
        current = {phase.id: phase.files for phase in (*head.phases, *head.undone)}
        if current.get(self.id) != self.files:
            reason = "was changed by another process meanwhile: run the same command again"
            return ChangedError(f"{self.root} {reason}")
        remedy = f"`geodl undo {self.root}` goes back to the last good state"
        if head.kind != "model":
            remedy = "the same command computes it and the phases after it, --fresh starts over"
        elif self.number < len(head.phases) - 1:
            remedy = "the model does not need it: it belongs to an earlier step"
        return DamagedError(f"{self.path / name} is damaged ({error}); {remedy}")


@dataclass(frozen=True)
class Head:
    """The state of a directory.

    kind:       run or model.
    record:     config, environment, and the number of phases of the complete run (None: any number).
    generation: the number of changes of `phases` and `undone`.
    undone:     phases that can be redone, the next one first.
    """

    kind: str
    record: Mapping[str, Any]
    generation: int = 0
    phases: tuple[SavedPhase, ...] = ()
    undone: tuple[SavedPhase, ...] = ()

    def next(self, phases: Iterable[SavedPhase], undone: Iterable[SavedPhase] = ()) -> "Head":
        """Return the head of the next generation."""
        generation = self.generation + 1
        return replace(self, generation=generation, phases=tuple(phases), undone=tuple(undone))

    def objects(self) -> set[str]:
        """Return the names of all objects that the directory needs."""
        phases = (*self.phases, *self.undone)
        return {digest for phase in phases for digest, _ in phase.files.values()}

    def content(self) -> bytes:
        """Return the content of head.json."""
        facts: dict[str, Any] = {"format": FORMAT, "kind": self.kind, "record": self.record}
        facts |= {"phases": [phase.to_json() for phase in self.phases]}
        facts |= {"undone": [phase.to_json() for phase in self.undone]}
        return canonical_json(signed(facts | {"generation": self.generation}))


def exists(path: Path) -> bool:
    """Return whether a path looks like a directory of geodl."""
    return any(os.path.lexists(path / name) for name in (HEAD, COPY, OLD))


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with every commit, without reading the head; None: the head has to be read."""
    try:
        status = (path / HEAD).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_head(path: Path) -> Head:
    """Return the verified head of a directory, its copy if it is lost, or the record that version 0.2 wrote."""
    from geodl.store import old_format

    try:
        return _parsed(path, HEAD)
    except StoreError as error:
        missing = isinstance(error, files.MissingFileError)
        if isinstance(error.__cause__, OSError) and not missing:
            raise
        try:
            copy = _parsed(path, COPY)
        except StoreError:
            if missing and os.path.lexists(path / OLD):
                return old_format.read(path)
            if missing and not os.path.lexists(path):
                raise StoreError(f"{path}: no such directory") from None
            if missing:
                raise StoreError(f"{path} is not a geodl directory: it has no {HEAD}") from None
            raise error from None
        _log.warning("%s; its copy is used", error)
        return copy


def write_head(path: Path, head: Head) -> None:
    """Replace head.json, which is the commit; the copy comes first: all its files are written already.

    In a new directory it comes last: whoever reads meanwhile has lost no head.
    """
    content = head.content()
    for name in (COPY, HEAD) if os.path.lexists(path / HEAD) else (HEAD, COPY):
        files.atomic_write(path / name, content)


def check_record(record: Mapping[str, Any], kind: Any) -> None:
    """Raise a ValueError, for `content.interpreting`, if the record or the kind of a directory is malformed."""
    types = {"config": dict, "environment": dict, "phases": int | None}
    if kind not in ("run", "model") or any(
        not isinstance(record[key], expected) for key, expected in types.items()
    ):
        raise ValueError("kind or record")


def _parsed(path: Path, name: str) -> Head:
    file = path / name
    facts = verified(read_json(file), file)
    if facts.get("format") != FORMAT:
        reads = f"this version of geodl reads formats 2 and {FORMAT}"
        raise StoreError(f"{path} has format {facts.get('format')!r}; {reads}")
    with interpreting(file):
        check_record(facts["record"], facts["kind"])
        both = [*facts["phases"], *facts["undone"]]
        phases = tuple(SavedPhase.parsed(path, number, value) for number, value in enumerate(both))
        done, generation = len(facts["phases"]), int(facts["generation"])
        return Head(facts["kind"], facts["record"], generation, phases[:done], phases[done:])
