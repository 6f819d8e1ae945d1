"""Small pieces of HTML: everything that comes from a run is escaped here."""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from geodl.report.figures import Plot
from geodl.report.results import Estimate
from geodl.report.tables import Cell, Table, text

__all__ = ["definitions", "escape", "figure", "grid", "note", "section", "table", "tabs"]


def section(anchor: str, title: str, *parts: str) -> str:
    """Give a part of the page; nothing where all its parts are empty."""
    body = "".join(parts)
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def note(words: str) -> str:
    """Give a paragraph of small print."""
    return f'<p class="note">{escape(words)}</p>' if words else ""


def table(content: Table, *, best: Mapping[str, bool] | None = None, alike: Sequence[Hashable] = ()) -> str:
    """Give a table without its empty columns.

    best:  of the numbers under these headings the best mean is bold: the greatest where True, the least where False.
    alike: of each row, what it must share with others to be compared; None: it is compared with none.
    """
    filled = [i for i in range(len(content.header)) if any(cell is not None for cell in content.column(i))]
    content = content.keeping(filled)
    numeric = content.numeric
    best = best or {}
    marked = {i: _best(content.column(i), best[name], alike) for i, name in enumerate(content.header) if name in best}
    head = "".join(
        f'<th{_right(n)} scope="col">{escape(name)}</th>' for name, n in zip(content.header, numeric, strict=True)
    )
    lines = []
    for number, row in enumerate(content.rows):
        cells = []
        for i, cell in enumerate(row):
            shown = escape(text(cell))
            cells.append(f"<td{_right(numeric[i])}>{f'<b>{shown}</b>' if number in marked.get(i, ()) else shown}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll">{body}</div>{"".join(note(words) for words in content.notes)}'


def _right(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _best(cells: Sequence[Cell], greatest: bool, alike: Sequence[Hashable]) -> set[int]:
    """Find the best of each group of rows, all of them where several are shown alike; one row alone is not the best."""
    found: set[int] = set()
    for group in set(alike) - {None}:
        known = {
            i: round(cell.mean, 2) for i, cell in enumerate(cells) if isinstance(cell, Estimate) and alike[i] == group
        }
        if len(known) > 1:
            best = (max if greatest else min)(known.values())
            found |= {i for i, value in known.items() if value == best}
    return found


def figure(plot: Plot, prefix: str, title: str, caption: str = "", *, zoom: int = 0) -> str:
    """Give a figure with its tips; ``zoom`` is the width in pixels to which a button enlarges it."""
    svg = plot.inline(prefix).replace("<svg", f'<svg role="img" aria-label="{escape(plot.alt)}"', 1)
    # A closing tag inside the data would end it.
    tips = json.dumps(plot.tips, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    button = f'<button type="button" data-zoom="{zoom}" aria-pressed="false">enlarge</button>' if zoom else ""
    return (
        f'<figure class="plot" data-prefix="{prefix}"><div class="top"><h3>{escape(title)}</h3>{button}</div>'
        f'<div class="canvas">{svg}</div>{f"<figcaption>{escape(caption)}</figcaption>" if caption else ""}'
        f'<script type="application/json">{tips}</script></figure>'
    )


def grid(parts: Sequence[str]) -> str:
    """Give figures side by side where there is room."""
    return f'<div class="grid">{"".join(parts)}</div>' if parts else ""


def tabs(name: str, panels: Mapping[str, str]) -> str:
    """Give panels of which one is shown, chosen by radio buttons that need no script."""
    if len(panels) < 2:
        return "".join(panels.values())
    chosen = iter([" checked"])
    inputs = [f'<input type="radio" name="{name}" id="{name}-{i}"{next(chosen, "")}>' for i in range(len(panels))]
    labels = [f'<label for="{name}-{i}">{escape(title)}</label>' for i, title in enumerate(panels)]
    buttons = "".join(x + y for x, y in zip(inputs, labels, strict=True))
    return f'<div class="tabs" role="group">{buttons}{"".join(f"<article>{body}</article>" for body in panels.values())}</div>'


def definitions(values: Iterable[tuple[str, Any, bool]]) -> str:
    """Give names with their values; the third of each says whether it is to be seen at once."""
    lines = [
        f"<div><dt>{escape(name)}</dt><dd>{f'<b>{escape(_plain(value))}</b>' if strong else escape(_plain(value))}</dd></div>"
        for name, value, strong in values
    ]
    return f"<dl>{''.join(lines)}</dl>"


def _plain(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
