"""Tables of results (mean and spread over runs) and of comparisons with published numbers, as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geodl.bench.report.published import SAME, Published, matching
from geodl.bench.report.results import DATA_NAMES, Estimate, Setting
from geodl.core.files import atomic_write
from geodl.core.text import printable
from geodl.model.classifiers import notes_on, titles


class Points(float):
    """A difference in points, shown with its sign."""


class Best(Estimate):
    """The best estimate of its column, bold in the page."""


Cell = str | int | float | Estimate | None
AVERAGE = "average 1..T"
INCREMENTAL = "average 0..T"
MEASURES = {
    "final": ("final", True),
    AVERAGE: ("average", True),
    INCREMENTAL: ("average_incremental", True),
    "forgetting": ("forgetting", False),
    "mean forgetting": ("mean_forgetting", False),
    "backward transfer": ("backward_transfer", True),
}
"""Columns of results: name in tables -> (key in `Trajectory.to_dict()`, whether higher is better)."""
PAPERS = ("cnn", "nme", "ame")
"""The classifiers that the paper uses."""


@dataclass(frozen=True)
class Table:
    """A table: header, rows and notes."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    @property
    def columns(self) -> list[list[Cell]]:
        """The cells of each column."""
        columns = []
        for i in range(len(self.header)):
            columns.append([row[i] for row in self.rows])
        return columns

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers."""
        return [_holds(int | float | Estimate, cells) for cells in self.columns]

    def inserting(self, at: int, name: str, cells: Sequence[Cell]) -> "Table":
        """Return the table with one more column."""
        rows = [[*row[:at], cell, *row[at:]] for row, cell in zip(self.rows, cells, strict=True)]
        return Table([*self.header[:at], name, *self.header[at:]], rows, self.notes)

    def keeping(self, columns: Iterable[int]) -> "Table":
        """Return the table with some of its columns."""
        kept = list(columns)
        rows = []
        for row in self.rows:
            rows.append([row[i] for i in kept])
        return Table([self.header[i] for i in kept], rows, self.notes)

    @property
    def filled(self) -> "Table":
        """The table without its empty columns."""
        return self.keeping(i for i, cells in enumerate(self.columns) if set(cells) - {None})

    def markdown(self) -> str:
        """Return it as Markdown; numbers are aligned to the right."""
        rules = [("---", "---:")[number] for number in self.numeric]
        rows = [self.header, rules]
        for row in self.rows:
            rows.append([text(cell).replace("|", "\\|") for cell in row])
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return "\n\n".join([table, *self.notes]) + "\n"

    def csv(self) -> str:
        """Return it as CSV: full precision, an estimate as mean, spread and number of runs; no notes."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        wide = [_holds(Estimate, cells) for cells in self.columns]
        header: list[str] = []
        for name, estimates in zip(self.header, wide, strict=True):
            header += [name, f"{name} spread", f"{name} runs"] if estimates else [name]
        writer.writerow(header)
        for row in self.rows:
            line: list[object] = []
            for cell, estimates in zip(row, wide, strict=True):
                if isinstance(cell, Estimate):
                    line += [cell.mean, cell.spread, cell.runs]
                else:
                    line += [cell, None, None] if estimates else [cell]
            writer.writerow(line)
        return out.getvalue()

    def latex(self) -> str:
        """Return it as a LaTeX tabular with the rules of booktabs."""
        columns = "".join("lr"[number] for number in self.numeric)
        head, *rows = [" & ".join(map(_latex, row)) + r" \\" for row in (self.header, *self.rows)]
        lines = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", head, "\\midrule", *rows]
        lines += ["\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def write(self, stem: Path, title: str = "") -> list[Path]:
        """Write STEM.md (with the title), STEM.csv and STEM.tex; return the files."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        head = f"# {title}\n\n" if title else ""
        contents = {"md": head + self.markdown(), "csv": self.csv(), "tex": self.latex()}
        paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            atomic_write(path, content.encode())
        return paths


def _holds(kind: object, cells: Sequence[Cell]) -> bool:
    return any(isinstance(cell, kind) for cell in cells)  # type: ignore[arg-type]


def text(cell: Cell) -> str:
    """Return a cell as text: two decimals as in the paper, a mean with its spread, None as the empty string."""
    if cell is None:
        return ""
    if isinstance(cell, Estimate):
        return f"{cell.mean:.2f}" if cell.spread is None else f"{cell.mean:.2f} ± {cell.spread:.2f}"
    if isinstance(cell, Points):
        return f"{cell:+.2f}"
    return f"{cell:.2f}" if isinstance(cell, float) else printable(str(cell))


def _latex(cell: Cell) -> str:
    """Return a cell as LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"±": r"$\pm$"}
    if not isinstance(cell, str):
        special["-"] = "$-$"  # a minus sign, not a hyphen
    return "".join(special.get(sign, sign) for sign in text(cell))


# ----------------------------------------------------------------------------------------------------------- results


def summary(settings: Sequence[Setting]) -> Table:
    """Return the results of every setting under every classifier."""
    rows: list[list[Cell]] = []
    shown: set[str] = set()
    for setting in settings:
        shown.update(setting.classifiers)
        for classifier in setting.classifiers:
            values = [setting.value(classifier, name) for name, _ in MEASURES.values()]
            rows.append([setting.label, titles()[classifier], len(setting.runs), *values])
    notes = ["All in %."]
    if any(setting.first.done > 1 for setting in settings):
        notes[0] += (
            f" {AVERAGE}: mean accuracy after phases 1 to T, as the paper defines it; {INCREMENTAL}: with phase 0, as most "
            "others do. Forgetting: accuracy on the base classes after phase 0 minus after the last phase. Mean forgetting: best "
            "accuracy before the last phase minus after it; backward transfer: after the last phase minus just after learning; both are "
            "means over the groups of classes learned before the last phase."
        )
    notes += notes_on(shown)
    if any(len(setting.runs) > 1 for setting in settings):
        notes.append("Mean ± sample standard deviation over runs.")
    return Table(["method", "classifier", "runs", *MEASURES], rows, notes)


@dataclass(frozen=True)
class Comparison:
    """A published number beside our averages or our forgetting; None if no run corresponds."""

    published: Published
    classifier: str | None
    setting: str | None = None
    values: Mapping[str, Estimate | None] = field(default_factory=dict)

    @property
    def against(self) -> str:
        """The measure of ours that the number is compared with."""
        if self.published.metric == "forgetting":
            return "forgetting"
        return INCREMENTAL if self.published.includes_phase0 else AVERAGE

    @property
    def ours(self) -> Estimate | None:
        """Our value of that measure."""
        return self.values.get(self.against)

    @property
    def difference(self) -> Points | None:
        """Ours minus published, in points."""
        return None if self.ours is None else Points(self.ours.mean - self.published.value)

    @property
    def row(self) -> list[Cell]:
        """The row of a table with the columns HEADER."""
        number = self.published
        unknown = number.metric == "average" and number.includes_phase0 is None
        return [
            number.table,
            DATA_NAMES.get(number.dataset or "", number.dataset),
            number.row,
            number.phases,
            number.memory,
            titles()[self.classifier] if self.classifier else "any",
            *map(self.values.get, OURS),
            number.value,
            self.against + (" (unknown)" if unknown else ""),
            self.difference,
        ]


OURS = (AVERAGE, INCREMENTAL, "forgetting")
HEADER = [
    *("table", "data", "method", "T", "memory", "classifier"),
    *OURS,
    *("published", "compared with", "difference"),
]


def compare(number: Published, setting: Setting | None) -> list[Comparison]:
    """Compare a published number with a setting (or none) under each classifier that the number may refer to."""
    if setting is None:
        return [Comparison(number, number.classifier)]
    measures = [AVERAGE, INCREMENTAL] if number.metric == "average" else ["forgetting"]
    classifiers = [name for name in setting.classifiers if name in PAPERS]
    comparisons = []
    for name in [number.classifier] if number.classifier else classifiers:
        values = {key: setting.value(name, MEASURES[key][0]) for key in measures}
        comparisons.append(Comparison(number, name, setting.label, values))
    return comparisons


def comparisons(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare all complete settings with the paper's numbers for their protocol."""
    compared = []
    for setting in settings:
        if setting.first.complete and setting.first.groups:
            for number in matching(setting.first.config, len(setting.first.groups[0])):
                compared += compare(number, setting)
    return [one for one in compared if one.ours is not None]


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Return comparisons as a table, with notes on what each number is compared with."""
    notes = [
        f"The paper's own rows leave phase 0 out ({AVERAGE}); the rows it cites from others count it ({INCREMENTAL}). "
        "Each published number is compared with ours of the same kind; the other one is shown beside it.",
        *notes_on(PAPERS),
    ]
    numbers = [one.published for one in compared]
    if any((number.method, number.distill) in SAME for number in numbers):
        notes.append(
            "LwF and iCaRL are one training, which the paper reads under CNN and under k-NME; so are CE + GeoDL and "
            "iCaRL + GeoDL."
        )
    unstated = dict.fromkeys(number.row for number in numbers if number.classifier is None)
    if unstated:
        notes.append(
            f"The paper does not say under which classifier it reads {', '.join(unstated)}: all of ours are shown."
        )
    table = Table(HEADER, [one.row for one in compared], notes)
    if len({(one.published, one.classifier) for one in compared}) == len(compared):
        return table
    # Several settings beside one published number need their labels.
    return table.inserting(3, "setting", [one.setting for one in compared])


def write_tables(settings: Sequence[Setting], directory: Path) -> list[Path]:
    """Write results.* and, if the paper has numbers for the protocol, published.*, in every format."""
    paths = summary(settings).write(directory / "results")
    if compared := comparisons(settings):
        paths += comparison_table(compared).write(directory / "published")
    return paths
