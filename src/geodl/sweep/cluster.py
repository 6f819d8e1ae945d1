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

from geodl.config import RunConfig
from geodl.errors import ConfigError, MissingExtraError
from geodl.locks import is_locked
from geodl.sweep.jobs import Job
from geodl.sweep.runner import Process, arguments, environment_of
from geodl.sweep.shipping import Files, Seen, changed, receive

RETRIES = 3
SHIP_SECONDS = 10.0
ALONE = sys.maxsize


def ray_module() -> Any:
    """Return Ray, quiet; without it, an error that says what to install."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a run without GPUs keeps its environment
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what it writes to the terminal is for its developers
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
                f"ray = {address}: no cluster lets us in there ({_first_line(error)}); one with a token wants it in RAY_AUTH_TOKEN"
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
        raise ConfigError(f"nodes = {config.nodes}: on Ray a run has one node; --submit slurm takes more")
    cores = {"num_cpus": float(config.devices * (config.threads or 1))}
    ray = ray_module()
    gpus = config.accelerator == "cuda" or (config.accelerator == "auto" and ray.cluster_resources().get("GPU"))
    return cores | {"num_gpus": float(config.devices)} if gpus else cores


class Order(NamedTuple):
    """What a task is told: the run, and where its directory is on the driver's machine."""

    name: str
    options: str
    root: Path
    cwd: Path
    environment: dict[str, str]
    allow_environment_change: bool
    shared: bool | None
    ship_seconds: float


class Desk:
    """Keeps the directories of runs beside the driver, for nodes that do not share its disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def give(self, name: str) -> Files:
        """Return the files of a run as far as they are here."""
        return changed(self.root / name, {})[0]

    def take(self, name: str, files: Files, names: set[str]) -> None:
        """Keep what a run has changed."""
        receive(self.root / name, files, names)


def execute(order: Order, desk: Any) -> str:
    """Do a run on a node of the cluster; return why it failed, an empty text where it did not."""
    here = order.root / ".sweep" / f"{order.name}.toml"
    shared = order.shared if order.shared is not None else here.exists() and here.read_text() == order.options
    if shared:
        out = order.root / order.name
        command = arguments(here, out, order.allow_environment_change)
        wait_for_lock(out)
        return supervise(Process(command, here.with_suffix(".log"), order.environment, order.cwd), lambda: None)
    ray = ray_module()
    with tempfile.TemporaryDirectory(prefix="geodl-") as scratch:
        options, out, log = (Path(scratch) / name for name in ("options.toml", order.name, "log"))
        options.write_text(order.options)
        given = ray.get(desk.give.remote(order.name))
        if given:
            receive(out, given, set(given))
        sent: Seen = changed(out, {})[1]

        def ship() -> None:
            nonlocal sent
            files, now = changed(out, sent)
            if now != sent:
                ray.get(desk.take.remote(order.name, files, set(now)))
                sent = now

        cwd = order.cwd if order.cwd.is_dir() else None
        command = arguments(options, out, order.allow_environment_change)
        error = supervise(Process(command, log, order.environment, cwd), ship, order.ship_seconds)
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
        allow_environment_change: bool = False,
        shared: bool | None = None,
        ship_seconds: float = SHIP_SECONDS,
    ) -> None:
        connect(address)
        ray = ray_module()
        self._allow, self._shared, self._ship_seconds = allow_environment_change, shared, ship_seconds
        self._takes = resources(jobs[0].config)
        self._root = jobs[0].out.parent.resolve()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._desk = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote(self._root)
        self._task = ray.remote(execute)

    def start(self, job: Job) -> Task:
        """Give a run to Ray."""
        how = (self._allow, self._shared, self._ship_seconds)
        order = Order(job.out.name, job.toml(), self._root, Path.cwd(), environment_of(job.config), *how)
        options = self._task.options(**self._takes, max_retries=RETRIES, name=job.label)
        return Task(options.remote(order, self._desk))


def leave() -> None:
    """Leave the cluster; one that was started for us ends."""
    ray_module().shutdown()
