"""Run the jobs of a sweep, several at a time; failures are kept and do not stop the others."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from geodl.bench.sweep.jobs import Job
from geodl.config import RunConfig
from geodl.core.devices import available_cores, device_kind
from geodl.core.errors import Interrupted
from geodl.core.files import atomic_write, open_in_place, writing

MEMORY = 1.5e9
"""Bytes that a run is given, so that not more are started than fit: ResNet-32 on CIFAR-100 takes 1.2e9."""
TURN = 0.2
"""Seconds between two looks at what runs."""
STOPPED = "stopped; progress is saved; the same command continues"

Told = Callable[[Collection[Job]], None]


class Running(Protocol):
    """A run that was started somewhere."""

    def result(self) -> str | None:
        """Return None while it runs, then why it failed: an empty text where it did not."""

    def stop(self) -> None:
        """Ask it to save its progress and end."""

    def kill(self) -> None:
        """End it at once."""


class Engine(Protocol):
    """Where runs are started; `places`: how many it takes at a time."""

    places: int

    def start(self, job: Job) -> Running:
        """Start a run."""


def run_all(
    jobs: Sequence[Job],
    engine: Engine,
    *,
    told: Told = lambda running: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[Job, str]:
    """Run the jobs, in their order, as many at a time as the engine takes; return those that failed and why.

    Args:
        jobs: none of them complete; those that were begun go on.
        engine: where they run.
        told: hears, several times a second, which jobs run, and in the end that none does.
        stop: whether the user wants to stop: all save their progress, then Interrupted is raised.
    """
    waiting, running, failed = deque(jobs), dict[Job, Running](), dict[Job, str]()
    try:
        while waiting or running:
            if stop():
                _stop_all(running)
                raise Interrupted(STOPPED)
            while waiting and len(running) < engine.places:
                job = waiting.popleft()
                job.prepare()
                running[job] = engine.start(job)
            told(running)
            for job, error in [(job, each.result()) for job, each in running.items()]:
                if error is not None:
                    del running[job]
                if error:
                    failed[job] = error
                    atomic_write(job.file("error"), error.encode())
            if running:
                time.sleep(TURN)
        told(running)
    finally:
        for each in running.values():
            each.kill()
    return failed


def _stop_all(running: Mapping[Job, Running]) -> None:
    for each in running.values():
        each.stop()
    while any(each.result() is None for each in running.values()):
        time.sleep(TURN)


# ------------------------------------------------------------------------------------------------------------ processes


class Launch(NamedTuple):
    """What starts the process of a run: the arguments of `geodl`, its log, its environment, its directory."""

    arguments: Sequence[str]
    log: Path
    environment: dict[str, str]
    cwd: Path | None = None


def launch(job: Job) -> Launch:
    """Return how a job is done: by the arguments that a person would give, with no more threads than it is given."""
    arguments = ["run", "--config", str(job.file("toml")), "--out", str(job.out), "--quiet"]
    if job.allow_environment_change:
        arguments.append("--allow-environment-change")
    return Launch(arguments, job.file("log"), {"OMP_NUM_THREADS": str(job.config.threads or 1)})


class Process:
    """A command of geodl in a process of its own, which ends with ours, however that happens (on Linux)."""

    def __init__(self, start: Launch) -> None:
        self.log = start.log
        with writing(self.log):
            opened = open_in_place(self.log, "wb")
        with opened as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "geodl.bench.sweep.child", *start.arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=start.cwd,
                env=os.environ | start.environment,
                start_new_session=True,  # Ctrl-C is for us; we tell it
            )

    def result(self) -> str | None:
        """Return None while it runs, then why it failed: an empty text where it did not."""
        status = self._process.poll()
        if not status:
            return None if status is None else ""
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip().removeprefix("geodl: ") if lines else f"ended with status {status}"

    def stop(self) -> None:
        """Ask it to save its progress and end."""
        self._signal("SIGINT")

    def kill(self) -> None:
        """End it at once."""
        self._signal("SIGKILL")
        self._process.wait()

    def _signal(self, name: str) -> None:
        if self._process.poll() is not None:
            return
        if not hasattr(
            os, "killpg"
        ):  # Windows: ended at once, the run resumes from its last checkpoint
            self._process.terminate()
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.Signals[name])


class Local:
    """Processes on this machine: as many as cores and memory allow, or one for each GPU (or group of them)."""

    def __init__(self, config: RunConfig, places: int | None = None) -> None:
        each = config.devices
        gpus = torch.cuda.device_count() // each if device_kind(config.accelerator) == "cuda" else 0
        by_cores = available_cores() // (each * (config.threads or 1))
        fits = min(by_cores, int(available_memory() // (each * MEMORY)))
        self.places = places or max(gpus or fits, 1)
        first = range(0, gpus * each, each)
        self._gpus = [",".join(map(str, range(i, i + each))) for i in first]
        self._used: dict[str, Process] = {}

    def start(self, job: Job) -> Process:
        """Start a run, on GPUs that no other run has where there are some."""
        start = launch(job)
        busy = {gpu for gpu, process in self._used.items() if process.result() is None}
        gpu = next((gpu for gpu in self._gpus if gpu not in busy), None)
        if gpu is None:
            return Process(start)
        start.environment["CUDA_VISIBLE_DEVICES"] = gpu
        self._used[gpu] = Process(start)
        return self._used[gpu]


def available_memory() -> float:
    """Return the bytes of memory that new processes can have; infinite where the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024.0
    return float("inf")
