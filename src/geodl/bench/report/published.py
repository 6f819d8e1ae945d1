"""The numbers that the paper prints, each with the table it stands in and the run that corresponds to it."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from geodl.config import Layer, preset_layer
from geodl.methods import configure

# Trainings with two names: LwF and iCaRL differ in the classifier they are read under, and iCaRL + GeoDL is CE + GeoDL
# under k-NME.
SAME = {("lwf", "lwf"): ("icarl", "lwf"), ("icarl", "geodesic"): ("finetune", "geodesic")}
# What is stored beside the options: which files a run had, not what it did.
FILES = ("fingerprint", "weights_sha256")
REPETITION = ("data_dir", "seed")
"""Options that tell which files and which repetition, not what is done."""
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
"""Options in which the rows of one table of the paper may differ."""


@dataclass(frozen=True)
class Published:
    """One published number.

    row:             the paper's name of the method; method and distill are ours for the same thing.
    classifier:      cnn, nme or ame; None where the paper does not say which.
    memory:          exemplars per class.
    includes_phase0: whether an average counts phase 0; None where that is unknown or no question.
    against:         what a time ratio is a multiple of.
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
    """Return the one name of a training that has two."""
    return SAME.get((method, distill), (method, distill))


def matching(config: Mapping[str, Any], base: int) -> list[Published]:
    """Return the accuracies and forgetting rates published for the protocol of a run, under any name of its training.

    config: the options of the run; base: the number of its base classes, which the options may leave open.
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
    """Say in words where a run on one of the paper's datasets was not trained as the paper does."""
    # The preset that has the dataset's name is the paper's; the rows of its tables differ in some options.
    return departures(config, str(config["data"]), IN_GRID)


def departures(config: Mapping[str, Any], preset: str, free: Collection[str] = ()) -> list[str]:
    """Say in words where a run departs from a preset, as that is for the run's method; options in ``free`` may differ."""
    method = {key: config[key] for key in ("method", "distill")}
    paper = configure([preset_layer(preset), Layer("", method)]).config
    expected = paper.identity()
    unused = ("milestones", "lr_decay") if config.get("schedule") in ("onecycle", "cosine") else ()
    left_out = {*FILES, *REPETITION, *free, *unused}
    found, wanted = _with_base(config), _with_base(expected)
    # A run may be older than an option, and know one that is gone: neither makes it another run. Nor does what the preset
    # leaves to the device (auto).
    fixed = [key for key, value in expected.items() if key in config and value != "auto"]
    known = [key for key in fixed if key not in left_out and config[key] != expected[key]]
    unknown = {key: value for key, value in config.items() if value is not None}
    words = []
    for key in (*known, *(key for key in unknown if key not in {*expected, *left_out})):
        if found[key] != wanted.get(key):
            instead = "" if wanted.get(key) is None else f" instead of {wanted[key]}"
            words.append(f"{key} {found[key]}{instead}")
    return words


def _with_base(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what phase 0 takes from the other phases."""
    names = {"base_epochs": "epochs", "base_lr": "lr"}
    return {**config} | {base: config.get(base) or config.get(key) for base, key in names.items()}


def _expand(block: dict[str, Any]) -> Iterator[Published]:
    """Write out a block: one number for each row and each of ``at``."""
    across, at = block.get("across"), block.get("at", [None])
    common = {key: value for key, value in block.items() if key not in ("across", "at", "rows")}
    for row in block["rows"]:
        values = common | {key: value for key, value in row.items() if key != "values"}
        for unknown, key in (("unstated", "classifier"), ("unknown", "includes_phase0")):
            if values.get(key) == unknown:
                values[key] = None
        for position, value in zip(at, row["values"], strict=True):
            yield Published(**values, value=float(value), **({across: position} if across else {}))
