"""What the page shows of all settings together, as plain data for its templates."""

from collections.abc import Hashable, Sequence
from dataclasses import astuple, replace
from typing import Any

from geodl.predictors import CLASSIFIERS
from geodl.report import plots
from geodl.report.figures import Plot
from geodl.report.published import not_as_published
from geodl.report.results import Estimate, Run, Setting
from geodl.report.tables import MEASURES, Best, Comparison, Table, comparison_table, comparisons, summary
from geodl.text import count


def heading(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the title, the sentence under it, and the tiles with the headline numbers of a single setting."""
    first = settings[0].first
    data = ", ".join(dict.fromkeys(setting.first.data for setting in settings))
    if len(settings) > 1:
        runs = sum(len(setting.runs) for setting in settings)
        lead = f"{runs} runs. {_protocol(settings)}"
        return {"title": f"{len(settings)} settings on {data}", "lead": lead, "tiles": []}
    seeds = ", ".join(str(run.config.get("seed", "?")) for run in settings[0].runs)
    state = "All phases complete." if first.complete else f"{first.done} of {first.total} phases complete."
    lead = f"{_protocol(settings)} Seed {seeds}. {state if first.done else 'No phase is complete yet.'}"
    return {"title": f"{first.label} on {data}", "lead": lead, **_tiles(settings[0])}


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
        phases, later = (run.total or len(sizes)) - 1, sizes[1:]
        facts["phases"] = f"{sizes[0]} classes" + (f", then {count(phases, 'phase')}" if phases else "")
        if later:
            facts["phases"] += f" of {later[0] if len(set(later)) == 1 else f'{min(later)} to {max(later)}'}"
    if "exemplars" in config:
        counted = "a class" if config.get("memory_budget") == "per_class" else "in total"
        facts["memory"] = f"{config['exemplars']} exemplars {counted}"
    if "network" in config:
        facts["network"] = f"network {config['network']}"
    return facts


def _tiles(setting: Setting) -> dict[str, Any]:
    """Return the headline numbers under the main classifier."""
    if setting.main is None:
        return {"tiles": []}
    names = {
        "final": f"accuracy on all {len(setting.first.classes)} classes",
        "average": "average accuracy, phases 1 to T",
        "average_incremental": "average accuracy with phase 0",
        "forgetting": "forgetting of the base classes",
    }
    under = f"Under {CLASSIFIERS[setting.main]}; other classifiers below."
    found = [(setting.value(setting.main, name), words) for name, words in names.items()]
    return {"tiles": [(value, words) for value, words in found if value], "under": under}


def results(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return what every setting reached: one table, or one for each classifier with its title; and notes on all."""
    content = summary(settings)
    if len(settings) == 1:  # the method is in the title
        return {"parts": [("", content.keeping(range(1, len(content.header))))] if content.rows else [], "notes": []}
    parts = []
    for classifier, name in CLASSIFIERS.items():
        rows = [row for row in content.rows if row[1] == name]
        alike = [_task(setting.first) for setting in settings if classifier in setting.classifiers]
        if rows:
            part = Table(content.header, rows).keeping([0, *range(2, len(content.header))])
            parts.append((name, _marked(part, alike)))
    notes = list(content.notes)
    if any(isinstance(cell, Best) for _, part in parts for row in part.rows for cell in row):
        notes.append("Bold: the best mean of the complete settings with the same data, base classes and phases.")
    return {"parts": parts, "notes": notes}


def _task(run: Run) -> Hashable:
    """Return what runs must share to be better or worse than each other; None for one that is not complete."""
    return (run.config.get("data"), run.config.get("fingerprint"), *run.seen) if run.complete else None


def _marked(content: Table, alike: Sequence[Hashable]) -> Table:
    """Mark the best means among the rows that share ``alike``, all that are shown as the same; one row alone is not the best."""
    rows = [list(row) for row in content.rows]
    for i, name in enumerate(content.header):
        for group in set(alike) - {None} if name in MEASURES else ():
            known = {
                n: cell for n, row in enumerate(rows) if isinstance(cell := row[i], Estimate) and alike[n] == group
            }
            means = [round(cell.mean, 2) for cell in known.values()]
            for n, cell in known.items() if len(known) > 1 else ():
                if round(cell.mean, 2) == (max if MEASURES[name][1] else min)(means):
                    rows[n][i] = Best(*astuple(cell))
    return replace(content, rows=rows)


def published(settings: Sequence[Setting]) -> dict[str, Any]:
    """Put complete runs beside the paper, where it has their protocol, and say where their training departs from it."""
    found = comparisons(settings)
    parts = []
    for title, metric in (("Average accuracy", "average"), ("Forgetting", "forgetting")):
        rows = [each for each in found if each.published.metric == metric]
        if rows:
            parts.append((title, *_without_constants(comparison_table(rows))))
    return {"parts": parts, "notes": comparison_table(found).notes, **_departures(settings, found)}


def _departures(settings: Sequence[Setting], found: Sequence[Comparison]) -> dict[str, Any]:
    """Say which of the settings that are compared were trained otherwise, and how; those that share it together."""
    grouped: dict[str, list[str]] = {}
    compared = {each.setting for each in found}
    for setting in settings:
        if setting.label in compared:
            grouped.setdefault(", ".join(not_as_published(setting.first.config)), []).append(setting.label)
    return {
        "departures": [("; ".join(labels), how) for how, labels in grouped.items() if how],
        "alike": len(grouped) == 1,
    }


def _without_constants(content: Table) -> tuple[str, Table]:
    """Move the columns that say where a number is from, if they are the same everywhere, out of the table."""
    places = dict.fromkeys(("table", "data", "method"), "")
    places |= {"T": "T = ", "memory": "exemplars a class: ", "compared with": "compared with "}
    same = [i for i, name in enumerate(content.header) if name in places and len(set(content.column(i))) == 1]
    caption = ", ".join(f"{places[content.header[i]]}{content.rows[0][i]}" for i in same)
    rest = content.keeping([i for i in range(len(content.header)) if i not in same])
    return caption, replace(rest, notes=())


def curves(settings: Sequence[Setting]) -> list[Plot]:
    """Draw accuracy and forgetting as classes arrive."""
    grown = any(setting.first.done > 1 for setting in settings)
    return [*plots.accuracy(settings), *plots.forgetting(settings)] if grown else []
