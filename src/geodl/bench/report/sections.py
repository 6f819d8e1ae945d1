"""Template data for the parts of the page about all settings."""

from collections.abc import Hashable, Sequence
from dataclasses import astuple, replace
from typing import Any

from geodl.bench.report import plots
from geodl.bench.report.figures import Plot
from geodl.bench.report.published import not_as_published
from geodl.bench.report.results import Estimate, Run, Setting
from geodl.bench.report.tables import (
    MEASURES,
    Best,
    Comparison,
    Table,
    comparison_table,
    comparisons,
    summary,
)
from geodl.core.text import count
from geodl.model.classifiers import titles

FACTS = ("base", "phases", "memory", "network")


def heading(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return title and lead, and the tiles with the headline numbers of a single setting."""
    first = settings[0].first
    data = ", ".join(dict.fromkeys(setting.first.data for setting in settings))
    if len(settings) > 1:
        runs = sum(len(setting.runs) for setting in settings)
        lead = f"{runs} runs. {_protocol(settings)}"
        return {"title": f"{len(settings)} settings on {data}", "lead": lead, "tiles": []}
    seeds = ", ".join(str(run.config.get("seed", "?")) for run in settings[0].runs)
    state = f"{first.done} of {first.total} phases complete."
    if first.complete or not first.done:
        state = "All phases complete." if first.done else "No phase is complete yet."
    lead = f"{_protocol(settings)} Seed {seeds}. {state}"
    return {"title": f"{first.label} on {data}", "lead": lead, **_tiles(settings[0])}


def _protocol(settings: Sequence[Setting]) -> str:
    """Describe what all settings have in common in one sentence: classes and phases, memory, network."""
    common, *others = [_facts(setting.first) for setting in settings]
    for other in others:
        common = dict(common.items() & other.items())
    if "phases" in common:
        common.pop("base", None)  # part of the phases
    words = "; ".join(common[key] for key in FACTS if key in common)
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _facts(run: Run) -> dict[str, str]:
    """Describe the phases, memory and network of a run."""
    config, facts = run.config, {}
    groups = config.get("groups") or run.groups or [config.get("base") or 0]
    base, *later = map(_size, groups)
    if base:
        facts["base"] = f"{base} classes at first"
        facts["phases"] = f"{base} classes"
        if phases := (run.total or len(groups)) - 1:
            facts["phases"] += f", then {count(phases, 'phase')}"
        if later:
            low, high = min(later), max(later)
            facts["phases"] += f" of {low}" if low == high else f" of {low} to {high}"
    if "exemplars" in config:
        counted = "per class" if config.get("memory_budget") == "per_class" else "in total"
        facts["memory"] = f"{config['exemplars']} exemplars {counted}"
    if "network" in config:
        facts["network"] = f"network {config['network']}"
    return facts


def _size(group: int | Sequence[str]) -> int:
    return group if isinstance(group, int) else len(group)


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
    under = f"Under {titles()[setting.main]}; other classifiers below."
    values = [(setting.value(setting.main, name), words) for name, words in names.items()]
    return {"tiles": [(value, words) for value, words in values if value], "under": under}


def results(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the results: one table for a single setting, else one per classifier with its title; and notes."""
    content = summary(settings)
    columns = range(len(content.header))
    if len(settings) == 1:  # the page's title names the method
        return {"parts": [("", content.keeping(columns[1:]))] if content.rows else [], "notes": []}
    parts, notes, marked = [], list(content.notes), False
    for classifier, name in titles().items():
        rows = [row for row in content.rows if row[1] == name]
        alike = [_task(setting.first) for setting in settings if classifier in setting.classifiers]
        if rows:
            part = Table(content.header, rows).keeping([0, *columns[2:]])
            parts.append((name, best := _marked(part, alike)))
            marked = marked or best != part
    if marked:
        notes.append(
            "Bold: the best mean of the complete settings with the same data, base classes and phases."
        )
    return {"parts": parts, "notes": notes}


def _task(run: Run) -> Hashable:
    """Return what makes complete runs comparable; None for an incomplete one."""
    data = (run.config.get("data"), run.config.get("fingerprint"))
    return (*data, *run.seen) if run.complete else None


def _marked(content: Table, alike: Sequence[Hashable]) -> Table:
    """Mark the best means among two or more rows with equal ``alike``, including all that round to the same."""
    rows = [list(row) for row in content.rows]
    for i, name in enumerate(content.header):
        for group in set(alike) - {None} if name in MEASURES else ():
            mine = [row for row, task in zip(rows, alike, strict=True) if task == group]
            cells = [row[i] for row in mine]
            means = [round(cell.mean, 2) for cell in cells if isinstance(cell, Estimate)]
            best = (max if MEASURES[name][1] else min)(means, default=None)
            for row in mine if len(means) > 1 else ():
                if isinstance(cell := row[i], Estimate) and round(cell.mean, 2) == best:
                    row[i] = Best(*astuple(cell))
    return replace(content, rows=rows)


def published(settings: Sequence[Setting]) -> dict[str, Any]:
    """Compare complete runs with the paper's numbers for their protocol, and list deviations from its training."""
    compared = comparisons(settings)
    parts = []
    for title, metric in (("Average accuracy", "average"), ("Forgetting", "forgetting")):
        if rows := [one for one in compared if one.published.metric == metric]:
            parts.append((title, *_without_constants(comparison_table(rows))))
    return {
        "parts": parts,
        "notes": comparison_table(compared).notes,
        **_departures(settings, compared),
    }


def _departures(settings: Sequence[Setting], compared: Sequence[Comparison]) -> dict[str, Any]:
    """Return the deviations of the compared settings from the paper's training, with the labels that share them."""
    grouped: dict[str, list[str]] = {}
    compared_labels = {one.setting for one in compared}
    for setting in settings:
        if setting.label in compared_labels:
            how = ", ".join(not_as_published(setting.first.config))
            grouped.setdefault(how, []).append(setting.label)
    departures = [("; ".join(labels), how) for how, labels in grouped.items() if how]
    return {"departures": departures, "alike": len(grouped) == 1}


def _without_constants(content: Table) -> tuple[str, Table]:
    """Move columns about a number's source that are constant out of the table into a caption."""
    places = dict.fromkeys(("table", "data", "method"), "")
    places |= {"T": "T = ", "memory": "exemplars per class: ", "compared with": "compared with "}
    same, rest = [], []
    for i, (name, cells) in enumerate(zip(content.header, content.columns, strict=True)):
        if name in places and len(set(cells)) == 1:
            same.append(f"{places[name]}{cells[0]}")
        else:
            rest.append(i)
    return ", ".join(same), replace(content.keeping(rest), notes=())


def curves(settings: Sequence[Setting]) -> list[Plot]:
    """Draw accuracy and forgetting over the phases, if there is more than one."""
    grown = any(setting.first.done > 1 for setting in settings)
    return [*plots.accuracy(settings), *plots.forgetting(settings)] if grown else []
