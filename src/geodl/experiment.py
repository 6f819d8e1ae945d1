"""A whole run: data, scenario, phase after phase, evaluation, metrics, files. Killed at any instant, it goes on."""

import math
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl import __version__
from geodl.analysis import leading_angles, linear_cka, svcca
from geodl.cache import Cache
from geodl.config import RunConfig
from geodl.data.batches import Transform
from geodl.data.images import ArrayImages, Images, concat
from geodl.data.scenario import ClassIncremental
from geodl.data.sources import Dataset, load, source_options
from geodl.devices import available_cores
from geodl.errors import ConfigError, MissingExtraError, TrainingError
from geodl.files import fingerprint
from geodl.memory import Memory, quota
from geodl.methods import Method, Phase, build
from geodl.metrics import Trajectory, confusion, dense, sparse
from geodl.nets import Network
from geodl.predictors import CLASSIFIERS, class_means, nearest_mean, predict
from geodl.store import RunDirectory
from geodl.training import Listener, Trainer


def run(
    config: RunConfig,
    *,
    out: Path | None = None,
    fresh: bool = False,
    allow_environment_change: bool = False,
    cache: Cache | None = None,
    listener: Listener = lambda kind, **fields: None,
    stop: Callable[[], bool] = lambda: False,
    data: Dataset | None = None,
) -> RunDirectory:
    """Run an experiment, or go on with it, or find it complete; give its directory.

    The directory is ``out`` or runs/NAME-HASH. ``data`` replaces the source that the configuration names.
    """
    data = data or load_data(config)
    scenario = scenario_of(config, data)
    method = build(config)
    path = out or default_directory(config)
    threads = _set_threads(config, path, fresh)
    base = fingerprint([data.fingerprint, [scenario.classes[c] for c in scenario.groups[0]]])
    transform = transform_of(config, data.train)
    trainer = Trainer(config, method, transform, cache=cache, base=base, listener=listener, stop=stop)
    trainer.build(1)  # a network that cannot be built is no reason to make a directory
    identity = config.identity() | {"fingerprint": fingerprint([data.fingerprint, data.classes])}
    if config.weights:  # another file under the same name makes another run
        identity["weights_sha256"] = sha256(config.weights.read_bytes()).hexdigest()
    if trainer.leads:
        store = RunDirectory.create_or_open(
            path,
            identity,
            environment=_environment(trainer, threads),
            must_match=("threads", "device"),
            phases=len(scenario.groups),
            fresh=fresh,
            allow_environment_change=allow_environment_change,
        )
    try:
        trainer.fabric.barrier()
        store = store if trainer.leads else RunDirectory(path)
        with store.lock() if trainer.leads else nullcontext():
            _Run(trainer, method, scenario, store, listener).through()
    except RuntimeError as error:  # what torch raises when the other end of a connection is gone
        if trainer.shard.world == 1:
            raise
        raise TrainingError("another process of this run has ended; the same command continues") from error
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


def transform_of(config: RunConfig, images: Images) -> Transform:
    """Give the transform of a run; without image_size that of the data, or 224 for image files."""
    own = min(images.pixels.shape[2:]) if isinstance(images, ArrayImages) else 224
    return Transform(
        config.image_size or own, config.mean, config.std, config.padding, config.flip, config.jitter, config.crop
    )


def run_name(config: RunConfig) -> str:
    """Give the name of a run: data, method, distillation where it is not the method's own."""
    own = type(config).model_fields["distill"].default
    suffix = "" if config.distill == own else f"-{config.distill}"
    return f"{config.data}-{config.method}{suffix}"


def default_directory(config: RunConfig) -> Path:
    """Give the directory of a run that was not given one."""
    return Path("runs") / f"{run_name(config)}-{config.hash()}"


class _Run:
    """The phases of one run."""

    def __init__(
        self, trainer: Trainer, method: Method, scenario: ClassIncremental, store: RunDirectory, listener: Listener
    ) -> None:
        self.trainer = trainer
        self.method = method
        self.scenario = scenario
        self.store = store
        self._listener = listener
        self._base_features: Tensor | None = None
        self._board = _board(store.path) if trainer.config.tensorboard and trainer.leads else None
        trainer.listener = self._tell

    def _tell(self, kind: str, **fields: Any) -> None:
        """Pass on what happens, and keep a record of it: all but single steps."""
        if not self.trainer.leads:
            return
        self._listener(kind, **fields)
        if self._board is not None:
            _draw(self._board, kind, fields)
        if kind != "step":
            self.store.events(
                kind, **{key: value for key, value in fields.items() if key not in ("metrics", "scenario")}
            )

    def through(self) -> None:
        """Go through all the phases that are not complete."""
        done = self.store.completed()
        total = len(self.scenario.groups)
        directory, work = str(self.store.path), self._work(total)
        self._tell("run", directory=directory, scenario=self.scenario, done=done, total=total, work=work)
        network, memory = self._restore(done) if done else (None, Memory.empty(embed=self.trainer.config.embed))
        for t in range(done, total):
            network, memory = self._phase(t, network, memory)
        if self.trainer.leads:
            self.store.verify()  # no result over damaged phases
        self._tell("done", directory=directory)

    def _work(self, total: int) -> list[int]:
        """Count the images that each phase trains on, over its epochs: what an estimate of the time left needs."""
        config = self.trainer.config
        sizes = [len(self.scenario.train(t)) for t in range(total)]
        work = []
        for t in range(total):
            before = self.scenario.seen(t - 1) if t else 0
            kept = (
                sum(sizes[:t])
                if self.method.keeps_all_data
                else before * quota(before, config.exemplars, config.budget)
            )
            work.append(self.method.main_schedule(t).epochs * (sizes[t] + kept))
        return work

    def _restore(self, done: int) -> tuple[Network, Memory]:
        last = self.store.load_phase(done - 1)
        network = self.trainer.build(self.scenario.seen(done - 1))
        network.load_state_dict(last.model)
        return network, Memory.from_tensors(last.memory)

    def _phase(self, t: int, network: Network | None, memory: Memory) -> tuple[Network, Memory]:
        images = self.scenario.train(t)
        if self.method.keeps_all_data:
            images = concat([self.scenario.train(s) for s in range(t + 1)])
            network, memory = None, Memory.empty(embed=memory.embed)
        group = [self.scenario.classes[c] for c in self.scenario.groups[t]]
        self._tell("phase", phase=t, classes=group, images=len(images))
        phase = self.trainer.learn(t, network, memory, images, self.scenario.seen(t), self.store)
        confusions, extra = self._evaluate(t, phase)
        metrics = self._metrics(t, confusions) | extra
        if self.trainer.leads:
            self.store.save_phase(t, phase.network.state_dict(), phase.memory.to_tensors(), metrics, {})
        self.trainer.fabric.barrier()
        self._tell("evaluated", phase=t, metrics=metrics)
        return phase.network, phase.memory

    def _evaluate(self, t: int, phase: Phase) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give each classifier's confusion matrix, from one pass over the test images, and the likeness to phase 0."""
        classes = self.scenario.seen(t)
        test = self.trainer.features(phase.network, self.scenario.test(t))
        means = {"ame": self._oracle_means(t, phase, classes), "honest_ame": phase.memory.means}
        if phase.memory.images is not None:
            means["nme"] = self.trainer.exemplar_means(phase.network, phase.memory.images, classes)
        scores = {"cnn": test.logits}
        scores |= {name: nearest_mean(test.pooled, mean) for name, mean in means.items() if mean is not None}
        confusions = {name: confusion(test.labels, predict(score), classes) for name, score in scores.items()}
        base = test.pooled[test.labels < self.scenario.seen(0)]
        return confusions, {"likeness": self._likeness(t, base)} if self.trainer.config.analysis else {}

    def _oracle_means(self, t: int, phase: Phase, classes: int) -> Tensor:
        """Give AME's means: over all training images seen so far, which a real learner no longer has."""
        images = concat([self.scenario.train(s) for s in range(t + 1)])
        most = self.trainer.config.ame_images
        if most is not None:
            rows = [(images.labels == c).nonzero().squeeze(1)[:most] for c in range(classes)]
            images = images.select(torch.cat(rows))
        found = self.trainer.features(phase.network, images)
        return class_means(found.pooled, found.labels, classes)

    def _likeness(self, t: int, now: Tensor) -> dict[str, Any]:
        """Compare the features of base-class test images, (N, d), with those of phase 0 (the paper's CCA figure)."""
        if t == 0:
            self._base_features = now
        elif self._base_features is None:
            network = self.trainer.build(self.scenario.seen(0))
            network.load_state_dict(self.store.load_phase(0).model)
            self._base_features = self.trainer.features(network, self.scenario.test(0)).pooled
        base = self._base_features
        assert base is not None
        if len(base) < 2:
            return {}
        scores = {"svcca": svcca(base, now), "cka": linear_cka(base, now)}
        known = {name: score for name, score in scores.items() if math.isfinite(score)}  # constant features have none
        return {**known, "angles": leading_angles(base, now)}

    def _metrics(self, t: int, confusions: dict[str, Tensor]) -> dict[str, Any]:
        """Give what metrics.json holds: no times, hosts or paths, so that equal runs have equal bytes."""
        before = [self.store.load_metrics(s)["confusions"] for s in range(t)]
        classes = list(self.scenario.classes[: self.scenario.seen(t)])
        results = {}
        for name, matrix in confusions.items():
            past = [dense(earlier[name], self.scenario.seen(s)) for s, earlier in enumerate(before) if name in earlier]
            if len(past) == t:
                results[name] = Trajectory(self.scenario.groups, [*past, matrix], self.scenario.classes).to_dict()
        shown = "nme" if "nme" in results else "cnn"
        best = results[shown]
        final = "-" if best["accuracy"][-1] is None else f"{best['accuracy'][-1]:.1f}"
        average = f", average {best['average']:.1f}" if best["average"] is not None else ""
        return {
            "phase": t,
            "classes": classes,
            "confusions": {name: sparse(matrix) for name, matrix in confusions.items()},
            "results": results,
            "headline": f"{final} % on {len(classes)} classes{average} ({CLASSIFIERS[shown]})",
        }


def _board(directory: Path) -> Any:
    """Open TensorBoard's file of curves in the run directory."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "--tensorboard") from None
    return SummaryWriter(str(directory / "tensorboard"))


def _draw(board: Any, kind: str, fields: dict[str, Any]) -> None:
    """Add what TensorBoard shows: the parts of the loss of each epoch, and the accuracies of each phase."""
    if kind == "epoch":
        for name, value in fields["parts"].items():
            board.add_scalar(f"phase {fields['phase']} {fields['stage']}/{name}", value, fields["epoch"])
    elif kind == "evaluated":
        for name, result in fields["metrics"]["results"].items():
            board.add_scalar(f"accuracy/{name}", result["accuracy"][-1], fields["phase"])
    elif kind == "done":
        board.close()


def _set_threads(config: RunConfig, path: Path, fresh: bool) -> int:
    """Set the number of threads: as configured, else as the run began, else the cores there are."""
    threads = config.threads
    if threads is None and not fresh and (path / "config.json").exists():
        threads = RunDirectory(path).environment.get("threads")
    threads = threads or available_cores()
    torch.set_num_threads(threads)
    return threads


def _environment(trainer: Trainer, threads: int) -> dict[str, Any]:
    return {
        "threads": threads,
        "device": trainer.fabric.device.type,
        "processes": trainer.shard.world,
        "geodl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Name the commit of the code, where it runs from a checkout of its own; with + where something was changed since."""
    here = ["git", "-C", str(Path(__file__).parent)]

    def said(*words: str) -> str:
        return subprocess.run([*here, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        said("ls-files", "--error-unmatch", Path(__file__).name)  # inside another project's checkout it is not tracked
        return said("rev-parse", "--short", "HEAD") + ("+" if said("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
