"""The numbers printed in the paper, each with its table and the run that corresponds to it."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from geodl.config import Layer, RunConfig, preset_layer
from geodl.methods import configure

# Trainings with two names: LwF and iCaRL differ in the classifier they are read under, and iCaRL + GeoDL is CE + GeoDL
# under k-NME.
SAME = {("lwf", "lwf"): ("icarl", "lwf"), ("icarl", "geodesic"): ("finetune", "geodesic")}
FILES = ("fingerprint", "weights_sha256")
"""Hashes of a run's input files, stored with its options."""
REPETITION = ("data_dir", "seed")
"""Options that select the files and the repetition of an experiment."""
IN_GRID = (
    "distill",
    "base",
    "phases",
    "exemplars",
    "store_images",
    "classifiers",
    "ame",
    "analysis",
    "subspace_dim",
)
"""Options that vary between the rows of a table of the paper."""


@dataclass(frozen=True)
class Published:
    """One published number.

    row:             the paper's name of the method; method and distill are our names.
    classifier:      cnn, nme or ame; None if the paper does not state it.
    memory:          exemplars per class.
    includes_phase0: whether an average counts phase 0; None if unknown or not applicable.
    against:         the distillation that a time ratio refers to.
    """

    table: str
    metric: Literal["average", "forgetting", "time_ratio", "memory_gb"]
    row: str
    method: str
    distill: str
    value: float
    dataset: str | None = None
    base: int | None = None
    phases: int | None = None
    memory: int | None = None
    classifier: str | None = None
    includes_phase0: bool | None = None
    subspace_dim: int = 127
    against: str | None = None


@cache
def numbers() -> tuple[Published, ...]:
    """Return every published number, in the paper's order."""
    file = resources.files("geodl.bench.report").joinpath("published.toml")
    blocks = tomllib.loads(file.read_text(encoding="utf-8"))["block"]
    return tuple(number for block in blocks for number in _expand(block))


def same(method: str, distill: str) -> tuple[str, str]:
    """Return the canonical name of a training that has two."""
    return SAME.get((method, distill), (method, distill))


def matching(config: Mapping[str, Any], base: int) -> list[Published]:
    """Return the accuracies and forgetting rates published for the protocol and training of a run.

    config: the options of the run; base: its number of base classes, which the options may leave unset.
    """
    protocol = (config.get("memory_budget"), config.get("order"), config.get("groups"))
    if protocol != ("per_class", "lucir-1993", None):
        return []
    training = same(str(config.get("method")), str(config.get("distill")))
    ours = {"dataset": config.get("data"), "base": base, "phases": config.get("phases")}
    ours["memory"] = config.get("exemplars")
    if config.get("distill") == "geodesic":
        ours["subspace_dim"] = config.get("subspace_dim")
    trained = [number for number in numbers() if same(number.method, number.distill) == training]
    return [number for number in trained if ours.items() <= vars(number).items()]


def not_as_published(config: Mapping[str, Any]) -> list[str]:
    """Describe how the training of a run on one of the paper's datasets deviates from the paper's."""
    # The preset named like the dataset is the paper's training.
    return departures(config, str(config["data"]), IN_GRID)


def reference(config: Mapping[str, Any], preset: str | None = None) -> RunConfig:
    """Return the configuration of a preset, or of the defaults, with the method and distillation of a run."""
    layers = [preset_layer(preset)] if preset else []
    parts = {key: config[key] for key in ("method", "distill") if key in config}
    return configure([*layers, Layer("", parts)]).config


def departures(config: Mapping[str, Any], preset: str, free: Collection[str] = ()) -> list[str]:
    """Describe how a run deviates from a preset with the run's method; options in ``free`` may differ."""
    expected = reference(config, preset).identity()
    unused = ("milestones", "lr_decay") if config.get("schedule") in ("onecycle", "cosine") else ()
    ignored = {*FILES, *REPETITION, *free, *unused}
    # An option that the run is too old for, or that the preset leaves to the device (auto), is no deviation; nor is an option
    # that does not exist any more and was unset.
    known = [key for key, value in expected.items() if key in config and value != "auto"]
    gone = [key for key, value in config.items() if key not in expected and value is not None]
    ours, theirs = _with_base(config), _with_base(expected)
    words = []
    for key in [*known, *gone]:
        if key in ignored or config[key] == expected.get(key) or ours[key] == theirs.get(key):
            continue
        instead = "" if theirs.get(key) is None else f" instead of {theirs[key]}"
        words.append(f"{key} {ours[key]}{instead}")
    return words


def _with_base(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the options of phase 0 that default to those of other phases."""
    names = {"base_epochs": "epochs", "base_lr": "lr"}
    return {**config} | {base: config.get(base) or config.get(key) for base, key in names.items()}


def _expand(block: dict[str, Any]) -> Iterator[Published]:
    """Yield the numbers of a block: one for each row and each value of ``at``."""
    across, at = block.get("across"), block.get("at", [None])
    common = {key: value for key, value in block.items() if key not in ("across", "at", "rows")}
    for row in block["rows"]:
        values = common | {key: value for key, value in row.items() if key != "values"}
        for unknown, key in (("unstated", "classifier"), ("unknown", "includes_phase0")):
            if values.get(key) == unknown:
                values[key] = None
        for position, value in zip(at, row["values"], strict=True):
            yield Published(**values, value=float(value), **({across: position} if across else {}))
