"""Beyond the paper: its protocols in closed form, over a backbone that was trained on the base classes and is never moved."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from geodl.bench.experiment import scenario_of
from geodl.bench.report.published import numbers
from geodl.bench.report.results import Estimate, estimate
from geodl.bench.report.tables import AVERAGE, INCREMENTAL, MEASURES, Cell, Table
from geodl.config import Layer, RunConfig, preset_layer
from geodl.core.errors import ConfigError
from geodl.core.events import Listener, ignore
from geodl.data import ClassIncremental
from geodl.data.dataset import Dataset
from geodl.learning.learner import Learner
from geodl.methods import configure
from geodl.model.classifiers import ClosedForm
from geodl.model.metrics import Confusion, Trajectory

PHASES = (5, 10, 25)
OURS = {
    "analytic_single": "closed form, one view",
    "analytic": "closed form, with the mirrored view",
}
PROTOCOL = "ResNet-32; order lucir-1993; the last epoch; no exemplars"
PAPERS_PROTOCOL = "ResNet-32; order lucir-1993; 160 epochs a phase; 20 exemplars a class"
NOTES = (
    f"{AVERAGE}: mean accuracy after phases 1 to T; {INCREMENTAL}: with phase 0; in %. Ours with several seeds: mean ± sample "
    "standard deviation. Test images fit nothing. How the long base is read was chosen on training images of the base classes; the "
    "levels, width and ridge of `cifar100-analytic` follow a prototype that was evaluated on test images.",
    "Rows of others are as published or as cited in later comparisons, and none of them averages scores over mirrored test images: compare them with "
    "the rows for one view. Networks, schedules, augmentation and class orders differ. FeCAM and CLOVER have T = 20 instead of 25: 69.4 and 71.0.",
)


def beyond_config(weights: Path | None, options: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of the preset cifar100-beyond, with a backbone from a file that is never trained."""
    if weights is None:
        raise ConfigError(
            "weights: beyond needs --weights FILE, a backbone that was trained on the 50 base classes"
        )
    if not weights.is_file():
        raise ConfigError(
            f"weights = {weights}: no such file; results/bases/ of the project has trained backbones"
        )
    options = {**options, "weights": weights}
    return configure([preset_layer("cifar100-beyond"), Layer("reproduce", options)]).config


Results = dict[str, dict[str, Any]]
"""By classifier: `Trajectory.to_dict()`, or a part of it."""


def beyond(
    config: RunConfig, data: Dataset, phases: Sequence[int] = PHASES, listener: Listener = ignore
) -> dict[int, Results]:
    """Return what the closed form reached at each number of phases T, with and without mirrored test images.

    The head does not depend on the cut into phases, so all T are learned at once: a group ends wherever one of theirs does.
    """
    scenarios = {t: scenario_of(config.model_copy(update={"phases": t}), data) for t in phases}
    ends = sorted({end for scenario in scenarios.values() for end in _ends(scenario)})
    groups = [after - before for before, after in pairwise([0, *ends])]
    cut = ClassIncremental(data, groups=groups, order=config.order, seed=config.order_seed)
    learner, test = Learner(config, listener=listener), cut.test(len(cut) - 1)
    expanded: list[Tensor] = []
    found: dict[str, dict[int, Confusion]] = {"analytic": {}, "analytic_single": {}}
    for phase, end in zip(cut, ends, strict=True):
        learner.learn(phase.train)
        closed_form = learner.known.default
        assert isinstance(closed_form, ClosedForm)
        fitted = closed_form.fitted
        if not expanded:  # once, since neither network nor expansion moves
            views = [learner.features(test, mirror=mirror) for mirror in (False, True)]
            expanded = [fitted.expand(view.levels) for view in views]
        seen = test.labels < end
        one, mirrored = (h[seen] @ fitted.head for h in expanded)
        for name, scores in (("analytic", one + mirrored), ("analytic_single", one)):
            labels = test.labels[seen]
            found[name][end] = Confusion.of(labels, scores.argmax(1), learner.classes)
    results: dict[int, Results] = {t: {} for t in phases}
    for t, scenario in scenarios.items():
        for name, after in found.items():
            confusions = [after[end] for end in _ends(scenario)]
            results[t][name] = Trajectory(scenario.groups, confusions).to_dict()
    return results


def _ends(scenario: ClassIncremental) -> list[int]:
    """Return how many classes are known after each phase."""
    return [scenario.seen(t) for t in range(len(scenario))]


def headline(found: Mapping[int, Sequence[Results]]) -> Table:
    """Put what the closed form reached beside the paper's Table 1 and what others published.

    found: for each T the results of some runs.
    """
    every = [run for runs in found.values() for run in runs]
    rows: list[list[Cell]] = []
    for shown in (INCREMENTAL, AVERAGE, "final", "forgetting"):
        for name, words in OURS.items():
            if any(name in run for run in every):
                cells = [_mean(runs, name, MEASURES[shown][0]) for runs in found.values()]
                rows.append([f"geodl: {words}", shown, *cells, PROTOCOL])
    paper: dict[tuple[str, bool | None], dict[int | None, float]] = {}
    for number in numbers():
        if (number.table, number.metric, number.dataset) == ("Table 1", "average", "cifar100"):
            paper.setdefault((number.row, number.includes_phase0), {})[number.phases] = number.value
    for (row, includes), values in paper.items():
        kind = INCREMENTAL if includes else AVERAGE
        name = f"{row} (the paper's Table 1)"
        rows.append([name, kind, *map(values.get, found), PAPERS_PROTOCOL])
    for other in others():
        averages = [other["average"].get(str(t)) for t in found]
        if any(averages):
            rows.append([other["name"], INCREMENTAL, *averages, other["protocol"]])
    columns = [f"T = {t}" for t in found]
    return Table(["CIFAR-100, 50 base classes", "figure", *columns, "protocol"], rows, NOTES)


def others() -> list[dict[str, Any]]:
    """Return what others published: name, average incremental accuracy by T, protocol."""
    text = resources.files("geodl.bench.report").joinpath("beyond.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["row"]
    return rows


def _mean(runs: Sequence[Results], classifier: str, measure: str) -> Estimate | None:
    return estimate([run.get(classifier, {}).get(measure) for run in runs])
