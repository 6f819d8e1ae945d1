"""A whole run: a scenario driven through a Learner, with evaluation and files. Killed at any instant, it goes on."""

import math
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl import __version__, events
from geodl.analysis import leading_angles, linear_cka, svcca
from geodl.cache import Cache
from geodl.config import Layer, RunConfig, file_layers, preset_layer
from geodl.data.images import concat
from geodl.data.scenario import ClassIncremental
from geodl.data.sources import Dataset, load, source_options
from geodl.devices import available_cores
from geodl.errors import ConfigError, MissingExtraError, TrainingError
from geodl.files import fingerprint, interpreting
from geodl.learner import Learner
from geodl.memory import quota
from geodl.methods import configure
from geodl.metrics import Trajectory, to_metrics
from geodl.store import RunDirectory, has_record
from geodl.text import one_line
from geodl.training import Base


@dataclass(frozen=True)
class RunResult:
    """A complete run: its directory, and by classifier what it could do after each phase."""

    directory: Path
    results: dict[str, Trajectory]


def run(
    *,
    preset: str | None = None,
    config: Path | str | None = None,
    out: Path | str | None = None,
    fresh: bool = False,
    allow_environment_change: bool = False,
    cache: bool = True,
    listener: events.Listener = events.ignore,
    **options: Any,
) -> RunResult:
    """Do what ``geodl run`` does: run an experiment, go on with it, or find it complete.

    The options are those of the command line: ``run(preset="digits", method="lucir", distill="geodesic")``.
    """
    layers = [preset_layer(preset)] if preset else []
    layers += file_layers(Path(config)) if config else []
    found = configure([*layers, Layer("option", options)]).config
    store = run_config(
        found,
        out=Path(out) if out else None,
        fresh=fresh,
        allow_environment_change=allow_environment_change,
        cache=Cache() if cache else None,
        listener=listener,
    )
    return RunResult(store.path, results_of(store))


def results_of(store: RunDirectory) -> dict[str, Trajectory]:
    """Return what each classifier could do after each complete phase of a run."""
    metrics = [store.load_metrics(t) for t in range(store.completed())]
    with interpreting(store.path):
        return Trajectory.of(metrics)


def run_config(
    config: RunConfig,
    *,
    out: Path | None = None,
    fresh: bool = False,
    allow_environment_change: bool = False,
    cache: Cache | None = None,
    listener: events.Listener = events.ignore,
    stop: Callable[[], bool] = lambda: False,
    data: Dataset | None = None,
) -> RunDirectory:
    """Run an experiment, or go on with it, or find it complete; return its directory.

    The directory is ``out`` or runs/NAME-HASH. ``data`` replaces the source that the configuration names.
    """
    data = data or load_data(config)
    scenario = scenario_of(config, data)
    path = out or Path("runs") / run_name(config)
    threads, precision = _machine(config, path, fresh)
    first = [scenario.classes[c] for c in scenario.groups[0]]
    shared = Base(cache, fingerprint([data.fingerprint, first])) if cache is not None else None
    learner = Learner(config, stop=stop, shared_base=shared, decided_precision=precision)
    learner.check()  # a network that cannot be built is no reason to make a directory
    ranks = learner.trainer.ranks
    identity = config.identity() | {"fingerprint": fingerprint([data.fingerprint, data.classes])}
    if config.weights:  # another file under the same name makes another run
        identity["weights_sha256"] = sha256(config.weights.read_bytes()).hexdigest()
    if ranks.is_main_process:
        store = RunDirectory.create_or_open(
            path,
            identity,
            environment=_environment(learner, threads),
            must_match=("threads", "device"),
            phases=len(scenario),
            fresh=fresh,
            allow_environment_change=allow_environment_change,
        )
    try:
        ranks.barrier()
        store = store if ranks.is_main_process else RunDirectory(path)
        with store.lock() if ranks.is_main_process else nullcontext():
            _Run(learner, scenario, store, listener).through()
    except RuntimeError as error:  # what torch raises when the other end of a connection is gone
        if ranks.world == 1 or isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        reason = one_line(error)
        raise TrainingError(f"another process of this run has ended; the same command continues ({reason})") from error
    return store


def follows() -> bool:
    """Whether this process was started to help another one, which does the talking."""
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def load_data(config: RunConfig) -> Dataset:
    """Load the data that a configuration names."""
    options = {name: getattr(config, name) for name in source_options(config.data) if name in type(config).model_fields}
    return load(config.data, config.data_dir, **options)


def scenario_of(config: RunConfig, data: Dataset) -> ClassIncremental:
    """Cut the data into groups as the configuration says."""
    count = len(data.classes if isinstance(config.order, str) else config.order)
    base = count // 2 if config.base is None else config.base
    if not config.phases:
        base = count
    elif config.groups is None and base >= count:
        raise ConfigError(
            f"base = {base}: at most {count - 1} of the {count} classes are allowed, so that some are left to learn"
        )
    return ClassIncremental(data, base, config.phases, groups=config.groups, order=config.order, seed=config.order_seed)


def run_name(config: RunConfig) -> str:
    """Return the name of a run's directory: data, method, distillation where it is not the method's own, hash."""
    own = type(config).model_fields["distill"].default
    suffix = "" if config.distill == own else f"-{config.distill}"
    return f"{config.data}-{config.method}{suffix}-{config.hash()}"


class _Run:
    """The phases of one run."""

    def __init__(
        self, learner: Learner, scenario: ClassIncremental, store: RunDirectory, listener: events.Listener
    ) -> None:
        self.learner, self.scenario, self.store = learner, scenario, store
        self.config = learner.config
        self.is_main_process = learner.trainer.ranks.is_main_process
        self._listener = listener
        self._base_features: Tensor | None = None
        self._board = _board(store.path) if self.config.tensorboard and self.is_main_process else None
        learner.listener = self._tell

    def _tell(self, event: events.Event) -> None:
        """Pass on what happens, and keep a record of it: all but single steps."""
        if not self.is_main_process:
            return
        self._listener(event)
        if self._board is not None:
            _draw(self._board, event)
        if not isinstance(event, events.FREQUENT):
            self.store.events(event.kind, **event.record())

    def through(self) -> None:
        """Go through all the phases that are not complete."""
        done, directory = self.store.completed(), str(self.store.path)
        sizes = [len(group) for group in self.scenario.groups]
        self._tell(events.RunStarted(directory, sizes, done, self._work()))
        if done:
            self.learner.restore(self.store.load_phase(done - 1))
            if self.learner.method.keeps_all_data:
                self.learner.given = concat([self.scenario.train(s) for s in range(done)])
        for t in range(done, len(self.scenario)):
            self._phase(t)
        if self.is_main_process:
            self.store.verify()  # no result over damaged phases
        self._tell(events.RunEnded(directory))

    def _work(self) -> list[int]:
        """Count the images that each phase trains on, over its epochs: what an estimate of the time left needs."""
        config, method = self.config, self.learner.method
        sizes = [len(self.scenario.train(t)) for t in range(len(self.scenario))]
        work = []
        for t, size in enumerate(sizes):
            before = self.scenario.seen(t - 1) if t else 0
            exemplars = before * quota(before, config.exemplars, config.memory_budget)
            kept = sum(sizes[:t]) if method.keeps_all_data else exemplars
            work.append(method.main_schedule(t).epochs * (size + kept) if method.trains(t) else size)
        return work

    def _phase(self, t: int) -> None:
        images, learner = self.scenario.train(t), self.learner
        names = [self.scenario.classes[c] for c in self.scenario.groups[t]]
        earlier = 0 if learner.given is None else len(learner.given)
        self._tell(events.PhaseStarted(t, names, earlier + len(images)))
        learner.learn(images, progress=self.store)
        test = learner.rows_of(self.scenario.test(t))
        found = learner.features(test)
        seen = concat([self.scenario.train(s) for s in range(t + 1)]) if self.config.ame else None
        more = {}
        if self.config.analysis:
            more["similarity"] = self._similarity(t, found.pooled[found.labels < self.scenario.seen(0)])
        metrics = to_metrics(t, learner.confusions(test, found, seen), **more)
        if self.is_main_process:
            model, memory, statistics = learner.tensors()
            self.store.save_phase(t, model, memory, metrics, learner.facts(), statistics)
            if t and statistics:
                self.store.forget_statistics(t - 1)
        learner.trainer.ranks.barrier()
        self._tell(events.PhaseEvaluated(t, metrics))

    def _similarity(self, t: int, now: Tensor) -> dict[str, Any]:
        """Compare the features of base-class test images, (N, d), with those of phase 0 (the paper's CCA figure)."""
        if t == 0:
            self._base_features = now
        elif self._base_features is None:
            precision = self.learner.trainer.precision
            before = Learner.restored(self.store.load_phase(0), config=self.config, decided_precision=precision)
            self._base_features = before.features(before.rows_of(self.scenario.test(0))).pooled
        base = self._base_features
        assert base is not None
        if len(base) < 2:
            return {}
        scores = {"svcca": svcca(base, now), "cka": linear_cka(base, now)}
        known = {name: score for name, score in scores.items() if math.isfinite(score)}  # constant features have none
        return {**known, "angles": leading_angles(base, now)}


def _board(directory: Path) -> Any:
    """Open TensorBoard's file of curves in the run directory."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "--tensorboard") from None
    return SummaryWriter(str(directory / "tensorboard"))


def _draw(board: Any, event: events.Event) -> None:
    """Add what TensorBoard shows: the parts of the loss of each epoch, and the accuracies of each phase."""
    if isinstance(event, events.EpochEnded):
        for name, value in event.parts.items():
            board.add_scalar(f"phase {event.phase} {event.stage}/{name}", value, event.epoch)
    elif isinstance(event, events.PhaseEvaluated):
        for name, accuracy in event.metrics["accuracy"].items():
            if accuracy is not None:  # there were test images
                board.add_scalar(f"accuracy/{name}", accuracy, event.phase)
    elif isinstance(event, events.RunEnded):
        board.close()


def _machine(config: RunConfig, path: Path, fresh: bool) -> tuple[int, str | None]:
    """Set the number of threads: as configured, else as the run began, else the cores there are.

    Return it, and the precision that the run began with where the configuration leaves that open.
    """
    began = {} if fresh or not has_record(path) else RunDirectory(path).environment
    threads = config.threads or began.get("threads") or available_cores()
    torch.set_num_threads(threads)
    return threads, began.get("precision") if config.precision == "auto" else None


def _environment(learner: Learner, threads: int) -> dict[str, Any]:
    return {
        "threads": threads,
        "device": learner.trainer.device.type,
        "precision": learner.trainer.precision,
        "processes": learner.trainer.ranks.world,
        "geodl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Name the commit of the code, where it runs from a checkout of its own; with + where something was changed since."""
    here = ["git", "-C", str(Path(__file__).parent)]

    def said(*words: str) -> str:
        return subprocess.run([*here, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        said("ls-files", "--error-unmatch", Path(__file__).name)  # inside another project's checkout it is not tracked
        return said("rev-parse", "--short", "HEAD") + ("+" if said("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
