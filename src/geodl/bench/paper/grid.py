"""The runs that each table and figure of the paper needs; shared ones are run once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from geodl.bench.report.published import Published, numbers, same
from geodl.bench.report.results import label_of
from geodl.bench.sweep.jobs import Job, named
from geodl.config import Layer, RunConfig, preset_layer
from geodl.core.errors import ConfigError
from geodl.learning.timing import LOSSES
from geodl.methods import configure

Length = Literal["paper", "cpu", "smoke"]
DATASETS = ("cifar100", "imagenet-subset", "imagenet")


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper: its datasets and T, and the table of published numbers it is compared with."""

    title: str
    datasets: tuple[str, ...]
    phases: tuple[int, ...]
    table: str = ""


ARTEFACTS = {
    "table1": Artefact(
        "Table 1: average accuracy and forgetting of the methods", DATASETS, (5, 10, 25), "Table 1"
    ),
    "table2": Artefact(
        "Table 2: losses, classifiers and memory sizes", ("cifar100",), (10,), "Table 2"
    ),
    "table3": Artefact("Table 3: dimension of the subspaces", ("cifar100",), (10,), "Table 3"),
    "table4": Artefact(
        "Table 4: losses, classifiers and memory sizes", ("imagenet-subset",), (10,), "Table 4"
    ),
    "init10": Artefact("10-class start", ("cifar100",), (10,), "10-class start"),
    "fig-phases": Artefact("Accuracy after each phase, with joint training", DATASETS, (5, 10)),
    "fig-classifiers": Artefact(
        "Losses under the three classifiers", ("cifar100", "imagenet-subset"), (5, 10, 25)
    ),
    # The paper does not state T for its CCA figures; its ablations have T = 10.
    "fig-cca": Artefact(
        "Similarity of the representation to phase 0", ("cifar100", "imagenet-subset"), (10,)
    ),
}


@dataclass(frozen=True)
class Training:
    """One training of the paper; several published numbers may be read from it."""

    method: str
    distill: str
    base: int
    phases: int
    memory: int = 20
    subspace_dim: int = 127


def training_of(number: Published) -> Training:
    """Return the training of a published accuracy or forgetting rate."""
    assert number.base is not None
    assert number.phases is not None
    assert number.memory is not None
    method, distill = same(number.method, number.distill)
    return Training(method, distill, number.base, number.phases, number.memory, number.subspace_dim)


def published(artefact: str, dataset: str, phases: Sequence[int]) -> list[Published]:
    """Return the paper's numbers of a table, in its order."""
    table = ARTEFACTS[artefact].table
    return [
        n for n in numbers() if n.table == table and n.dataset == dataset and n.phases in phases
    ]


def trainings(artefact: str, dataset: str, phases: Sequence[int]) -> list[Training]:
    """Return the trainings of a table or figure, each once."""
    base = 500 if dataset == "imagenet" else 50
    needed: Iterable[Training]
    if artefact == "fig-phases":
        joint = [Training("joint", "none", base, t) for t in phases]
        needed = [*trainings("table1", dataset, phases), *joint]
    elif artefact in ("fig-classifiers", "fig-cca"):
        needed = [Training("finetune", loss, base, t) for t in phases for loss in LOSSES]
    else:
        needed = map(training_of, published(artefact, dataset, phases))
    return list(dict.fromkeys(needed))


def choose(
    artefact: str, dataset: str | None, phases: Sequence[int] | None
) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return the dataset, and the chosen tables and figures with their T; ``all`` chooses all of the dataset."""
    if artefact == "all":
        dataset = dataset or "cifar100"
        chosen = {name: one for name, one in ARTEFACTS.items() if dataset in one.datasets}
        allowed: tuple[str, ...] = DATASETS
    elif artefact in ARTEFACTS:
        chosen = {artefact: ARTEFACTS[artefact]}
        allowed = ARTEFACTS[artefact].datasets
        dataset = dataset or allowed[0]
    else:
        raise ConfigError(f"{artefact!r}: allowed values are {', '.join(ARTEFACTS)}, beyond, all")
    if dataset not in allowed:
        raise ConfigError(
            f"dataset = {dataset!r}: the paper has {artefact} for {', '.join(allowed)}"
        )
    known = sorted({t for one in chosen.values() for t in one.phases})
    unknown = [t for t in phases or () if t not in known]
    if unknown:
        raise ConfigError(
            f"phases = {unknown[0]}: the paper has {artefact} for {', '.join(map(str, known))}"
        )
    wanted = set(known if phases is None else phases)
    by_name = {name: tuple(sorted(wanted.intersection(one.phases))) for name, one in chosen.items()}
    return dataset, {name: numbers for name, numbers in by_name.items() if numbers}


def config_of(
    training: Training, dataset: str, length: Length, options: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return the configuration of a training; options: seed, data_dir, threads."""
    values: dict[str, Any] = {
        "method": training.method,
        "distill": training.distill,
        "base": training.base,
        "phases": training.phases,
        "exemplars": training.memory,
        **(options or {"seed": 1}),
    }
    if training.distill == "geodesic":
        values["subspace_dim"] = training.subspace_dim
    if length == "smoke":
        values |= _on_digits(training)
    return configure([preset_layer(preset_of(dataset, length)), Layer("reproduce", values)]).config


def preset_of(dataset: str, length: Length) -> str:
    """Return the preset of a length."""
    if length == "cpu" and dataset != "cifar100":
        raise ConfigError(
            f"length = 'cpu': the short schedule is for cifar100 alone; {dataset}: paper, smoke"
        )
    return {"paper": dataset, "cpu": "cifar100-cpu", "smoke": "digits"}[length]


def _on_digits(training: Training) -> dict[str, Any]:
    """Return the options of a similar training on the digits: fewer phases, a quarter of the memory, fewer epochs."""
    small_start = training.base == 10
    return {
        "data_dir": None,
        "base": 2 if small_start else 4,
        "phases": 4 if small_start else {5: 2, 10: 3, 25: 6}[training.phases],
        "exemplars": training.memory // 4,
        "epochs": 3,
        "base_epochs": 5,
        "ame": True,
    }


@dataclass(frozen=True)
class Planned(Job):
    """A run of the grid, with its training and the tables and figures that need it."""

    training: Training
    artefacts: tuple[str, ...]


def _label(training: Training, config: RunConfig) -> str:
    words = [label_of(config.method, config.distill)]
    words += [f"{config.base} classes + {config.phases} phases", f"{config.exemplars} exemplars"]
    if training.subspace_dim != 127:
        words.append(f"n = {training.subspace_dim}")
    return ", ".join([*words, f"seed {config.seed}"])


def grid(
    chosen: dict[str, tuple[int, ...]],
    dataset: str,
    length: Length,
    root: Path,
    *,
    runs: int = 3,
    options: Mapping[str, Any] | None = None,
) -> list[Planned]:
    """Return the runs below `root` that the chosen tables and figures need, each once, ordered by seed."""
    if runs < 1:
        raise ConfigError(f"runs = {runs}: at least 1 is allowed")
    needed: dict[Training, list[str]] = {}
    for name, phases in chosen.items():
        for training in trainings(name, dataset, phases):
            needed.setdefault(training, []).append(name)
    jobs = []
    for seed in range(1, runs + 1):
        for training, names in needed.items():
            config = config_of(training, dataset, length, {**(options or {}), "seed": seed})
            run = named(config, root, _label(training, config))
            jobs.append(Planned(run.config, run.out, run.label, training, tuple(names)))
    return jobs
