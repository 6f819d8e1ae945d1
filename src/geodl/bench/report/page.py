"""A self-contained HTML page about runs: works offline, in light and dark mode, in print and on a phone."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from geodl.bench.report import plots, sections
from geodl.bench.report.details import FEW, details
from geodl.bench.report.results import Setting
from geodl.bench.report.tables import Best, text
from geodl.core.files import atomic_write
from geodl.model.analysis import ANGLES
from geodl.model.page import templates


def write(settings: Sequence[Setting], out: Path) -> Path:
    """Write the page of one or several settings; it shows exemplars of public datasets only."""
    atomic_write(out, render(settings).encode())
    return out


def render(settings: Sequence[Setting], *, with_images: bool | None = None) -> str:
    """Return the page as text.

    with_images: whether to show exemplars; None: those of public datasets only.
    """
    content = _content(settings, with_images)
    page = _templates().get_template("page.html")
    return page.render(heading=sections.heading(settings), **content)


def research(settings: Sequence[Setting], *, with_images: bool | None = None) -> Markup:
    """Return the results without the page around them, for the page of a model."""
    content = _content(settings, with_images)
    return Markup(_templates().get_template("research.html").render(**content))


def _content(settings: Sequence[Setting], with_images: bool | None) -> dict[str, Any]:
    return {
        "angles": ANGLES,
        "few": FEW,
        "settings": settings,
        "published": sections.published(settings),
        "results": sections.results(settings),
        "curves": sections.curves(settings),
        "similarity": [*plots.similarity(settings), *plots.angles(settings)],
        "drift": plots.drift(settings),
        "details": details(settings, with_images),
    }


@cache
def _templates() -> Environment:
    environment = templates("geodl.bench.report")
    environment.filters["text"] = text
    environment.tests["best"] = lambda cell: isinstance(cell, Best)
    return environment
