"""A growing model: many classes, many steps, many files. The fast tests run these cases at small sizes."""

import json
import os
import random
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image
from tests.helpers.pictures import encode, noise, png

from geodl.app.classifier import IncrementalClassifier
from geodl.app.state import UNDO
from geodl.store import Directory

from .commands import QUICK, geodl
from .harness import family

SIDE = 8
SHOWN = 20


def pictures(draw: random.Random, number: int) -> Any:
    """Return different small pictures, (N, H, W, 3)."""
    return noise(number, SIDE, SIDE, 3, seed=draw.randrange(2**32))


@family("many classes", most=4, classes=1600)
def many_classes(draw: random.Random, folder: Path, classes: int = 40) -> None:
    """Very many classes in one or a few steps: all are known, listed and predicted, and one of them can be removed."""
    names = [f"class {i}" for i in range(classes)]
    draw.shuffle(names)
    method, each = draw.choice(["finetune", "lucir"]), draw.randint(2, 4)
    model = IncrementalClassifier(folder / "model")
    cut = draw.randint(2, classes - 2)
    for part in [names] if draw.random() < 0.5 else [names[:cut], names[cut:]]:
        labels = [name for name in part for _ in range(each)]
        model.learn(pictures(draw, len(labels)), labels, method=method, exemplars=1, **QUICK)
    assert sorted(model.classes) == sorted(names)
    found = model.predict(pictures(draw, 5), top=classes, threshold=float("-inf"))
    assert all(sorted(name for name, _ in one.top) == sorted(names) for one in found)
    assert len(json.loads(geodl("info", str(model.path), "--json")[1])["classes"]) == classes
    assert len(geodl("info", str(model.path))[1].splitlines()) < 100, "too long to read"
    gone = draw.choice(names)
    model.remove(gone, for_good=True)
    assert sorted([*model.classes, gone]) == sorted(names)


@family("many steps", most=3, steps=100)
def many_steps(draw: random.Random, folder: Path, steps: int = 6) -> None:
    """Many steps in a row, some undone or redone: the classes are right, and old states are gone."""
    model, number = IncrementalClassifier(folder / "model"), count()
    states: list[list[str]] = []
    undone: list[list[str]] = []

    def learn() -> list[str]:
        known = states[-1] if states else []
        # A first step of one class has nothing to tell apart.
        names = [f"class {next(number)}" for _ in range(1 if known else 2)]
        labels = [name for name in names for _ in range(3)]
        images = pictures(draw, len(labels))
        model.learn(images, labels, method="finetune", exemplars=1, **QUICK)
        return [*known, *names]

    for step in range(steps):
        what = (
            draw.choice(["learn"] * 6 + ["rename", "remove", "undo", "redo"])
            if step > 1
            else "learn"
        )
        known = states[-1] if states else []
        if what == "undo" and len(states) > 1 and not Directory(model.path).phase(-2).forgotten:
            model.undo()
            undone.append(states.pop())
        elif what == "redo" and undone:
            model.redo()
            states.append(undone.pop())
        else:
            if what == "rename" and known:
                old, new = draw.choice(known), f"class {next(number)}"
                model.rename(old, new)
                states.append([new if name == old else name for name in known])
            elif what == "remove" and len(known) > 2:
                gone = draw.choice(known)
                model.remove(gone)
                states.append([name for name in known if name != gone])
            else:
                states.append(learn())
            undone.clear()
        assert list(model.classes) == states[-1], f"after {what}"
    assert len(model.predict(pictures(draw, 2), top=1)) == 2
    run = Directory(model.path)
    run.verify()
    assert run.completed() == len(states)
    whole = [t for t in range(run.completed()) if not run.phase(t).forgotten]
    assert len(whole) <= UNDO + 1


@family("many files", most=1, files=100_000)
def many_files(draw: random.Random, folder: Path, files: int = 300) -> None:
    """Very many files, most of them bad: each is used or named; the terminal lists the first ones, JSON all."""
    good = 12
    source, model = folder / "images", str(folder / "model")
    for name in ("a", "b"):
        (source / name).mkdir(parents=True)
        for i, picture in enumerate(pictures(draw, good)):
            (source / name / f"good {i}.png").write_bytes(encode(Image.fromarray(picture)))
        _fill(draw, source / name, files // 2 - good)
    options = "--network convnet --method finetune --epochs 1 --threads 1 --workers 2".split()
    status, out = geodl("learn", model, str(source), *options)
    assert status == 0
    assert f"skipped: {files - 2 * good}" in out
    assert len(out.splitlines()) < SHOWN + 30
    assert "--json lists all" in out
    status, out = geodl("predict", model, str(source), "--json", "--workers", "2")
    found = json.loads(out)
    named = [each["name"] for part in ("predictions", "skipped") for each in found[part]]
    assert len(set(named)) == files
    assert len(found["predictions"]) >= 2 * good
    status, out = geodl("learn", str(folder / "other"), str(source), "--strict", *options)
    assert status == 2
    assert not out
    assert not (folder / "other").exists()


def _fill(draw: random.Random, folder: Path, number: int) -> None:
    """Fill a folder with bad files, most of them under many names: that is quick, and to a reader all the same."""
    bad = png()
    for i in range(number):
        path = folder / f"bad {i}.png"
        if i % 1000 == 0:
            contents = [b"", b"no picture", bad[: draw.randrange(8, 50)], bytes(100)]
            path.write_bytes(draw.choice(contents))
            last = path
        else:
            os.link(last, path)
