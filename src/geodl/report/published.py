"""The numbers that the paper prints, each with the table it stands in and the run that corresponds to it."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

Metric = Literal["average", "forgetting", "time_ratio", "memory_gb"]


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
    metric: Metric
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


@dataclass(frozen=True)
class Protocol:
    """How the paper trains on a dataset: what a run must share before its numbers can be expected to agree."""

    classes: int
    network: str
    epochs: int
    batch_size: int

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """Say in words where a run's configuration departs from the paper's training."""
        wanted = {"network": self.network, "epochs": self.epochs, "batch_size": self.batch_size}
        found = {key: config.get(key) for key in wanted}
        if config.get("base_epochs") not in (None, self.epochs):
            wanted["base_epochs"], found["base_epochs"] = self.epochs, config["base_epochs"]
        return [
            f"{key} {found[key]} instead of {value}" for key, value in wanted.items() if found[key] not in (None, value)
        ]


@cache
def numbers() -> tuple[Published, ...]:
    """Give every published number, in the paper's order."""
    return tuple(number for block in _file()["block"] for number in _expand(block))


@cache
def protocols() -> dict[str, Protocol]:
    """Give the paper's training by dataset."""
    return {dataset: Protocol(**values) for dataset, values in _file()["protocol"].items()}


def matching(config: Mapping[str, Any], base: int) -> list[Published]:
    """Give the accuracies and forgetting rates published for the protocol of a run.

    config: the options of the run; base: the number of its base classes, which the options may leave open.
    """
    if config.get("budget") != "per_class" or config.get("order") != "lucir-1993":
        return []
    ours = {key: config.get(key) for key in ("method", "distill", "phases")}
    ours |= {"dataset": config.get("data"), "base": base, "memory": config.get("exemplars")}
    if config.get("distill") == "geodesic":
        ours["subspace_dim"] = config.get("subspace_dim")
    return [number for number in numbers() if all(getattr(number, key) == value for key, value in ours.items())]


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(resources.files("geodl.report").joinpath("published.toml").read_text(encoding="utf-8"))


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
