"""The parts of the page that show all settings together: each gives HTML, or nothing where there is nothing to show."""

from collections.abc import Hashable, Sequence

from geodl.analysis import ANGLES
from geodl.predictors import CLASSIFIERS
from geodl.report import plots
from geodl.report.markup import escape, figure, grid, note, section, table
from geodl.report.published import not_as_published
from geodl.report.results import Run, Setting
from geodl.report.tables import HIGHER_IS_BETTER, Cell, Comparison, Table, comparison_table, comparisons, summary


def heading(settings: Sequence[Setting]) -> tuple[str, str, str]:
    """Give the title, the sentence under it, and the tiles with the headline numbers of a single setting."""
    first = settings[0].first
    data = ", ".join(dict.fromkeys(setting.first.data for setting in settings))
    if len(settings) > 1:
        runs = sum(len(setting.runs) for setting in settings)
        return f"{len(settings)} settings on {data}", f"{runs} runs. {_protocol(settings)}", ""
    seeds = ", ".join(str(run.config.get("seed", "?")) for run in settings[0].runs)
    words = f"{_protocol(settings)} {'' if first.is_model else f'Seed {seeds}. '}{_state(first)}"
    title = f"{first.path.name}: {len(first.classes)} classes" if first.is_model else f"{first.label} on {data}"
    return title, words, _tiles(settings[0])


def _protocol(settings: Sequence[Setting]) -> str:
    """Say in a sentence what all settings have in common: which classes come when, memory, network."""
    first, *others = [_facts(setting.first) for setting in settings]
    common = {key: words for key, words in first.items() if all(other.get(key) == words for other in others)}
    if "phases" in common:
        del common["base"]  # the phases say it too
    words = "; ".join(common.values())
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _facts(run: Run) -> dict[str, str]:
    """Say what a run learns when it is complete, by which network, with what memory."""
    config, facts = run.config, {}
    given = config.get("groups") or run.groups
    sizes = [each if isinstance(each, int) else len(each) for each in given] or [config.get("base") or 0]
    if sizes[0]:
        facts["base"] = f"{sizes[0]} classes at first"
        count, later = (run.total or len(sizes)) - 1, sizes[1:]
        facts["phases"] = f"{sizes[0]} classes"
        if count:
            facts["phases"] += f", then {count} {'phase' if count == 1 else 'phases'}"
        if later:
            facts["phases"] += f" of {later[0] if len(set(later)) == 1 else f'{min(later)} to {max(later)}'}"
    if "exemplars" in config:
        facts["memory"] = (
            f"{config['exemplars']} exemplars {'a class' if config.get('budget') == 'per_class' else 'in total'}"
        )
    if "network" in config:
        facts["network"] = f"network {config['network']}"
    return facts


def _state(run: Run) -> str:
    if run.is_model:
        steps = sum(record["action"] == "learn" for record in run.history)
        return f"A model after {steps} {'step' if steps == 1 else 'steps'}; accuracies are on its check images."
    if not run.done:
        return "No phase is complete yet."
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
    under = f"Under {CLASSIFIERS[setting.main]}; other classifiers below."
    if setting.first.is_model:  # for someone who trained it, not for a researcher
        names = {"final": names["final"], "forgetting": "lost on the classes of the first step"}
        under = "On the check images, by the nearest class mean (k-NME), as geodl predict does it."
    found = [(setting.value(setting.main, name), words) for name, words in names.items()]
    tiles = [
        f"<div><strong>{value.mean:.1f}<small> %{f' ± {value.spread:.1f}' if value.spread is not None else ''}</small></strong>"
        f"<span>{escape(words)}</span></div>"
        for value, words in found
        if value
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>' + note(under)


def history(settings: Sequence[Setting]) -> str:
    """List what was done to a model, oldest first."""
    rows: list[Sequence[Cell]] = []
    for record in settings[0].first.history if len(settings) == 1 else ():
        day = record["time"][:10] if record["time"] else None
        if record["action"] == "learn":
            more = f"more images of {', '.join(record['returning'])}" if record["returning"] else ""
            what = "; ".join(filter(None, [", ".join(record["new"]), more]))
            rows.append([day, what, record["images"], record["accuracy"]])
        elif record["action"] == "rename":
            rows.append([day, f"{record['old']} is now called {record['new']}", None, None])
        else:
            rows.append([day, f"{record['class']} removed", None, None])
    words = "The last column: how many of the check images of all classes known then were recognised, in percent."
    content = Table(["day", "what happened", "images", "recognised"], rows, [words])
    return section("history", "History", table(content)) if rows else ""


def results(settings: Sequence[Setting]) -> str:
    """Show what every setting reached under every classifier."""
    content = summary(settings)
    if not content.rows:
        return ""
    if len(settings) == 1:  # the method is in the title
        return section("results", "Results", table(content.keeping(range(1, len(content.header)))))
    parts = []
    for classifier, name in CLASSIFIERS.items():
        rows = [row for row in content.rows if row[1] == name]
        alike = [_task(setting.first) for setting in settings if classifier in setting.classifiers]
        if rows:
            part = Table(content.header, rows).keeping([0, *range(2, len(content.header))])
            parts.append(f"<h3>{escape(name)}</h3>{table(part, best=HIGHER_IS_BETTER, alike=alike)}")
    notes = list(content.notes)
    if any("<b>" in part for part in parts):
        notes.append("Bold: the best mean of the complete settings with the same data, base classes and phases.")
    return section("results", "Results", *parts, *map(note, notes))


def _task(run: Run) -> Hashable:
    """Give what runs must share to be better or worse than each other; None for one that is not complete."""
    return (run.config.get("data"), run.config.get("fingerprint"), *run.seen) if run.complete else None


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
    return section("published", "Beside the paper", _caution(settings, found), *parts, *notes)


def _caution(settings: Sequence[Setting], found: Sequence[Comparison]) -> str:
    """Say which of the settings that are compared were trained otherwise, and how; those that share it together."""
    grouped: dict[str, list[str]] = {}
    compared = {each.setting for each in found}
    for setting in settings:
        if setting.label in compared:
            grouped.setdefault(", ".join(not_as_published(setting.first.config)), []).append(setting.label)
    groups = [(labels, how) for how, labels in grouped.items() if how]
    if not groups:
        return ""
    head = "Not trained as in the paper, so the numbers need not agree"
    if len(grouped) == 1:
        return f'<p class="warning">{head}: {escape(groups[0][1])}.</p>'
    items = "".join(f"<li><b>{escape('; '.join(labels))}</b>: {escape(how)}</li>" for labels, how in groups)
    return f'<div class="warning">{head}.<ul>{items}</ul></div>'


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
    if len(settings) == 1 and "ame" in settings[0].classifiers:
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
    parts = [figure(plot, plot.name, "Likeness of features") for plot in plots.similarity(settings)]
    parts += [figure(plot, plot.name, "Principal angles") for plot in plots.angles(settings)]
    words = (
        "Features of the base classes' test images after each phase, compared with those after phase 0. Angles: between the leading "
        f"directions of both, at most {ANGLES}; the median, and of a single setting a band from the least to the greatest."
    )
    moved = [figure(plot, plot.name, "Angles along training") for plot in plots.drift(settings)]
    if moved:
        words += (
            " Along training: the same between the old network and the new one, after each epoch, phases marked; in each phase the "
            "old network is that of the phase before."
        )
    parts += moved
    return section("representation", "How the representation moves", grid(parts), note(words) if parts else "")
