"""``geodl results``: keep the results of runs as small files, and write a page from them."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from geodl.cli.display import say
from geodl.cli.runs import without_files
from geodl.files import atomic_write, interpreting, make_directory
from geodl.reproduce import records, verdicts
from geodl.text import count


def add(
    runs: Annotated[list[Path], Parameter(help="Directories of complete runs.", negative=())],
    /,
    *,
    to: Annotated[Path, Parameter(help="Directory of the result files.")],
) -> None:
    """Write what each run reached into a small JSON file: configuration, seed, commit, machine, accuracies, seconds."""
    for path in records.add(without_files(runs), to):
        say(f"{path}")


def write(
    directory: Annotated[Path, Parameter(help="Directory of the result files.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="The page, in Markdown.")],
    preset: Annotated[
        str | None,
        Parameter(help="The preset that the runs are of; others are listed apart. Unset: the directory's name."),
    ] = None,
) -> None:
    """Write the page: every row of the paper under every classifier, and whether each comparison of the paper holds."""
    found = records.read(directory)
    make_directory(out.parent)
    with interpreting(directory):
        text = verdicts.page(found, preset or directory.resolve().name)
    atomic_write(out, text.encode())
    say(f"{out}: {count(len(found), 'run')}")
