"""Experiments: a scenario driven through a Learner, with evaluation and files; resumable at any point."""

import logging
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl import __version__
from geodl.bench.curves import curves
from geodl.bench.work import trained_images
from geodl.config import Layer, RunConfig, file_layers, import_parts, imported, preset_layer
from geodl.core import events
from geodl.core.cache import Cache
from geodl.core.content import fingerprint, interpreting
from geodl.core.devices import available_cores
from geodl.core.errors import ConfigError, TrainingError
from geodl.core.keys import derive
from geodl.core.ranks import Ranks
from geodl.core.text import one_line
from geodl.data.dataset import Dataset, load, source_options
from geodl.data.images import concat
from geodl.data.scenario import ClassIncremental, class_order
from geodl.learning.evaluation import evaluate
from geodl.learning.learner import Learner
from geodl.learning.saving import load_model, save_model
from geodl.learning.shared_base import SharedBase
from geodl.methods import METHODS, configure
from geodl.model.analysis import leading_angles, linear_cka, svcca
from geodl.model.metrics import Trajectory, to_metrics
from geodl.store import Directory, exists

_log = logging.getLogger("geodl")


@dataclass(frozen=True)
class RunResult:
    """A complete run: its directory and the trajectory of each classifier, on test images and (with `hold_out`) held-out images."""

    directory: Path
    results: dict[str, Trajectory]
    held_out: dict[str, Trajectory] = field(default_factory=dict)


def run(
    *,
    preset: str | None = None,
    config: Path | str | None = None,
    out: Path | str | None = None,
    fresh: bool = False,
    allow_environment_change: bool = False,
    cache: bool = True,
    listener: events.Listener = events.ignore,
    imports: Sequence[str] = (),
    **options: Any,
) -> RunResult:
    """Run an experiment as ``geodl run`` does; an interrupted one resumes, a complete one is only read.

    Args:
        preset: the name of a preset.
        config: a TOML file of options.
        out: the run directory; None: ``runs/NAME-HASH``.
        fresh: start over instead of resuming.
        allow_environment_change: resume even if the number of threads or the device changed.
        cache: whether to share trained base phases with other runs.
        listener: called with each event (`geodl.core.events`).
        imports: files or modules with parts of your own, as for ``--import``.
        options: those of the command line, such as ``method="lucir", distill="geodesic"``.
    """
    import_parts(imports)
    layers = [preset_layer(preset)] if preset else []
    layers += file_layers(Path(config)) if config else []
    store = run_config(
        configure([*layers, Layer("option", options)]).config,
        out=Path(out) if out else None,
        fresh=fresh,
        allow_environment_change=allow_environment_change,
        cache=Cache() if cache else None,
        listener=listener,
    )
    return RunResult(store.path, results_of(store), results_of(store, held_out=True))


def results_of(store: Directory, *, held_out: bool = False) -> dict[str, Trajectory]:
    """Return the trajectory of each classifier over the complete phases, on test images or on held-out images (if any)."""
    metrics = [store.phase(t).json("metrics.json") for t in range(store.completed())]
    if held_out:
        metrics = [phase["held_out"] for phase in metrics if "held_out" in phase]
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
) -> Directory:
    """Run an experiment, or resume it, unless it is complete; return its directory.

    out: the directory; None: runs/NAME-HASH.
    stop: polled during training; when it returns True, progress is saved and Interrupted raised.
    data: used instead of the source that the configuration names.
    """
    data = data or load_data(config)
    scenario = scenario_of(config, data)
    path = out or Path("runs") / run_name(config)
    threads, precision = _machine(config, path, fresh)
    shared = SharedBase(cache, _base_data(config, scenario)) if cache is not None else None
    learner = Learner(config, stop=stop, shared_base=shared, decided_precision=precision)
    if fresh or not exists(path):
        learner.check()  # fails before a directory is made if the network cannot be built
    ranks = learner.trainer.ranks
    if ranks.is_main_process:
        store = Directory.create_or_open(
            path,
            _identity(config, path, fresh, data),
            environment=_environment(learner, threads),
            must_match=("threads", "device"),
            phases=len(scenario),
            fresh=fresh,
            allow_environment_change=allow_environment_change,
        )
    with _connection_errors(ranks):
        ranks.barrier()
        store = store if ranks.is_main_process else Directory(path)
        with store.lock() if ranks.is_main_process else nullcontext():
            _Run(learner, scenario, store, listener).execute()
    return store


@contextmanager
def _connection_errors(ranks: Ranks) -> Iterator[None]:
    """Turn torch's RuntimeError for a lost peer into a TrainingError."""
    try:
        yield
    except RuntimeError as error:
        if ranks.world == 1 or isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise TrainingError(
            f"another process of this run has ended; the same command continues ({one_line(error)})"
        ) from error


def _base_data(config: RunConfig, scenario: ClassIncremental) -> str:
    """Return a fingerprint of the images and classes of phase 0."""
    first = [scenario.classes[c] for c in scenario.groups[0]]
    part = [config.hold_out, config.images_per_class, config.split_seed]
    subset = part if config.hold_out or config.images_per_class else []
    return fingerprint([scenario.data.fingerprint, first, *subset])


def _identity(config: RunConfig, path: Path, fresh: bool, data: Dataset) -> dict[str, Any]:
    """Return what identifies this run; options that an existing directory does not know are left out at their defaults."""
    known = config.identity() if fresh or not exists(path) else Directory(path).config
    identity = config.older(known)
    identity["fingerprint"] = fingerprint([data.fingerprint, data.classes])
    if config.weights:  # another file under the same name makes another run
        identity["weights_sha256"] = sha256(config.weights.read_bytes()).hexdigest()
    return identity


def follows() -> bool:
    """Return whether this is a worker process of a distributed run; only the main process prints."""
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def load_data(config: RunConfig) -> Dataset:
    """Load the data of a configuration."""
    flat = config.flat()
    options = {name: flat[name] for name in source_options(config.data) if name in flat}
    return load(config.data, config.data_dir, **options)


def scenario_of(config: RunConfig, data: Dataset) -> ClassIncremental:
    """Split the data into phases according to the configuration."""
    order: Any = config.order
    seed = config.order_seed
    if config.classes is not None:
        order, seed = _first_classes(config, data), None
    if config.images_per_class is not None:
        data = _fewer_images(data, config.images_per_class, config.split_seed)
    return ClassIncremental(
        data,
        config.base,
        config.phases,
        groups=config.groups,
        order=order,
        seed=seed,
        hold_out=config.hold_out,
        split_seed=config.split_seed,
    )


def _first_classes(config: RunConfig, data: Dataset) -> list[int]:
    """Return the labels of the first `config.classes` classes of the order."""
    order = class_order(config.order, data.classes, config.order_seed)
    number = config.classes or 0
    if number > len(order):
        raise ConfigError(f"classes = {number}: allowed values are 1 to {len(order)}")
    if config.groups and isinstance(config.groups[0], tuple):
        raise ConfigError(f"classes = {number}: not allowed with groups of named classes")
    return order[:number]


def _fewer_images(data: Dataset, limit: int, seed: int) -> Dataset:
    """Return the data with at most `limit` training images per class, drawn by the seed and the class's name."""
    labels, kept = data.train.labels, []
    for label, name in enumerate(data.classes):
        rows = (labels == label).nonzero().flatten()
        generator = torch.Generator().manual_seed(derive(seed, "images per class", name))
        kept.append(rows[torch.randperm(len(rows), generator=generator)[:limit]])
    return replace(data, train=data.train.select(torch.cat(kept).sort().values))


def run_name(config: RunConfig) -> str:
    """Return the name of a run's directory: data, method, distillation (if not the method's default), hash."""
    own = METHODS[config.method].Options.default("distill")
    suffix = "" if config.distill == own else f"-{config.distill}"
    return f"{config.data}-{config.method}{suffix}-{config.hash()}"


class _Run:
    """The phases of one run."""

    def __init__(
        self,
        learner: Learner,
        scenario: ClassIncremental,
        store: Directory,
        listener: events.Listener,
    ) -> None:
        self.learner, self.scenario, self.store = learner, scenario, store
        self.config = learner.config
        self.ranks = learner.trainer.ranks
        self._base_features: Tensor | None = None
        self._listeners = [listener]
        if self.config.tensorboard and self.ranks.is_main_process:
            self._listeners.append(curves(store.path))
        learner.listen(self._emit)

    def _emit(self, event: events.Event) -> None:
        """Pass an event to the listeners and log it, except for single steps."""
        if not self.ranks.is_main_process:
            return
        for listener in self._listeners:
            listener(event)
        if not isinstance(event, events.FREQUENT):
            self.store.events(event.kind, **event.record())

    def execute(self) -> None:
        """Run all phases that are not complete."""
        if self.ranks.is_main_process and (problem := self.store.drop_damaged()):
            _log.warning("%s; the run resumes from there", problem)
        self.ranks.barrier()
        if not self.ranks.is_main_process:
            self.store = Directory(self.store.path)
        done, directory = self.store.completed(), str(self.store.path)
        sizes = [len(group) for group in self.scenario.groups]
        images = [len(self.scenario.train(t)) for t in range(len(self.scenario))]
        work = trained_images(self.config, images, sizes)
        self._emit(events.RunStarted(directory, sizes, done, work))
        advice = self.learner.method.advice(sum(sizes))
        if advice is not None and done < len(sizes) > 1:
            self._emit(events.Advised(advice))
        if done:
            self.learner.model = load_model(self.store.phase(-1), self.config)
            if self.learner.method.joint:
                for t in range(done):
                    self.learner.remember(self.scenario.train(t))
        for t in range(done, len(self.scenario)):
            self._phase(t)
        if self.ranks.is_main_process:
            self.store.verify()  # no result from damaged phases
        self._emit(events.RunEnded(directory))

    def _phase(self, t: int) -> None:
        """Learn, evaluate and store one phase."""
        images, learner = self.scenario.train(t), self.learner
        names = [self.scenario.classes[c] for c in self.scenario.groups[t]]
        earlier = 0 if learner.seen is None else len(learner.seen)
        self._emit(events.PhaseStarted(t, names, earlier + len(images)))
        learner.learn(images, progress=self.store)
        seen = None
        if self.config.ame:
            seen = learner.rows_of(concat([self.scenario.train(s) for s in range(t + 1)]))
        test = learner.rows_of(self.scenario.test(t))
        confusions, features = evaluate(learner.known, test, learner.features, seen=seen)
        more = {}
        if self.config.analysis:
            of_base = features.labels < self.scenario.seen(0)
            more["similarity"] = self._similarity(t, features.pooled[of_base])
        held_out = self.scenario.held_out(t)
        if held_out is not None:
            more["held_out"] = to_metrics(t, learner.evaluate(held_out))
        metrics = to_metrics(t, confusions, **more)
        if self.ranks.is_main_process:
            action = {"action": "learn", "phase": t}
            save_model(
                self.store, learner.known, action=action, metrics=metrics, drop_statistics=True
            )
        self.ranks.barrier()
        self._emit(events.PhaseEvaluated(t, metrics))

    def _similarity(self, t: int, now: Tensor) -> dict[str, Any]:
        """Compare the features (N, d) of base-class test images with those of phase 0 (the paper's CCA figure)."""
        if t == 0:
            self._base_features = now
        elif self._base_features is None:
            model = load_model(self.store.phase(0), self.config)
            precision = self.learner.trainer.precision
            before = Learner(self.config, model=model, decided_precision=precision)
            self._base_features = before.features(before.rows_of(self.scenario.test(0))).pooled
        base = self._base_features
        assert base is not None
        if len(base) < 2:
            return {}
        scores = {"svcca": svcca(base, now), "cka": linear_cka(base, now)}
        # Undefined for constant features.
        finite = {name: score for name, score in scores.items() if math.isfinite(score)}
        return {**finite, "angles": leading_angles(base, now)}


def _machine(config: RunConfig, path: Path, fresh: bool) -> tuple[int, str | None]:
    """Set the number of threads and return it, with the precision of a run to resume if the configuration leaves it open.

    Threads: as configured, else as the run was started with, else all cores.
    """
    began = {} if fresh or not exists(path) else Directory(path).environment
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
        "imports": imported(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this checkout, with + if it has local changes; None outside a checkout of this project."""
    file = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # fails in another project's checkout
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", ".") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None
