"""``python -m tests.break``: many cases of every family, and a table of the failures."""

import argparse
import sys
import time
from pathlib import Path

from .harness import FAMILIES, run, table

ABOUT = """# Reliability

Written by `make break`: hostile cases by family, and how many failed. A failure is a traceback, a hang, a write outside the
directory, or a wrong result presented as right. Every case is made again by its family and number:
`python -m tests.break --family NAME --first NUMBER --cases 1`.
"""


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.break", description=__doc__)
    parser.add_argument("--cases", type=int, default=600, help="cases of each family; fewer where each is large")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--family", choices=list(FAMILIES), action="append", help="only this one; may be repeated")
    parser.add_argument("--small", action="store_true", help="large cases at the size they have in the fast tests")
    parser.add_argument("--out", type=Path, help="also write the table into this Markdown file")
    arguments = parser.parse_args()
    counts, failures = {}, []
    for name in arguments.family or FAMILIES:
        began = time.monotonic()
        counts[name] = FAMILIES[name].cases(arguments.cases)
        found = run(name, range(arguments.first, arguments.first + counts[name]), full=not arguments.small)
        failures += found
        print(f"{name}: {counts[name]} cases, {len(found)} failures, {time.monotonic() - began:.0f} s", flush=True)
        for each in found[:10]:
            print(f"  number {each.number}: {each.reason}")
    text = table(counts, failures)
    print(f"\n{text}")
    if arguments.out:
        arguments.out.write_text(f"{ABOUT}\n{text}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
