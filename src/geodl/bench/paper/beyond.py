"""Beyond the paper: its protocols in closed form over a frozen backbone trained on the base classes."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from geodl.bench.experiment import scenario_of
from geodl.bench.report.published import numbers
from geodl.bench.report.results import Estimate, estimate
from geodl.bench.report.tables import AVERAGE, INCREMENTAL, MEASURES, Cell, Table
from geodl.closed_form.expansion import Blocks
from geodl.closed_form.primal import Statistics
from geodl.closed_form.random_features import RandomFeatures
from geodl.config import Layer, RunConfig, preset_layer
from geodl.core.errors import ConfigError
from geodl.core.events import Listener, ignore
from geodl.core.keys import derive
from geodl.data import ClassIncremental
from geodl.data.batches import transform_of
from geodl.data.dataset import Dataset
from geodl.data.images import ArrayImages, Images
from geodl.learning.learner import Learner
from geodl.methods import configure
from geodl.model.classifiers import ClosedForm
from geodl.model.classifiers.fitting import ClosedFormOptions
from geodl.model.metrics import Confusion, Trajectory

PHASES = (5, 10, 25)
OURS = {
    "analytic_single": "closed form, one view",
    "analytic": "closed form, with the mirrored view",
    "analytic_shifted": "closed form, with mirrored and shifted views",
}
PROTOCOL = "ResNet-32; order lucir-1993; the last epoch; no exemplars"
PAPERS_PROTOCOL = "ResNet-32; order lucir-1993; 160 epochs per phase; 20 exemplars per class"
NOTES = (
    f"{AVERAGE}: mean accuracy after phases 1 to T; {INCREMENTAL}: with phase 0; in %. Ours with several seeds: mean ± sample "
    "standard deviation. Test images fit nothing. How the long base is read was chosen on training images of the base classes; the "
    "levels, width and ridge of `cifar100-analytic` follow a prototype that was evaluated on test images.",
    "Rows of others are as published or as cited in later comparisons, and none of them averages scores over mirrored test images: compare them with "
    "the rows for one view. Networks, schedules, augmentation and class orders differ. FeCAM and CLOVER have T = 20 instead of 25: 69.4 and 71.0.",
)


def beyond_config(weights: Path | None, options: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of the preset cifar100-beyond with a backbone from a file."""
    if weights is None:
        raise ConfigError(
            "weights: beyond needs --weights FILE, a backbone trained on the 50 base classes"
        )
    if not weights.is_file():
        raise ConfigError(
            f"weights = {weights}: no such file; results/bases/ of the project has trained backbones"
        )
    options = {**options, "weights": weights}
    return configure([preset_layer("cifar100-beyond"), Layer("reproduce", options)]).config


Results = dict[str, dict[str, Any]]
"""By classifier: `Trajectory.to_dict()` or parts of it."""


class View(NamedTuple):
    """A view of an image: mirrored or not, shifted by some pixels."""

    mirror: bool = False
    down: int = 0
    right: int = 0


ONE, PAIR = (View(),), (View(), View(mirror=True))
SHIFTS = ((0, 0), (-2, -2), (-2, 2), (2, -2), (2, 2))
SHIFTED = tuple(View(mirror, *by) for mirror in (False, True) for by in SHIFTS)
Fitted = tuple[tuple[View, ...], ...]
"""Training views of a head: each part gives one row per image, the mean of h over its views."""


Read = Callable[[Images, View], Blocks]


class Reading(NamedTuple):
    """The training views of a head, and the test views whose scores are averaged."""

    fitted: Fitted
    tested: tuple[View, ...]


_EACH = (ONE, (View(mirror=True),))
_MIRRORED = {"analytic_single": Reading(_EACH, ONE), "analytic": Reading(_EACH, PAIR)}
READINGS = {
    "mirror": _MIRRORED,
    "mirror,shift": _MIRRORED | {"analytic_shifted": Reading((SHIFTED,), SHIFTED)},
}
"""The readings compared, by the option --views; `python -m studies.reading` compares more."""


def shifted(pixels: Tensor, down: int, right: int) -> Tensor:
    """Return pixels (N, 3, H, W) shifted down and right, filled with black."""
    height, width = pixels.shape[2:]
    padded = F.pad(pixels, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)))
    return padded[:, :, max(-down, 0) :, max(-right, 0) :][:, :, :height, :width].contiguous()


def _reader(config: RunConfig, images: Images, listener: Listener) -> Read:
    """Return a function that reads a view of images: the features (N, d) by level; `images` determine the transform."""
    learner = Learner(config, listener=listener)
    network = learner.method.initial_network(1)
    transform, levels = transform_of(config, images), ClosedForm.levels(network, config)

    def read(images: Images, view: View) -> Blocks:
        if view.down or view.right:
            assert isinstance(images, ArrayImages)
            images = replace(images, pixels=shifted(images.pixels, view.down, view.right))
        features = learner.trainer.features
        return features(network, images, transform, mirror=view.mirror, levels=levels).levels

    return read


def beyond(
    config: RunConfig,
    data: Dataset,
    phases: Sequence[int] = PHASES,
    readings: Mapping[str, Reading] = _MIRRORED,
    listener: Listener = ignore,
) -> dict[int, Results]:
    """Return the results of the closed form for each number of phases T, with each reading.

    The head does not depend on the split into phases, so all T are learned at once, in groups that end where a phase of any T
    ends.
    """
    scenarios = {t: scenario_of(config.model_copy(update={"phases": t}), data) for t in phases}
    ends = sorted({end for scenario in scenarios.values() for end in _ends(scenario)})
    groups = [after - before for before, after in pairwise([0, *ends])]
    split = ClassIncremental(data, groups=groups, order=config.order, seed=config.order_seed)
    confusions = _learned(config, split, readings, listener)
    results: dict[int, Results] = {t: {} for t in phases}
    for t, scenario in scenarios.items():
        for name, after in confusions.items():
            trajectory = Trajectory([after[end] for end in _ends(scenario)])
            results[t][name] = trajectory.to_dict()
    return results


def _learned(
    config: RunConfig, split: ClassIncremental, readings: Mapping[str, Reading], listener: Listener
) -> dict[str, dict[int, Confusion]]:
    """Learn group by group; return the confusions of each reading by the number of classes learned."""
    options, test = config.of(ClosedFormOptions), split.test(len(split) - 1)
    read = _reader(config, split.train(0), listener)
    fits = {reading.fitted for reading in readings.values()}
    views = {view for fitted in fits for part in fitted for view in part}
    sums = {fitted: Statistics.empty(options.expansion) for fitted in fits}
    expand: RandomFeatures | None = None
    tested: dict[tuple[View, ...], Tensor] = {}
    confusions: dict[str, dict[int, Confusion]] = {name: {} for name in readings}
    for phase, end in zip(split, _ends(split), strict=True):
        labels, z = phase.train.labels, {view: read(phase.train, view) for view in views}
        if expand is None:  # once: network and expansion are frozen
            seed = derive(config.seed, "expansion")
            expand = RandomFeatures.of(z[View()], options.expansion, seed)
            tested = _expanded(expand, readings, partial(read, test))
        heads = {}
        for fitted in fits:
            for part in fitted:
                sums[fitted] += expand.sums([z[view] for view in part], labels, end)
            heads[fitted] = sums[fitted].solve(options.gamma).head.float()
        seen = test.labels < end
        for name, (fitted, over) in readings.items():
            scores = tested[over][seen] @ heads[fitted]
            predictions = scores.argmax(1)
            confusions[name][end] = Confusion.of(
                test.labels[seen], predictions, split.classes[:end]
            )
    return confusions


def _expanded(
    expand: RandomFeatures, readings: Mapping[str, Reading], read: Callable[[View], Blocks]
) -> dict[tuple[View, ...], Tensor]:
    """Return the random features (N, M) of the test images for each set of test views: their means over these views."""
    once = cache(read)
    tested = {reading.tested for reading in readings.values()}
    return {views: expand(*map(once, views)) for views in tested}


def _ends(scenario: ClassIncremental) -> list[int]:
    """Return the number of classes learned after each phase."""
    return [scenario.seen(t) for t in range(len(scenario))]


def headline(results: Mapping[int, Sequence[Results]]) -> Table:
    """Return a table of the closed form beside the paper's Table 1 and numbers published by others.

    results: for each T the results of some runs.
    """
    every = [run for runs in results.values() for run in runs]
    rows: list[list[Cell]] = []
    for shown in (INCREMENTAL, AVERAGE, "final", "forgetting"):
        for name, words in OURS.items():
            if any(name in run for run in every):
                cells = [_mean(runs, name, MEASURES[shown][0]) for runs in results.values()]
                rows.append([f"geodl: {words}", shown, *cells, PROTOCOL])
    paper: dict[tuple[str, bool | None], dict[int | None, float]] = {}
    for number in numbers():
        if (number.table, number.metric, number.dataset) == ("Table 1", "average", "cifar100"):
            paper.setdefault((number.row, number.includes_phase0), {})[number.phases] = number.value
    for (row, includes), values in paper.items():
        kind = INCREMENTAL if includes else AVERAGE
        name = f"{row} (the paper's Table 1)"
        rows.append([name, kind, *map(values.get, results), PAPERS_PROTOCOL])
    for other in others():
        averages = [other["average"].get(str(t)) for t in results]
        if any(averages):
            rows.append([other["name"], INCREMENTAL, *averages, other["protocol"]])
    columns = [f"T = {t}" for t in results]
    return Table(["CIFAR-100, 50 base classes", "figure", *columns, "protocol"], rows, NOTES)


def others() -> list[dict[str, Any]]:
    """Return the numbers published by others: name, average incremental accuracy by T, protocol."""
    text = resources.files("geodl.bench.report").joinpath("beyond.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["row"]  # type: ignore[no-any-return]


def _mean(runs: Sequence[Results], classifier: str, measure: str) -> Estimate | None:
    return estimate([run.get(classifier, {}).get(measure) for run in runs])
