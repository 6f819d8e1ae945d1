"""Real models and runs, damaged, under whole commands: exit 0 with the right answer, or 2 with one line."""

import json
import random
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tests.helpers import tiny
from tests.helpers.directories import cut
from tests.helpers.pictures import encode

from geodl.app.classifier import IncrementalClassifier
from geodl.bench.experiment import run_config
from geodl.core.errors import Interrupted

from .commands import QUICK, geodl
from .damage import harm, restore, snapshot
from .harness import Refused, attempt, family

METHODS = ("lucir", "analytic")
DATA = tiny.dataset(classes=4, train=8)


def part(*classes: int) -> tuple[torch.Tensor, list[str]]:
    """Return the training images of some classes, and their labels."""
    rows = torch.isin(DATA.train.labels, torch.tensor(classes))
    names = [DATA.classes[label] for label in DATA.train.labels[rows].tolist()]
    return DATA.train.pixels[rows], names


@cache
def model_files(method: str) -> Mapping[str, bytes | None]:
    """Return the files of a model of two steps, one of them renamed, and one that was undone; made once."""
    with tempfile.TemporaryDirectory() as folder:
        model = IncrementalClassifier(Path(folder) / "model")
        model.learn(*part(0, 1), method=method, **QUICK)
        model.learn(*part(2, 3), method=method, **QUICK)
        model.rename("class 0", "zero")
        model.rename("class 1", "one")
        model.undo()
        if method == "lucir":
            asked = iter([False, True])
            with suppress(Interrupted):
                model.learn(
                    *part(0, 2),
                    method=method,
                    again=True,
                    stop=lambda: next(asked),
                    **QUICK | {"epochs": 3},
                )
        return snapshot(model.path)


@cache
def run_files() -> Mapping[str, bytes | None]:
    """Return the files of a complete run; made once."""
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder) / "run")
        return snapshot(Path(folder) / "run")


def _run(path: Path) -> Any:
    return run_config(tiny.config(method="lucir", analysis=False), out=path, data=DATA)


# ---------------------------------------------------------------------------------------------------------- commands


@cache
def pictures() -> Mapping[str, bytes | None]:
    """Return a folder of two class folders."""
    pixels = DATA.test.pixels[:10].permute(0, 2, 3, 1).numpy()
    files = {f"class {i % 2}/{i}.png": Image.fromarray(each) for i, each in enumerate(pixels)}
    return {"class 0": None, "class 1": None} | {
        name: encode(image) for name, image in files.items()
    }


READS = ("info --json", "predict --json --top 4 --no-unknown", "evaluate --json")
WRITES = ("learn", "undo", "redo", "rename", "remove", "remove --for-good", "report")
WRITES += ("info", "predict")


# How much is kept beside the last state may well change.
BESIDE = "images_per_second directory_bytes model unfinished undone redo undo".split()


def command(words: str, path: Path, images: Path) -> tuple[Any, str]:
    """Run a command on a model."""
    name, *options = words.split()
    more = {
        "predict": [str(images)],
        "evaluate": [str(images)],
        "learn": [str(images), "--epochs", "1", "--threads", "1"],
        "rename": ["class 3", "three"],
        "remove": ["class 3"],
        "report": ["--out", str(path.parent / "report.html")],
    }.get(name, [])
    return geodl(name, str(path), *more, *options, notes=3)


def answer(words: str, path: Path, images: Path) -> Any:
    """Return the JSON of a read, without what depends on time and place; None if it is refused."""
    status, out = command(words, path, images)
    if status:
        return None
    facts = json.loads(out)
    for name in BESIDE:
        facts.pop(name, None)
    for each in [*facts.get("classes", []), *facts.get("steps", [])]:
        if isinstance(each, dict):  # from events.jsonl, of which lines may be lost
            each.pop("learned", None)
            each.pop("time", None)
    for each in facts.get("predictions", []):
        each["name"] = Path(each["name"]).name
    return facts


@cache
def right(words: str, method: str) -> Any:
    """Return the JSON of the undamaged model."""
    with tempfile.TemporaryDirectory() as folder:
        restore(model_files(method), Path(folder) / "model")
        restore(pictures(), Path(folder) / "images")
        found = answer(words, Path(folder) / "model", Path(folder) / "images")
        assert found is not None
        return found


@family("models", most=300)
def models(draw: random.Random, folder: Path) -> None:
    """Commands on a damaged model: the right answer or one line; whatever they write can be read."""
    method = draw.choice(METHODS)
    path, images = folder / "model", folder / "images"
    restore(model_files(method), path)
    restore(pictures(), images)
    signed = harm(draw, path, folder / "outside")
    read = draw.choice(READS)
    found = answer(read, path, images)
    assert signed or found is None or found == right(read, method), f"{read}: another answer"
    for words in draw.sample(WRITES, 2):
        command(words, path, images)
    answer("info --json", path, images)
    assert snapshot(images) == pictures(), "a write into the images"


@family("runs", most=60)
def runs(draw: random.Random, folder: Path) -> None:
    """The same run again over a damaged one: complete with the same files, or refused in one line; and its report."""
    path = folder / "run"
    restore(run_files(), path)
    if draw.random() < 0.5:
        cut(path, 2)
    signed = harm(draw, path, folder / "outside") if draw.random() < 0.9 else False
    found = attempt(lambda: _run(path))
    if not signed and not isinstance(found, Refused):
        for name, data in run_files().items():
            if name.startswith("objects/"):
                assert (path / name).read_bytes() == data, f"complete, but another {name}"
    if draw.random() < 0.3:  # the figures take seconds
        geodl("report", str(path), "--out", str(folder / "report.html"), notes=3)
    geodl("runs", "show", str(path), notes=3)
