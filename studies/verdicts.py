"""The page of an experiment: the rows of the paper under each classifier, and the paper's comparisons."""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from geodl.bench.paper.beyond import headline
from geodl.bench.report.published import departures, numbers
from geodl.bench.report.results import Estimate, estimate
from geodl.bench.report.tables import AVERAGE, INCREMENTAL, MEASURES, Cell, Points, Table
from geodl.config import preset_layer
from geodl.core.text import count
from geodl.methods import configure
from geodl.model.classifiers import titles
from studies.records import Record

# The paper's rows and their trainings, and a control experiment that the paper does not have.
ROWS = {
    "LwF": ("icarl", "lwf"),
    "iCaRL": ("icarl", "lwf"),
    "BiC": ("bic", "lwf"),
    "LUCIR": ("lucir", "cosine"),
    "LUCIR, cosine on the grid": ("lucir", "cosine on the grid"),
    "Mnemonics": ("mnemonics", "cosine"),
    "iCaRL + GeoDL": ("finetune", "geodesic"),
    "LUCIR + GeoDL": ("lucir", "geodesic"),
    "CE": ("finetune", "none"),
    "CE + LwF": ("finetune", "lwf"),
    "CE + Cos": ("finetune", "cosine"),
    "CE + GeoDL": ("finetune", "geodesic"),
    "Joint training": ("joint", "none"),
}
# The first row is better according to the paper; the two with the grid separate the effect of the subspaces from that of the grid.
PAIRS = [
    ("CE + GeoDL", "CE + Cos"),
    ("CE + GeoDL", "CE + LwF"),
    ("CE + GeoDL", "CE"),
    ("CE + Cos", "CE + LwF"),
    ("CE + Cos", "CE"),
    ("CE + LwF", "CE"),
    ("iCaRL + GeoDL", "iCaRL"),
    ("LUCIR + GeoDL", "LUCIR"),
    ("LUCIR + GeoDL", "LUCIR, cosine on the grid"),
    ("LUCIR, cosine on the grid", "LUCIR"),
    ("LUCIR + GeoDL", "Mnemonics"),
    ("LUCIR + GeoDL", "BiC"),
    ("Mnemonics", "LUCIR"),
]
JUDGED = ("cnn", "nme")
READ = (*JUDGED, "ame", "ncm")
"""The classifiers of these rows."""
READINGS = [
    *(("LUCIR + GeoDL", name, name) for name in READ),
    ("LUCIR + GeoDL", "ame", "cnn"),
    ("LUCIR", "ame", "cnn"),
]
"""A row under the first classifier minus LUCIR under the second; the last two: a gain like the paper's, and the part of it that
comes from the change of classifier."""
SHOWN = (AVERAGE, INCREMENTAL, "final", "forgetting")
SEEDS = 3
"""Seeds needed for a decision."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t of a 95 % interval with 1 to 10 degrees of freedom; the last is used for more, slightly too wide."""

Rows = Mapping[tuple[str, int], Sequence[Record]]
"""The records of each row by its name and T."""


@dataclass(frozen=True)
class Difference:
    """One row minus another, by seed."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean (t distribution); None for a single seed."""
        seeds = len(self.values)
        if seeds < 2:
            return None
        half = T_95[min(seeds - 2, len(T_95) - 1)] * statistics.stdev(self.values) / seeds**0.5
        return self.mean - half, self.mean + half

    @property
    def shown(self) -> str:
        """The mean with its interval as text."""
        if self.interval is None:
            return f"{self.mean:+.2f}"
        low, high = self.interval
        return f"{self.mean:+.2f} ({low:+.2f} to {high:+.2f})"


def difference(
    one: Sequence[Record], other: Sequence[Record], classifiers: tuple[str, str], measure: str
) -> Difference | None:
    """Subtract by seed, each side under its classifier; None if both sides share no seed."""
    first, second = (
        {record.seed: record.value(name, measure) for record in side}
        for side, name in zip((one, other), classifiers, strict=True)
    )
    pairs = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
    values = [a - b for a, b in pairs if a is not None and b is not None]
    return Difference(values) if values else None


def verdict(found: Difference, *, lower_is_better: bool = False) -> str:
    """Decide whether the first row is better or worse: if the 95 % interval over three or more seeds excludes zero."""
    low, high = found.interval or (0, 0)
    if len(found.values) < SEEDS or low <= 0 <= high:
        return "not decided"
    return "better" if (found.mean < 0) == lower_is_better else "worse"


def comparisons(rows: Rows, pairs: Sequence[tuple[str, str]], measure: str) -> Table:
    """Compare pairs of rows that share a seed by one measure, under each classifier of a learner."""
    table: list[list[Cell]] = []
    for t, pair in product(_phases(rows), pairs):
        one, other = (rows.get((name, t), ()) for name in pair)
        key, less = MEASURES[measure][0], measure == "forgetting"
        found = {name: difference(one, other, (name, name), key) for name in JUDGED}
        if not any(found.values()):
            continue
        seeds = max(len(each.values) for each in found.values() if each)
        cells: list[Cell] = [" against ".join(pair), t, seeds]
        for name, each in found.items():
            words = verdict(each, lower_is_better=less) if each else "not run"
            cells += [each.shown if each else None, _published(pair, name, measure, t), words]
        table.append(cells)
    header = [part for name in JUDGED for part in (titles()[name], "in the paper", "verdict")]
    return Table(["comparison", "T", "seeds", *header], table)


def readings(rows: Rows) -> Table:
    """Return LUCIR + GeoDL minus LUCIR, both under one classifier, and AME minus CNN, with and without GeoDL."""
    table = []
    phases = [t for t in _phases(rows) if rows.get(("LUCIR + GeoDL", t))]
    for t, (name, mine, theirs) in product(phases, READINGS):
        words = titles()[mine] + ("" if mine == theirs else f" against {titles()[theirs]}")
        cells: list[Cell] = [t, words + (", LUCIR on both sides" if name == "LUCIR" else "")]
        for measure in (AVERAGE, "forgetting"):
            one, other = (rows.get((row, t), ()) for row in (name, "LUCIR"))
            found = difference(one, other, (mine, theirs), MEASURES[measure][0])
            cells += [found.shown if found else None, _published((name, "LUCIR"), mine, measure, t)]
        if cells[2] is not None:
            table.append(cells)
    return Table(["T", "read under", AVERAGE, "in the paper", "forgetting", "in the paper"], table)


def _phases(rows: Rows) -> list[int]:
    return sorted({t for (_, t), records in rows.items() if records})


def _published(pair: tuple[str, str], classifier: str, measure: str, t: int) -> Points | None:
    """Return the paper's difference of two rows on CIFAR-100 with 20 exemplars: Table 1 at this T, or Table 2 at T = 10."""
    if measure == "final" or pair[0] == pair[1]:
        return None
    metric = "forgetting" if measure == "forgetting" else "average"
    values: dict[str, float] = {}
    for number in numbers():
        place = (number.table, number.phases) in (("Table 1", t), ("Table 2", 10))
        alike = (number.dataset, number.metric, number.memory) == ("cifar100", metric, 20)
        if place and alike and number.classifier in (None, classifier):
            values.setdefault(number.row, number.value)
    return Points(values[pair[0]] - values[pair[1]]) if {*pair} <= values.keys() else None


# ----------------------------------------------------------------------------------------------------------- page


def sort_out(records: Sequence[Record], preset: str) -> tuple[Rows, list[tuple[Record, list[str]]]]:
    """Return the records of each row, and those that do not count with their deviations from the preset."""
    rows: dict[tuple[str, int], list[Record]] = {}
    others = []
    taken: set[tuple[tuple[str, str], int, int]] = set()
    every = sorted({int(one.config["phases"]) for one in records if one.config["phases"]}) or [0]
    for record in sorted(records, key=lambda each: not each.config["phases"]):  # T = 0 last
        departs = departures(record.config, preset, ("phases", "cosine_features"))
        t = int(record.config["phases"])
        key = (record.training, t, record.seed)
        # A run of joint training on all classes at once (T = 0) serves every T without a run of its own.
        free = [at for at in every if (record.training, at, record.seed) not in taken]
        places = [t] if t else free
        if not departs and (key in taken or not places):
            departs = ["the same once more"]  # a seed counts once
        names = [name for name, training in ROWS.items() if training == record.training]
        if departs or not names:
            others.append((record, departs))
            continue
        taken.add(key)
        for place in product(names, places):
            rows.setdefault(place, []).append(record)
    return rows, others


def standing(rows: Rows, classifier: str) -> Table:
    """Return the results of every row under one classifier."""
    table: list[list[Cell]] = [
        [
            name,
            t,
            len(found),
            *(_estimate(found, classifier, MEASURES[measure][0]) for measure in SHOWN),
        ]
        for t in _phases(rows)
        for name in ROWS
        if (found := rows.get((name, t)))
    ]
    return Table(["row", "T", "seeds", *SHOWN], table)


def _estimate(records: Sequence[Record], classifier: str, measure: str) -> Estimate | None:
    return estimate([record.value(classifier, measure) for record in records])


def times(rows: Rows) -> Table:
    """Return the minutes of each row: phase 0 (of runs that trained it) and the later phases."""
    table: list[list[Cell]] = []
    for (name, t), records in rows.items():
        base = [record.seconds[0] / 60 for record in records if not record.cached]
        later = [sum(record.seconds[1:]) / 60 for record in records if len(record.seconds) > 1]
        table.append([name, t, estimate(base), estimate(later)])
    return Table(["row", "T", "phase 0 (min)", "phases 1 to T (min)"], table)


def page(records: Sequence[Record], preset: str) -> str:
    """Return the page as Markdown."""
    parts = [
        f"# Results: {preset}",
        "Written by `python -m studies.results write` from one file per run; do not edit. "
        + preset_words(preset)
        + f" {_machines(records)} All accuracies in %, mean ± sample standard deviation over seeds where there are several.",
    ]
    if preset_layer(preset).values.get("method") == "analytic":
        parts += _closed_form(records, preset)
    else:
        parts += _paper(records, preset)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _closed_form(every: Sequence[Record], preset: str) -> list[str]:
    """Return the part about the closed form beside published numbers; runs that depart from the preset are left out."""
    records = [
        one
        for one in every
        if one.training == ("analytic", "none") and not departures(one.config, preset, ("phases",))
    ]
    records.sort(key=lambda one: (int(one.config["phases"]), one.seed))
    found: dict[int, list[Mapping[str, Mapping[str, Any]]]] = {}
    rows: list[list[Cell]] = []
    for record in records:
        t = int(record.config["phases"])
        found.setdefault(t, []).append(record.results)
        values = [
            _estimate([record], name, "average_incremental")
            for name in ("analytic", "analytic_single")
        ]
        rows.append([t, record.seed, *values])
    runs = Table(["T", "seed", f"{INCREMENTAL}, mirrored", f"{INCREMENTAL}, not mirrored"], rows)
    return [headline(found).markdown(), "## Each run", runs.markdown()]


def _paper(records: Sequence[Record], preset: str) -> list[str]:
    """Return the part about the paper's rows and comparisons."""
    rows, others = sort_out(records, preset)
    against_joint = [("Joint training", name) for name in ROWS if name != "Joint training"]
    parts = [
        "LwF and iCaRL are one training, which the paper evaluates under CNN and under k-NME; so are CE + GeoDL and iCaRL + GeoDL. "
        f"{AVERAGE}: mean accuracy after phases 1 to T (the paper's definition); {INCREMENTAL}: with phase 0; final: after the last "
        "phase; forgetting: accuracy on the base classes after phase 0 minus after the last phase.",
    ]
    if missing := [name for name in ROWS if all(name != run for run, _ in rows)]:
        parts.append(f"Not run: {'; '.join(missing)}.")
    for classifier in READ:
        words = []
        if classifier == "ame":
            most = preset_layer(preset).values.get("ame_images")
            limit = f" Its means use at most {most} images per class." if most else ""
            words = [
                "AME needs images of old classes, which a real learner no longer has: it is an oracle."
                + limit
            ]
        parts += _section(standing(rows, classifier), f"## {titles()[classifier]}", *words)
    compared: list[str] = []
    for title, pairs, measure in (
        ("Average accuracy, phases 1 to T", PAIRS, AVERAGE),
        ("Forgetting (less is better)", PAIRS, "forgetting"),
        ("Final accuracy against joint training", against_joint, "final"),
    ):
        compared += _section(comparisons(rows, pairs, measure), f"### {title}")
    if compared:
        parts += [
            "## The paper's comparisons",
            "The first row minus the second by seed: mean and, in parentheses, its 95 % interval (t distribution), not corrected for multiple "
            "comparisons. *better*, *worse*: of the first row, if the interval excludes zero; *not decided*: if it does not, or with fewer than "
            f"{SEEDS} seeds. *In the paper*: the paper's difference on CIFAR-100 with 20 exemplars, from Table 2 (T = 10) for the CE rows, else "
            "from Table 1, where cited rows count phase 0 and the paper's own rows do not.",
            *compared,
        ]
    parts += _section(
        readings(rows),
        "## Two readings of LUCIR + GeoDL against LUCIR",
        "The paper does not state the classifier of these rows of Table 1. Both under one classifier; GeoDL under AME (an oracle) "
        "against LUCIR under CNN; and the effect of that change of classifier without GeoDL:",
    )
    clock = "Wall-clock time of training and evaluation without interruptions, possibly beside other work."
    parts += _section(times(rows), "## Time", clock)
    return parts + _section(_others(others), "## Other runs", "Runs that deviate from the preset.")


def _section(table: Table, *words: str) -> list[str]:
    """Return the title and words of a section with its table; nothing if the table is empty."""
    return [*words, table.markdown()] if table.rows else []


def preset_words(preset: str) -> str:
    """Describe a preset."""
    values = configure([preset_layer(preset)]).config
    kept = f", {values.exemplars} exemplars per class" if values.exemplars else ""
    later = "" if values.method == "analytic" else f" and {values.epochs} in each phase after it"
    return (
        f"Preset `{preset}`: {values.network}, {values.base} classes, then {values.phases} phases (or as in column T){kept}, "
        f"{values.base_epochs or values.epochs} epochs in phase 0{later}."
    )


def _machines(records: Sequence[Record]) -> str:
    """Describe the machines of the runs, and what changed in runs that were moved."""
    kinds = Counter(map(_machine, records))
    commits = sorted({one.commit for one in records if one.commit})
    runs = [f"{count(number, 'run')} on {kind}" for kind, number in sorted(kinds.items())]
    return f"{'; '.join(runs)}; commits {', '.join(commits) or 'unknown'}." if records else ""


def _machine(one: Record) -> str:
    machine = one.machine
    # Of "threads is 2 there and 1 now" only the first value is new.
    earlier = [
        re.sub(r"^(\S+) is (.*) there and .* now$", r"\1 \2", line)
        for line in machine.get("changed", ())
    ]
    return (
        f"{machine.get('device')} ({machine.get('machine')}), {count(machine.get('threads', 0), 'thread')}, "
        f"precision {machine.get('precision', one.config.get('precision'))}, torch {machine.get('torch')}"
        + (f", earlier with {', '.join(earlier)}" if earlier else "")
    )


def _others(others: Sequence[tuple[Record, list[str]]]) -> Table:
    table: list[list[Cell]] = []
    for record, departs in others:
        found = [
            _estimate([record], name, measure)
            for name in JUDGED
            for measure in ("average", "forgetting")
        ]
        why = ", ".join(departs) or "no row of the paper"
        table.append(
            [" + ".join(record.training), record.config["phases"], record.seed, why, *found]
        )
    heads = [
        f"{titles()[name]} {measure}" for name in JUDGED for measure in (AVERAGE, "forgetting")
    ]
    return Table(["training", "T", "seed", "different from the preset", *heads], table)
