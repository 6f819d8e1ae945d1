"""One HTML page that is complete in itself: it opens without a network, in light and in dark, on paper and on a phone.

Python prepares plain data, the templates show it: they escape all that comes from a run, and write characters that would act
instead of being shown as their escapes.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from geodl import __version__
from geodl.analysis import ANGLES
from geodl.files import atomic_write
from geodl.report import plots, sections
from geodl.report.details import FEW, details
from geodl.report.owner import owner
from geodl.report.results import Setting
from geodl.report.tables import Best, text
from geodl.text import count, printable


def write(settings: Sequence[Setting], out: Path, *, with_images: bool | None = None) -> Path:
    """Write the page of one or several settings.

    with_images: whether exemplars are shown; None: only those of public datasets, never a person's own.
    """
    atomic_write(out, render(settings, with_images=with_images).encode())
    return out


def render(settings: Sequence[Setting], *, with_images: bool | None = None) -> str:
    """Return the page as text."""
    script = _templates().get_template("page.js").render()
    first = settings[0].first
    model = len(settings) == 1 and first.is_model
    return _templates().get_template("owner.html" if model else "page.html").render(
        owner=owner(first, with_images) if model else None,
        version=__version__,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        angles=ANGLES,
        few=FEW,
        settings=settings,
        heading=sections.heading(settings),
        published=sections.published(settings),
        results=sections.results(settings),
        curves=sections.curves(settings),
        similarity=[*plots.similarity(settings), *plots.angles(settings)],
        drift=plots.drift(settings),
        details=details(settings, with_images),
    )  # fmt: skip


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("geodl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    found.filters["text"], found.filters["count"] = text, count
    found.tests["best"] = lambda cell: isinstance(cell, Best)
    return found


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
