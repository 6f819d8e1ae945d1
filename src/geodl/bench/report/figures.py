"""Figures in one style, safe for color-blind readers: SVG and PDF files for papers, SVG inside the HTML page.

Each figure is drawn once, by matplotlib. In the page its colors become CSS variables, so that it follows light and dark,
its text stays text in the page's font, and ``tips`` name the points under the pointer.
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

# Okabe and Ito's palette without its yellow and black; each has a marker too, for print and for eyes.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
# The colors come round again with another style; dashes are for oracles.
STYLES = ("-", (0, (1, 1.2)), (0, (3, 1.2, 1, 1.2)), (0, (9, 1.5)))
ORACLE = (0, (4, 2))
INK, MUTED, RULE = "#1c2127", "#66707c", "#d8dde3"
HEAT = "#2f7fd0"
CSS = {INK: "--ink", MUTED: "--muted", RULE: "--rule"} | {
    color: f"--series-{number}" for number, color in enumerate(PALETTE)
}
POINTS = 60
"""Lines of more points have no markers."""
SHORT, LONG = 20, 46
"""Letters of the labels that fit two columns of a legend, and of a line of one column."""
SIDE = 446
"""Points that a dense matrix is wide and high."""
WRITTEN = 12
"""Heat maps of more columns have no numbers in their cells."""

STYLE = matplotlib.rc_params_from_file(
    Path(__file__).with_suffix(".mplstyle"), use_default_template=False
)


@dataclass(frozen=True)
class Curve:
    """A line over x; ``low`` and ``high`` bound a band around it; an oracle is dashed."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """A drawn figure.

    name: for files and ids; title: its heading in the page; alt: what it shows, in words.
    tips: what to say about the points of a line (by its id), or about a heat map's cells (key ``heat``).
    """

    name: str
    title: str
    alt: str
    figure: Figure
    tips: Mapping[str, Any] = field(default_factory=dict)

    def files(self, directory: Path) -> list[Path]:
        """Write NAME.svg and NAME.pdf for a paper, with letters as shapes or embedded fonts."""
        paths = {directory / f"{self.name}.{kind}": kind for kind in ("svg", "pdf")}
        for path, kind in paths.items():
            atomic_write(path, self._saved(kind, "path"))
        return list(paths)

    def inline(self, prefix: str) -> str:
        """Return the <svg> element for a page; ids get the prefix, so that figures do not meet."""
        root = ElementTree.fromstring(self._saved("svg", "none"))
        for element in list(root.iter()):
            # Namespaces go: a page knows what svg is.
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
        """Draw once: ``savefig`` would draw everything twice."""
        buffer = io.BytesIO()
        with _style(), matplotlib.rc_context({"svg.fonttype": fonttype}):
            if kind == "svg":
                FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]
            else:
                FigureCanvasPdf(self.figure).print_pdf(buffer, metadata={"CreationDate": None})  # type: ignore[no-untyped-call]
        return buffer.getvalue()


def _in_page(key: str, value: str, prefix: str) -> str:
    """Return the value of an attribute with the prefix on ids, and colors as variables of the page."""
    if key == "id":
        return f"{prefix}-{value}"
    if key == "style":
        for color, variable in CSS.items():
            value = value.replace(color, f"var({variable})")
    return (
        f"#{prefix}-{value[1:]}"
        if key == "href" and value[0] == "#"
        else value.replace("url(#", f"url(#{prefix}-")
    )


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A class name in a script that the font lacks: browsers have other fonts, so it is right in the page.
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
    """Draw curves; y is written over the axis; ``marks`` are vertical lines with a word each."""
    curves = [replace(curve, label=printable(curve.label)) for curve in curves]
    labels = [textwrap.fill(curve.label, LONG) for curve in curves]
    columns = 2 if max(map(len, labels), default=0) <= SHORT else 1
    rows = math.ceil(sum(label.count("\n") + 1 for label in labels) / columns)
    with _style():
        # A long legend makes the figure higher, not the axes lower.
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
    """Draw the ticks of x, and vertical lines with a word each."""
    if ticks is not None:
        # Few enough of them that their numbers do not meet, the last always.
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
    """Draw a matrix of percentages: the more, the bluer; nan is left blank.

    ``boundaries`` are drawn between rows and between columns (of a square matrix); ``root`` shows the square root, for small ones.
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
    """Make axes with room for names; laid out by hand: measuring hundreds of names would take seconds."""
    figure = Figure(figsize=(SIDE / 72, SIDE / 72))
    figure.set_layout_engine("none")
    edge = (room + 22) / SIDE
    return figure.add_axes((edge, 0.01, 0.99 - edge, 0.99 - edge))


def _blues(matrix: NDArray[np.float64], root: bool) -> NDArray[np.uint8]:
    """Color a matrix of percentages by opacity alone, so that it is right on white, on black and on paper: (r, c, 4)."""
    share = np.nan_to_num(matrix) / 100
    image = np.empty((*matrix.shape, 4), dtype=np.uint8)
    image[..., :3] = [int(HEAT[i : i + 2], 16) for i in (1, 3, 5)]
    image[..., 3] = np.rint(255 * 0.85 * (np.sqrt(share) if root else share))
    return image


def _names(axes: Axes, rows: Sequence[str], columns: Sequence[str], x: str, y: str) -> None:
    """Write the names of rows and columns as ticks; long ones upright."""
    axes.set_yticks(range(len(rows)), [_short(name) for name in rows])
    upright = max(map(len, columns), default=0) > 4
    axes.set_xticks(
        range(len(columns)), [_short(name) for name in columns], rotation=90 if upright else 0
    )
    axes.set_xlabel(x)
    axes.set_title(y)


def _small_names(axes: Axes, rows: Sequence[str], columns: Sequence[str], x: str, y: str) -> None:
    """Write many names as small as they must be; in the page they are letters, so enlarging shows them."""
    axes.set_xticks([])
    axes.set_yticks([])
    size = _size(rows)
    for i, name in enumerate(rows):
        axes.annotate(_short(name), (0, i), (-2, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", va="center", fontsize=size, color=MUTED, annotation_clip=False)  # fmt: skip
    for i, name in enumerate(columns):
        axes.annotate(_short(name), (i, 1), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="center", va="bottom", fontsize=size, color=MUTED, rotation=90, annotation_clip=False)  # fmt: skip
    # Columns are named on top, where reading begins. The page makes these two smaller where all else is enlarged.
    room = _room(rows, columns) + 4
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(x, labelpad=room, gid="axis-x", loc="left")
    axes.set_ylabel(y, labelpad=room, gid="axis-y", loc="top")


def _size(names: Sequence[str]) -> float:
    """Return the size in points of letters that fit the rows of a dense matrix."""
    return min(8.0, 0.7 * SIDE / max(len(names), 1))


def _room(rows: Sequence[str], columns: Sequence[str]) -> float:
    """Return about how many points the longest of the names takes."""
    return 0.62 * _size(rows) * max((len(_short(name)) for name in (*rows, *columns)), default=0)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 22 else f"{name[:20]}…"
