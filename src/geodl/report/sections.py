"""The parts of the page that show all settings together: each gives HTML, or nothing where there is nothing to show."""

from collections.abc import Sequence

from geodl.predictors import CLASSIFIERS
from geodl.report import plots
from geodl.report.markup import escape, figure, grid, note, section, table
from geodl.report.published import protocols
from geodl.report.results import Run, Setting
from geodl.report.tables import Table, comparison_table, comparisons, summary


def heading(settings: Sequence[Setting]) -> tuple[str, str, str]:
    """Give the title, the sentence under it, and the tiles with the headline numbers of a single setting."""
    first = settings[0].first
    data = ", ".join(dict.fromkeys(setting.first.data for setting in settings))
    if len(settings) > 1:
        runs = sum(len(setting.runs) for setting in settings)
        return f"{len(settings)} settings on {data}", f"{runs} runs. {_protocol(first)}", ""
    seeds = ", ".join(str(run.config.get("seed", "?")) for run in settings[0].runs)
    words = f"{_protocol(first)} Seed {seeds}. {_state(first)}"
    return f"{first.label} on {data}", words, _tiles(settings[0])


def _protocol(run: Run) -> str:
    """Say in a sentence what was learned, by which network, with what memory."""
    sizes = [len(group) for group in run.groups]
    if not sizes:
        return "No phase is complete yet."
    later = sizes[1:]
    words = f"{sizes[0]} classes"
    if later:
        each = str(later[0]) if len(set(later)) == 1 else f"{min(later)} to {max(later)}"
        words += f", then {len(later)} {'phase' if len(later) == 1 else 'phases'} of {each}"
    config = run.config
    if "exemplars" in config:
        kind = "a class" if config.get("budget") == "per_class" else "in total"
        words += f"; {config['exemplars']} exemplars {kind}"
    return words + (f"; network {config['network']}." if "network" in config else ".")


def _state(run: Run) -> str:
    if run.total is None:
        return f"{run.done} steps learned."
    return "All phases complete." if run.complete else f"{run.done} of {run.total} phases complete."


def _tiles(setting: Setting) -> str:
    """Show the headline numbers under the main classifier."""
    if setting.main is None:
        return ""
    names = {
        "final": f"accuracy on all {len(setting.first.classes)} classes",
        "average": "average accuracy, phases 1 to T",
        "average_incremental": "average accuracy with phase 0",
        "forgetting": "forgetting of the base classes",
    }
    found = [(setting.value(setting.main, name), words) for name, words in names.items()]
    tiles = [
        f"<div><strong>{value.mean:.1f}<small> %{f' ± {value.spread:.1f}' if value.spread is not None else ''}</small></strong>"
        f"<span>{escape(words)}</span></div>"
        for value, words in found
        if value
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>' + note(
        f"Under {CLASSIFIERS[setting.main]}; other classifiers below."
    )


def results(settings: Sequence[Setting]) -> str:
    """Show what every setting reached under every classifier."""
    content = summary(settings)
    if not content.rows:
        return ""
    if len(settings) == 1:  # the method is in the title
        content = Table(content.header[1:], [row[1:] for row in content.rows], content.notes)
        return section("results", "Results", table(content))
    parts = []
    for name in CLASSIFIERS.values():
        rows = [[row[0], *row[2:]] for row in content.rows if row[1] == name]
        if rows:
            best = {2: True, 3: True, 4: True, 5: False, 6: False, 7: True}
            parts.append(
                f"<h3>{escape(name)}</h3>" + table(Table([content.header[0], *content.header[2:]], rows), best=best)
            )
    return section(
        "results", "Results", *parts, *(note(words) for words in content.notes), note("Bold: the best mean.")
    )


def published(settings: Sequence[Setting]) -> str:
    """Put complete runs beside the paper, where it has their protocol, and say where their training departs from it."""
    found = comparisons(settings)
    if not found:
        return ""
    parts = []
    for title, metric in (("Average accuracy", "average"), ("Forgetting", "forgetting")):
        rows = [each for each in found if each.published.metric == metric]
        if rows:
            same, content = _without_constants(comparison_table(rows))
            parts.append(f"<h3>{title} <small>{escape(same)}</small></h3>" + table(content))
    notes = [note(words) for words in comparison_table(found).notes]
    warnings = []
    for setting in settings:
        paper = protocols().get(str(setting.first.config.get("data")))
        differences = paper.differences(setting.first.config) if paper else []
        if differences:
            words = f"{setting.label} was not trained as in the paper ({'; '.join(differences)}): its numbers need not agree."
            warnings.append(f'<p class="warning">{escape(words)}</p>')
    return section("published", "Beside the paper", *warnings, *parts, *notes)


def _without_constants(content: Table) -> tuple[str, Table]:
    """Move the columns that say where a number is from, if they are the same everywhere, out of the table; drop empty ones."""
    columns = list(zip(*content.rows, strict=True))
    named = ("table", "data", "T", "memory")
    same = [i for i, name in enumerate(content.header) if name in named and len(set(columns[i])) == 1]
    keep = [i for i in range(len(content.header)) if i not in same and any(cell is not None for cell in columns[i])]
    words = {"T": "T = ", "memory": "exemplars a class: "}
    caption = ", ".join(f"{words.get(content.header[i], '')}{columns[i][0]}" for i in same)
    return caption, Table([content.header[i] for i in keep], [[row[i] for i in keep] for row in content.rows])


def curves(settings: Sequence[Setting]) -> str:
    """Show accuracy and forgetting as classes arrive."""
    captions = {
        "accuracy": "Dashed: AME, an oracle that looks at old data.",
        "forgetting": "Accuracy on the base classes just after learning them, minus now.",
    }
    drawn = {"accuracy": plots.accuracy(settings), "forgetting": plots.forgetting(settings)}
    several = [setting for setting in settings if len(setting.runs) > 1]
    band = " Bands: one standard deviation over runs." if several else ""
    parts = [
        figure(plot, plot.name, _title(plot.name), captions[kind] + band)
        for kind, found in drawn.items()
        for plot in (found if any(setting.first.done > 1 for setting in settings) else [])
    ]
    return section("curves", "As classes arrive", grid(parts))


def _title(name: str) -> str:
    kind, _, classifier = name.partition("-")
    return kind.capitalize() + (f" under {CLASSIFIERS[classifier]}" if classifier else "")


def representation(settings: Sequence[Setting]) -> str:
    """Show how far the features of the base classes have moved from those of phase 0."""
    what = "Features of the base classes' test images, after each phase and after phase 0."
    parts = [figure(plot, plot.name, "Likeness of features", what) for plot in plots.likeness(settings)]
    parts += [
        figure(
            plot,
            plot.name,
            "Principal angles",
            "Between the leading directions of those features: the median of the angles, and from the least to the greatest.",
        )
        for plot in plots.angles(settings)
    ]
    return section("representation", "How the representation moves", grid(parts))
