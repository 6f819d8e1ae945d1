"""Which figures a report has: from settings to drawn plots."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from geodl.predictors import CLASSIFIERS
from geodl.report.figures import Curve, Plot, heat, lines
from geodl.report.results import Epoch, Estimate, Run, Setting
from geodl.text import printable

NAMED = 150
"""A confusion matrix of more classes has no names at its sides; the tips have them."""


def accuracy(settings: Sequence[Setting]) -> list[Plot]:
    """Draw the accuracy on all classes seen: for one setting its classifiers, for several a figure a classifier."""
    return _by_classifier("Accuracy", settings, Setting.accuracy, "accuracy on all classes learned so far (%)")


def forgetting(settings: Sequence[Setting]) -> list[Plot]:
    """Draw what is lost on the base classes."""
    grown = [setting for setting in settings if setting.first.done > 1]
    return _by_classifier("Forgetting", grown, Setting.lost, "accuracy lost on the base classes (points)")


def similarity(settings: Sequence[Setting]) -> list[Plot]:
    """Draw SVCCA and linear CKA of the features with those of phase 0 (the paper's CCA figures)."""
    compared = [setting for setting in settings if len(setting.similarity("svcca")) > 1]
    measures = {"svcca": "SVCCA", "cka": "linear CKA"}
    if not compared:
        return []
    title, y = "Representation similarity", "similarity to the features of phase 0"
    if len(compared) == 1:
        curves = [curve(name, compared[0].first.seen, compared[0].similarity(key)) for key, name in measures.items()]
        return [_over_phases("similarity", title, compared, curves, y)]
    drawn = []
    for key, name in measures.items():
        curves = [curve(setting.label, setting.first.seen, setting.similarity(key)) for setting in compared]
        drawn.append(_over_phases(f"similarity-{key}", title, compared, curves, f"{name}: {y}"))
    return drawn


def angles(settings: Sequence[Setting]) -> list[Plot]:
    """Draw the principal angles between the subspaces of the base classes' features in phase 0 and now."""
    compared = [setting for setting in settings if len(setting.angles()) > 1]
    if not compared:
        return []
    curves = [_angles(setting, setting.first.seen, setting.angles(), len(compared) == 1) for setting in compared]
    return [_over_phases("angles", "Principal angles", compared, curves, "principal angles to phase 0 (degrees)")]


def drift(settings: Sequence[Setting]) -> list[Plot]:
    """Draw the principal angles between the old network and the new one, epoch after epoch through the phases."""
    compared = [setting for setting in settings if len(setting.turned) > 1]
    if not compared:
        return []
    curves = [
        _angles(setting, range(1, len(setting.turned) + 1), setting.drift(), len(compared) == 1) for setting in compared
    ]
    marks = [_marks(setting.turned) for setting in compared]
    shared = marks[0] if all(each == marks[0] for each in marks) else {}
    title, y = "Angles along training", "principal angles to the old network (degrees)"
    return [lines("angles-training", curves, x="epoch after phase 0", y=y, title=title, percent=False, marks=shared)]


def _angles(setting: Setting, x: Sequence[float], found: Sequence[tuple[float, float, float]], alone: bool) -> Curve:
    """Make a curve of medians; a band from the least to the greatest only where it is alone, since bands would cover all else."""
    low, median, high = (list(each) for each in zip(*found, strict=True))
    return Curve("median", x, median, low, high) if alone else Curve(setting.label, x, median)


def training(run: Run) -> list[Plot]:
    """Draw the loss and its parts, epoch after epoch through all phases and stages."""
    if len(run.epochs) < 2:
        return []
    count = range(1, len(run.epochs) + 1)
    names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch.parts))
    curves = [Curve(name, count, [epoch.parts.get(name) for epoch in run.epochs]) for name in names]
    if len(names) > 1:
        curves.insert(0, Curve("loss", count, [epoch.loss for epoch in run.epochs]))
    y = "mean loss of each epoch, phases marked"
    return [lines("training", curves, x="epoch", y=y, title="Loss", percent=False, marks=_marks(run.epochs))]


def _marks(epochs: Sequence[Epoch]) -> dict[float, str]:
    """Return where each phase begins, with its number; nothing where there are too many to be read."""
    starts: dict[int, float] = {}
    for number, epoch in enumerate(epochs):
        starts.setdefault(epoch.phase, number + 0.5)
    return {start: str(phase) for phase, start in starts.items()} if len(starts) <= 12 else {}


def groups(setting: Setting, classifier: str) -> Plot | None:
    """Draw the accuracy on each phase's classes after each phase: rows fade where a group is forgotten."""
    run = setting.first
    if run.done < 2:
        return None
    matrix = np.array(run.results[classifier]["matrix"], dtype=np.float64)
    names = [printable(", ".join(group[:4])) + (", …" if len(group) > 4 else "") for group in run.groups]
    described = enumerate(zip(run.groups, names, strict=True))
    tips = {
        "rows": [f"classes of phase {t} ({len(group)}: {name})" for t, (group, name) in described],
        "columns": [f"after phase {t}" for t in range(run.done)],
        "values": [[None if np.isnan(value) else round(value, 2) for value in row] for row in matrix.tolist()],
    }
    phases = [str(t) for t in range(run.done)]
    title, y = "Accuracy on each phase's classes", "accuracy (%) on the classes of phase …"
    return heat(
        f"groups-{classifier}", matrix, rows=phases, columns=phases, x="after phase", y=y, title=title, tips=tips
    )


def confusion(setting: Setting, classifier: str) -> Plot:
    """Draw what is taken for what, in % of the true class's test images; classes in the order of learning."""
    run = setting.first
    counts = run.confusion(classifier).counts.numpy()
    matrix = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes = [printable(name) for name in run.classes]
    names = classes if len(classes) <= NAMED else []
    tips = {
        "rows": classes,
        "columns": classes,
        "totals": counts.sum(axis=1).tolist(),
        "entries": [[int(i), int(j), int(counts[i, j])] for i, j in zip(*counts.nonzero(), strict=True)],
    }
    return heat(
        f"confusion-{classifier}", matrix, rows=names, columns=names, x="predicted class", y="true class",
        title="Confusion matrix", tips=tips, boundaries=run.seen[:-1], root=True,
    )  # fmt: skip


def write_figures(settings: Sequence[Setting], directory: Path) -> list[Path]:
    """Write every figure as SVG and PDF; those of single settings into a folder each where there are several."""
    directory.mkdir(parents=True, exist_ok=True)
    together = [plot for draw in (accuracy, forgetting, similarity, angles, drift) for plot in draw(settings)]
    paths = [path for plot in together for path in plot.files(directory)]
    for number, setting in enumerate(settings, start=1):
        words = re.sub(r"[^a-z0-9]+", "-", setting.label.lower()).strip("-")[:60] or "run"
        folder = directory / f"{number}-{words}" if len(settings) > 1 else directory
        folder.mkdir(exist_ok=True)
        drawn = [draw(setting, name) for name in setting.classifiers for draw in (groups, confusion)]
        paths += [path for plot in (*drawn, *training(setting.first)) if plot for path in plot.files(folder)]
    return paths


def _by_classifier(
    title: str, settings: Sequence[Setting], values: Callable[[Setting, str], list[Estimate | None]], y: str
) -> list[Plot]:
    if len(settings) == 1:
        only = settings[0]
        curves = [curve(CLASSIFIERS[c], only.first.seen, values(only, c), c == "ame") for c in only.classifiers]
        return [_over_phases(title.lower(), title, settings, curves, y)] if curves else []
    plots = []
    for classifier, shown in CLASSIFIERS.items():
        having = [setting for setting in settings if classifier in setting.classifiers]
        curves = [curve(setting.label, setting.first.seen, values(setting, classifier)) for setting in having]
        if curves:
            name, under = f"{title.lower()}-{classifier}", f"{title} under {shown}"
            plots.append(_over_phases(name, under, having, curves, f"{shown}: {y}"))
    return plots


def _over_phases(name: str, title: str, settings: Sequence[Setting], curves: Sequence[Curve], y: str) -> Plot:
    """Draw curves over the number of classes learned, with ticks there where all settings agree on them."""
    seen = {tuple(setting.first.seen) for setting in settings}
    ticks = next(iter(seen)) if len(seen) == 1 else None
    return lines(name, curves, x="classes learned", y=y, title=title, percent="(%)" in y, ticks=ticks)


def curve(label: str, x: Sequence[float], values: Sequence[Estimate | None], dashed: bool = False) -> Curve:
    """Make a curve of estimates over x, with a band of one standard deviation where there are several runs."""
    means = [value.mean if value else None for value in values]
    if not any(value.runs > 1 for value in values if value):
        return Curve(label, x, means, dashed=dashed)
    low, high = ([v.mean + sign * (v.spread or 0) if v else None for v in values] for sign in (-1, 1))
    return Curve(label, x, means, low, high, dashed)
