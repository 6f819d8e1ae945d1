"""What is written when the runs of a grid are done: tables beside the published numbers, and figures."""

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
# Trainings that have other names in the figure of Table 1's methods.
NAMES = {("icarl", "lwf"): "LwF / iCaRL", ("finetune", "geodesic"): "iCaRL + GeoDL"}


def read(jobs: Sequence[Planned]) -> dict[Training, Setting]:
    """Read the complete runs of a grid: each training with all its seeds."""
    found: dict[Training, list[Run]] = {}
    for job in jobs:
        if job.complete():
            found.setdefault(job.training, []).append(read_run(job.out))
    return {training: Setting(runs[0].label, tuple(runs)) for training, runs in found.items()}


def write(
    artefact: str,
    dataset: str,
    length: Length,
    phases: Sequence[int],
    settings: Settings,
    out: Path,
) -> list[Path]:
    """Write one table or figure of the paper, as far as its runs are complete; return the files."""
    title = f"{ARTEFACTS[artefact].title} ({DATA_NAMES[dataset]})"
    if ARTEFACTS[artefact].table:
        return compared(artefact, dataset, length, phases, settings).write(out / artefact, title)
    needed = [training for training in trainings(artefact, dataset, phases) if training in settings]
    if artefact == "fig-phases":
        settings = {
            one: replace(s, label=NAMES.get((one.method, one.distill), s.label))
            for one, s in settings.items()
        }
    table = summary(
        [replace(settings[one], label=f"{settings[one].label}, T = {one.phases}") for one in needed]
    )
    paths = replace(table, notes=[*table.notes, *caution(dataset, length)]).write(
        out / artefact, title
    )
    return [
        *paths,
        *(path for plot in figures(artefact, needed, settings) for path in plot.files(out)),
    ]


def compared(
    artefact: str, dataset: str, length: Length, phases: Sequence[int], settings: Settings
) -> Table:
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
        table = table.inserting(3, name, [getattr(each.published, key) for each in found])
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


def caution(dataset: str, length: Length) -> list[str]:
    """Say how a length departs from the paper's training."""
    if length == "smoke":
        return [
            "Smoke test: ours are of the ten digits, with fewer phases, exemplars and epochs than the row says; the published "
            f"numbers are of {DATA_NAMES[dataset]}. The two cannot be compared."
        ]
    departs = not_as_published(
        configure([preset_layer(preset_of(dataset, length))]).config.identity()
    )
    return [f"Ours are of length {length}: {', '.join(departs)}."] if departs else []


# ------------------------------------------------------------------------------------------------------- figures


def figures(artefact: str, needed: Sequence[Training], settings: Settings) -> list[Plot]:
    """Draw a figure of the paper; one for each number of phases, or for each classifier, as the paper has it."""
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
    """Draw the average accuracy over the number of phases, a line for each loss."""
    curves = []
    for loss in LOSSES:
        mine = {
            one.phases: settings[one].value(classifier, "average")
            for one in needed
            if one.distill == loss
        }
        found = {t: value for t, value in sorted(mine.items()) if value}
        if found:
            label, dashed = label_of("finetune", loss), is_oracle(classifier)
            curves.append(plots.curve(label, list(found), list(found.values()), dashed))
    if not curves:
        return None
    ticks = sorted({training.phases for training in needed})
    y = f"{titles()[classifier]}: {AVERAGE} accuracy (%)"
    return lines(f"fig-classifiers-{classifier}", curves, x="phases T", y=y, ticks=ticks)
