"""Short runs, and what must be the same bytes however they were done."""

import re
import subprocess
import time
from pathlib import Path

from geodl.bench.sweep.jobs import Job, expand
from geodl.config import Layer, preset_layer
from geodl.store import Directory

DIGITS = "--preset digits --network convnet --base 6 --phases 2 --base-epochs 1 --epochs 1".split()
QUICK = {"network": "convnet", "base": 6, "phases": 2, "base_epochs": 1, "epochs": 1}
RESULTS = ("model.safetensors", "memory.safetensors", "metrics.json")


def quick(root: Path, *points, **options) -> list[Job]:
    """Return jobs of a second or two each."""
    return expand([preset_layer("digits"), Layer("test", QUICK | options)], list(points), root)


def seeds(root: Path, count: int) -> list[Job]:
    """Return jobs that differ in their seeds: 0, 1, ..."""
    return quick(root, *({"seed": seed} for seed in range(count)))


def result_files(run: Path) -> dict[str, bytes]:
    """Return what must be the same bytes however a run was done."""
    store = Directory(run)
    phases = [store.phase(t) for t in range(store.completed())]
    return {f"{phase.number}/{name}": phase.read(name) for phase in phases for name in RESULTS}


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def wait_until_told(directory: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    """Wait until a process that still runs has noted something down in a directory."""
    events = directory / "events.jsonl"

    def told() -> bool:
        assert process.poll() is None, process.communicate()
        return events.exists() and re.search(pattern, events.read_text()) is not None

    wait_until(told)
