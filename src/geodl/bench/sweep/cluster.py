"""Runs on a Ray cluster: one task a run. Ray finds the place, and starts a run again whose worker or node was lost.

The task starts the same process that a person would. Where the nodes share the disk of the sweep, that process works in
the run's own directory. Where they do not, it works in a copy, and what changes there is sent back every few seconds to an
actor beside the driver, from which a run that is started again gets it.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from geodl.bench.sweep.jobs import FOLDER, Job
from geodl.bench.sweep.runner import Launch, Process, launch
from geodl.bench.sweep.shipping import Files, Seen, changed, receive
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, MissingExtraError
from geodl.core.locks import is_locked

RETRIES = 3
SHIP_SECONDS = 10.0
ALONE = sys.maxsize


def ray_module() -> Any:
    """Return Ray, quiet; without it, an error that says what to install."""
    # A run without GPUs keeps its environment; what Ray writes to the terminal is for its developers.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "running on Ray") from None
    return ray


def connect(address: str) -> None:
    """Connect to a cluster: at an address, the one that runs here (auto; else one is started), or a new one (local)."""
    ray = ray_module()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "geodl"}
    alone = {"include_dashboard": False, "object_store_memory": 200 * 2**20}
    if address not in ("auto", "local"):
        _reach(address)
    try:
        if address == "local":
            ray.init("local", **quiet, **alone)
            return
        ray.init(address, **quiet)
    except ConnectionError as error:
        if address != "auto":
            raise ConfigError(
                f"ray = {address}: the cluster refuses the connection ({_first_line(error)}); one with a token wants it in RAY_AUTH_TOKEN"
            ) from None
        ray.init("local", **quiet, **alone)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"ray = {address}: {_first_line(error)}") from None


def _reach(address: str) -> None:
    """Raise an error where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"ray = {address}: no cluster can be reached there ({_first_line(error)}); auto, local or HOST:PORT are allowed"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def resources(config: RunConfig) -> dict[str, float]:
    """Return what a run takes of its node."""
    if config.nodes > 1:
        raise ConfigError(
            f"nodes = {config.nodes}: on Ray a run has one node; --submit slurm takes more"
        )
    found = {"num_cpus": float(config.devices * (config.threads or 1))}
    there = config.accelerator == "auto" and ray_module().cluster_resources().get("GPU")
    if config.accelerator == "cuda" or there:
        found["num_gpus"] = float(config.devices)
    return found


class Order(NamedTuple):
    """What a task is told: how to start the run in its own directory, and all that a copy of it needs.

    shared: whether the node has the sweep's directory under the same path; None: it looks for itself.
    """

    start: Launch
    out: Path
    options: str
    shared: bool | None
    ship_seconds: float


class Desk:
    """Keeps the directories of runs beside the driver, for nodes that do not share its disk."""

    def give(self, out: Path) -> Files:
        """Return the files of a run as far as they are here."""
        return changed(out, {})[0]

    def take(self, out: Path, files: Files, names: set[str]) -> None:
        """Keep what a run has changed."""
        receive(out, files, names)


def execute(order: Order, desk: Any) -> str:
    """Do a run on a node of the cluster; return why it failed, an empty text where it did not."""
    options = order.out.parent / FOLDER / f"{order.out.name}.toml"
    here = options.is_file() and options.read_text() == order.options
    if here if order.shared is None else order.shared:
        wait_for_lock(order.out)
        return supervise(Process(order.start), lambda: None)
    ray = ray_module()
    with tempfile.TemporaryDirectory(prefix="geodl-") as scratch:
        options, out, log = (Path(scratch) / name for name in ("options.toml", "run", "log"))
        options.write_text(order.options)
        given = ray.get(desk.give.remote(order.out))
        if given:
            receive(out, given, set(given))
        sent: Seen = changed(out, {})[1]

        def ship() -> None:
            nonlocal sent
            files, now = changed(out, sent)
            if now != sent:
                ray.get(desk.take.remote(order.out, files, set(now)))
                sent = now

        start, cwd = order.start, order.start.cwd
        elsewhere = {str(order.out): str(out), start.arguments[2]: str(options)}
        arguments = [elsewhere.get(word, word) for word in start.arguments]
        there = cwd if cwd is not None and cwd.is_dir() else None
        process = Process(Launch(arguments, log, start.environment, there))
        error = supervise(process, ship, order.ship_seconds)
        ship()
        return error


def wait_for_lock(out: Path) -> None:
    """Give the process of a lost worker, which dies with it, a moment to be gone."""
    deadline = time.monotonic() + 10
    while is_locked(out) and time.monotonic() < deadline:
        time.sleep(0.1)


def supervise(process: Process, ship: Callable[[], None], seconds: float = SHIP_SECONDS) -> str:
    """Wait for a run, calling `ship` every so many seconds; cancelled by Ray, which is a SIGINT, it saves its progress first."""
    shipped = time.monotonic()
    with _interrupts(process.stop):
        while (error := process.result()) is None:
            time.sleep(0.2)
            if time.monotonic() - shipped > seconds:
                ship()
                shipped = time.monotonic()
    return error


@contextmanager
def _interrupts(call: Callable[[], None]) -> Any:
    before = signal.signal(signal.SIGINT, lambda number, frame: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Task:
    """A run that Ray has taken."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._result: str | None = None

    def result(self) -> str | None:
        """Return None while it runs or waits for a place, then why it failed: an empty text where it did not."""
        ray = ray_module()
        if self._result is None and ray.wait([self._reference], timeout=0)[0]:
            try:
                self._result = ray.get(self._reference)
            except ray.exceptions.RayError as error:
                self._result = f"Ray: {_first_line(error)}"
        return self._result

    def stop(self) -> None:
        """Ask it to save its progress and end."""
        if self.result() is None:
            ray_module().cancel(self._reference)

    def kill(self) -> None:
        """End it at once."""
        if self.result() is None:
            ray_module().cancel(self._reference, force=True)


class Cluster:
    """A Ray cluster as a place for runs.

    shared: whether the nodes have the sweep's directory under the same path; None: each looks for itself.
    ship_seconds: where they do not, how often what changed is sent back.
    """

    places = ALONE  # Ray has a queue of its own

    def __init__(
        self,
        address: str,
        jobs: list[Job],
        *,
        shared: bool | None = None,
        ship_seconds: float = SHIP_SECONDS,
    ) -> None:
        connect(address)
        ray = ray_module()
        self._shared, self._ship_seconds = shared, ship_seconds
        self._takes = resources(jobs[0].config)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._desk = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote()
        self._task = ray.remote(execute)

    def start(self, job: Job) -> Task:
        """Give a run to Ray."""
        job = job.resolved()
        start = launch(job)._replace(cwd=Path.cwd())
        order = Order(start, job.out, job.toml(), self._shared, self._ship_seconds)
        options = self._task.options(**self._takes, max_retries=RETRIES, name=job.label)
        return Task(options.remote(order, self._desk))


def leave() -> None:
    """Leave the cluster; one that was started for us ends."""
    ray_module().shutdown()
