"""The parts of the page that show all settings together: each gives HTML, or nothing where there is nothing to show."""

from collections.abc import Sequence

from geodl.predictors import CLASSIFIERS
from geodl.report import plots
from geodl.report.markup import escape, figure, grid, note, section, table
from geodl.report.published import protocols
from geodl.report.results import Run, Setting
from geodl.report.tables import HIGHER_IS_BETTER, Table, comparison_table, comparisons, summary


def heading(settings: Sequence[Setting]) -> tuple[str, str, str]:
    """Give the title, the sentence under it, and the tiles with the headline numbers of a single setting."""
    first = settings[0].first
    data = ", ".join(dict.fromkeys(setting.first.data for setting in settings))
    if len(settings) > 1:
        runs = sum(len(setting.runs) for setting in settings)
        return f"{len(settings)} settings on {data}", f"{runs} runs. {_protocol(first)}", ""
    seeds = ", ".join(str(run.config.get("seed", "?")) for run in settings[0].runs)
    words = f"{_protocol(first)} Seed {seeds}. {_state(first)}"
    title = f"{first.path.name}: {len(first.classes)} classes" if first.is_model else f"{first.label} on {data}"
    return title, words, _tiles(settings[0])


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
        return f"A model after {run.done} {'step' if run.done == 1 else 'steps'}; accuracies are on its check images."
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
        return section("results", "Results", table(content.keeping(range(1, len(content.header)))))
    parts = []
    for name in CLASSIFIERS.values():
        rows = [row for row in content.rows if row[1] == name]
        if rows:
            part = Table(content.header, rows).keeping([0, *range(2, len(content.header))])
            parts.append(f"<h3>{escape(name)}</h3>{table(part, best=HIGHER_IS_BETTER)}")
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
    """Move the columns that say where a number is from, if they are the same everywhere, out of the table."""
    places = {
        "table": "",
        "data": "",
        "method": "",
        "T": "T = ",
        "memory": "exemplars a class: ",
        "compared with": "compared with ",
    }
    same = [i for i, name in enumerate(content.header) if name in places and len(set(content.column(i))) == 1]
    caption = ", ".join(f"{places[content.header[i]]}{content.rows[0][i]}" for i in same)
    rest = content.keeping([i for i in range(len(content.header)) if i not in same])
    return caption, Table(rest.header, rest.rows)


def curves(settings: Sequence[Setting]) -> str:
    """Show accuracy and forgetting as classes arrive."""
    if not any(setting.first.done > 1 for setting in settings):
        return ""
    drawn = [*plots.accuracy(settings), *plots.forgetting(settings)]
    words = "Forgetting: accuracy on the base classes just after learning them, minus now."
    if any("ame" in setting.classifiers for setting in settings):
        words += " Dashed: AME, an oracle that looks at old data."
    if any(len(setting.runs) > 1 for setting in settings):
        words += " Bands: one standard deviation over runs."
    parts = [figure(plot, plot.name, _title(plot.name)) for plot in drawn]
    return section("curves", "As classes arrive", grid(parts), note(words))


def _title(name: str) -> str:
    kind, _, classifier = name.partition("-")
    return kind.capitalize() + (f" under {CLASSIFIERS[classifier]}" if classifier else "")


def representation(settings: Sequence[Setting]) -> str:
    """Show how far the features of the base classes have moved from those of phase 0."""
    parts = [figure(plot, plot.name, "Likeness of features") for plot in plots.likeness(settings)]
    parts += [figure(plot, plot.name, "Principal angles") for plot in plots.angles(settings)]
    words = (
        "Features of the base classes' test images after each phase, compared with those after phase 0. Angles: between the leading "
        "directions of both; the median, and from the least to the greatest."
    )
    return section("representation", "How the representation moves", grid(parts), note(words) if parts else "")
