"""Read run directories into plain data: runs, and settings, which are runs that differ in their seed alone."""

import itertools
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from geodl.config import Layer, RunConfig, groups_of_options, preset_layer, presets
from geodl.errors import ConfigError, StoreError
from geodl.files import interpreting
from geodl.losses import DISTILLATIONS
from geodl.memory import Memory
from geodl.methods import METHODS, configure, kinds
from geodl.metrics import Confusion, Trajectory, confusions_of
from geodl.predictors import CLASSIFIERS, default_classifier
from geodl.store import RunDirectory, read_steadily

DATA_NAMES = {"cifar100": "CIFAR-100", "imagenet-subset": "ImageNet-subset", "imagenet": "ImageNet", "digits": "digits"}
PUBLIC = frozenset(DATA_NAMES)
"""Sources whose images anyone may see; all others may be a person's own photographs."""
MANY = 4
"""Runs that differ in more options than so many are told apart by the names of their directories."""


def label_of(method: str, distill: str | None) -> str:
    """Return a method and its distillation as the paper's tables name them; the method's own distillation goes without saying."""
    if method not in METHODS:
        return method
    name = METHODS[method].title
    if distill == METHODS[method].Config.model_fields["distill"].default:
        return name
    added = DISTILLATIONS[distill].title if distill in DISTILLATIONS else distill
    return f"{name}, no distillation" if distill == "none" else f"{name} + {added}"


@dataclass(frozen=True)
class Epoch:
    """One epoch as events.jsonl tells it: mean loss, its parts, images per second.

    angles: principal angles in degrees between the features of the old network and of the new one; empty where not taken.
    """

    phase: int
    stage: str
    epoch: int
    loss: float
    parts: Mapping[str, float]
    rate: float
    angles: tuple[float, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run directory, as far as it is complete.

    total:    the phases of the whole run, None where it may always go on; done: those complete.
    metrics:  metrics.json of each complete phase.
    epochs:   what training said, in order.
    history:  what was done to a model, oldest first, and when; nothing for a run.
    """

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    total: int | None
    metrics: Sequence[Mapping[str, Any]]
    epochs: Sequence[Epoch]
    history: Sequence[Mapping[str, Any]] = ()

    @property
    def is_model(self) -> bool:
        """Whether it is a model that learned a person's images, not a run."""
        return self.config.get("kind") == "model"

    @property
    def done(self) -> int:
        """The number of complete phases."""
        return len(self.metrics)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.total is not None and self.done == self.total

    @cached_property
    def results(self) -> dict[str, dict[str, Any]]:
        """What each classifier could do after each phase, ``Trajectory.to_dict()``, in the order of CLASSIFIERS."""
        found = Trajectory.of(self.metrics)
        return {name: found[name].to_dict() for name in CLASSIFIERS if name in found}

    @property
    def classes(self) -> list[str]:
        """The names of the classes seen, in the learning order."""
        return list(self.metrics[-1]["classes"]) if self.metrics else []

    @property
    def groups(self) -> list[list[str]]:
        """The names of the classes that each complete phase added."""
        return next(iter(self.results.values()))["groups"] if self.results else []

    @property
    def seen(self) -> list[int]:
        """How many classes were known after each complete phase."""
        return list(itertools.accumulate(len(group) for group in self.groups))

    @property
    def similarity(self) -> list[dict[str, Any]]:
        """The comparison of the features with those of phase 0 after each phase; empty where it was not made."""
        found = [metrics.get("similarity") for metrics in self.metrics]
        return [item for item in found if item] if all(found) else []

    def confusion(self, classifier: str) -> Confusion:
        """Return what is taken for what after the last complete phase."""
        return confusions_of(self.metrics[-1])[classifier]

    def memory(self) -> Memory:
        """Read the exemplars kept after the last complete phase."""
        if not self.metrics:
            return Memory()
        directory = RunDirectory(self.path)
        with interpreting(self.path):
            return Memory.from_tensors(directory.load_memory(directory.completed() - 1))

    @property
    def label(self) -> str:
        """The method as the paper's tables name it."""
        return label_of(self.config.get("method", "model"), self.config.get("distill"))

    @property
    def data(self) -> str:
        """The name of the data for people."""
        source = str(self.config.get("data", "own images"))
        return DATA_NAMES.get(source, source)

    def command(self) -> str | None:
        """Return the command that computes this run again; None where it had its data from memory, or is no run."""
        config = {key: value for key, value in self.config.items() if key != "fingerprint"}
        if (
            self.is_model
            or config.get("method") not in METHODS
            or (config.get("data") == "arrays" and not config.get("data_dir"))
        ):
            return None
        found = [words for preset in (None, *presets()) if (words := _words(config, preset)) is not None]
        threads = self.environment.get("threads")
        more = ["--threads", str(threads)] if threads else []
        return shlex.join(["geodl", "run", *min(found, key=len), *more]) if found else None


def read_run(path: Path) -> Run:
    """Read the directory of a run or of a model; a phase in work is left out."""
    with interpreting(path):
        run = read_steadily(path, _read_run)
        _ = run.results  # here, where what is wrong with them is the file's fault
        return run


def _read_run(directory: RunDirectory) -> Run:
    metrics: list[Mapping[str, Any]] = [directory.load_metrics(t) for t in range(directory.completed())]
    epochs = _epochs(directory.read_events())
    config, history = directory.config, []
    if directory.kind == "model" and metrics:
        data = groups_of_options(RunConfig)["Data"]
        last = directory.load_extra(len(metrics) - 1)
        config = {key: value for key, value in last["config"].items() if key not in data} | dict(config)
        metrics, times = _learned([each for each in metrics if each]), directory.times("learned", "renamed", "removed")
        told = last.get("history", ())  # a learner that was saved by itself has none
        first = directory.completed() - len(told)
        history = [{**record, "time": record.get("time") or times.get(t)} for t, record in enumerate(told, first)]
    return Run(directory.path, config, directory.environment, directory.phases, metrics, epochs, history)


def _learned(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the steps of a model that brought classes."""
    steps: list[Mapping[str, Any]] = []
    for each in metrics:
        if steps and len(each["classes"]) < len(steps[-1]["classes"]):
            steps = []  # a class was removed: what was before has other classes
        if steps and len(each["classes"]) == len(steps[-1]["classes"]):
            steps.pop()  # more images of known classes, or another name
        # A state after a renaming has the new names, the steps before it the old ones: the last ones hold.
        steps.append(each)
    return steps


def _epochs(events: Sequence[Mapping[str, Any]]) -> list[Epoch]:
    """Keep one record of each epoch: the last, since a killed run tells some of them twice."""
    found: dict[tuple[int, str, int], Epoch] = {}
    for event in events:
        if event["kind"] not in ("epoch", "angles"):
            continue
        key = (event["phase"], event["stage"], event["epoch"])
        if event["kind"] == "epoch" and isinstance(event["loss"], float):
            found.pop(key, None)
            found[key] = Epoch(*key, event["loss"], event["parts"], event["rate"])
        elif event["kind"] == "angles" and key in found:
            found[key] = replace(found[key], angles=tuple(event["angles"]))
    return list(found.values())


def _words(config: Mapping[str, Any], preset: str | None) -> list[str] | None:
    """Return the options that make this configuration from a preset; None where no option could."""
    layers = [preset_layer(preset)] if preset else []
    try:
        start = configure([*layers, Layer("", {key: config[key] for key in ("method", "distill")})]).config.identity()
    except ConfigError:
        return None
    words = ["--preset", preset] if preset else []
    for key in kinds().of(config["method"], config["distill"]).model_fields:
        value = config.get(key, start.get(key))
        own = key == "distill" and value != METHODS[config["method"]].Config.model_fields["distill"].default
        if key == "method" or own or value != start.get(key):
            if value is None:
                return None
            words += _word(key, value)
    return words


def _word(key: str, value: Any) -> list[str]:
    """Write one option as the command line takes it: ``--key value``, ``--no-key``, ``--key a,b``."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        nested = value and isinstance(value[0], list)
        value = ";".join(",".join(group) for group in value) if nested else ",".join(map(str, value))
    return [f"--{name}", str(value)]


@dataclass(frozen=True)
class Estimate:
    """A mean over runs and the sample standard deviation, None for a single run."""

    mean: float
    spread: float | None
    runs: int


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Summarize one value of each run; None unless every run has it."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known or len(known) < len(values):
        return None
    return Estimate(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone, and are equally far."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The run with the lowest seed: what cannot be averaged is shown of it."""
        return self.runs[0]

    @property
    def classifiers(self) -> list[str]:
        """The classifiers that every run has."""
        return [name for name in self.first.results if all(name in run.results for run in self.runs)]

    @property
    def main(self) -> str | None:
        """The classifier to show where there is room for one."""
        return default_classifier(self.classifiers) if self.classifiers else None

    def value(self, classifier: str, name: str) -> Estimate | None:
        """Summarize a figure by its name in ``Trajectory.to_dict()``."""
        return estimate([run.results.get(classifier, {}).get(name) for run in self.runs])

    def accuracy(self, classifier: str) -> list[Estimate | None]:
        """Summarize A_t for each phase t."""
        return [
            estimate(each) for each in zip(*(run.results[classifier]["accuracy"] for run in self.runs), strict=True)
        ]

    def lost(self, classifier: str) -> list[Estimate | None]:
        """Summarize, for each phase, the accuracy lost on the first group since it was learned."""
        rows = [run.results[classifier]["matrix"][0] for run in self.runs]
        losses = [[None if None in (row[0], now) else row[0] - now for now in row] for row in rows]
        return [estimate(each) for each in zip(*losses, strict=True)]

    def similarity(self, measure: str) -> list[Estimate | None]:
        """Summarize svcca or cka for each phase; empty where a run has none."""
        return [estimate([item.get(measure) for item in each]) for each in self._similarities()]

    def angles(self) -> list[tuple[float, float, float]]:
        """Return the least, the median and the greatest principal angle to phase 0 in degrees, of all runs, by phase."""
        found = [[angle for item in each for angle in item["angles"]] for each in self._similarities()]
        return [_range(each) for each in found if each]

    @property
    def turned(self) -> list[Epoch]:
        """The epochs after which angles between the old network and the new one were taken."""
        return [epoch for epoch in self.first.epochs if epoch.angles]

    def drift(self) -> list[tuple[float, float, float]]:
        """Return the least, the median and the greatest of those angles, of all runs, for each epoch in ``turned``."""
        found: dict[tuple[int, str, int], list[float]] = {}
        for epoch in (epoch for run in self.runs for epoch in run.epochs):
            found.setdefault((epoch.phase, epoch.stage, epoch.epoch), []).extend(epoch.angles)
        return [_range(found[epoch.phase, epoch.stage, epoch.epoch]) for epoch in self.turned]

    def _similarities(self) -> list[tuple[dict[str, Any], ...]]:
        found = [run.similarity for run in self.runs]
        return list(zip(*found, strict=True)) if all(found) else []


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def read_settings(paths: Sequence[Path]) -> list[Setting]:
    """Read run directories and put runs together that differ in their seed alone, each seed once, in the order given.

    A model stands by itself: models with equal options may have learned different images.
    """
    if not paths:
        raise StoreError("no run directory given: one or more are needed")
    unique = {path.resolve(): path for path in paths}
    grouped: dict[str, dict[int, Run]] = {}
    for resolved, run in zip(unique, map(read_run, unique.values()), strict=True):
        options = sorted((name, value) for name, value in run.config.items() if name != "seed")
        key = repr((options, run.done, run.total, resolved if run.is_model else None))
        grouped.setdefault(key, {}).setdefault(run.config.get("seed", 0), run)
    settings = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in grouped.values()]
    return _tell_apart([Setting(members[0].label, members) for members in settings])


def _tell_apart(settings: Sequence[Setting]) -> list[Setting]:
    """Add to each label the protocol where that differs at all, and whatever else differs among equal labels."""
    protocol = [key for key in ("data", "base", "phases") if len({repr(s.first.config.get(key)) for s in settings}) > 1]
    counts = Counter(setting.label for setting in settings)
    told = []
    for setting in settings:
        keys = list(protocol)
        if counts[setting.label] > 1:
            same = [other.first.config for other in settings if other.label == setting.label]
            keys += [
                key
                for key in setting.first.config
                if key not in ("seed", "fingerprint", *keys) and len({repr(config.get(key)) for config in same}) > 1
            ]
        more = [f"{key} {setting.first.config.get(key)}" for key in keys]
        by_name = len(more) > MANY or (setting.first.is_model and counts[setting.label] > 1)
        parts = [setting.label, *([setting.first.path.name] if by_name else more)]
        if not setting.first.complete and setting.first.total is not None:
            parts.append(f"{setting.first.done} of {setting.first.total} phases")
        told.append(replace(setting, label=", ".join(parts)))
    return told
