"""Beyond the paper: its protocols in closed form, over a backbone that was trained on the base classes and is never moved."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from geodl.config import Layer, RunConfig, preset_layer
from geodl.data import ClassIncremental
from geodl.data.dataset import Dataset
from geodl.errors import ConfigError
from geodl.events import Listener, ignore
from geodl.experiment import scenario_of
from geodl.learner import Learner
from geodl.methods import configure
from geodl.metrics import Confusion, Trajectory
from geodl.report.published import numbers
from geodl.report.results import estimate
from geodl.report.tables import AVERAGE, INCREMENTAL, MEASURES, Cell, Table

PHASES = (5, 10, 25)
OTHERS: dict[str, dict[int, float]] = {
    "ACIL (closed form, base of 160 epochs)": {5: 66.30, 10: 66.07, 25: 65.95},
    "ACIL (TrivialAugment, 300 epochs)": {25: 71.05},
    "DS-AL (TrivialAugment, 300 epochs)": {25: 71.28},
    "DER (expands the network, 20 exemplars a class)": {5: 71.69, 10: 70.42},
    "FOSTER (expands the network, 20 exemplars a class)": {5: 71.08, 10: 68.61, 25: 64.95},
}
"""What is published of others for CIFAR-100, 50 base classes, with phase 0 in the average."""
NOTES = (
    f"{AVERAGE}: mean accuracy after phases 1 to T; {INCREMENTAL}: with phase 0; in %. Ours with several seeds: mean ± sample "
    "standard deviation. Test images fit nothing. How the long base is read was chosen on training images of the base classes; the "
    "levels, width and ridge of `cifar100-analytic` follow a prototype that was evaluated on test images.",
    "The paper's rows: ResNet-32, 160 epochs a phase, 20 exemplars a class, which the closed form does not keep. Rows of others are "
    "as published or as cited in later comparisons; their networks, schedules, augmentation and class orders differ, and DER and FOSTER expand the network.",
)


def beyond_config(weights: Path, options: Mapping[str, Any]) -> RunConfig:
    """Return the configuration: that of the preset cifar100-beyond, with a backbone from a file that is never trained."""
    if not weights.is_file():
        raise ConfigError(f"weights = {weights}: no such file; results/bases/ of the project has trained backbones")
    return configure([preset_layer("cifar100-beyond"), Layer("reproduce", {**options, "weights": weights})]).config


def beyond(
    config: RunConfig, data: Dataset, phases: Sequence[int] = PHASES, listener: Listener = ignore
) -> dict[int, dict[str, Trajectory]]:
    """Return what the closed form reached at each number of phases T, with and without mirrored test images.

    The head does not depend on the cut into phases, so all T are learned at once: a group ends wherever one of theirs does.
    """
    scenarios = {t: scenario_of(config.model_copy(update={"phases": t}), data) for t in phases}
    ends = sorted({scenario.seen(k) for scenario in scenarios.values() for k in range(len(scenario))})
    cut = ClassIncremental(
        data, groups=[b - a for a, b in pairwise([0, *ends])], order=config.order, seed=config.order_seed
    )
    learner, test = Learner(config, listener=listener), cut.test(len(cut) - 1)
    expanded: list[Tensor] = []
    found: dict[int, dict[str, Confusion]] = {}
    for phase, end in zip(cut, ends, strict=True):
        learner.learn(phase.train)
        fitted = learner.method.fitted(learner.memory.own)
        assert fitted is not None
        if not expanded:  # once, since neither network nor expansion moves
            expanded = [fitted.expand(learner.features(test, mirror=mirror).levels) for mirror in (False, True)]
        seen = test.labels < end
        one, mirrored = (h[seen] @ fitted.head for h in expanded)
        scores = {"analytic": one + mirrored, "analytic_single": one}
        found[end] = {
            name: Confusion.of(test.labels[seen], each.argmax(1), learner.classes) for name, each in scores.items()
        }
    return {
        t: {
            name: Trajectory(scenario.groups, [found[scenario.seen(k)][name] for k in range(len(scenario))])
            for name in found[end]
        }
        for t, scenario in scenarios.items()
    }


# ---------------------------------------------------------------------------------------------------------- table

Found = Mapping[int, Sequence[Mapping[str, Mapping[str, Any]]]]
"""For each T the results of some runs: classifier -> `Trajectory.to_dict()`, or a record's part of it."""


def headline(found: Found) -> Table:
    """Put what the closed form reached beside the paper's Table 1 and what others published, for each T."""
    ours = {"analytic": "closed form", "analytic_single": "closed form, without mirrored test images"}
    measures = {shown: MEASURES[shown][0] for shown in (INCREMENTAL, AVERAGE, "final", "forgetting")}
    rows: list[list[Cell]] = [
        [f"geodl: {words}", shown, *(estimate([run.get(name, {}).get(measure) for run in found[t]]) for t in found)]
        for shown, measure in measures.items()
        for name, words in ours.items()
        if any(name in run for runs in found.values() for run in runs)
    ]
    paper: dict[tuple[str, bool | None], dict[int | None, float]] = {}
    for number in numbers():
        if (number.table, number.metric, number.dataset) == ("Table 1", "average", "cifar100"):
            paper.setdefault((number.row, number.includes_phase0), {})[number.phases] = number.value
    for (row, includes), values in paper.items():
        rows.append([f"{row} (the paper's Table 1)", INCREMENTAL if includes else AVERAGE, *map(values.get, found)])
    rows += [[row, INCREMENTAL, *map(values.get, found)] for row, values in OTHERS.items() if values.keys() & found]
    return Table(["CIFAR-100, 50 base classes", "figure", *(f"T = {t}" for t in found)], rows, NOTES)
