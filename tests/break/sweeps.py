"""Long and large experiments: 300 tiny phases in a row, a disk that fills during a sweep, a run that is killed in one."""

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import tiny
from tests.helpers.runs import quick, result_files

from geodl.bench.experiment import run_config
from geodl.bench.sweep.jobs import Job
from geodl.bench.sweep.runner import Engine, Local, Process, run_all
from geodl.core.errors import Interrupted
from geodl.store import Directory, exists

from .harness import family

FULL = """
import errno, os, sys
from pathlib import Path
disk, full = os.environ["BREAK_DISK"], Path(os.environ["BREAK_FULL"])
def watch(event, found):
    if event == "open" and str(found[0]).startswith(disk) and found[2] & os.O_CREAT and full.exists():
        raise OSError(errno.ENOSPC, "No space left on device", found[0])
sys.addaudithook(watch)
"""
"""What a process of a sweep begins with: below a directory no file can be made while another file is there."""


@family("many phases", most=1, phases=300)
def many_phases(draw: random.Random, folder: Path, phases: int = 4) -> None:
    """Very many tiny phases, stopped once on the way: all are there, sound, and nothing else is."""
    data = tiny.dataset(classes=phases + 2, train=3, test=1)
    more: dict[str, Any] = {"base": 2, "phases": phases, "epochs": 1, "exemplars": 1}
    config = tiny.config(method="finetune", analysis=False, **more)
    asked, last = iter(range(1 << 40)), draw.randint(2, phases)
    with suppress(Interrupted):
        run_config(config, out=folder / "run", data=data, stop=lambda: next(asked) >= last)
    begun = Directory(folder / "run").completed()
    assert begun <= phases, "it was not stopped"
    store = run_config(config, out=folder / "run", data=data)
    assert store.completed() == store.phases == phases + 1
    store.verify()
    metrics = store.phase(-1).json("metrics.json")
    assert len(metrics["classes"]) == phases + 2
    named = {name for phase in store._head.phases for name, _ in phase.files.values()}
    assert {path.name for path in (store.path / "objects").iterdir()} == named, "leftovers"


@family("full disk in a sweep", most=1, epochs=30)
def full_disk(draw: random.Random, folder: Path, epochs: int = 30) -> None:
    """A disk that fills during a sweep: each run fails with one line, and with room the same command ends with the same bytes."""
    jobs, engine, environment = _sweep(folder, epochs)
    full = Path(environment["BREAK_FULL"])
    with mock.patch.dict(os.environ, environment):
        failed = run_all(jobs, engine, notify=lambda _: full.touch() if _begun(jobs) else None)
        assert full.exists()
        assert failed, "no run met the full disk"
        assert all("the disk is full; make room" in each for each in failed.values()), failed
        assert all(job.file("error").read_text() == failed[job] for job in failed)
        full.unlink()
        left = [job for job in jobs if not job.complete()]
        assert not run_all(left, engine)
    _check(jobs, folder)


@family("killed run in a sweep", most=1, epochs=30)
def killed_run(draw: random.Random, folder: Path, epochs: int = 30) -> None:
    """A run of a sweep that is killed: the others continue, it is named, and the same command ends with the same bytes."""
    jobs, engine, environment = _sweep(folder, epochs)
    with mock.patch.dict(os.environ, environment):
        victims: list[Process] = []
        start = engine.start

        def started(job: Job) -> Any:
            process = start(job)
            victims.append(process)
            return process

        def kill(_: Any) -> None:
            if _begun(jobs) and victims[0]._process.poll() is None:
                victims[0]._process.send_signal(signal.SIGKILL)

        with mock.patch.object(engine, "start", started):
            failed = run_all(jobs, engine, notify=kill)
        assert list(failed.values()) == ["killed by SIGKILL"], failed
        assert all(job.complete() for job in jobs if job not in failed)
        assert not run_all(list(failed), engine)
    _check(jobs, folder)


def _sweep(folder: Path, epochs: int) -> tuple[list[Job], Engine, dict[str, str]]:
    """Return two runs, what starts them, and the environment of their processes."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(FULL)
    options = {"base": 4, "phases": 3, "epochs": epochs, "checkpoint_steps": 5}
    jobs = quick(folder / "runs", {"seed": 1}, {"seed": 2}, **options)
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "GEODL_CACHE": str(folder / "cache")}
    environment |= {"BREAK_DISK": str(folder / "runs"), "BREAK_FULL": str(folder / "full")}
    return jobs, Local(jobs[0].config, 2), environment


def _begun(jobs: list[Job]) -> bool:
    return any(exists(job.out) and job.done() for job in jobs)


def _check(jobs: list[Job], folder: Path) -> None:
    """Compare with runs that nothing stood in the way of."""
    for job in jobs:
        store = run_config(job.config, out=folder / "alone" / job.out.name)
        assert result_files(job.out) == result_files(store.path), "other results"
        Directory(job.out).verify()
