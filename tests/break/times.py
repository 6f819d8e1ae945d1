"""Concurrent writers, and many steps in a row: one writer at a time, readers see whole states, and nothing is left over."""

import random
import threading
from pathlib import Path

import torch
from tests.helpers.directories import make_model

from geodl.core.errors import StoreError
from geodl.store import Directory, reading

from .harness import Refused, attempt, family


def _save(run: Directory, number: int, states: int | None = None) -> None:
    contents = {"n.safetensors": {"n": torch.tensor(number)}, "n.json": {"n": number}}
    run.commit(contents, {"n": number}, states=states, lasting=["n.json"])


def _numbers(run: Directory) -> list[int]:
    return [run.phase(t).json("n.json")["n"] for t in range(run.completed())]


@family("concurrency")
def concurrency(draw: random.Random, folder: Path) -> None:
    """Writers and readers at once: every read gives a state that was there, no step is lost, undo and redo belong together."""
    first = make_model(folder / "it")
    with first.lock():
        _save(first, 0)
    saved, failures = [0], []
    seeds = [draw.randrange(2**32) for _ in range(2)]

    def write(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(6):
            try:
                run = Directory(folder / "it")
                with run.lock():
                    what = mine.choice(["save", "save", "undo", "redo"])
                    if what == "save":
                        saved.append(len(saved))
                        _save(run, saved[-1])
                    elif what == "undo" and run.completed() > 1:
                        run.undo()
                    elif what == "redo" and run.undone():
                        run.redo()
            except StoreError as error:
                if "is being written" not in str(error):
                    failures.append(str(error))

    def read() -> None:
        for _ in range(10):
            found = attempt(lambda: reading(folder / "it", _numbers))
            if isinstance(found, Refused):
                if "changed by another process" not in found.message:
                    failures.append(found.message)
            elif found != sorted(found) or any(number not in saved for number in found):
                failures.append(f"no state that ever was: {found}")

    threads = [
        *(threading.Thread(target=write, args=(seed,)) for seed in seeds),
        threading.Thread(target=read),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    run = Directory(folder / "it")
    run.verify()
    with run.lock():
        assert not list(run.path.rglob(".geodl-tmp-*"))


@family("growth")
def growth(draw: random.Random, folder: Path) -> None:
    """Many steps in a row, with states forgotten, undone and redone: nothing is missing or left over."""
    run = make_model(folder / "it")
    kept = draw.randint(1, 4)
    with run.lock():
        for t in range(draw.choice([5] * 6 + [20] * 3 + [101])):
            _save(run, t, kept + 1)
            if draw.random() < 0.2 and t:
                run.undo()
                run.redo()
    done = run.completed()
    assert done == t + 1
    assert _numbers(run) == list(range(done))
    run.verify()
    assert len(list((run.path / "objects").iterdir())) == done + min(kept + 1, done)
    assert run.undone() == []
