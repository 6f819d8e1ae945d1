"""One HTML page that is complete in itself: it opens without a network, in light and in dark, on paper and on a phone."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from geodl import __version__
from geodl.files import atomic_write
from geodl.report.details import details
from geodl.report.markup import escape
from geodl.report.results import Setting
from geodl.report.sections import curves, heading, history, published, representation, results

# Besides what is in the page nothing is allowed to load: a slip would be blocked, not fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write(settings: Sequence[Setting], out: Path, *, with_images: bool | None = None) -> Path:
    """Write the page of one or several settings.

    with_images: whether exemplars are shown; None: only those of public datasets, never a person's own.
    """
    atomic_write(out, render(settings, with_images=with_images).encode())
    return out


def render(settings: Sequence[Setting], *, with_images: bool | None = None) -> str:
    """Give the page as text."""
    title, words, tiles = heading(settings)
    body = [history(settings), published(settings), results(settings), curves(settings), representation(settings)]
    body.append(details(settings, with_images))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · geodl</title><style>{_asset('page.css')}</style></head><body>"
        f'<header><p class="brand">geodl report</p><h1>{escape(title)}</h1><p class="lead">{escape(words)}</p>{tiles}</header>'
        f"<main>{''.join(body)}</main><footer>Written by geodl {__version__}.</footer>"
        f'<div id="tip" role="status" hidden></div><script>{_asset("page.js")}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("geodl.report").joinpath(name).read_text(encoding="utf-8")
