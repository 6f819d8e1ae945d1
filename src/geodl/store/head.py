"""`head.json`: the one pointer to all that a directory holds; and the phases that it names."""

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
"""SHA-256 in hexadecimal, which names the object, and number of bytes."""
_log = logging.getLogger("geodl")


class ChangedError(StoreError):
    """A writer removed what was being read: the head names other files now."""


class DamagedError(StoreError):
    """A file of a phase is not as it was written."""


@dataclass(frozen=True)
class SavedPhase:
    """A complete phase: named files, each verified when it is read.

    root:      the directory; number: counted from 0.
    id:        a hash of all of it and of the phase before it: equal runs have equal IDs.
    action:    what led to it, ready for JSON; nothing where the phase was forgotten.
    files:     by name; a value can be committed again as a file of another phase, without reading it.
    forgotten: whether most of its files were removed, so that nobody can go back to it.
    folder:    where version 0.2 keeps its files; None: they are objects.
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
        """Return the phase that comes after others."""
        key = fingerprint([before[-1].id if before else "", action, contents])
        return cls(root, len(before), key[:16], action, contents)

    @classmethod
    def parsed(cls, root: Path, number: int, value: Any) -> Self:
        """Return the phase that `to_json` gave; anything else is an error that `content.interpreting` knows."""
        found = {
            str(name): (str(digest), int(size)) for name, (digest, size) in value["files"].items()
        }
        if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest, _ in found.values()):
            raise ValueError("a digest that is none")
        action, forgotten = dict(value["action"]), bool(value.get("forgotten"))
        return cls(root, number, str(value["id"]), action, found, forgotten)

    def to_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        found = {"id": self.id, "action": self.action, "files": self.files}
        return found | ({"forgotten": True} if self.forgotten else {})

    @property
    def path(self) -> Path:
        """What names it in messages."""
        return self.root / f"phase {self.number}"

    def read(self, name: str) -> bytes:
        """Read a file, verified; the error about a damaged one says what to do."""
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
        """Read a file of tensors, onto the CPU."""
        from geodl.core.tensors import parse_tensors

        return parse_tensors(self.read(name), self.path / name)

    def damage(self) -> str | None:
        """Return what is wrong with its files; what cannot be read here and now may well be sound."""
        try:
            for name in self.files:
                self.read(name)
        except DamagedError as error:
            return str(error)
        except StoreError:
            return None
        return None

    def _explained(self, name: str, error: StoreError) -> StoreError:
        missing = isinstance(error, files.MissingFileError)
        if isinstance(error.__cause__, OSError | MemoryError) and not missing:
            return error  # it cannot be read here and now, and may well be sound
        head = read_head(self.root)
        now = {phase.id: phase.files for phase in (*head.phases, *head.undone)}
        if now.get(self.id) != self.files:
            reason = "was changed by another process meanwhile: run the same command again"
            return ChangedError(f"{self.root} {reason}")
        remedy = f"`geodl undo {self.root}` goes back to the last good state"
        if head.kind != "model":
            remedy = "the same command computes it and the phases after it, --fresh starts over"
        elif self.number < len(head.phases) - 1:
            remedy = "the model does not need it: it is of an earlier step"
        return DamagedError(f"{self.path / name} is damaged ({error}); {remedy}")


@dataclass(frozen=True)
class Head:
    """The state of a directory.

    kind:       run or model.
    record:     what it was made with: config, environment, and how many phases the complete run has (None: any number).
    generation: counts the changes of `phases` and `undone`.
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
    """Return whether something is there that looks like a directory of geodl."""
    return any(os.path.lexists(path / name) for name in (HEAD, COPY, OLD))


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what is another one after every commit, without reading the head; None where it has to be read."""
    try:
        found = (path / HEAD).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_head(path: Path) -> Head:
    """Read the head of the directory at `path`, verified; its copy where it is lost; what version 0.2 wrote instead."""
    from geodl.store import old_format

    try:
        return _parsed(path, HEAD)
    except StoreError as error:
        missing = isinstance(error, files.MissingFileError)
        if isinstance(error.__cause__, OSError) and not missing:
            raise
        try:
            found = _parsed(path, COPY)
        except StoreError:
            if missing and os.path.lexists(path / OLD):
                return old_format.read(path)
            if missing and not os.path.lexists(path):
                raise StoreError(f"{path}: no such directory") from None
            if missing:
                raise StoreError(f"{path} is not a geodl directory: it has no {HEAD}") from None
            raise error from None
        _log.warning("%s; its copy is used", error)
        return found


def write_head(path: Path, head: Head) -> None:
    """Replace head.json, which is the commit; the copy comes first, since all that it names is there."""
    content = head.content()
    for name in (COPY, HEAD):
        files.atomic_write(path / name, content)


def _parsed(path: Path, name: str) -> Head:
    file = path / name
    facts = verified(read_json(file), file)
    if facts.get("format") != FORMAT:
        reads = f"this version of geodl reads formats 2 and {FORMAT}"
        raise StoreError(f"{path} has format {facts.get('format')!r}; {reads}")
    with interpreting(file):
        record, kinds = facts["record"], {"config": dict, "environment": dict, "phases": int | None}
        sound = all(isinstance(record[key], kind) for key, kind in kinds.items())
        if not sound or facts["kind"] not in ("run", "model"):
            raise ValueError("kind or record")
        both = [*facts["phases"], *facts["undone"]]
        phases = [SavedPhase.parsed(path, number, value) for number, value in enumerate(both)]
        done = len(facts["phases"])
        head = Head(facts["kind"], record, int(facts["generation"]) - 1)
        return head.next(phases[:done], phases[done:])
