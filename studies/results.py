"""Store the results of runs as small JSON files, and write the pages of docs/results from them.

python -m studies.results add runs/* --to results/cifar100-cpu
python -m studies.results write results/cifar100-cpu --out docs/results/cifar100-cpu.md
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from geodl.core.content import interpreting
from geodl.core.errors import GeodlError
from geodl.core.files import atomic_write, make_directory
from studies import records, verdicts


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("add", help="write the result of each complete run into a file")
    one.add_argument("runs", nargs="+", type=Path)
    one.add_argument("--to", type=Path, required=True, help="directory of the result files")
    one.set_defaults(action=lambda given: add(given.runs, given.to))
    other = commands.add_parser("write", help="write the page of a directory of result files")
    other.add_argument("directory", type=Path)
    other.add_argument("--out", type=Path, required=True, help="the page, in Markdown")
    other.add_argument("--preset", help="the preset of the runs; unset: the directory's name")
    other.set_defaults(action=lambda given: write(given.directory, given.out, given.preset))
    given = parser.parse_args(arguments)
    try:
        given.action(given)
    except GeodlError as error:
        sys.exit(f"{error}")


def add(runs: Sequence[Path], to: Path) -> None:
    """Write the record of each run: configuration, seed, commit, machine, results, seconds."""
    directories = [run for run in runs if not run.is_file()] or runs
    for path in records.add(directories, to):
        print(path)


def write(directory: Path, out: Path, preset: str | None = None) -> None:
    """Write the page of a directory of records."""
    found = records.read(directory)
    make_directory(out.parent)
    with interpreting(directory):
        text = verdicts.page(found, preset or directory.resolve().name)
    atomic_write(out, text.encode())
    print(f"{out}: {len(found)} runs")


if __name__ == "__main__":
    main()
