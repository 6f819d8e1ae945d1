"""Small run directories for tests: made, written to, compared, broken at any step of a write, signed anew."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from geodl.files import canonical_json, json_file, signed
from geodl.store import RunDirectory
from geodl.store.phases import FILES, MANIFEST, describe, manifest_file

CONFIG = {"method": "lucir", "schedule": {"epochs": 3, "milestones": (1, 2)}, "seed": 0}
ENVIRONMENT = {"threads": 1, "torch": "2.13.0"}


class Killed(BaseException):
    """Not an Exception: like a real kill, it lets nobody clean up."""


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: what is tested is not a power failure."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make(path: Path, **changes: Any) -> RunDirectory:
    """Make a run of three phases, or open it."""
    arguments = {"config": CONFIG, "environment": ENVIRONMENT, "must_match": ["threads"], "phases": 3} | changes
    return RunDirectory.create_or_open(path, **arguments)


def metrics_of(t: int) -> dict[str, Any]:
    """Give a metrics.json that says t % on t + 1 classes."""
    return {
        "phase": t,
        "classes": [f"class {i}" for i in range(t + 1)],
        "accuracy": {"nme": float(t)},
        "confusions": {},
    }


def save_phase(run: RunDirectory, t: int) -> None:
    """Save a phase that tells its number."""
    model = {"weight": torch.full((t + 1, 4), float(t)), "steps": torch.tensor(10 * t)}
    run.save_phase(t, model, {"pixels": torch.full((2, 3), t, dtype=torch.uint8)}, metrics_of(t), {"t": t})


def save_progress(run: RunDirectory, step: int) -> None:
    """Save a checkpoint that tells its step."""
    run.save_progress({"weight": torch.full((4,), float(step))}, {"step": step})


def state(run: RunDirectory) -> dict[str, Any]:
    """Return everything that reading gives, in a form that can be compared."""
    phases = [run.load_phase(t) for t in range(run.completed())]
    progress = run.load_progress()
    return {
        "config": run.config,
        "environment": run.environment,
        "phases": [
            [{k: v.tolist() for k, v in p.model.items()}, p.memory["pixels"].tolist(), p.metrics, p.extra]
            for p in phases
        ],
        "progress": progress and [progress[0]["weight"].tolist(), progress[1]],
    }


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file but the log and the lock."""
    found = (p for p in sorted(path.rglob("*")) if p.is_file() and p.name not in ("events.jsonl", "lock"))
    return {str(p.relative_to(path)): p.read_bytes() for p in found}


def break_at(n: int, failure: BaseException, tear: bool = False) -> Callable[[str, Path], None]:
    """Return a crash point that fails at the n-th step; with `tear`, half of a file not yet on the disk is lost."""
    steps = itertools.count()

    def crash(step: str, path: Path) -> None:
        if next(steps) == n:
            if tear and step in ("created", "written"):
                os.truncate(path, path.stat().st_size // 2)
            raise failure

    return crash


def sign_phase(folder: Path) -> None:
    """Write the manifest of a phase anew: for tests that change its files on purpose."""
    found = {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
    (folder / MANIFEST).write_bytes(manifest_file(int(folder.name), describe(found)))


def rewrite(path: Path, value: Any) -> None:
    """Put other JSON into a file of a directory, with sound checksums."""
    if path.name in ("config.json", MANIFEST):
        path.write_bytes(json_file(signed(value)))
    else:
        path.write_bytes(canonical_json(value))
        sign_phase(path.parent)


def content(path: Path) -> Any:
    """Read the JSON of a file without its checksum."""
    value = json.loads(path.read_bytes())
    value.pop("sha256", None)
    return value
