"""Results read from run directories: runs, and settings (runs that differ only in their seed)."""

import itertools
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from geodl.bench.report.published import reference
from geodl.config import SECTIONS, presets
from geodl.core.content import interpreting
from geodl.core.errors import ConfigError, StoreError
from geodl.learning.saving import load_model
from geodl.losses import DISTILLATIONS
from geodl.methods import METHODS
from geodl.model.classifiers import default_classifier, titles
from geodl.model.memory import Memory
from geodl.model.metrics import Confusion, Trajectory, confusions_of
from geodl.store import Directory, reading

DATA_NAMES = {
    "cifar100": "CIFAR-100",
    "imagenet-subset": "ImageNet-subset",
    "imagenet": "ImageNet",
    "digits": "digits",
}
PUBLIC = frozenset(DATA_NAMES)
"""Sources with public images; images of all others may be private."""
MANY = 4
"""Settings that differ in more options than this are labeled by their directories instead."""


def label_of(method: str, distill: str | None) -> str:
    """Return the label of a method with a distillation as in the paper's tables; a method's default distillation is left out."""
    if method not in METHODS:
        return method
    name = METHODS[method].title
    if distill == METHODS[method].Options.default("distill"):
        return name
    if distill == "none":
        return f"{name}, no distillation"
    known = DISTILLATIONS.get(str(distill))
    return f"{name} + {known.title if known else distill}"


@dataclass(frozen=True)
class Epoch:
    """One epoch from events.jsonl: mean loss, its parts, images per second.

    angles: principal angles in degrees between the features of the old and the new network; empty if not measured.
    """

    phase: int
    stage: str
    epoch: int
    loss: float
    parts: Mapping[str, float]
    rate: float
    angles: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[int, str, int]:
        """Phase, stage and number."""
        return self.phase, self.stage, self.epoch


@dataclass(frozen=True)
class Run:
    """The complete phases of a run directory.

    total:    the number of phases of the whole run; None for a model, which can always learn more.
    metrics:  metrics.json of each complete phase.
    epochs:   the epochs of training, in order.
    """

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    total: int | None
    metrics: Sequence[Mapping[str, Any]]
    epochs: Sequence[Epoch]

    @property
    def is_model(self) -> bool:
        """Whether it is a model of `geodl learn` and not a run."""
        return self.config.get("kind") == "model"

    @property
    def done(self) -> int:
        """The number of complete phases."""
        return len(self.metrics)

    @property
    def complete(self) -> bool:
        """Whether all phases are complete."""
        return self.total is not None and self.done == self.total

    @cached_property
    def results(self) -> dict[str, dict[str, Any]]:
        """The results of each classifier (``Trajectory.to_dict()``), in the order of tables."""
        trajectories = Trajectory.of(self.metrics)
        return {name: trajectories[name].to_dict() for name in titles() if name in trajectories}

    @property
    def classes(self) -> list[str]:
        """The names of the classes learned, in learning order."""
        return list(self.metrics[-1]["classes"]) if self.metrics else []

    @property
    def groups(self) -> list[list[str]]:
        """The names of the classes that each complete phase added."""
        return next(iter(self.results.values()))["groups"] if self.results else []

    @property
    def seen(self) -> list[int]:
        """The number of classes learned after each complete phase."""
        return list(itertools.accumulate(len(group) for group in self.groups))

    def similarities(self, measure: str) -> list[Any]:
        """Return svcca, cka or angles between the features and those of phase 0 by phase; empty if not measured."""
        measures = [metrics.get("similarity") or {} for metrics in self.metrics]
        return [phase.get(measure) for phase in measures] if all(measures) else []

    def confusion(self, classifier: str) -> Confusion:
        """Return the confusion matrix after the last complete phase."""
        return confusions_of(self.metrics[-1])[classifier]

    def memory(self) -> Memory:
        """Read the exemplars kept after the last complete phase."""
        if not self.metrics:
            return Memory()
        directory = Directory(self.path)
        return load_model(directory.phase(-1)).memory

    @property
    def label(self) -> str:
        """The label of the method as in the paper's tables."""
        return label_of(self.config.get("method", "model"), self.config.get("distill"))

    @property
    def data(self) -> str:
        """The display name of the data."""
        source = str(self.config.get("data", "own images"))
        return DATA_NAMES.get(source, source)

    def command(self) -> str | None:
        """Return the command that reproduces this run; None for a model and for data from memory."""
        config, threads = self.config, self.environment.get("threads")
        from_memory = config.get("data") == "arrays" and not config.get("data_dir")
        if self.is_model or from_memory or config.get("method") not in METHODS:
            return None
        candidates = [words for preset in (None, *presets()) if (words := _words(config, preset))]
        more = ["--threads", str(threads)] if threads else []
        for name in self.environment.get("imports", ()):
            more += ["--import", name]
        return (
            shlex.join(["geodl", "run", *min(candidates, key=len), *more]) if candidates else None
        )


def read_run(path: Path) -> Run:
    """Read the complete phases of a run or model directory."""
    with interpreting(path):
        run = reading(path, _read_run)
        _ = run.results  # parsed here, so that malformed metrics are reported with the path
        return run


def _read_run(directory: Directory) -> Run:
    metrics = [directory.phase(t).json("metrics.json") for t in range(directory.completed())]
    epochs = _epochs(directory.read_events())
    config: Mapping[str, Any] = directory.config
    if directory.kind == "model" and metrics:
        data = SECTIONS["Data"].model_fields
        last = directory.phase(-1).json("extra.json")["config"]
        config = {key: last[key] for key in last if key not in data}
        metrics = _learned([phase for phase in metrics if phase])
    if directory.kind == "model":
        config = {**config, "kind": "model"}
    return Run(directory.path, config, directory.environment, directory.phases, metrics, epochs)


def _learned(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of those steps of a model that added classes."""
    steps: list[dict[str, Any]] = []
    for step in metrics:
        if steps and len(step["classes"]) < len(steps[-1]["classes"]):
            steps = []  # a class was removed: earlier steps have other classes
        if steps and len(step["classes"]) == len(steps[-1]["classes"]):
            steps.pop()  # more images of known classes, or a renamed class
        steps.append(step)
    return steps


def _epochs(events: Sequence[Mapping[str, Any]]) -> list[Epoch]:
    """Return the last record of each epoch; a resumed run repeats some of them."""
    epochs: dict[tuple[int, str, int], Epoch] = {}
    for event in events:
        if event["kind"] not in ("epoch", "angles"):
            continue
        key = (event["phase"], event["stage"], event["epoch"])
        if event["kind"] == "epoch" and isinstance(event["loss"], float):
            epochs.pop(key, None)
            epochs[key] = Epoch(*key, event["loss"], event["parts"], event["rate"])
        elif event["kind"] == "angles" and key in epochs:
            epochs[key] = replace(epochs[key], angles=tuple(event["angles"]))
    return list(epochs.values())


def _words(config: Mapping[str, Any], preset: str | None) -> list[str]:
    """Return the command line options that yield this configuration from a preset; empty if it cannot be reached."""
    try:
        start = reference(config, preset).identity()
    except ConfigError:
        return []
    own = METHODS[config["method"]].Options.default("distill")
    named = {"method"} if config["distill"] == own else {"method", "distill"}
    words = ["--preset", preset] if preset else []
    for key, usual in start.items():
        value = config.get(key, usual)
        if key in named or value != usual:
            if value is None:
                return []
            words += _word(f"--{key.replace('_', '-')}", value)
    return words


def _word(name: str, value: Any) -> list[str]:
    """Return one option in command line syntax: ``--key value``, ``--no-key``, ``--key a,b``."""
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [name, ";".join(map(",".join, value))]
    return [name, ",".join(map(str, value)) if isinstance(value, list) else str(value)]


@dataclass(frozen=True)
class Estimate:
    """Mean and sample standard deviation (None for a single run) over runs."""

    mean: float
    spread: float | None
    runs: int


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Summarize one value per run; None unless every run has it."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known or len(known) < len(values):
        return None
    spread = statistics.stdev(known) if len(known) > 1 else None
    return Estimate(statistics.fmean(known), spread, len(known))


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed and have as many complete phases."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The run with the lowest seed, shown where runs cannot be averaged."""
        return self.runs[0]

    @property
    def classifiers(self) -> list[str]:
        """The classifiers that every run has."""
        others = [set(run.results) for run in self.runs]
        return [name for name in self.first.results if name in set.intersection(*others)]

    @property
    def main(self) -> str | None:
        """The main classifier."""
        return default_classifier(self.classifiers) if self.classifiers else None

    @property
    def held_out(self) -> "Setting | None":
        """The same setting evaluated on held-out training images; None if there are none."""
        runs = []
        for run in self.runs:
            metrics = [phase["held_out"] for phase in run.metrics if "held_out" in phase]
            runs.append(replace(run, metrics=metrics))
        return replace(self, runs=tuple(runs)) if all(run.done for run in runs) else None

    def value(self, classifier: str, name: str) -> Estimate | None:
        """Summarize a result by its key in ``Trajectory.to_dict()``."""
        return estimate([run.results.get(classifier, {}).get(name) for run in self.runs])

    def accuracy(self, classifier: str) -> list[Estimate | None]:
        """Summarize the accuracy A_t for each phase t; empty if a run does not have the classifier."""
        return self._by_phase(lambda run: run.results.get(classifier, {}).get("accuracy", []))

    def lost(self, classifier: str) -> list[Estimate | None]:
        """Summarize, for each phase, the accuracy lost on the first group since it was learned."""
        return self._by_phase(
            lambda run: _losses(run.results.get(classifier, {}).get("matrix", [[]])[0])
        )

    def similarity(self, measure: str) -> list[Estimate | None]:
        """Summarize svcca or cka for each phase; empty if a run does not have it."""
        return self._by_phase(lambda run: run.similarities(measure))

    def _by_phase(self, values: Callable[[Run], list[float | None]]) -> list[Estimate | None]:
        """Summarize a value per phase over the runs; empty if a run has none."""
        by_run = [values(run) for run in self.runs]
        return [estimate(phase) for phase in zip(*by_run, strict=True)] if all(by_run) else []

    def angles(self) -> list[tuple[float, float, float]]:
        """Return minimum, median and maximum of the principal angles to phase 0 over all runs, in degrees, by phase."""
        by_run = [run.similarities("angles") for run in self.runs]
        phases = zip(*by_run, strict=True) if all(by_run) else ()
        return [_range(angles) for phase in phases if (angles := list(itertools.chain(*phase)))]

    @property
    def turned(self) -> list[Epoch]:
        """The epochs with angles between the old and the new network."""
        return [epoch for epoch in self.first.epochs if epoch.angles]

    def drift(self) -> list[tuple[float, float, float]]:
        """Return minimum, median and maximum of those angles over all runs, for each epoch in ``turned``."""
        angles: dict[tuple[int, str, int], list[float]] = {}
        for run in self.runs:
            for epoch in run.epochs:
                angles.setdefault(epoch.key, []).extend(epoch.angles)
        return [_range(angles[epoch.key]) for epoch in self.turned]


def _losses(accuracies: Sequence[float | None]) -> list[float | None]:
    """Return the first accuracy minus each; None if one of both is unknown."""
    first, found = next(iter(accuracies), None), list[float | None]()
    for now in accuracies:
        found.append(None if first is None or now is None else first - now)
    return found


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def read_settings(paths: Sequence[Path]) -> list[Setting]:
    """Read run directories and group runs that differ only in their seed, each seed once, in the order of `paths`.

    Models are not grouped: models with equal options may have learned different images.
    """
    if not paths:
        raise StoreError("no run directory: at least one is needed")
    unique = {path.resolve(): path for path in paths}
    grouped: dict[str, dict[int, Run]] = {}
    for resolved, run in zip(unique, map(read_run, unique.values()), strict=True):
        options = sorted((name, value) for name, value in run.config.items() if name != "seed")
        key = repr((options, run.done, run.total, resolved if run.is_model else None))
        grouped.setdefault(key, {}).setdefault(run.config.get("seed", 0), run)
    settings = []
    for seeds in grouped.values():
        members = tuple(run for _, run in sorted(seeds.items()))
        settings.append(Setting(members[0].label, members))
    return _distinguished(settings)


def _distinguished(settings: Sequence[Setting]) -> list[Setting]:
    """Add the differences to labels: protocol options that are not the same everywhere, other options among equal labels."""
    protocol = [key for key in ("data", "base", "phases") if _differs(key, settings)]
    labeled = []
    for setting in settings:
        run, keys = setting.first, list(protocol)
        same = [other for other in settings if other.label == setting.label]
        others = [key for key in run.config if key not in ("seed", "fingerprint", *keys)]
        keys += [key for key in others if _differs(key, same)]
        more = [f"{key} {run.config.get(key)}" for key in keys]
        if len(more) > MANY or (run.is_model and len(same) > 1):
            more = [run.path.name]
        if not run.complete and run.total is not None:
            more.append(f"{run.done} of {run.total} phases")
        labeled.append(replace(setting, label=", ".join([setting.label, *more])))
    return labeled


def _differs(key: str, settings: Sequence[Setting]) -> bool:
    return len({repr(setting.first.config.get(key)) for setting in settings}) > 1
