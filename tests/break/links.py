"""Links in the place of what geodl writes: nothing behind one is written, read as geodl's own, or removed."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tests.helpers import tiny
from tests.helpers.directories import make

from geodl.app.classifier import drop_uploads
from geodl.bench.report.tables import Table
from geodl.bench.sweep.jobs import FOLDER, Job
from geodl.bench.sweep.runner import Launch, Process
from geodl.core.cache import Cache
from geodl.core.files import make_below
from geodl.store import remove_directory

from .damage import snapshot
from .directories import KINDS, put, resume, sample
from .harness import Refused, attempt, family

Place = Callable[[random.Random, Path, Path], None]
PLACES: dict[str, Place] = {}
"""What writes into each kind of directory: given randomness, a folder, and the folder that a link leads to."""


def place(write: Place) -> Place:
    """Register what writes."""
    PLACES[write.__name__] = write
    return write


@family("links")
def links(draw: random.Random, folder: Path) -> None:
    """A link in any place of any directory that geodl writes: what is behind it stays as it was."""
    outside = folder / "outside"
    outside.mkdir()
    for name in ("k" * 64, f"{'0' * 64}.safetensors", ".geodl-tmp-x", "a.toml", "checkpoint-1"):
        (outside / name).write_bytes(draw.randbytes(draw.randint(0, 99)))
    (outside / "00").mkdir()
    (outside / "00" / "manifest.json").write_bytes(b"{}")
    before = snapshot(outside)
    name = draw.choice(sorted(PLACES))
    PLACES[name](draw, folder, outside)
    # The folder of a cache may be below a link: that is named by the user.
    after = snapshot(outside)
    assert before.items() <= after.items(), f"{name}: a write behind a link"
    assert after == before or name == "cache", f"{name}: a new file behind a link"


def _link(draw: random.Random, path: Path, outside: Path) -> None:
    """Put a link to a folder or a file outside, to nothing or to itself in a place."""
    if path.is_dir():
        path.rename(outside.parent / "moved")
    path.unlink(missing_ok=True)
    targets = [outside, outside, outside / "k", outside / ("k" * 64), path]
    path.symlink_to(draw.choice(targets))


@place
def model_or_run(draw: random.Random, folder: Path, outside: Path) -> None:
    kind, path = draw.choice(KINDS), folder / "it"
    put(kind, path)
    names = ["objects", "progress", "phases", "undone", "damaged-progress", "tensorboard"]
    names += ["report.html", "lock", "writer.json", *sorted(sample(kind))]
    _link(draw, path / draw.choice(names), outside)
    attempt(lambda: resume(path))
    if kind == "run":
        attempt(lambda: make(path, fresh=True))
    attempt(lambda: remove_directory(path))


@place
def cache(draw: random.Random, folder: Path, outside: Path) -> None:
    root = folder / "cache"
    root.mkdir(mode=0o700)
    where = draw.choice(["entries", "entries", "link"])
    (root / where).symlink_to(outside)
    held = Cache(root if where == "entries" else root / where / "below")
    actions = [lambda: held.put("0" * 64, {"a": torch.zeros(3)}), lambda: held.load("0" * 64)]
    for action in draw.sample([*actions, held.clear], 3):
        attempt(action)


@place
def teaching(draw: random.Random, folder: Path, outside: Path) -> None:
    path = folder / "it" / "teaching"
    path.mkdir(parents=True)
    _link(draw, draw.choice([path, path / "a"]), outside)
    attempt(lambda: drop_uploads(path))


@place
def sweep(draw: random.Random, folder: Path, outside: Path) -> None:
    job = Job(tiny.config(), folder / "runs" / "a", "a")
    make_below(folder / "runs", FOLDER)
    kinds = [job.file(kind) for kind in ("toml", "log", "error", "stopped")]
    _link(draw, draw.choice([folder / "runs" / FOLDER, *kinds]), outside)
    if not isinstance(attempt(job.prepare), Refused):
        attempt(lambda: Process(Launch(["--version"], job.file("log"), {})).kill())


@place
def tables(draw: random.Random, folder: Path, outside: Path) -> None:
    out = folder / "out"
    out.mkdir()
    _link(draw, out / f"t.{draw.choice(['md', 'csv', 'tex'])}", outside)
    attempt(lambda: Table(["a"], [["b"]]).write(out / "t"))


@place
def figures(draw: random.Random, folder: Path, outside: Path) -> None:
    out = folder / "out"
    out.mkdir()
    _link(draw, out / "1-lucir", outside)
    attempt(lambda: make_below(out, "1-lucir", "b"))
