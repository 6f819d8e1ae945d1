"""Run the jobs of a sweep, several at a time; failures are kept and do not stop the others."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import torch

from geodl.config import RunConfig
from geodl.devices import available_cores, device_kind
from geodl.files import atomic_write, make_directory, unlink
from geodl.sweep.jobs import Job
from geodl.training import Interrupted

MEMORY = 1.5e9
"""Bytes that a run is given, so that not more are started than fit: ResNet-32 on CIFAR-100 takes 1.2e9."""
TURN = 0.2
"""Seconds between two looks at what runs."""
STOPPED = "stopped; progress is saved; the same command continues"

State = Literal["waiting", "running", "complete", "failed", "stopped"]
States = Mapping[Job, State]
Told = Callable[[States], None]


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
    jobs: Sequence[Job], engine: Engine, *, told: Told = lambda states: None, stop: Callable[[], bool] = lambda: False
) -> dict[Job, str]:
    """Run the jobs, in their order, as many at a time as the engine takes; return those that failed and why.

    Args:
        jobs: none of them complete; those that were begun go on.
        engine: where they run.
        told: hears, several times a second, how every job stands.
        stop: whether the user wants to stop: all save their progress, then Interrupted is raised.
    """
    waiting, running, failed = deque(jobs), dict[Job, Running](), dict[Job, str]()
    states: dict[Job, State] = dict.fromkeys(jobs, "waiting")
    try:
        while waiting or running:
            if stop():
                _stop_all(running)
                raise Interrupted(STOPPED)
            while waiting and len(running) < engine.places:
                job = waiting.popleft()
                prepare(job)
                running[job], states[job] = engine.start(job), "running"
            for job, error in [(job, each.result()) for job, each in running.items()]:
                if error is not None:
                    del running[job]
                    states[job] = "failed" if error else "complete"
                if error:
                    failed[job] = error
                    atomic_write(job.file("error"), error.encode())
            told(states)
            if running:
                time.sleep(TURN)
    finally:
        for each in running.values():
            each.kill()
    return failed


def _stop_all(running: Mapping[Job, Running]) -> None:
    for each in running.values():
        each.stop()
    while any(each.result() is None for each in running.values()):
        time.sleep(TURN)


def prepare(job: Job) -> None:
    """Write the options of a run for whoever starts it, and forget what became of it before."""
    make_directory(job.file("toml").parent)
    atomic_write(job.file("toml"), job.toml().encode())
    for kind in ("error", "stopped"):
        unlink(job.file(kind))


# ------------------------------------------------------------------------------------------------------------ processes


def arguments(options: Path, out: Path, allow_environment_change: bool = False) -> list[str]:
    """Return the arguments of `geodl` that do a run: the same that a person would give."""
    command = ["run", "--config", str(options), "--out", str(out), "--quiet"]
    return [*command, "--allow-environment-change"] if allow_environment_change else command


class Process:
    """A command of geodl's in a process of its own, which ends with ours, however that happens (on Linux)."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "geodl.sweep.child", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=cwd,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C is for us; we tell it
            )

    def result(self) -> str | None:
        """Return None while it runs, then why it failed: an empty text where it did not."""
        status = self._process.poll()
        return None if status is None else "" if status == 0 else self._last_words(status)

    def _last_words(self, status: int) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return lines[-1].removeprefix("geodl: ") if lines else f"ended with status {status}"

    def stop(self) -> None:
        """Ask it to save its progress and end."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def environment_of(config: RunConfig) -> dict[str, str]:
    """Return the environment of a run's process: no more threads than it is given."""
    return {"OMP_NUM_THREADS": str(config.threads or 1)}


class Local:
    """Processes on this machine: as many as cores and memory allow, or one for each GPU (or group of them)."""

    def __init__(self, config: RunConfig, places: int | None = None, *, allow_environment_change: bool = False) -> None:
        each = config.devices
        gpus = torch.cuda.device_count() // each if device_kind(config.accelerator) == "cuda" else 0
        fits = min(available_cores() // (each * (config.threads or 1)), int(available_memory() // (each * MEMORY)))
        self.places = places or max(gpus or fits, 1)
        self._gpus = [",".join(str(i * each + j) for j in range(each)) for i in range(gpus)]
        self._used: dict[str, Process] = {}
        self._allow = allow_environment_change

    def start(self, job: Job) -> Process:
        """Start a run, on GPUs that no other run has where there are some."""
        environment = environment_of(job.config)
        free = [gpu for gpu in self._gpus if gpu not in self._used or self._used[gpu].result() is not None]
        if free:
            environment["CUDA_VISIBLE_DEVICES"] = free[0]
        command = arguments(job.file("toml"), job.out, self._allow)
        process = Process(command, job.file("log"), environment)
        if free:
            self._used[free[0]] = process
        return process


def available_memory() -> float:
    """Return the bytes of memory that new processes can have; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
