"""Tables that are right in Markdown, CSV and LaTeX: ours, mean and spread over runs, beside the published numbers."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from geodl.predictors import CLASSIFIERS
from geodl.report.published import Published, matching
from geodl.report.results import DATA_NAMES, Estimate, Setting


class Points(float):
    """A difference: shown with its sign."""


Cell = str | int | float | Estimate | None
AVERAGE = "average 1..T"
INCREMENTAL = "average 0..T"
PAPERS = ("cnn", "nme", "ame")
"""The classifiers that a published number may be of."""


@dataclass(frozen=True)
class Table:
    """A heading, rows of cells under it, and what a reader must know."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Write it for a README or an issue; numbers are aligned to the right."""
        right = [any(isinstance(row[i], int | float | Estimate) for row in self.rows) for i in range(len(self.header))]
        lines = [self.header, ["---:" if number else "---" for number in right]]
        lines += [[text(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([table, *self.notes]) + "\n"

    def csv(self) -> str:
        """Write it for programs: full precision, an estimate as mean, spread and number of runs; no notes."""
        wide = [any(isinstance(row[i], Estimate) for row in self.rows) for i in range(len(self.header))]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        header: list[str] = []
        for name, expands in zip(self.header, wide, strict=True):
            header += [name, f"{name} spread", f"{name} runs"] if expands else [name]
        writer.writerow(header)
        for row in self.rows:
            line: list[object] = []
            for cell, expands in zip(row, wide, strict=True):
                if isinstance(cell, Estimate):
                    line += [cell.mean, cell.spread, cell.runs]
                else:
                    line += [cell, None, None] if expands else [cell]
            writer.writerow(line)
        return out.getvalue()

    def latex(self) -> str:
        """Write it for a paper, with the rules of booktabs."""
        columns = "".join(
            "r" if any(isinstance(row[i], int | float | Estimate) for row in self.rows) else "l"
            for i in range(len(self.header))
        )
        body = [[_latex(text(cell)) for cell in row] for row in self.rows]
        lines = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", _line(map(_latex, self.header)), "\\midrule"]
        lines += [*(_line(row) for row in body), "\\bottomrule", "\\end{tabular}"]
        return "\n".join([*lines, *(f"% {note}" for note in self.notes)]) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {"md": Table.markdown, "csv": Table.csv, "tex": Table.latex}


def text(cell: Cell) -> str:
    """Show a cell: two decimals, as the paper has; a mean with its spread; nothing where there is nothing."""
    if cell is None:
        return ""
    if isinstance(cell, Estimate):
        return f"{cell.mean:.2f}" if cell.spread is None else f"{cell.mean:.2f} ± {cell.spread:.2f}"
    if isinstance(cell, Points):
        return f"{cell:+.2f}"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def summary(settings: Sequence[Setting]) -> Table:
    """Give what every setting reached under every classifier."""
    measures = {
        "final": "final",
        AVERAGE: "average",
        INCREMENTAL: "average_incremental",
        "forgetting": "forgetting",
        "mean forgetting": "mean_forgetting",
        "backward transfer": "backward_transfer",
    }
    rows: list[list[Cell]] = []
    for setting in settings:
        for classifier in setting.classifiers:
            found = [setting.value(classifier, name) for name in measures.values()]
            rows.append([setting.label, CLASSIFIERS[classifier], len(setting.runs), *found])
    notes = [
        f"All in %. {AVERAGE}: mean accuracy after phases 1 to T, as the paper defines it; {INCREMENTAL}: with phase 0, as most "
        "others do. Forgetting: accuracy on the base classes after phase 0 minus after the last phase; mean forgetting: best before "
        "minus last, over all groups. AME needs data that a real learner no longer has: it is an oracle.",
    ]
    if any(len(setting.runs) > 1 for setting in settings):
        notes.append("mean ± sample standard deviation over runs.")
    return Table(["method", "classifier", "runs", *measures], rows, notes)


@dataclass(frozen=True)
class Comparison:
    """A published number beside both our averages, or our forgetting; None where no run corresponds."""

    published: Published
    classifier: str | None
    average: Estimate | None = None
    incremental: Estimate | None = None
    forgetting: Estimate | None = None

    @property
    def against(self) -> str:
        """Which of ours the number is compared with: the one of its own kind."""
        if self.published.metric == "forgetting":
            return "forgetting"
        return INCREMENTAL if self.published.includes_phase0 else AVERAGE

    @property
    def ours(self) -> Estimate | None:
        """Our number of the same kind."""
        return {"forgetting": self.forgetting, INCREMENTAL: self.incremental, AVERAGE: self.average}[self.against]

    @property
    def difference(self) -> Points | None:
        """Ours minus published, in points."""
        return None if self.ours is None else Points(self.ours.mean - self.published.value)


def compare(number: Published, setting: Setting | None) -> list[Comparison]:
    """Put a published number beside a setting, under each classifier it may be of; without a setting, beside nothing."""
    if setting is None:
        return [Comparison(number, number.classifier)]
    classifiers = [number.classifier] if number.classifier else [name for name in setting.classifiers if name in PAPERS]
    if number.metric == "forgetting":
        return [Comparison(number, name, forgetting=setting.value(name, "forgetting")) for name in classifiers]
    return [
        Comparison(number, name, setting.value(name, "average"), setting.value(name, "average_incremental"))
        for name in classifiers
    ]


def comparisons(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare all complete settings whose protocol the paper has numbers for."""
    return [
        each
        for setting in settings
        if setting.first.complete and setting.first.groups
        for number in matching(setting.first.config, len(setting.first.groups[0]))
        for each in compare(number, setting)
        if each.ours is not None
    ]


def comparison_table(found: Sequence[Comparison]) -> Table:
    """Write comparisons as a table that says what each number is compared with."""
    rows: list[list[Cell]] = []
    for each in found:
        number = each.published
        classifier = CLASSIFIERS[each.classifier] if each.classifier else ""
        unknown = number.metric == "average" and number.includes_phase0 is None
        rows.append(
            [
                number.table,
                DATA_NAMES.get(number.dataset or "", number.dataset),
                number.row,
                number.phases,
                number.memory,
                classifier if number.classifier else f"{classifier} (paper: not stated)".strip(),
                each.average,
                each.incremental,
                each.forgetting,
                number.value,
                each.against + (" (unknown)" if unknown else ""),
                each.difference,
            ]
        )
    header = ["table", "data", "method", "T", "memory", "classifier"]
    header += [AVERAGE, INCREMENTAL, "forgetting", "published", "compared with", "difference"]
    notes = [
        f"The paper's own rows leave phase 0 out ({AVERAGE}); the rows it cites from others count it ({INCREMENTAL}). "
        "Each published number is compared with ours of the same kind; the other one is shown beside it.",
        "AME needs data that a real learner no longer has: it is an oracle.",
    ]
    return Table(header, rows, notes)


def _latex(words: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
    special |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
    return "".join(special.get(sign, sign) for sign in words)


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
