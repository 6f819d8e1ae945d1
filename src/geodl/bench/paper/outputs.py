"""Tables (with the published numbers) and figures from the runs of a grid."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from geodl.bench.paper.grid import (
    ARTEFACTS,
    Length,
    Planned,
    Training,
    preset_of,
    published,
    training_of,
    trainings,
)
from geodl.bench.report import plots
from geodl.bench.report.figures import Plot, lines
from geodl.bench.report.published import not_as_published
from geodl.bench.report.results import DATA_NAMES, Run, Setting, label_of, read_run
from geodl.bench.report.tables import (
    AVERAGE,
    PAPERS,
    Table,
    compare,
    comparison_table,
    summary,
)
from geodl.config import preset_layer
from geodl.learning.timing import LOSSES
from geodl.methods import configure
from geodl.model.classifiers import is_oracle, titles

Settings = Mapping[Training, Setting]
# Labels in the figure of Table 1's methods.
NAMES = {("icarl", "lwf"): "LwF / iCaRL", ("finetune", "geodesic"): "iCaRL + GeoDL"}


def read(jobs: Sequence[Planned]) -> dict[Training, Setting]:
    """Read the complete runs of a grid: each training with its seeds."""
    runs: dict[Training, list[Run]] = {}
    for job in jobs:
        if job.complete():
            runs.setdefault(job.training, []).append(read_run(job.out))
    return {training: Setting(some[0].label, tuple(some)) for training, some in runs.items()}


def write(
    artefact: str,
    dataset: str,
    length: Length,
    phases: Sequence[int],
    settings: Settings,
    out: Path,
) -> list[Path]:
    """Write a table or figure of the paper from the complete runs; return the files."""
    title = f"{ARTEFACTS[artefact].title} ({DATA_NAMES[dataset]})"
    if ARTEFACTS[artefact].table:
        return compared(artefact, dataset, length, phases, settings).write(out / artefact, title)
    needed = [training for training in trainings(artefact, dataset, phases) if training in settings]
    if artefact == "fig-phases":
        settings = {
            one: replace(setting, label=NAMES.get((one.method, one.distill), setting.label))
            for one, setting in settings.items()
        }
    table = summary(
        [replace(settings[one], label=f"{settings[one].label}, T = {one.phases}") for one in needed]
    )
    table = replace(table, notes=[*table.notes, *caution(dataset, length)])
    paths = table.write(out / artefact, title)
    for plot in figures(artefact, needed, settings):
        paths += plot.files(out)
    return paths


def compared(
    artefact: str, dataset: str, length: Length, phases: Sequence[int], settings: Settings
) -> Table:
    """Return a table of the paper with our numbers and the differences."""
    rows = [
        one
        for number in published(artefact, dataset, phases)
        for one in compare(number, settings.get(training_of(number)))
    ]
    table = comparison_table(rows)
    varied = {"table3": ("dimension", "subspace_dim"), "init10": ("base classes", "base")}
    if artefact in varied:
        name, key = varied[artefact]
        table = table.inserting(3, name, [getattr(one.published, key) for one in rows])
    dropped = [] if any(one.published.metric == "forgetting" for one in rows) else ["forgetting"]
    notes = list(table.notes)
    if length == "smoke":
        # Differences between digits and another dataset would mislead.
        dropped, notes = [*dropped, "difference", "compared with"], notes[1:]
    table = table.keeping([i for i, name in enumerate(table.header) if name not in dropped])
    if any(len(setting.runs) > 1 for setting in settings.values()):
        notes.append("Ours: mean ± sample standard deviation over runs.")
    notes += caution(dataset, length)
    if waiting := sum(one.ours is None for one in rows):
        notes.append(f"Not run yet: {waiting} of {len(rows)} rows.")
    return Table(table.header, table.rows, notes)


def caution(dataset: str, length: Length) -> list[str]:
    """Describe how a length deviates from the paper's training."""
    if length == "smoke":
        return [
            "Smoke test: ours are of the ten digits, with fewer phases, exemplars and epochs than the row says; the published "
            f"numbers are of {DATA_NAMES[dataset]}. The two cannot be compared."
        ]
    config = configure([preset_layer(preset_of(dataset, length))]).config
    deviations = not_as_published(config.identity())
    return [f"Ours are of length {length}: {', '.join(deviations)}."] if deviations else []


# ------------------------------------------------------------------------------------------------------- figures


def figures(artefact: str, needed: Sequence[Training], settings: Settings) -> list[Plot]:
    """Draw a figure of the paper: one plot per number of phases, or per classifier."""
    if artefact == "fig-classifiers":
        return [plot for classifier in PAPERS if (plot := _by_phases(classifier, needed, settings))]
    drawn = []
    for t in sorted({training.phases for training in needed}):
        some = [settings[training] for training in needed if training.phases == t]
        kind = (
            plots.accuracy(some)
            if artefact == "fig-phases"
            else [*plots.similarity(some), *plots.angles(some)]
        )
        drawn += [replace(plot, name=f"{artefact}-T{t}-{plot.name}") for plot in kind]
    return drawn


def _by_phases(classifier: str, needed: Sequence[Training], settings: Settings) -> Plot | None:
    """Draw the average accuracy over the number of phases, with a line per loss; None without results."""
    curves = []
    for loss in LOSSES:
        mine = sorted((one for one in needed if one.distill == loss), key=lambda one: one.phases)
        values = [settings[one].value(classifier, "average") for one in mine]
        if any(values):
            label, dashed = label_of("finetune", loss), is_oracle(classifier)
            curves.append(plots.curve(label, [one.phases for one in mine], values, dashed))
    if not curves:
        return None
    ticks = sorted({training.phases for training in needed})
    y = f"{titles()[classifier]}: {AVERAGE} accuracy (%)"
    return lines(f"fig-classifiers-{classifier}", curves, x="phases T", y=y, ticks=ticks)
