"""Several at once, and many in a row: one writer at a time, readers see whole states, and nothing grows without need."""

import random
import threading
from pathlib import Path

import torch

from geodl.errors import StoreError
from geodl.store import RunDirectory, read_steadily

from .harness import Refused, attempt, family


def _save(run: RunDirectory, t: int, number: int) -> None:
    state = torch.tensor(number)
    run.save_phase(t, {"n": state}, {"n": state}, {"n": number}, {"n": number})


def _numbers(run: RunDirectory) -> list[int]:
    done = run.completed()
    return [run.load_phase(t).extra["n"] for t in range(done) if run.remembers(t)]


@family("concurrency")
def concurrency(draw: random.Random, folder: Path) -> None:
    """Writers and readers at once: every read gives a state that was there, no step is lost, undo and redo belong together."""
    first = RunDirectory.create_or_open(folder / "it", {"kind": "model"})
    with first.lock():
        _save(first, 0, 0)
    saved, failures = [0], []
    seeds = [draw.randrange(2**32) for _ in range(2)]

    def write(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(6):
            try:
                run = RunDirectory(folder / "it")
                with run.lock():
                    what = mine.choice(["save", "save", "undo", "redo"])
                    if what == "save":
                        saved.append(len(saved))
                        _save(run, run.completed(), saved[-1])
                    elif what == "undo" and run.completed() > 1:
                        run.drop_last_phase(keep=True)
                    elif what == "redo" and run.undone():
                        run.redo_phase()
            except StoreError as error:
                if "is being written" not in str(error):
                    failures.append(str(error))

    def read() -> None:
        for _ in range(10):
            found = attempt(lambda: read_steadily(folder / "it", _numbers))
            if isinstance(found, Refused):
                if "all the time" not in found.message:
                    failures.append(found.message)
            elif found != sorted(found) or any(number not in saved for number in found):
                failures.append(f"no state that ever was: {found}")

    threads = [*(threading.Thread(target=write, args=(seed,)) for seed in seeds), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    run = RunDirectory(folder / "it")
    run.verify()
    with run.lock():
        assert not list(run.path.rglob(".geodl-tmp-*"))


@family("growth")
def growth(draw: random.Random, folder: Path) -> None:
    """Many steps in a row, with states forgotten, taken back and brought back: all there is what should be, and no more."""
    run = RunDirectory.create_or_open(folder / "it", {"kind": "model"})
    kept = draw.randint(1, 4)
    with run.lock():
        for t in range(draw.choice([5] * 6 + [20] * 3 + [101])):
            _save(run, t, t)
            if t > kept:
                run.forget_phase(t - kept - 1)
            if draw.random() < 0.2 and t:
                run.drop_last_phase(keep=True)
                run.redo_phase()
    done = run.completed()
    assert done == t + 1
    assert run.load_phase(t).extra == {"n": t}
    assert [run.load_metrics(i)["n"] for i in range(done)] == list(range(done))
    run.verify()
    assert len(list(run.path.rglob("model.safetensors"))) <= kept + 1
    assert not (run.path / "undone").exists() or not list((run.path / "undone").iterdir())
