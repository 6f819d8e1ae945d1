"""Run the jobs of a sweep, several at a time; a failed job does not stop the others."""

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
"""Memory assumed for a run in bytes; ResNet-32 on CIFAR-100 takes 1.2e9."""
TURN = 0.2
"""Seconds between polls of the running jobs."""
STOPPED = "stopped; progress is saved; the same command continues"

Notify = Callable[[Collection[Job]], None]


class Running(Protocol):
    """A run that an engine has started."""

    def result(self) -> str | None:
        """Return None while it runs, then its error, or an empty string."""

    def stop(self) -> None:
        """Make it save its progress and exit."""

    def kill(self) -> None:
        """Kill it."""


class Engine(Protocol):
    """Starts runs; `places`: how many at a time."""

    places: int

    def start(self, job: Job) -> Running:
        """Start a run."""


def run_all(
    jobs: Sequence[Job],
    engine: Engine,
    *,
    notify: Notify = lambda running: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[Job, str]:
    """Run the jobs in order, as many at a time as the engine allows; return the errors of failed ones.

    Args:
        jobs: incomplete jobs; interrupted ones resume.
        engine: starts the runs.
        notify: called several times a second with the jobs that run, at the end with none.
        stop: polled; when it returns True, all runs save their progress and Interrupted is raised.
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
            notify(running)
            for job, error in [(job, run.result()) for job, run in running.items()]:
                if error is not None:
                    del running[job]
                if error:
                    failed[job] = error
                    atomic_write(job.file("error"), error.encode())
            if running:
                time.sleep(TURN)
        notify(running)
    finally:
        for run in running.values():
            run.kill()
    return failed


def _stop_all(running: Mapping[Job, Running]) -> None:
    for run in running.values():
        run.stop()
    while any(run.result() is None for run in running.values()):
        time.sleep(TURN)


# ------------------------------------------------------------------------------------------------------------ processes


class Launch(NamedTuple):
    """How to start the process of a run: arguments of `geodl`, log file, environment, working directory."""

    arguments: Sequence[str]
    log: Path
    environment: dict[str, str]
    cwd: Path | None = None


def launch(job: Job) -> Launch:
    """Return how to start the process of a job."""
    arguments = ["run", "--config", str(job.file("toml")), "--out", str(job.out), "--quiet"]
    if job.allow_environment_change:
        arguments.append("--allow-environment-change")
    return Launch(arguments, job.file("log"), {"OMP_NUM_THREADS": str(job.config.threads or 1)})


class Process:
    """A geodl command in a child process, which on Linux dies with this one."""

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
                start_new_session=True,  # Ctrl-C reaches this process only, which then stops it
            )

    def result(self) -> str | None:
        """Return None while it runs, then its error, or an empty string."""
        status = self._process.poll()
        if not status:
            return None if status is None else ""
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip().removeprefix("geodl: ") if lines else f"ended with status {status}"

    def stop(self) -> None:
        """Make it save its progress and exit."""
        self._signal("SIGINT")

    def kill(self) -> None:
        """Kill it."""
        self._signal("SIGKILL")
        self._process.wait()

    def _signal(self, name: str) -> None:
        if self._process.poll() is not None:
            return
        if not hasattr(os, "killpg"):  # Windows; the run resumes from its last checkpoint
            self._process.terminate()
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.Signals[name])


class Local:
    """Runs jobs in processes on this machine: as many as cores and memory allow, or one per (group of) GPU."""

    def __init__(self, config: RunConfig, places: int | None = None) -> None:
        size = config.devices
        groups = (
            torch.cuda.device_count() // size if device_kind(config.accelerator) == "cuda" else 0
        )
        by_cores = available_cores() // (size * (config.threads or 1))
        by_memory = int(available_memory() // (size * MEMORY))
        self.places = places or max(groups or min(by_cores, by_memory), 1)
        first = range(0, groups * size, size)
        self._gpus = [",".join(map(str, range(i, i + size))) for i in first]
        self._used: dict[str, Process] = {}

    def start(self, job: Job) -> Process:
        """Start a run, on unused GPUs if there are any."""
        start = launch(job)
        busy = {gpu for gpu, process in self._used.items() if process.result() is None}
        gpu = next((gpu for gpu in self._gpus if gpu not in busy), None)
        if gpu is None:
            return Process(start)
        start.environment["CUDA_VISIBLE_DEVICES"] = gpu
        self._used[gpu] = Process(start)
        return self._used[gpu]


def available_memory() -> float:
    """Return the available memory in bytes; infinite if the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024.0
    return float("inf")
