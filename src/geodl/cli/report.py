"""``geodl report``: the HTML page, figures and tables of runs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from geodl.cli.display import say
from geodl.cli.runs import without_files
from geodl.files import make_directory, writing
from geodl.report import page
from geodl.report.plots import write_figures
from geodl.report.results import read_settings
from geodl.report.tables import write_tables
from geodl.store import has_record, list_runs
from geodl.text import count


def report(
    runs: Annotated[list[Path], Parameter(negative=())],
    /,
    *,
    out: Path | None = None,
    figures: Path | None = None,
    tables: Path | None = None,
    with_images: Annotated[bool | None, Parameter(negative="--without-images")] = None,
) -> None:
    """Write one HTML page about one or several runs.

    Parameters
    ----------
    runs
        Directories of runs, a directory that holds runs, or a model.
    out
        The page; unset: report.html in the run's directory, or here for several runs.
    figures
        Also write every figure as SVG and PDF into this directory.
    tables
        Also write the tables as Markdown, CSV and LaTeX into this directory.
    with_images
        Show pictures even if they may be private (exemplars; of a model, those that it took for another class), or show none;
        unset: only those of public datasets.
    """
    runs = [run for given in without_files(runs) for run in _runs_of(given)]
    settings = read_settings(runs)
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    make_directory(target.parent)
    say(f"page: {page.write(settings, target, with_images=with_images)}")
    if figures is not None:
        with writing(figures):
            say(f"figures: {count(len(write_figures(settings, figures)), 'file')} in {figures}")
    if tables is not None:
        with writing(tables):
            say(f"tables: {', '.join(str(path) for path in write_tables(settings, tables))}")


def _runs_of(path: Path) -> list[Path]:
    """Return the runs below a directory that is none itself; a path as it is where there are none."""
    if has_record(path):
        return [path]
    below = [run.path for run in list_runs(path)] if path.is_dir() else []
    return below or [path]
