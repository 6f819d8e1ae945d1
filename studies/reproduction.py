"""The page of the reproduction: the paper's tables and figures on CIFAR-100 beside ours, with a verdict on each claim.

python -m studies.reproduction results/cifar100-cpu --out docs/reproduction.md

It reads the result files of `python -m studies.results add`. A claim is *reproduced* or *not reproduced* if three or more seeds have a
95 % interval that excludes zero, or if one or two seeds differ by more than two points; otherwise it is *not decided*.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from geodl.bench.paper.grid import ARTEFACTS, Training, published, training_of, trainings
from geodl.bench.report.published import IN_GRID, Published, departures
from geodl.bench.report.results import estimate, label_of
from geodl.bench.report.tables import AVERAGE, INCREMENTAL, PAPERS, Cell, Points, Table
from geodl.core.files import atomic_write
from geodl.core.text import count
from geodl.learning.timing import LOSSES
from geodl.model.classifiers import titles
from studies import records
from studies.records import Record
from studies.verdicts import SEEDS, Difference, difference, preset_words

PRESET = "cifar100-cpu"
CLEAR = 2.0
"""Difference in points that decides with one or two seeds."""
PHASES = (5, 10, 25)
MEMORIES = (20, 40, 60, 80, 100)
SIMILARITY = "svcca"
"""The measure of the paper's CCA figures; in a claim that of the last phase, without a classifier."""
WORST = "worst"
"""A claim about every phase is judged by its least favorable phase."""
MEASURES = {
    "average": AVERAGE,
    "forgetting": "forgetting",
    SIMILARITY: "SVCCA with phase 0 (%)",
    WORST: "accuracy in the least favorable phase",
}

Runs = dict[Training, list[Record]]


@dataclass(frozen=True)
class Claim:
    """The claim that one training is better than another by a measure; with `than`, by more than in that claim.

    artefact: the table or figure of the claim.
    """

    artefact: str
    one: Training
    other: Training
    classifier: str
    measure: str = "average"
    than: "Claim | None" = None

    @property
    def words(self) -> str:
        """The claim in words."""
        one = "iCaRL + GeoDL" if self.other.method == "icarl" else _name(self.one)
        label = f"{one} ahead of {_name(self.other)}"
        if self.than is not None:
            return f"{label} by more than at T = {self.than.one.phases}"
        return label

    def found(self, runs: Runs) -> Difference | None:
        """Return our difference by seed, positive if the claim holds; None if both sides share no seed."""
        sides = [runs.get(training, []) for training in (self.one, self.other)]
        if self.measure == WORST:
            return _worst(sides[0], sides[1], self.classifier)
        if self.measure == SIMILARITY:
            sides = [[replace(each, results=_similarity(each)) for each in side] for side in sides]
        mine = difference(sides[0], sides[1], (self.classifier,) * 2, self.measure)
        if mine is None or self.than is None:
            return mine and Difference([self.sign * value for value in mine.values])
        theirs = self.than.found(runs)
        if theirs is None or len(theirs.values) != len(mine.values):
            return None
        pairs = zip(mine.values, theirs.values, strict=True)
        return Difference([self.sign * value - before for value, before in pairs])

    @property
    def sign(self) -> int:
        """-1 if lower is better, else 1."""
        return -1 if self.measure == "forgetting" else 1

    @property
    def published(self) -> Points | None:
        """The paper's own difference, positive in favor of the claim; None if it prints none."""
        values = [_printed(self.artefact, side, self) for side in (self.one, self.other)]
        if None in values:
            return None
        mine = self.sign * (values[0] - values[1])  # type: ignore[operator]
        if self.than is None:
            return Points(mine)
        before = self.than.published
        return None if before is None else Points(mine - before)


def verdict(found: Difference) -> str:
    """Return the verdict on a claim; positive differences support it."""
    if len(found.values) >= SEEDS:
        assert found.interval is not None
        low, high = found.interval
        clear = low > 0 or high < 0
    else:
        clear = abs(found.mean) > CLEAR
    if not clear:
        return "not decided"
    return "reproduced" if found.mean > 0 else "not reproduced"


def claims() -> Iterator[Claim]:
    """Yield the claims of the paper about CIFAR-100, by table or figure."""
    lucir, cosine = Training("lucir", "geodesic", 50, 5), Training("lucir", "cosine", 50, 5)
    icarl, lwf = Training("finetune", "geodesic", 50, 5), Training("icarl", "lwf", 50, 5)
    # Table 1: it improves iCaRL and LUCIR, is ahead of the others, forgets less; LUCIR by 2, 5 and 5 %.
    for t, measure in product(PHASES, ("average", "forgetting")):
        ours = replace(lucir, phases=t)
        yield Claim("table1", replace(icarl, phases=t), replace(lwf, phases=t), "nme", measure)
        for other, name in product((cosine, Training("mnemonics", "cosine", 50, 5)), PAPERS):
            yield Claim("table1", ours, replace(other, phases=t), name, measure)
        yield Claim("table1", ours, Training("bic", "lwf", 50, t), "cnn", measure)
    for t, name in product(PHASES[1:], PAPERS):
        first = Claim("table1", lucir, cosine, name)
        more = (replace(lucir, phases=t), replace(cosine, phases=t))
        yield Claim("table1", *more, name, than=first)
    for t, name in product((5, 10), PAPERS):  # higher accuracy than LUCIR and LwF for each task
        yield Claim("fig-phases", replace(lucir, phases=t), replace(cosine, phases=t), name, WORST)
        yield Claim("fig-phases", replace(lucir, phases=t), replace(lwf, phases=t), name, WORST)
    # Table 2, the classifiers: ahead of the other losses under each classifier, at each memory size.
    for memory, name, loss in product(MEMORIES, PAPERS, ("cosine", "lwf", "none")):
        one, other = (Training("finetune", each, 50, 10, memory) for each in ("geodesic", loss))
        yield Claim("table2", one, other, name)
    for t, loss in product(PHASES, ("cosine", "lwf", "none")):
        one, other = (Training("finetune", each, 50, t) for each in ("geodesic", loss))
        yield Claim("fig-classifiers", one, other, "ame")
    # Table 3 and the start from 10 classes.
    for dim in (16, 32, 64):
        full = Training("finetune", "geodesic", 50, 10)
        yield Claim("table3", full, replace(full, subspace_dim=dim), "ame")
    for base in (50, 10):
        one, other = (Training("finetune", each, base, 10) for each in ("geodesic", "cosine"))
        yield Claim("init10", one, other, "ame")
    for loss in ("cosine", "lwf"):
        one, other = (Training("finetune", each, 50, 10) for each in ("geodesic", loss))
        yield Claim("fig-cca", one, other, SIMILARITY, SIMILARITY)


def _name(training: Training) -> str:
    more = [f"n = {training.subspace_dim}"] if training.subspace_dim != 127 else []
    more += [f"{training.memory} exemplars"] if training.memory != 20 else []
    more += [f"{training.base} base classes"] if training.base != 50 else []
    return ", ".join([label_of(training.method, training.distill), *more])


def _printed(artefact: str, training: Training, claim: Claim) -> float | None:
    """Return the paper's number for a training, from the table of the claim or from Table 2."""
    tables = (ARTEFACTS[artefact].table, "Table 2")
    for number in (each for table in tables for each in _numbers(table)):
        alike = training_of(number) == training and number.metric == claim.measure
        if alike and number.classifier in (None, claim.classifier):
            return number.value
    return None


def _numbers(table: str) -> list[Published]:
    names = [name for name, one in ARTEFACTS.items() if one.table == table and table]
    return [each for name in names for each in published(name, "cifar100", PHASES)]


def _worst(one: Sequence[Record], other: Sequence[Record], classifier: str) -> Difference | None:
    """Return the smallest difference of accuracies over the phases after phase 0, by seed."""
    theirs = {record.seed: record.results[classifier]["accuracy"] for record in other}
    values = []
    for record in one:
        if record.seed in theirs:
            mine = record.results[classifier]["accuracy"]
            pairs = zip(mine[1:], theirs[record.seed][1:], strict=True)
            values.append(min(a - b for a, b in pairs))
    return Difference(values) if values else None


def _similarity(record: Record) -> dict[str, dict[str, float]]:
    values = record.similarity.get(SIMILARITY, [])
    return {SIMILARITY: {SIMILARITY: 100 * values[-1]}} if values else {}


# ----------------------------------------------------------------------------------------------------------- page


def sort_out(found: Sequence[Record]) -> tuple[Runs, int]:
    """Return the runs of each training in the most frequent precision, one per seed, and the number of others."""
    precisions = [_precision(record) for record in found]
    most = max(precisions, key=precisions.count, default="")
    runs: Runs = {}
    for record in found:
        config = record.config
        if departures(config, PRESET, (*IN_GRID, "precision")) or _precision(record) != most:
            continue
        dim = config["subspace_dim"] if config["distill"] == "geodesic" else 127
        place = (config["base"], config["phases"], config["exemplars"], dim)
        same = runs.setdefault(Training(*record.training, *map(int, place)), [])
        if record.seed not in [each.seed for each in same]:
            same.append(record)
    return runs, len(found) - sum(map(len, runs.values()))


def _precision(record: Record) -> str:
    return str(record.machine.get("precision", record.config.get("precision")))


def beside(artefact: str, runs: Runs) -> Table:
    """Return the numbers of a table of the paper beside ours, under each classifier that they may refer to."""
    rows: list[list[Cell]] = []
    for number in published(artefact, "cifar100", PHASES):
        training, measure = training_of(number), number.metric
        shown = AVERAGE if measure == "average" else measure
        if measure == "average" and number.includes_phase0:
            measure, shown = "average_incremental", INCREMENTAL  # type: ignore[assignment]
        names = [number.classifier] if number.classifier else PAPERS
        mine = runs.get(training, [])
        if not mine:
            continue
        values = [estimate([each.value(name, measure) for each in mine]) for name in names]
        cells: list[Cell] = [None] * len(PAPERS)
        for name, value in zip(names, values, strict=True):
            cells[PAPERS.index(name)] = value
        label = number.row if artefact == "table1" else _name(training)
        rows.append([label, training.phases, shown, number.value, *cells, len(mine) or None])
    ours = [f"ours: {titles()[name]}" for name in PAPERS]
    return Table(["row", "T", "figure", "published", *ours, "seeds"], rows)


def judged(artefact: str, runs: Runs) -> Table:
    """Return the verdict on each claim about a table or figure."""
    rows: list[list[Cell]] = []
    for claim in (each for each in claims() if each.artefact == artefact):
        found = claim.found(runs)
        if found is None:
            continue
        under = "" if claim.measure == SIMILARITY else titles()[claim.classifier]
        cells: list[Cell] = [claim.words, claim.one.phases, MEASURES[claim.measure], under]
        figures = (claim.published, found.shown, len(found.values), verdict(found))
        rows.append([*cells, *figures])
    header = ["claim", "T", "by", "under", "published", "ours", "seeds", "verdict"]
    return Table(header, rows)


def missing(artefact: str, runs: Runs) -> list[str]:
    """List the trainings of a table or figure that were not run, with the number of claims not judged."""
    needed = trainings(artefact, "cifar100", ARTEFACTS[artefact].phases)
    gone = [f"{_name(each)}, T = {each.phases}" for each in needed if each not in runs]
    if not gone:
        return []
    mine = [claim for claim in claims() if claim.artefact == artefact]
    waiting = [claim for claim in mine if claim.found(runs) is None]
    return [
        f"Not run: {'; '.join(gone)}. Therefore {len(waiting)} of {count(len(mine), 'claim')} are not judged."
    ]


def page(found: Sequence[Record]) -> str:
    """Return the page as Markdown."""
    runs, left_out = sort_out(found)
    kept = sum(map(len, runs.values()))
    parts = [
        "# The paper on CIFAR-100, table by table",
        f"Written by `python -m studies.reproduction` from the files of {count(kept, 'run')} ({left_out} with other options, another "
        f"precision or a repeated seed are left out); do not edit. {preset_words(PRESET)} The paper trains 160 epochs per phase, so only "
        "differences between rows that were trained alike are judged.",
        f"A claim is *reproduced* or *not reproduced* if {SEEDS} or more seeds have a 95 % interval (t distribution) that excludes zero, "
        f"or if fewer seeds differ by more than {CLEAR:g} points; otherwise it is *not decided*. Positive differences support the claim, "
        "also for forgetting, where less is better. If the paper does not name the classifier of a row, the claim is judged under "
        "each. The paper's differences from rows that it cites mix averages with and without phase 0.",
    ]
    for name, artefact in ARTEFACTS.items():
        if "cifar100" not in artefact.datasets:
            continue
        parts += [f"## {artefact.title}", *missing(name, runs)]
        tables = [beside(name, runs)] if artefact.table else []
        parts += [each.markdown() for each in (*tables, judged(name, runs)) if each.rows]
    losses = ", ".join(label_of("finetune", loss) for loss in LOSSES)
    parts += [
        "## Time and memory",
        f"`python -m benchmarks.time_memory` measures {losses} ([figures](reproducing.md#time-and-memory-of-an-iteration)).",
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="directory of result files")
    parser.add_argument("--out", type=Path, required=True, help="the page, in Markdown")
    given = parser.parse_args(arguments)
    atomic_write(given.out, page(records.read(given.results)).encode())


if __name__ == "__main__":
    main()
