"""Small run directories for tests: made, written to, compared, broken at any step of a write, signed anew."""

import hashlib
import itertools
import json
import os
import socket
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import torch

from geodl.core.content import canonical_json, json_file, signed
from geodl.core.tensors import tensor_file
from geodl.store import Directory

CONFIG = {"method": "lucir", "schedule": {"epochs": 3, "milestones": (1, 2)}, "seed": 0}
ENVIRONMENT = {"threads": 1, "torch": "2.13.0"}
FILES = ("model.safetensors", "memory.safetensors", "metrics.json", "extra.json")


class Killed(BaseException):
    """Not an Exception: like a real kill, it lets nobody clean up."""


def make(path: Path, **changes: Any) -> Directory:
    """Make a run of three phases, or open it."""
    arguments = {
        "config": CONFIG,
        "environment": ENVIRONMENT,
        "must_match": ["threads"],
        "phases": 3,
    } | changes
    return Directory.create_or_open(path, **arguments)


def make_model(path: Path) -> Directory:
    """Make a model that has learned nothing, or open it."""
    return Directory.create_or_open(path, {}, kind="model")


def metrics_of(t: int) -> dict[str, Any]:
    """Give a metrics.json that says t % on t + 1 classes."""
    return {
        "phase": t,
        "classes": [f"class {i}" for i in range(t + 1)],
        "accuracy": {"nme": float(t)},
        "confusions": {},
    }


def contents_of(t: int) -> dict[str, Any]:
    """Give the files of a phase that tells its number."""
    model = {"weight": torch.full((t + 1, 4), float(t)), "steps": torch.tensor(10 * t)}
    memory = {"pixels": torch.full((2, 3), t % 256, dtype=torch.uint8)}
    return dict(zip(FILES, (model, memory, metrics_of(t), {"t": t}), strict=True))


def commit(run: Directory, t: int | None = None, **options: Any) -> None:
    """Save a phase that tells its number."""
    t = run.completed() if t is None else t
    run.commit(contents_of(t), {"action": "learn", "step": t}, **options)


def save_progress(run: Directory, step: int) -> None:
    """Save a checkpoint that tells its step."""
    run.save_progress({"weight": torch.full((4,), float(step))}, {"step": step})


class Saved(NamedTuple):
    """The files of a phase."""

    model: dict[str, torch.Tensor]
    memory: dict[str, torch.Tensor]
    metrics: dict[str, Any]
    extra: dict[str, Any]


def saved(run: Directory, t: int) -> Saved:
    """Read a phase."""
    phase = run.phase(t)
    return Saved(*map(phase.tensors, FILES[:2]), *map(phase.json, FILES[2:]))


def state(run: Directory) -> dict[str, Any]:
    """Return everything that reading gives, in a form that can be compared."""
    phases = [run.phase(t) for t in range(run.completed())]
    found = []
    for phase in phases:
        tensors = {name: phase.tensors(name) for name in phase.files if "safetensors" in name}
        plain = {
            name: {key: tensor.tolist() for key, tensor in each.items()}
            for name, each in tensors.items()
        }
        plain |= {name: phase.json(name) for name in phase.files if name.endswith(".json")}
        found.append([phase.action, phase.forgotten, plain])
    progress = run.load_progress()
    return {
        "config": run.config,
        "environment": run.environment,
        "phases": found,
        "undone": run.undone(),
        "progress": progress and [progress[0]["weight"].tolist(), progress[1]],
    }


def contents(path: Path, *, progress: bool = True) -> dict[str, bytes]:
    """Return the bytes of every file but the log, the lock and, if asked, unfinished work."""
    names = ("events.jsonl", "lock", "writer.json")
    found = (p for p in sorted(path.rglob("*")) if p.is_file() and p.name not in names)
    kept = (p for p in found if progress or p.parent.name != "progress")
    return {str(p.relative_to(path)): p.read_bytes() for p in kept}


def break_at(n: int, failure: BaseException, tear: bool = False) -> Callable[[str, Path], None]:
    """Return a crash point that fails at the n-th step; with `tear`, half of a file not yet on the disk is lost."""
    steps = itertools.count()

    def crash(step: str, path: Path) -> None:
        if next(steps) == n:
            if tear and step in ("created", "written"):
                os.truncate(path, path.stat().st_size // 2)
            raise failure

    return crash


def put_odd(path: Path, kind: str) -> None:
    """Put what is no regular file in the place of one; any other kind is where a link leads."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        # By its name alone: the path of a socket may have about a hundred characters.
        with socket.socket(socket.AF_UNIX) as end, chdir(path.parent):
            end.bind(path.name)
    else:
        path.symlink_to(kind)


def object_of(path: Path, t: int, name: str) -> Path:
    """Return where the file of a phase is."""
    return path / "objects" / content(path / "head.json")["phases"][t]["files"][name][0]


def rewrite(path: Path, t: int, name: str, value: Any) -> None:
    """Put another file (bytes, or a value for JSON) into a phase of a directory, with sound checksums."""
    data = value if isinstance(value, bytes) else canonical_json(value)
    digest = hashlib.sha256(data).hexdigest()
    (path / "objects" / digest).write_bytes(data)
    head = content(path / "head.json")
    head["phases"][t]["files"][name] = [digest, len(data)]
    sign(path / "head.json", head)


def cut(path: Path, phases: int) -> None:
    """Make a directory end after so many phases."""
    head = content(path / "head.json")
    sign(path / "head.json", head | {"phases": head["phases"][:phases]})


def sign(path: Path, value: Any) -> None:
    """Write a JSON file with a sound checksum."""
    path.write_bytes(json_file(signed(value)))


def content(path: Path) -> Any:
    """Read the JSON of a file without its checksum."""
    value = json.loads(path.read_bytes())
    value.pop("sha256", None)
    return value


def write_old(path: Path, phases: int, *, model: bool = False, undone: int = 0) -> None:
    """Write a directory as version 0.2 did, with phases that tell their number."""
    path.mkdir(parents=True)
    config = {"kind": "model"} if model else json.loads(canonical_json(CONFIG))
    record = {"config": config, "environment": ENVIRONMENT, "format": 2}
    sign(path / "config.json", record | {"phases": None if model else 3})
    for t in range(phases + undone):
        folder = path / ("phases" if t < phases else "undone") / f"{t:02d}"
        folder.mkdir(parents=True)
        described = {}
        for name, value in contents_of(t).items():
            if name == "extra.json":
                value = value | {"history": [{"action": "learn", "step": t}], "tensors": ["form"]}
            data = tensor_file(value) if name.endswith("safetensors") else json_file(value)
            (folder / name).write_bytes(data)
            described[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        sign(folder / "manifest.json", {"phase": t, "files": described})
    (path / "progress").mkdir()
    (path / "progress" / "checkpoint.safetensors").write_bytes(b"old")
    (path / "lock").write_text("")
