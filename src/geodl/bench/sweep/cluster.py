"""Runs on a Ray cluster, one task per run. Ray schedules the tasks and restarts those whose worker or node was lost.

A task starts ``geodl run`` in a process. If the nodes share the sweep's disk, it works in the run's own directory. If not, it
works in a copy, sends changed files every few seconds to an actor on the driver's node, and gets them back when restarted.
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
from geodl.bench.sweep.shipping import Files, Stamps, changed, receive
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, MissingExtraError
from geodl.core.locks import is_locked

RETRIES = 3
SHIP_SECONDS = 10.0


def ray_module() -> Any:
    """Import Ray, without its log output, or raise MissingExtraError."""
    # Ray must not hide GPUs from tasks that request none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "running on Ray") from None
    return ray


def connect(address: str) -> None:
    """Connect to a cluster at HOST:PORT, to the one running here or a new one (auto), or to a new one (local)."""
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
                f"ray = {address}: connection refused ({_first_line(error)}); a cluster's token belongs in RAY_AUTH_TOKEN"
            ) from None
        ray.init("local", **quiet, **alone)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"ray = {address}: {_first_line(error)}") from None


def _reach(address: str) -> None:
    """Raise an error if nothing listens at an address; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"ray = {address}: no cluster can be reached ({_first_line(error)}); allowed values are auto, local, HOST:PORT"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def resources(config: RunConfig) -> dict[str, float]:
    """Return the CPUs and GPUs that a run uses on its node."""
    if config.nodes > 1:
        raise ConfigError(
            f"nodes = {config.nodes}: on Ray a run uses one node; --submit slurm allows more"
        )
    needed = {"num_cpus": float(config.devices * (config.threads or 1))}
    available = config.accelerator == "auto" and ray_module().cluster_resources().get("GPU")
    if config.accelerator == "cuda" or available:
        needed["num_gpus"] = float(config.devices)
    return needed


class Order(NamedTuple):
    """The input of a task: how to start the run in its own directory, and what a copy of it needs.

    options: the content of the run's options file.
    shared: whether the node has the sweep's directory under the same path; None: the task checks that.
    """

    start: Launch
    out: Path
    options: str
    shared: bool | None
    ship_seconds: float


class Desk:
    """An actor on the driver's node that reads and writes run directories for nodes that do not share its disk."""

    def give(self, out: Path) -> Files:
        """Return the files of a run's directory."""
        return changed(out, {})[0]

    def take(self, out: Path, files: Files, names: set[str]) -> None:
        """Store the changed files of a run; `names` are all its files."""
        receive(out, files, names)


def execute(order: Order, desk: Any) -> str:
    """Do a run on a node of the cluster; return the error, or an empty string."""
    options = order.out.parent / FOLDER / f"{order.out.name}.toml"
    shared = order.shared
    if shared is None:
        shared = options.is_file() and options.read_text() == order.options
    if shared:
        wait_for_lock(order.out)
        return supervise(Process(order.start), lambda: None)
    ray = ray_module()
    with tempfile.TemporaryDirectory(prefix="geodl-") as scratch:
        options, out, log = (Path(scratch) / name for name in ("options.toml", "run", "log"))
        options.write_text(order.options)
        files = ray.get(desk.give.remote(order.out))
        if files:
            receive(out, files, set(files))
        sent: Stamps = changed(out, {})[1]

        def ship() -> None:
            nonlocal sent
            files, now = changed(out, sent)
            if now != sent:
                ray.get(desk.take.remote(order.out, files, set(now)))
                sent = now

        start, cwd = order.start, order.start.cwd
        moved = {str(order.out): str(out), start.arguments[2]: str(options)}
        arguments = [moved.get(word, word) for word in start.arguments]
        cwd = cwd if cwd is not None and cwd.is_dir() else None
        process = Process(Launch(arguments, log, start.environment, cwd))
        error = supervise(process, ship, order.ship_seconds)
        ship()
        return error


def wait_for_lock(out: Path) -> None:
    """Wait until the process of a lost worker, which dies with it, has released its lock."""
    deadline = time.monotonic() + 10
    while is_locked(out) and time.monotonic() < deadline:
        time.sleep(0.1)


def supervise(process: Process, ship: Callable[[], None], seconds: float = SHIP_SECONDS) -> str:
    """Wait for a run, calling `ship` at intervals; when Ray cancels the task (by SIGINT), the run saves its progress."""
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
    """A run submitted to Ray."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._result: str | None = None

    def result(self) -> str | None:
        """Return None while it runs or is queued, then its error, or an empty string."""
        ray = ray_module()
        if self._result is None and ray.wait([self._reference], timeout=0)[0]:
            try:
                self._result = ray.get(self._reference)
            except ray.exceptions.RayError as error:
                self._result = f"Ray: {_first_line(error)}"
        return self._result

    def stop(self) -> None:
        """Make it save its progress and exit."""
        if self.result() is None:
            ray_module().cancel(self._reference)

    def kill(self) -> None:
        """Kill it."""
        if self.result() is None:
            ray_module().cancel(self._reference, force=True)


class Cluster:
    """Runs jobs as tasks of a Ray cluster.

    shared: whether the nodes have the sweep's directory under the same path; None: each task checks that.
    ship_seconds: the interval at which nodes that do not share it send changed files.
    """

    places = sys.maxsize  # Ray has its own queue

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
        """Submit a run to Ray."""
        job = job.resolved()
        start = launch(job)._replace(cwd=Path.cwd())
        order = Order(start, job.out, job.toml(), self._shared, self._ship_seconds)
        options = self._task.options(**self._takes, max_retries=RETRIES, name=job.label)
        return Task(options.remote(order, self._desk))


def leave() -> None:
    """Disconnect from the cluster; one started by `connect` ends."""
    ray_module().shutdown()
