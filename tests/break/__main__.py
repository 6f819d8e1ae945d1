"""``python -m tests.break``: many cases of every family, and a table of the failures."""

import argparse
import sys
import time
from pathlib import Path

from .harness import FAMILIES, LEAST, USED, Count, run, table, watch

ABOUT = """# Reliability

Written by `make break`: hostile cases by family, and how many failed. A failure is a traceback, a hang, a write outside the
directory, or a wrong result presented as right. Every case is made again by its family and number:
`python -m tests.break --family NAME --first NUMBER --cases 1`. The table is only written with at least so many cases of each
family. Processes that the cases started and connections that they opened are counted apart: they are no cases.
"""


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.break", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=LEAST, help="cases of each family; fewer where each is large"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--family", choices=list(FAMILIES), action="append", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--small", action="store_true", help="large cases at the size they have in the fast tests"
    )
    parser.add_argument("--out", type=Path, help="also write the table into this Markdown file")
    arguments = parser.parse_args()
    if arguments.out and (arguments.family or arguments.small or arguments.cases < LEAST):
        parser.error(f"--out needs all families in full, and at least {LEAST} cases of each")
    sys.addaudithook(watch)
    counts, failures = {}, []
    for name in arguments.family or FAMILIES:
        began, before = time.monotonic(), USED.copy()
        cases = FAMILIES[name].cases(arguments.cases)
        numbers = range(arguments.first, arguments.first + cases)
        found = run(name, numbers, full=not arguments.small)
        failures += found
        counts[name] = Count(cases, **{kind: USED[kind] - before[kind] for kind in before})
        print(
            f"{name}: {cases} cases, {len(found)} failures, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for each in found[:10]:
            print(f"  number {each.number}: {each.reason}")
    text = table(counts, failures)
    print(f"\n{text}")
    if arguments.out:
        arguments.out.write_text(f"{ABOUT}\n{text}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
