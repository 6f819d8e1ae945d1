"""The numbers that the paper prints, each with the table it stands in and the run that corresponds to it."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from geodl.config import Layer, preset_layer
from geodl.methods import configure, kinds

# Trainings with two names: LwF and iCaRL differ in the classifier they are read under, and iCaRL + GeoDL is CE + GeoDL
# under k-NME.
SAME = {("lwf", "lwf"): ("icarl", "lwf"), ("icarl", "geodesic"): ("finetune", "geodesic")}
# What is stored beside the options: which files a run had, not what it did.
FILES = ("fingerprint", "weights_sha256")


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
    text = resources.files("geodl.report").joinpath("published.toml").read_text(encoding="utf-8")
    return tuple(number for block in tomllib.loads(text)["block"] for number in _expand(block))


def same(method: str, distill: str) -> tuple[str, str]:
    """Return the one name of a training that has two."""
    return SAME.get((method, distill), (method, distill))


def matching(config: Mapping[str, Any], base: int) -> list[Published]:
    """Return the accuracies and forgetting rates published for the protocol of a run, under any name of its training.

    config: the options of the run; base: the number of its base classes, which the options may leave open.
    """
    if config.get("memory_budget") != "per_class" or config.get("order") != "lucir-1993" or config.get("groups"):
        return []
    training = same(str(config.get("method")), str(config.get("distill")))
    ours = {"dataset": config.get("data"), "base": base, "phases": config.get("phases")}
    ours["memory"] = config.get("exemplars")
    if config.get("distill") == "geodesic":
        ours["subspace_dim"] = config.get("subspace_dim")
    return [
        number
        for number in numbers()
        if same(number.method, number.distill) == training
        and all(getattr(number, key) == value for key, value in ours.items())
    ]


def not_as_published(config: Mapping[str, Any]) -> list[str]:
    """Say in words where a run on one of the paper's datasets was not trained as the paper does."""
    kind = kinds().of(config["method"], config["distill"])
    # The preset that has the dataset's name is the paper's; the rows of its tables differ in some options.
    return departures(config, str(config["data"]), kind.having("in_grid"))


def departures(config: Mapping[str, Any], preset: str, free: Collection[str] = ()) -> list[str]:
    """Say in words where a run departs from a preset, as that is for the run's method; options in ``free`` may differ."""
    method = {key: config[key] for key in ("method", "distill")}
    paper = configure([preset_layer(preset), Layer("", method)]).config
    expected = paper.identity()
    unused = ("milestones", "lr_decay") if config.get("schedule") == "onecycle" else ()
    left_out = {*FILES, *paper.having("repetition"), *free, *unused}
    found, wanted = _with_base(config), _with_base(expected)
    # A run may be older than an option, and know one that is gone: neither makes it another run. Nor does what the preset
    # leaves to the device (auto).
    fixed = [key for key, value in expected.items() if key in config and value != "auto"]
    known = [key for key in fixed if key not in left_out and config[key] != expected[key]]
    gone = [key for key, value in config.items() if key not in {*expected, *left_out} and value is not None]
    return [
        f"{key} {found[key]}" + ("" if wanted.get(key) is None else f" instead of {wanted[key]}")
        for key in (*known, *gone)
        if found[key] != wanted.get(key)
    ]


def _with_base(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what phase 0 takes from the other phases."""
    return {**config, **{f"base_{key}": config.get(f"base_{key}") or config.get(key) for key in ("epochs", "lr")}}


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
