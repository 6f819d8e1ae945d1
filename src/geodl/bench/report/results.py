"""Read run directories into plain data: runs, and settings, which are runs that differ in their seed alone."""

import itertools
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from geodl.config import SECTIONS, Layer, preset_layer, presets
from geodl.core.content import interpreting
from geodl.core.errors import ConfigError, StoreError
from geodl.learning.saving import load_model
from geodl.losses import DISTILLATIONS
from geodl.methods import METHODS, configure
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
"""Sources whose images anyone may see; all others may be a person's own photographs."""
MANY = 4
"""Runs that differ in more options than so many are told apart by the names of their directories."""


def label_of(method: str, distill: str | None) -> str:
    """Return a method and its distillation as the paper's tables name them; the method's own distillation goes without saying."""
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

    @property
    def key(self) -> tuple[int, str, int]:
        """Phase, stage and number."""
        return self.phase, self.stage, self.epoch


@dataclass(frozen=True)
class Run:
    """One run directory, as far as it is complete.

    total:    the phases of the whole run, None where it may always go on; done: those complete.
    metrics:  metrics.json of each complete phase.
    epochs:   what training said, in order.
    """

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    total: int | None
    metrics: Sequence[Mapping[str, Any]]
    epochs: Sequence[Epoch]

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
        """What each classifier could do after each phase, ``Trajectory.to_dict()``, in the order of tables."""
        found = Trajectory.of(self.metrics)
        return {name: found[name].to_dict() for name in titles() if name in found}

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

    def similarities(self, measure: str) -> list[Any]:
        """Return svcca, cka or angles of the features to those of phase 0 after each phase; empty where they were not compared."""
        found = [metrics.get("similarity") or {} for metrics in self.metrics]
        return [each.get(measure) for each in found] if all(found) else []

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
        """The method as the paper's tables name it."""
        return label_of(self.config.get("method", "model"), self.config.get("distill"))

    @property
    def data(self) -> str:
        """The name of the data for people."""
        source = str(self.config.get("data", "own images"))
        return DATA_NAMES.get(source, source)

    def command(self) -> str | None:
        """Return the command that computes this run again; None where it had its data from memory, or is no run."""
        config, threads = self.config, self.environment.get("threads")
        from_memory = config.get("data") == "arrays" and not config.get("data_dir")
        if self.is_model or from_memory or config.get("method") not in METHODS:
            return None
        found = [words for preset in (None, *presets()) if (words := _words(config, preset))]
        more = ["--threads", str(threads)] if threads else []
        for name in self.environment.get("imports", ()):
            more += ["--import", name]
        return shlex.join(["geodl", "run", *min(found, key=len), *more]) if found else None


def read_run(path: Path) -> Run:
    """Read the directory of a run or of a model; a phase in work is left out."""
    with interpreting(path):
        run = reading(path, _read_run)
        _ = run.results  # here, where what is wrong with them is the file's fault
        return run


def _read_run(directory: Directory) -> Run:
    metrics = [directory.phase(t).json("metrics.json") for t in range(directory.completed())]
    epochs = _epochs(directory.read_events())
    config: Mapping[str, Any] = directory.config
    if directory.kind == "model" and metrics:
        data = SECTIONS["Data"].model_fields
        last = directory.phase(-1).json("extra.json")["config"]
        config = {key: last[key] for key in last if key not in data}
        metrics = _learned([each for each in metrics if each])
    if directory.kind == "model":
        config = {**config, "kind": "model"}
    return Run(directory.path, config, directory.environment, directory.phases, metrics, epochs)


def _learned(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps of a model that brought classes."""
    steps: list[dict[str, Any]] = []
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


def _words(config: Mapping[str, Any], preset: str | None) -> list[str]:
    """Return the options that make this configuration from a preset; none where no options could."""
    layers = [preset_layer(preset)] if preset else []
    given = {key: config[key] for key in ("method", "distill")}
    try:
        start = configure([*layers, Layer("", given)]).config.identity()
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
    """Write one option as the command line takes it: ``--key value``, ``--no-key``, ``--key a,b``."""
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [name, ";".join(map(",".join, value))]
    return [name, ",".join(map(str, value)) if isinstance(value, list) else str(value)]


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
    spread = statistics.stdev(known) if len(known) > 1 else None
    return Estimate(statistics.fmean(known), spread, len(known))


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
        others = [set(run.results) for run in self.runs]
        return [name for name in self.first.results if name in set.intersection(*others)]

    @property
    def main(self) -> str | None:
        """The classifier to show where there is room for one."""
        return default_classifier(self.classifiers) if self.classifiers else None

    @property
    def held_out(self) -> "Setting | None":
        """The same on the training images that were held out; None where none were."""
        runs = []
        for run in self.runs:
            metrics = [each["held_out"] for each in run.metrics if "held_out" in each]
            runs.append(replace(run, metrics=metrics))
        return replace(self, runs=tuple(runs)) if all(run.done for run in runs) else None

    def value(self, classifier: str, name: str) -> Estimate | None:
        """Summarize a figure by its name in ``Trajectory.to_dict()``."""
        return estimate([run.results.get(classifier, {}).get(name) for run in self.runs])

    def accuracy(self, classifier: str) -> list[Estimate | None]:
        """Summarize A_t for each phase t."""
        found = [run.results[classifier]["accuracy"] for run in self.runs]
        return [estimate(each) for each in zip(*found, strict=True)]

    def lost(self, classifier: str) -> list[Estimate | None]:
        """Summarize, for each phase, the accuracy lost on the first group since it was learned."""
        found = [_losses(run.results[classifier]["matrix"][0]) for run in self.runs]
        return [estimate(each) for each in zip(*found, strict=True)]

    def similarity(self, measure: str) -> list[Estimate | None]:
        """Summarize svcca or cka for each phase; empty where a run has none."""
        found = [run.similarities(measure) for run in self.runs]
        return [estimate(each) for each in zip(*found, strict=True)] if all(found) else []

    def angles(self) -> list[tuple[float, float, float]]:
        """Return the least, the median and the greatest principal angle to phase 0 in degrees, of all runs, by phase."""
        found = [run.similarities("angles") for run in self.runs]
        phases = zip(*found, strict=True) if all(found) else ()
        together = [list(itertools.chain(*each)) for each in phases]
        return [_range(each) for each in together if each]

    @property
    def turned(self) -> list[Epoch]:
        """The epochs after which angles between the old network and the new one were taken."""
        return [epoch for epoch in self.first.epochs if epoch.angles]

    def drift(self) -> list[tuple[float, float, float]]:
        """Return the least, the median and the greatest of those angles, of all runs, for each epoch in ``turned``."""
        found: dict[tuple[int, str, int], list[float]] = {}
        for run in self.runs:
            for epoch in run.epochs:
                found.setdefault(epoch.key, []).extend(epoch.angles)
        return [_range(found[epoch.key]) for epoch in self.turned]


def _losses(accuracies: Sequence[float | None]) -> list[float | None]:
    """Return the first accuracy minus each; None where one is not known."""
    first, found = accuracies[0], list[float | None]()
    for now in accuracies:
        found.append(None if first is None or now is None else first - now)
    return found


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
    settings = []
    for seeds in grouped.values():
        members = tuple(run for _, run in sorted(seeds.items()))
        settings.append(Setting(members[0].label, members))
    return _tell_apart(settings)


def _tell_apart(settings: Sequence[Setting]) -> list[Setting]:
    """Add to each label the protocol where that differs at all, and whatever else differs among equal labels."""
    protocol = [key for key in ("data", "base", "phases") if _differs(key, settings)]
    found = []
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
        found.append(replace(setting, label=", ".join([setting.label, *more])))
    return found


def _differs(key: str, settings: Sequence[Setting]) -> bool:
    return len({repr(setting.first.config.get(key)) for setting in settings}) > 1
