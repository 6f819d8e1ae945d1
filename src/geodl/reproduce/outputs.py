"""What is written when the runs of a grid are done: tables beside the published numbers, and figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from geodl.config import preset_layer
from geodl.methods import configure
from geodl.predictors import CLASSIFIERS
from geodl.report import plots
from geodl.report.figures import Curve, Plot, lines
from geodl.report.published import not_as_published, numbers
from geodl.report.results import DATA_NAMES, Setting, label_of, read_run
from geodl.report.tables import AVERAGE, PAPERS, Cell, Table, compare, comparison_table, summary
from geodl.reproduce.grid import ARTEFACTS, Job, Length, Training, preset_of, published, training_of, trainings
from geodl.reproduce.steps import LOSSES, Ratio, ratio

Settings = Mapping[Training, Setting]
# Trainings that have other names in the figure of Table 1's methods.
NAMES = {("icarl", "lwf"): "LwF / iCaRL", ("finetune", "geodesic"): "iCaRL + GeoDL"}


def read(jobs: Sequence[Job], runs: Path) -> dict[Training, Setting]:
    """Read the complete runs of a grid: each training with all its seeds."""
    found: dict[Training, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.training, []).append(job)
    settings = {}
    for training, group in found.items():
        complete = [run for job in group if (runs / job.name).exists() and (run := read_run(runs / job.name)).complete]
        if complete:
            settings[training] = Setting(complete[0].label, tuple(complete))
    return settings


def write(
    artefact: str, dataset: str, length: Length, phases: Sequence[int], settings: Settings, out: Path
) -> list[Path]:
    """Write one table or figure of the paper, as far as its runs are complete; return the files."""
    title = f"{ARTEFACTS[artefact].title} ({DATA_NAMES[dataset]})"
    if ARTEFACTS[artefact].table:
        return compared(artefact, dataset, length, phases, settings).write(out / artefact, title)
    needed = [training for training in trainings(artefact, dataset, phases) if training in settings]
    if artefact == "fig-phases":
        settings = {one: replace(s, label=NAMES.get((one.method, one.distill), s.label)) for one, s in settings.items()}
    table = summary([replace(settings[one], label=f"{settings[one].label}, T = {one.phases}") for one in needed])
    table = Table(table.header, table.rows, [*table.notes, *caution(dataset, length)])
    paths = table.write(out / artefact, title)
    return [*paths, *(path for plot in figures(artefact, needed, settings) for path in plot.files(out))]


def compared(artefact: str, dataset: str, length: Length, phases: Sequence[int], settings: Settings) -> Table:
    """Put every published number of a table beside ours, and the difference."""
    found = [
        each
        for number in published(artefact, dataset, phases)
        for each in compare(number, settings.get(training_of(number)))
    ]
    table = comparison_table(found)
    own = {"table3": ("dimension", "subspace_dim"), "init10": ("base classes", "base")}
    if artefact in own:  # what such a table varies
        name, key = own[artefact]
        table = _with_column(table, 3, name, [getattr(each.published, key) for each in found])
    dropped = [] if any(each.published.metric == "forgetting" for each in found) else ["forgetting"]
    notes = list(table.notes)
    if length == "smoke":
        # On digits there is nothing to compare: the published numbers keep their place, differences would mislead.
        dropped, notes = [*dropped, "difference", "compared with"], notes[1:]
    table = table.keeping([i for i, name in enumerate(table.header) if name not in dropped])
    if any(len(setting.runs) > 1 for setting in settings.values()):
        notes.append("Ours: mean ± sample standard deviation over runs.")
    notes += caution(dataset, length)
    if waiting := sum(each.ours is None for each in found):
        notes.append(f"Not run yet: {waiting} of {len(found)} rows.")
    return Table(table.header, table.rows, notes)


def _with_column(table: Table, at: int, name: str, cells: Sequence[Cell]) -> Table:
    header = [*table.header[:at], name, *table.header[at:]]
    rows = [[*row[:at], cell, *row[at:]] for row, cell in zip(table.rows, cells, strict=True)]
    return Table(header, rows, table.notes)


def caution(dataset: str, length: Length) -> list[str]:
    """Say how a length departs from the paper's training."""
    if length == "smoke":
        return [
            "Smoke test: ours are of the ten digits, with fewer phases, exemplars and epochs than the row says; the published "
            f"numbers are of {DATA_NAMES[dataset]}. The two cannot be compared."
        ]
    departs = not_as_published(configure([preset_layer(preset_of(dataset, length))]).config.identity())
    return [f"Ours are of length {length}: {', '.join(departs)}."] if departs else []


# ------------------------------------------------------------------------------------------------------- figures


def figures(artefact: str, needed: Sequence[Training], settings: Settings) -> list[Plot]:
    """Draw a figure of the paper; one for each number of phases, or for each classifier, as the paper has it."""
    if artefact == "fig-classifiers":
        return [plot for classifier in PAPERS if (plot := _by_phases(classifier, needed, settings))]
    drawn = []
    for t in sorted({training.phases for training in needed}):
        some = [settings[training] for training in needed if training.phases == t]
        kind = plots.accuracy(some) if artefact == "fig-phases" else [*plots.similarity(some), *plots.angles(some)]
        drawn += [replace(plot, name=f"{artefact}-T{t}-{plot.name}") for plot in kind]
    return drawn


def _by_phases(classifier: str, needed: Sequence[Training], settings: Settings) -> Plot | None:
    """Draw the average accuracy over the number of phases, a line for each loss."""
    curves = []
    for loss in LOSSES:
        mine = sorted((training for training in needed if training.distill == loss), key=lambda one: one.phases)
        found = [(one.phases, value) for one in mine if (value := settings[one].value(classifier, "average"))]
        if found:
            spread = [value.spread or 0.0 for _, value in found]
            means = [value.mean for _, value in found]
            low, high = ([m + sign * s for m, s in zip(means, spread, strict=True)] for sign in (-1, 1))
            curves.append(
                Curve(label_of("finetune", loss), [t for t, _ in found], means, low, high, classifier == "ame")
            )
    if not curves:
        return None
    ticks = sorted({training.phases for training in needed})
    y = f"{CLASSIFIERS[classifier]}: {AVERAGE} accuracy (%)"
    return lines(f"fig-classifiers-{classifier}", curves, x="phases T", y=y, ticks=ticks)


# ----------------------------------------------------------------------------------------------- time and memory


def time_memory(times: Mapping[str, Sequence[float]], peaks: Mapping[str, float], about: str) -> Table:
    """Put measured times and peaks, and their ratios, beside the paper's.

    times: seconds of single steps, in turns; peaks: bytes; both by distillation.
    """
    rows: list[list[Cell]] = []
    for name in LOSSES:
        against = [_against("time_ratio", times, name), _against("memory_gb", {k: [v] for k, v in peaks.items()}, name)]
        middle = sorted(times[name])[len(times[name]) // 2]
        row: list[Cell] = [
            label_of("finetune", name),
            1e3 * middle,
            None if math.isnan(peaks[name]) else peaks[name] / 2**20,
        ]
        rows.append([*row, *(cell for cells in against for cell in cells)])
    header = ["loss", "ms an iteration", "peak MB"]
    header += ["GeoDL takes x times as long", "published", "GeoDL takes x times the memory", "published memory ratio"]
    turns = len(times["geodesic"])
    notes = [
        f"{about}. Steps took turns ({turns} each); ratios are medians of paired ratios with their 95 % interval.",
        "Memory: the peak of training steps above what was there before the first, each loss in a process of its own. The paper "
        "states the whole process on an NVIDIA GTX Titan X (2.4, 2.1 and 1.7 GB); its ratios are shown.",
    ]
    return Table(header, rows, notes)


def _against(metric: str, measured: Mapping[str, Sequence[float]], other: str) -> list[Cell]:
    """Return GeoDL's ratio to another loss, ours and the paper's."""
    if other == "geodesic":
        return [None, None]
    found = [n for n in numbers() if n.metric == metric]
    if metric == "time_ratio":
        theirs = next((n.value for n in found if n.against == other), None)
    else:
        gb = {n.distill: n.value for n in found}
        theirs = gb["geodesic"] / gb[other] if other in gb else None
    known = not any(map(math.isnan, measured["geodesic"]))
    return [_show(ratio(measured["geodesic"], measured[other])) if known else None, theirs]


def _show(value: Ratio) -> Cell:
    return value.median if value.pairs == 1 else f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"
