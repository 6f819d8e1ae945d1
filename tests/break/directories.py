"""Families about run and model directories: a read gives the same answer or one line, a write the old or the new state."""

import random
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tests.helpers.directories import FILES, commit, content, make, make_model, save_progress

from geodl.bench.runs import summarize
from geodl.store import Directory, remove_directory

from . import damage
from .damage import HEADS, objects, restore, snapshot
from .harness import Refused, attempt, family

KINDS = ("run", "model")
Damage = Callable[[random.Random, Path], Any]


# The directories.

save = partial(commit, states=4, lasting=["metrics.json"])


@cache
def sample(kind: str) -> Mapping[str, bytes | None]:
    """Return the files of a run that was interrupted in its third phase, or of a model of four steps, one begun and one undone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "it"
        run = make(path) if kind == "run" else make_model(path)
        with run.lock():
            for t in range(2 if kind == "run" else 5):
                save(run)
                run.events("learned", phase=t, seconds=1.5, classes=["a", "µ"])
            if kind == "model":
                run.undo()
            save_progress(run, 7)
        return snapshot(path)


def put(kind: str, path: Path) -> None:
    """Write such a directory."""
    restore(sample(kind), path)


def draw_file(draw: random.Random, kind: str) -> str:
    """Choose a file that is not empty: the lock is."""
    return draw.choice([name for name, data in sorted(sample(kind).items()) if data])


# What is read.


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Make tensors comparable."""
    return {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in tensors.items()}


def answers(path: Path) -> dict[str, Any]:
    """Return the results of all reads of a directory, each part by itself."""
    run = attempt(lambda: Directory(path))
    if isinstance(run, Refused):
        return {"record": run}

    def phase(t: int) -> Any:
        found = run.phase(t)
        tensors = [plain(found.tensors(name)) for name in FILES[:2]]
        return [*tensors, *map(found.json, FILES[2:])]

    def metrics(t: int) -> Any:
        return run.phase(t).json("metrics.json")

    def action(t: int) -> Any:
        return [run.phase(t).action, run.phase(t).forgotten, run.phase(t).id]

    def progress() -> Any:
        found = run.load_progress()
        return found and [plain(found[0]), found[1]]

    def summary() -> Any:
        found = summarize(path)
        return (
            [found.done, found.total, found.result] if found.error is None else Refused(found.error)
        )

    reads: dict[str, Callable[[], Any]] = {
        "record": lambda: [run.config, run.environment, run.phases, run.kind],
        "completed": run.completed,
        "progress": progress,
        "events": run.read_events,
        "times": lambda: run.times("learned"),
        "version": lambda: run.version,
        "verify": run.verify,
        "undone": run.undone,
        "summary": summary,
    }
    for t in range(4):
        reads[f"phase {t}"] = partial(phase, t)
        reads[f"metrics {t}"] = partial(metrics, t)
        reads[f"action {t}"] = partial(action, t)
    return {name: attempt(read) for name, read in reads.items()}


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    """Drop the answers that depend on paths or times."""
    kept = {name: value for name, value in found.items() if name not in ("events", "times")}
    return {
        name: "refused" if isinstance(value, Refused) else value for name, value in kept.items()
    }


@cache
def sound(kind: str) -> dict[str, Any]:
    """Return the answers of an undamaged directory."""
    with tempfile.TemporaryDirectory() as folder:
        put(kind, Path(folder))
        return answers(Path(folder))


def check_answers(kind: str, path: Path) -> dict[str, Any]:
    """Return the answers, of which each is the right one or refused. Optional parts may be missing, but not wrong."""
    given = answers(path)
    for name, found in given.items():
        right = sound(kind)[name]
        if isinstance(found, Refused) or found == right:
            continue
        if name == "events":
            assert all(event in right for event in found), f"another event: {found}"
        elif name == "times":
            assert found.items() <= right.items(), f"other times: {found}"
        else:
            assert name == "progress", f"{name}: {found} instead of {right}"
            assert found is None, f"{name}: {found} instead of {right}"
    return given


def resume(path: Path) -> None:
    """Write to a directory as the same command would after an interruption."""
    run = Directory(path)
    with run.lock():
        run.load_progress()
        run.save_progress({"weight": torch.zeros(2)}, {"step": 9})
        found = run.load_progress()
        assert found is not None, "a checkpoint is lost"
        assert found[1] == {"step": 9}
        run.events("continued")
        done = run.completed()
        run.commit({"metrics.json": {"headline": "new"}}, {})
        assert run.phase(-1).json("metrics.json") == {"headline": "new"}
        run.undo()
        assert run.completed() == done


def redo(path: Path) -> None:
    """Redo the phase that was undone."""
    run = Directory(path)
    with run.lock():
        run.redo()


# Damage.


@family("bit flips")
def bit_flips(draw: random.Random, folder: Path) -> None:
    """One changed bit in any file."""
    _damaged(draw, folder, damage.flip)


@family("torn files")
def torn_files(draw: random.Random, folder: Path) -> None:
    """A block of any file lost, blanked or exchanged."""
    _damaged(draw, folder, damage.tear)


def _damaged(draw: random.Random, folder: Path, how: Damage) -> None:
    kind = draw.choice(KINDS)
    name = draw_file(draw, kind)
    put(kind, folder / "it")
    how(draw, folder / "it" / name)
    changed = (folder / "it" / name).read_bytes() != sample(kind)[name]
    undone = [] if kind == "run" else content(folder / "it" / HEADS[name in HEADS[:1]])["undone"]
    found = check_answers(kind, folder / "it")
    if changed and name.startswith("objects"):
        only_undone = any(Path(name).name in str(phase) for phase in undone) and (
            found["verify"] is None
        )
        checked = attempt(lambda: redo(folder / "it")) if only_undone else found["verify"]
        assert isinstance(checked, Refused), f"{name} passes for sound"
    written = attempt(lambda: resume(folder / "it"))
    assert written is None, f"{name} blocks: {written}"


@family("odd JSON")
def odd_json(draw: random.Random, folder: Path) -> None:
    """Other types, names and depths than expected, with and without sound checksums."""
    _odd(draw, folder / "it", damage.odd_json, ".json", *HEADS)


@family("odd events")
def odd_events(draw: random.Random, folder: Path) -> None:
    """Lines in events.jsonl that geodl did not write; its own must still be found."""
    kind = draw.choice(KINDS)
    put(kind, folder / "it")
    damage.odd_events(draw, folder / "it" / "events.jsonl")
    found = answers(folder / "it")
    assert all(event in found["events"] for event in sound(kind)["events"])
    assert comparable(found) == comparable(sound(kind))
    assert attempt(lambda: resume(folder / "it")) is None


@family("odd tensors")
def odd_tensors(draw: random.Random, folder: Path) -> None:
    """Headers that lie, other names and shapes, with and without sound checksums."""
    written = _odd(draw, folder / "it", damage.odd_tensors, ".safetensors")
    assert written is None, f"it blocks: {written}"


def _odd(draw: random.Random, path: Path, how: Damage, suffix: str, *heads: str) -> Any:
    """Damage one of some files; return how writing to the directory ends."""
    kind = draw.choice(KINDS)
    put(kind, path)
    name = draw.choice([*heads, *objects(path, suffix)])
    if how(draw, path / name):
        answers(path)
    else:
        check_answers(kind, path)
    return attempt(lambda: resume(path))


@family("odd files")
def odd_files(draw: random.Random, folder: Path) -> None:
    """A pipe, a device, a link, a folder in the place of a file or vice versa: nothing outside changes."""
    kind = draw.choice(KINDS)
    name = draw.choice(sorted(sample(kind)))
    put(kind, folder / "it")
    outside = folder / "outside"
    outside.mkdir()
    damage.replace(draw, folder / "it" / name, outside)
    before = snapshot(outside)
    check_answers(kind, folder / "it")
    written = attempt(lambda: resume(folder / "it"))
    if name.startswith("progress"):
        assert written is None, f"{name} blocks: {written}"
    if kind == "run" and draw.random() < 0.5:
        attempt(lambda: make(folder / "it", fresh=True))
    attempt(lambda: remove_directory(folder / "it"))
    assert snapshot(outside) == before, "a write outside"
    assert {path.name for path in folder.iterdir()} <= {"it", "outside"}
