"""The figures of a report."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from geodl.bench.report.figures import Curve, Plot, heat, lines
from geodl.bench.report.results import Epoch, Estimate, Run, Setting
from geodl.core.files import make_below
from geodl.core.text import printable
from geodl.model.classifiers import is_oracle, titles

NAMED = 150
"""A confusion matrix of more classes has names in its tooltips only."""
SIMILARITIES = {"svcca": "SVCCA", "cka": "linear CKA"}


def accuracy(settings: Sequence[Setting]) -> list[Plot]:
    """Draw the accuracy on all classes learned so far, by classifier."""
    y = "accuracy on all classes learned so far (%)"
    return _by_series("accuracy", "Accuracy", settings, titles(), Setting.accuracy, y)


def forgetting(settings: Sequence[Setting]) -> list[Plot]:
    """Draw the accuracy lost on the base classes, by classifier."""
    grown = [setting for setting in settings if setting.first.done > 1]
    y = "accuracy lost on the base classes (points)"
    return _by_series("forgetting", "Forgetting", grown, titles(), Setting.lost, y)


def similarity(settings: Sequence[Setting]) -> list[Plot]:
    """Draw SVCCA and linear CKA of the features with those of phase 0 (the paper's CCA figures)."""
    compared = [setting for setting in settings if len(setting.similarity("svcca")) > 1]
    title, y = "Representation similarity", "similarity to the features of phase 0"
    return _by_series("similarity", title, compared, SIMILARITIES, Setting.similarity, y)


def _by_series(
    name: str,
    title: str,
    settings: Sequence[Setting],
    series: Mapping[str, str],
    values: Callable[[Setting, str], list[Estimate | None]],
    y: str,
) -> list[Plot]:
    """Draw values by phase: one figure with all series of a single setting, or one figure per series for several settings.

    series: key -> name; values: the estimates of a series, empty if a setting does not have it.
    """
    if len(settings) == 1:
        (only,) = settings
        curves = [
            curve(shown, only.first.seen, estimates, is_oracle(key))
            for key, shown in series.items()
            if (estimates := values(only, key))
        ]
        return [_over_phases(name, title, settings, curves, y)] if curves else []
    plots = []
    for key, shown in series.items():
        compared = [setting for setting in settings if values(setting, key)]
        if compared:
            curves = [curve(one.label, one.first.seen, values(one, key)) for one in compared]
            heading, axis = f"{title}: {shown}", f"{shown}: {y}"
            plots.append(_over_phases(f"{name}-{key}", heading, compared, curves, axis))
    return plots


def angles(settings: Sequence[Setting]) -> list[Plot]:
    """Draw the principal angles between the base classes' feature subspaces in phase 0 and in each phase."""
    compared = [setting for setting in settings if len(setting.angles()) > 1]
    alone, y = len(compared) == 1, "principal angles to phase 0 (degrees)"
    curves = [_angles(one, one.first.seen, one.angles(), alone) for one in compared]
    return [_over_phases("angles", "Principal angles", compared, curves, y)] if curves else []


def drift(settings: Sequence[Setting]) -> list[Plot]:
    """Draw the principal angles between the old and the new network after each epoch."""
    compared = [setting for setting in settings if len(setting.turned) > 1]
    if not compared:
        return []
    curves = []
    for setting in compared:
        epochs = range(1, len(setting.turned) + 1)
        curves.append(_angles(setting, epochs, setting.drift(), len(compared) == 1))
    marks = [_marks(setting.turned) for setting in compared]
    shared = marks[0] if all(one == marks[0] for one in marks) else {}
    plot = lines(
        "angles-training",
        curves,
        x="epoch after phase 0",
        y="principal angles to the old network (degrees)",
        title="Angles along training",
        percent=False,
        marks=shared,
    )
    return [plot]


def _angles(
    setting: Setting, x: Sequence[float], ranges: Sequence[tuple[float, float, float]], alone: bool
) -> Curve:
    """Return a curve of medians; with a band from minimum to maximum if it is the only curve."""
    low, median, high = map(list, zip(*ranges, strict=True))
    return Curve("median", x, median, low, high) if alone else Curve(setting.label, x, median)


def training(run: Run) -> list[Plot]:
    """Draw the loss and its parts after each epoch of all phases and stages."""
    if len(run.epochs) < 2:
        return []
    count = range(1, len(run.epochs) + 1)
    names = dict.fromkeys(name for epoch in run.epochs for name in epoch.parts)
    curves = [Curve("loss", count, [epoch.loss for epoch in run.epochs])] if len(names) > 1 else []
    for name in names:
        curves.append(Curve(name, count, [epoch.parts.get(name) for epoch in run.epochs]))
    y, marks = "mean loss of each epoch, phases marked", _marks(run.epochs)
    return [lines("training", curves, x="epoch", y=y, title="Loss", percent=False, marks=marks)]


def _marks(epochs: Sequence[Epoch]) -> dict[float, str]:
    """Return the epoch at which each phase starts, with its number; nothing if there are too many to label."""
    starts: dict[int, float] = {}
    for number, epoch in enumerate(epochs):
        starts.setdefault(epoch.phase, number + 0.5)
    return {start: str(phase) for phase, start in starts.items()} if len(starts) <= 12 else {}


def groups(setting: Setting, classifier: str) -> Plot | None:
    """Draw the accuracy on each phase's classes after each phase; None before the second phase."""
    run = setting.first
    if run.done < 2:
        return None
    matrix = np.array(run.results[classifier]["matrix"], dtype=np.float64)
    rows = []
    for t, group in enumerate(run.groups):
        names = printable(", ".join(group[:4])) + (", …" if len(group) > 4 else "")
        rows.append(f"classes of phase {t} ({len(group)}: {names})")
    values = matrix.round(2).astype(object)
    values[np.isnan(matrix)] = None
    phases = [str(t) for t in range(run.done)]
    tips = {
        "rows": rows,
        "columns": [f"after phase {t}" for t in phases],
        "values": values.tolist(),
    }
    return heat(
        f"groups-{classifier}",
        matrix,
        rows=phases,
        columns=phases,
        x="after phase",
        y="accuracy (%) on the classes of phase …",
        title="Accuracy on each phase's classes",
        tips=tips,
    )


def confusion(setting: Setting, classifier: str) -> Plot:
    """Draw the confusion matrix in % of the true class's test images, classes in learning order."""
    run = setting.first
    counts = run.confusion(classifier).counts.numpy()
    matrix = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes = [printable(name) for name in run.classes]
    names = classes if len(classes) <= NAMED else []
    entries = [[*place, int(counts[*place])] for place in np.argwhere(counts).tolist()]
    tips = {"rows": classes, "columns": classes, "entries": entries}
    return heat(
        f"confusion-{classifier}",
        matrix,
        rows=names,
        columns=names,
        x="predicted class",
        y="true class",
        title="Confusion matrix",
        tips=tips | {"totals": counts.sum(axis=1).tolist()},
        boundaries=run.seen[:-1],
        root=True,
    )


def write_figures(settings: Sequence[Setting], directory: Path) -> list[Path]:
    """Write every figure as SVG and PDF; with several settings, those of each setting into a folder of its own."""
    paths = []
    directory.mkdir(parents=True, exist_ok=True)
    for draw in (accuracy, forgetting, similarity, angles, drift):
        for plot in draw(settings):
            paths += plot.files(directory)
    for number, setting in enumerate(settings, start=1):
        words = re.sub(r"[^a-z0-9]+", "-", setting.label.lower()).strip("-")[:60] or "run"
        folder = make_below(directory, f"{number}-{words}") if len(settings) > 1 else directory
        drawn: list[Plot | None] = [*training(setting.first)]
        for name in setting.classifiers:
            drawn += [groups(setting, name), confusion(setting, name)]
        for one in filter(None, drawn):
            paths += one.files(folder)
    return paths


def _over_phases(
    name: str, title: str, settings: Sequence[Setting], curves: Sequence[Curve], y: str
) -> Plot:
    """Draw curves over the number of classes learned, with ticks at the phases if all settings share them."""
    seen = {tuple(setting.first.seen) for setting in settings}
    ticks = next(iter(seen)) if len(seen) == 1 else None
    percent = "(%)" in y
    return lines(name, curves, x="classes learned", y=y, title=title, percent=percent, ticks=ticks)


def curve(
    label: str, x: Sequence[float], values: Sequence[Estimate | None], dashed: bool = False
) -> Curve:
    """Return a curve of estimates over x, with a band of one standard deviation if there are several runs."""
    known = [(at, value) for at, value in zip(x, values, strict=True) if value]
    places, means = [at for at, _ in known], [value.mean for _, value in known]
    if all(value.runs == 1 for _, value in known):
        return Curve(label, places, means, dashed=dashed)
    low = [value.mean - (value.spread or 0) for _, value in known]
    high = [value.mean + (value.spread or 0) for _, value in known]
    return Curve(label, places, means, low, high, dashed)
