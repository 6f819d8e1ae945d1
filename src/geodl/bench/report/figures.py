"""Figures in one color-blind-safe style: SVG and PDF files for papers, inline SVG for the HTML page.

Each figure is drawn once by matplotlib. In the page its colors become CSS variables that follow light and dark mode, its
text uses the page's font, and ``tips`` are tooltips of its points.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from geodl.core.files import atomic_write
from geodl.core.text import printable

# Okabe and Ito's palette without yellow and black; each color has a marker too.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
# Line styles of further rounds through the colors; dashes are reserved for oracles.
STYLES = ("-", (0, (1, 1.2)), (0, (3, 1.2, 1, 1.2)), (0, (9, 1.5)))
ORACLE = (0, (4, 2))
INK, MUTED, RULE = "#1c2127", "#66707c", "#d8dde3"
HEAT = "#2f7fd0"
CSS = {INK: "--ink", MUTED: "--muted", RULE: "--rule"} | {
    color: f"--series-{number}" for number, color in enumerate(PALETTE)
}
POINTS = 60
"""Lines with more points have no markers."""
SHORT, LONG = 20, 46
"""Longest label in a legend of two columns, and longest line in one of one column (characters)."""
SIDE = 446
"""Width and height of a dense matrix in points."""
WRITTEN = 12
"""Heat maps with more columns have no numbers in their cells."""

STYLE = matplotlib.rc_params_from_file(
    Path(__file__).with_suffix(".mplstyle"), use_default_template=False
)


@dataclass(frozen=True)
class Curve:
    """A line over x, with a band from ``low`` to ``high``; dashed for oracles."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """A drawn figure.

    name: for files and ids; title: the heading in the page; alt: alternative text.
    tips: the tooltips of a line's points (by its id) or of a heat map's cells (key ``heat``).
    """

    name: str
    title: str
    alt: str
    figure: Figure
    tips: Mapping[str, Any] = field(default_factory=dict)

    def files(self, directory: Path) -> list[Path]:
        """Write NAME.svg (text as paths) and NAME.pdf (embedded fonts) for a paper."""
        paths = {directory / f"{self.name}.{kind}": kind for kind in ("svg", "pdf")}
        for path, kind in paths.items():
            atomic_write(path, self._saved(kind, "path"))
        return list(paths)

    def inline(self, prefix: str) -> str:
        """Return the <svg> element for a page; the prefix makes ids unique."""
        root = ElementTree.fromstring(self._saved("svg", "none"))
        for element in list(root.iter()):
            # HTML needs no namespaces.
            element.tag = element.tag.partition("}")[2]
            element.attrib = {key.rpartition("}")[2]: value for key, value in element.items()}
            for child in list(element):
                if child.tag.endswith(("}metadata", "}style")):
                    element.remove(child)
            for key, value in element.items():
                element.set(key, _in_page(key, value, prefix))
            if not (element.tail or "").strip():
                element.tail = "\n"
        root.attrib = {"role": "img", "aria-label": self.alt, "viewBox": root.attrib["viewBox"]}
        return ElementTree.tostring(root, encoding="unicode")

    def _saved(self, kind: str, fonttype: str) -> bytes:
        """Return the file's content; ``savefig`` would draw everything twice."""
        buffer = io.BytesIO()
        with _style(), matplotlib.rc_context({"svg.fonttype": fonttype}):
            if kind == "svg":
                FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]
            else:
                FigureCanvasPdf(self.figure).print_pdf(buffer, metadata={"CreationDate": None})  # type: ignore[no-untyped-call]
        return buffer.getvalue()


def _in_page(key: str, value: str, prefix: str) -> str:
    """Return the value of an attribute with prefixed ids, and with colors as variables of the page."""
    if key == "id":
        return f"{prefix}-{value}"
    if key == "href" and value[0] == "#":
        return f"#{prefix}-{value[1:]}"
    if key == "style":
        for color, variable in CSS.items():
            value = value.replace(color, f"var({variable})")
    return value.replace("url(#", f"url(#{prefix}-")


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Scripts that the font lacks: browsers use other fonts for them.
        warnings.filterwarnings("ignore", message=".*missing from font")
        yield


def lines(
    name: str,
    curves: Sequence[Curve],
    *,
    x: str,
    y: str,
    title: str = "",
    percent: bool = True,
    ticks: Sequence[float] | None = None,
    marks: Mapping[float, str] | None = None,
) -> Plot:
    """Draw curves; y is the label above the axes, ``marks`` are labeled vertical lines."""
    curves = [replace(curve, label=printable(curve.label)) for curve in curves]
    labels = [textwrap.fill(curve.label, LONG) for curve in curves]
    columns = 2 if max(map(len, labels), default=0) <= SHORT else 1
    rows = math.ceil(sum(label.count("\n") + 1 for label in labels) / columns)
    with _style():
        # A long legend makes the figure taller, not the axes smaller.
        figure = Figure(figsize=(4.0, 2.8 + 0.18 * max(0, rows - 2)))
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        unit = "%" if percent else ""
        tips = {f"line-{i}": _draw(axes, i, one, x, unit) for i, one in enumerate(curves)}
        handles = axes.get_lines()
        axes.set_xlabel(x)
        axes.set_title(y)
        low, high = axes.get_ylim()
        if percent and high - low < 1:  # a flat line stays flat: no scale of hundredths
            axes.set_ylim((low + high) / 2 - 1, (low + high) / 2 + 1)
        _mark(axes, ticks, marks or {})
        if len(curves) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    alt = f"{y}, by {x}: {', '.join(curve.label for curve in curves)}"
    return Plot(name, title, alt, figure, tips)


def _mark(axes: Axes, ticks: Sequence[float] | None, marks: Mapping[float, str]) -> None:
    """Draw the ticks of x and labeled vertical lines."""
    if ticks is not None:
        # At most nine, so that labels do not overlap; always the last.
        axes.set_xticks(ticks[:: -math.ceil(len(ticks) / 9)][::-1])
    else:  # classes and epochs are whole
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    for position, word in marks.items():
        axes.axvline(position, color=RULE, linewidth=0.8, zorder=0)
        axes.annotate(
            word, (position, 1), (2, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
            va="top", fontsize=7, color=MUTED,
        )  # fmt: skip


def _draw(axes: Axes, number: int, curve: Curve, x: str, unit: str) -> list[str]:
    """Draw one curve and return the tips of its points."""
    color = PALETTE[number % len(PALETTE)]
    known = [i for i, value in enumerate(curve.y) if value is not None]
    xs, ys = [curve.x[i] for i in known], [curve.y[i] for i in known]
    marker = MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
    if curve.low is not None and curve.high is not None:
        low, high = [curve.low[i] for i in known], [curve.high[i] for i in known]
        axes.fill_between(xs, low, high, color=color, alpha=0.16, linewidth=0)  # type: ignore[arg-type]
    style = ORACLE if curve.dashed else STYLES[number // len(PALETTE) % len(STYLES)]
    look = {"color": color, "linestyle": style, "marker": marker if len(known) <= POINTS else None}
    axes.plot(xs, ys, **look, label=curve.label, gid=f"line-{number}")  # type: ignore[arg-type]
    tips = []
    for i in known if len(known) <= POINTS else ():
        tip = f"{curve.label}\n{x} {curve.x[i]:g}: {curve.y[i]:.2f} {unit}".rstrip()
        if curve.low is not None and curve.high is not None:
            tip += f" ({curve.low[i]:.2f} to {curve.high[i]:.2f})"
        tips.append(tip)
    return tips


def heat(
    name: str,
    matrix: NDArray[np.float64],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    x: str,
    y: str,
    title: str = "",
    tips: Mapping[str, Any],
    boundaries: Sequence[int] = (),
    root: bool = False,
) -> Plot:
    """Draw a matrix of percentages as shades of blue; nan is left blank.

    ``boundaries`` are lines between rows and columns of a square matrix; ``root`` colors by square root, to show small values.
    """
    with _style():
        dense = max(matrix.shape) > 2 * WRITTEN
        axes = _dense_axes(_room(rows, columns)) if dense else _axes(len(matrix))
        axes.imshow(_blues(matrix, root), interpolation="none", aspect="auto", gid="heat")
        for edge in boundaries:
            axes.axhline(edge - 0.5, color=RULE, linewidth=0.6)
            axes.axvline(edge - 0.5, color=RULE, linewidth=0.6)
        if matrix.shape[1] <= WRITTEN:
            for (i, j), value in np.ndenumerate(matrix):
                if not np.isnan(value) and (value or not root):
                    axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=8)
        write = _small_names if dense else _names
        write(axes, rows, columns, x, y)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    shown = {"heat": {"shape": list(matrix.shape), **tips}}
    return Plot(name, title, f"{y}, by {x}", axes.figure, shown)  # type: ignore[arg-type]


def _axes(rows: int) -> Axes:
    return Figure(figsize=(4.0, max(1.6, min(4.2, 1.0 + 0.32 * rows)))).add_subplot()


def _dense_axes(room: float) -> Axes:
    """Return axes with room for names; not laid out automatically, as measuring hundreds of names takes seconds."""
    figure = Figure(figsize=(SIDE / 72, SIDE / 72))
    figure.set_layout_engine("none")
    edge = (room + 22) / SIDE
    return figure.add_axes((edge, 0.01, 0.99 - edge, 0.99 - edge))


def _blues(matrix: NDArray[np.float64], root: bool) -> NDArray[np.uint8]:
    """Return percentages as RGBA (r, c, 4), by opacity alone, which suits light and dark backgrounds."""
    share = np.nan_to_num(matrix) / 100
    image = np.empty((*matrix.shape, 4), dtype=np.uint8)
    image[..., :3] = [int(HEAT[i : i + 2], 16) for i in (1, 3, 5)]
    image[..., 3] = np.rint(255 * 0.85 * (np.sqrt(share) if root else share))
    return image


def _names(axes: Axes, rows: Sequence[str], columns: Sequence[str], x: str, y: str) -> None:
    """Label rows and columns; long names of columns are rotated."""
    axes.set_yticks(range(len(rows)), [_short(name) for name in rows])
    upright = max(map(len, columns), default=0) > 4
    axes.set_xticks(
        range(len(columns)), [_short(name) for name in columns], rotation=90 if upright else 0
    )
    axes.set_xlabel(x)
    axes.set_title(y)


def _small_names(axes: Axes, rows: Sequence[str], columns: Sequence[str], x: str, y: str) -> None:
    """Label many rows and columns in small type, readable when the page enlarges the figure."""
    axes.set_xticks([])
    axes.set_yticks([])
    size = _size(rows)
    for i, name in enumerate(rows):
        axes.annotate(_short(name), (0, i), (-2, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", va="center", fontsize=size, color=MUTED, annotation_clip=False)  # fmt: skip
    for i, name in enumerate(columns):
        axes.annotate(_short(name), (i, 1), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="center", va="bottom", fontsize=size, color=MUTED, rotation=90, annotation_clip=False)  # fmt: skip
    # The page shrinks these two labels when it enlarges the figure.
    room = _room(rows, columns) + 4
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(x, labelpad=room, gid="axis-x", loc="left")
    axes.set_ylabel(y, labelpad=room, gid="axis-y", loc="top")


def _size(names: Sequence[str]) -> float:
    """Return the font size in points that fits the rows of a dense matrix."""
    return min(8.0, 0.7 * SIDE / max(len(names), 1))


def _room(rows: Sequence[str], columns: Sequence[str]) -> float:
    """Return about how many points the longest name takes."""
    return 0.62 * _size(rows) * max((len(_short(name)) for name in (*rows, *columns)), default=0)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 22 else f"{name[:20]}…"
