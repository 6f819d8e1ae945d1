"""The page about an experiment: every row of the paper under every classifier, and whether each of its comparisons holds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from geodl.config import preset_layer
from geodl.predictors import CLASSIFIERS
from geodl.report.published import departures, numbers
from geodl.report.results import Estimate, estimate
from geodl.report.tables import AVERAGE, INCREMENTAL, Cell, Points, Table
from geodl.reproduce.records import Record

# The paper's rows and the training each is read from.
ROWS = {
    "LwF": ("icarl", "lwf"),
    "iCaRL": ("icarl", "lwf"),
    "BiC": ("bic", "lwf"),
    "LUCIR": ("lucir", "cosine"),
    "Mnemonics": ("mnemonics", "cosine"),
    "iCaRL + GeoDL": ("finetune", "geodesic"),
    "LUCIR + GeoDL": ("lucir", "geodesic"),
    "CE": ("finetune", "none"),
    "CE + LwF": ("finetune", "lwf"),
    "CE + Cos": ("finetune", "cosine"),
    "CE + GeoDL": ("finetune", "geodesic"),
    "Joint training": ("joint", "none"),
}
# Which row the paper finds better than which.
PAIRS = [
    ("CE + GeoDL", "CE + Cos"),
    ("CE + GeoDL", "CE + LwF"),
    ("CE + GeoDL", "CE"),
    ("CE + Cos", "CE + LwF"),
    ("CE + Cos", "CE"),
    ("CE + LwF", "CE"),
    ("iCaRL + GeoDL", "iCaRL"),
    ("LUCIR + GeoDL", "LUCIR"),
    ("LUCIR + GeoDL", "Mnemonics"),
    ("LUCIR + GeoDL", "BiC"),
]
JUDGED = ("cnn", "nme")
READ = (*JUDGED, "ame", "ncm")
"""The classifiers that these rows are read under."""
MEASURES = {AVERAGE: "average", INCREMENTAL: "average_incremental", "final": "final", "forgetting": "forgetting"}
NOT_RUN = "not run"

Rows = Mapping[str, Sequence[Record]]


@dataclass(frozen=True)
class Difference:
    """One row minus another, over the seeds that both have: mean, and sample standard deviation where there are several."""

    mean: float
    spread: float | None
    seeds: int


def difference(one: Sequence[Record], other: Sequence[Record], classifier: str, measure: str) -> Difference | None:
    """Subtract seed by seed; None where no seed has both."""
    values = [
        {record.seed: value for record in side if (value := record.value(classifier, measure)) is not None}
        for side in (one, other)
    ]
    paired = [values[0][seed] - values[1][seed] for seed in sorted(values[0].keys() & values[1].keys())]
    if not paired:
        return None
    return Difference(statistics.fmean(paired), statistics.stdev(paired) if len(paired) > 1 else None, len(paired))


def verdict(found: Difference, borrowed: float | None, *, lower_is_better: bool = False) -> str:
    """Say whether the first row is better by more than the spread.

    borrowed: the spread to go by where one seed alone was run; None: there is none, and nothing can be said but the sign.
    """
    gain = -found.mean if lower_is_better else found.mean
    spread = borrowed if found.spread is None else found.spread
    if spread is None:
        return f"{'better' if gain > 0 else 'worse' if gain < 0 else 'equal'} (one seed, spread unknown)"
    words = "holds" if gain > spread else "does not hold" if gain < -spread else "within spread"
    return words if found.seeds > 1 else f"{words} (one seed)"


def comparisons(rows: Rows, pairs: Sequence[tuple[str, str]], measure: str) -> Table:
    """Judge by one measure, under the classifiers that a learner has, the comparisons whose rows share a seed."""
    sides = {name: _judge(rows, pairs, name, measure) for name in JUDGED}
    run = [pair for pair in pairs if any(pair in side for side in sides.values())]
    table: list[list[Cell]] = []
    for pair in run:
        found = [side.get(pair, (None, NOT_RUN)) for side in sides.values()]
        cells: list[Cell] = [" against ".join(pair), max(each.seeds for each, _ in found if each)]
        for classifier, (each, words) in zip(JUDGED, found, strict=True):
            cells += [_shown(each), _published(pair, classifier, measure), words]
        table.append(cells)
    header = [part for name in JUDGED for part in (CLASSIFIERS[name], "in the paper", "verdict")]
    missing = [" against ".join(pair) for pair in pairs if pair not in run]
    return Table(["comparison", "seeds", *header], table, _not_run(missing))


def _judge(
    rows: Rows, pairs: Sequence[tuple[str, str]], classifier: str, measure: str
) -> dict[tuple[str, str], tuple[Difference | None, str]]:
    """Return the difference and the verdict of each pair that was run."""
    found = {pair: difference(rows[pair[0]], rows[pair[1]], classifier, MEASURES[measure]) for pair in pairs}
    known = [each.spread for each in found.values() if each is not None and each.spread is not None]
    lower, borrowed = measure == "forgetting", max(known, default=None)
    return {pair: (each, verdict(each, borrowed, lower_is_better=lower)) for pair, each in found.items() if each}


def _shown(found: Difference | None) -> str | None:
    if found is None:
        return None
    return f"{found.mean:+.2f}" + ("" if found.spread is None else f" ± {found.spread:.2f}")


def _not_run(missing: Sequence[str]) -> list[str]:
    return [f"Not run yet: {'; '.join(missing)}."] if missing else []


def _published(pair: tuple[str, str], classifier: str, measure: str) -> Points | None:
    """Return the paper's own difference on CIFAR-100: Table 1 at T = 5, or Table 2 at T = 10, both with 20 exemplars."""
    values = []
    for row in pair:
        metric = "forgetting" if measure == "forgetting" else "average"
        values += [
            number.value
            for number in numbers()
            if (number.row, number.dataset, number.metric, number.memory) == (row, "cifar100", metric, 20)
            and (number.table, number.phases) in (("Table 1", 5), ("Table 2", 10))
            and number.classifier in (None, classifier)
        ][:1]
    return Points(values[0] - values[1]) if measure != "final" and len(values) == 2 else None


# ----------------------------------------------------------------------------------------------------------- page


def sort_out(records: Sequence[Record], preset: str) -> tuple[dict[str, list[Record]], list[tuple[Record, list[str]]]]:
    """Return the records of each row, and those that depart from the preset with what is different in them."""
    rows: dict[str, list[Record]] = {name: [] for name in ROWS}
    others = []
    taken: set[tuple[tuple[str, str], int]] = set()
    for record in records:
        departs = _departs(record, preset)
        if not departs and (record.training, record.seed) in taken:
            departs = ["the same once more"]  # a seed counts once, however often it was run
        names = [name for name, training in ROWS.items() if training == record.training]
        if departs or not names:
            others.append((record, departs))
            continue
        taken.add((record.training, record.seed))
        for name in names:
            rows[name].append(record)
    return rows, others


def _departs(record: Record, preset: str) -> list[str]:
    # Joint training may have been done once, at the end.
    return departures(record.config, preset, ("phases",) if record.config["method"] == "joint" else ())


def standing(rows: Rows, classifier: str) -> Table:
    """Return what every row reached under one classifier."""
    table: list[list[Cell]] = [
        [name, len(records), *(_estimate(records, classifier, measure) for measure in MEASURES.values())]
        for name, records in rows.items()
        if records
    ]
    return Table(["row", "seeds", *MEASURES], table, _not_run([name for name, records in rows.items() if not records]))


def _estimate(records: Sequence[Record], classifier: str, measure: str) -> Estimate | None:
    return estimate([record.value(classifier, measure) for record in records])


def times(rows: Rows) -> Table:
    """Return the minutes of each row: phase 0 of the runs that trained it, and the phases after it."""
    table: list[list[Cell]] = []
    for name, records in rows.items():
        base = [record.seconds[0] / 60 for record in records if not record.cached]
        later = [sum(record.seconds[1:]) / 60 for record in records if len(record.seconds) > 1]
        if records:
            table.append([name, estimate(base), estimate(later)])
    return Table(["row", "phase 0 (min)", "phases 1 to T (min)"], table)


def page(records: Sequence[Record], preset: str) -> str:
    """Write the page in Markdown."""
    rows, others = sort_out(records, preset)
    against_joint = [("Joint training", name) for name in ROWS if name != "Joint training"]
    parts = [
        f"# Results: {preset}",
        "Written by `geodl results write` from one file a run; do not edit. "
        + preset_words(preset)
        + f" {_machines(records)} All accuracies in %, mean ± sample standard deviation over seeds where there are several.",
        "LwF and iCaRL are one training, which the paper reads under CNN and under k-NME; so are CE + GeoDL and iCaRL + GeoDL. "
        f"{AVERAGE}: mean accuracy after phases 1 to T (the paper's definition); {INCREMENTAL}: with phase 0; final: after the last "
        "phase; forgetting: accuracy on the base classes after phase 0 minus after the last phase.",
    ]
    for classifier in READ:
        parts += [f"## {CLASSIFIERS[classifier]}", standing(rows, classifier).markdown()]
        if classifier == "ame":
            parts.append(_oracle(preset))
    parts += [
        "## Do the paper's comparisons hold?",
        "The first row minus the second, seed by seed, with the standard deviation over seeds where there are several. *holds*: better by more than that "
        "deviation; *does not hold*: worse by more than that; *within spread*: neither. Where the two share one seed only, that is "
        "said, and the largest spread known from the other comparisons under the same classifier stands in; where there is none, the sign is told. *In the paper*: its own "
        "difference on CIFAR-100 with 20 exemplars, from Table 2 (T = 10) for the CE rows, else from Table 1 (T = 5), where the rows "
        "it cites count phase 0 and its own do not. Table 2 itself has CE + GeoDL behind CE + Cos under CNN.",
    ]
    for title, pairs, measure in (
        ("Average accuracy, phases 1 to T", PAIRS, AVERAGE),
        ("Forgetting (less is better)", PAIRS, "forgetting"),
        ("Final accuracy against joint training", against_joint, "final"),
    ):
        parts += [f"### {title}", comparisons(rows, pairs, measure).markdown()]
    parts += ["## Time", times(rows).markdown()]
    parts.append(
        "Wall-clock time of training and evaluation, without interruptions; other work may have run beside it."
    )
    if others:
        parts += ["## Other runs", "Runs that depart from the preset.", _others(others).markdown()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def preset_words(preset: str) -> str:
    """Say what a preset does."""
    values = preset_layer(preset).values
    return (
        f"Preset `{preset}`: {values['network']}, {values['base']} classes and then {values['phases']} phases, "
        f"{values['exemplars']} exemplars a class, {values.get('base_epochs', values['epochs'])} epochs in phase 0 and "
        f"{values['epochs']} in each phase after it."
    )


def _oracle(preset: str) -> str:
    most = preset_layer(preset).values.get("ame_images")
    limit = f" Its means are of at most {most} images a class." if most else ""
    return f"AME needs old classes' images, which a real learner no longer has: it is an oracle.{limit}"


def _machines(records: Sequence[Record]) -> str:
    kinds = sorted(
        {
            f"{one.machine.get('device')} ({one.machine.get('machine')}), threads: {one.machine.get('threads')}, "
            f"precision: {one.machine.get('precision', one.config.get('precision'))}, torch {one.machine.get('torch')}"
            for one in records
        }
    )
    commits = sorted({one.commit for one in records if one.commit})
    return f"{len(records)} runs on {'; '.join(kinds)}; commits {', '.join(commits) or 'unknown'}." if records else ""


def _others(others: Sequence[tuple[Record, list[str]]]) -> Table:
    table: list[list[Cell]] = []
    for record, departs in others:
        found = [_estimate([record], name, measure) for name in JUDGED for measure in ("average", "forgetting")]
        name = " + ".join(record.training)
        table.append([name, record.seed, ", ".join(departs) or "no row of the paper", *found])
    heads = [f"{CLASSIFIERS[name]} {measure}" for name in JUDGED for measure in (AVERAGE, "forgetting")]
    return Table(["training", "seed", "different from the preset", *heads], table)
