"""``geodl report``: the HTML page, figures and tables of runs, or the page of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from geodl.app import page as owner
from geodl.bench.report import page
from geodl.bench.report.plots import write_figures
from geodl.bench.report.results import Setting, read_settings
from geodl.bench.report.tables import write_tables
from geodl.bench.runs import list_runs
from geodl.cli.display import echo
from geodl.core.files import atomic_write, make_directory, writing
from geodl.core.text import count
from geodl.store import exists


def report(
    runs: list[Path],
    /,
    *,
    out: Path | None = None,
    figures: Path | None = None,
    tables: Path | None = None,
    with_images: Annotated[bool | None, Parameter(negative="--without-images")] = None,
) -> None:
    """Write one HTML page about one or several runs, or about a model.

    Args:
        runs: Directories of runs, a directory that holds runs, or a model.
        out: The page; unset: report.html in the run's directory, or in the current one for several runs.
        figures: Also write every figure as SVG and PDF into this directory.
        tables: Also write the tables as Markdown, CSV and LaTeX into this directory.
        with_images: Show pictures even if they may be private (exemplars; of a model, wrongly classified ones), or show no
            pictures and, of a model, no names of images; unset: show only pictures of public datasets.
    """
    # Files among `runs/*`, such as report.html, are skipped, unless there is nothing else.
    given = [path for path in runs if not path.is_file()] or runs
    paths = [run for path in given for run in _runs_of(path)]
    settings = read_settings(paths)
    target = out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    make_directory(target.parent)
    atomic_write(target, render(settings, with_images).encode())
    echo(f"page: {target}")
    if figures is not None:
        with writing(figures):
            echo(f"figures: {count(len(write_figures(settings, figures)), 'file')} in {figures}")
    if tables is not None:
        with writing(tables):
            echo(f"tables: {', '.join(map(str, write_tables(settings, tables)))}")


def render(settings: Sequence[Setting], with_images: bool | None = None) -> str:
    """Return the page; for a single model its owner's page, with the researcher's part folded below."""
    first = settings[0].first
    if len(settings) > 1 or not first.is_model:
        return page.render(settings, with_images=with_images)
    below = page.research(settings, with_images=with_images)
    return owner.render(first.path, with_images=with_images, research=below)


def _runs_of(path: Path) -> list[Path]:
    """Return the runs below a directory that is not a run itself, or else the path."""
    if exists(path) or not path.is_dir():
        return [path]
    return [run.path for run in list_runs(path)] or [path]
