"""``python -m tests.break``: many cases of every family, and a table of the failures."""

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .harness import FAMILIES, LEAST, USED, Count, Failure, run, table, watch

ROOT = Path(__file__).parents[2]
ABOUT = """# Reliability

Written by `make break`: hostile cases by family, and how many failed. A failure is a traceback, a hang, a write outside the
directory, or a wrong result presented as right. A case is repeated by its family and number:
`python -m tests.break --family NAME --first NUMBER --cases 1`. The table is written only with at least so many cases of each
family. Processes that the cases started and connections that they opened are counted separately: they are no cases.
"""


class Done:
    """The families that are done, kept in a file, so that an interrupted run resumes. Other code or sizes start over."""

    def __init__(self, file: Path | None, arguments: argparse.Namespace) -> None:
        self.file, digest = file, hashlib.sha256()
        for path in sorted([*ROOT.glob("src/geodl/**/*.py"), *ROOT.glob("tests/**/*.py")]):
            digest.update(path.read_bytes())
        sizes = [arguments.cases, arguments.first, arguments.small]
        self.record: dict[str, Any] = {"code": digest.hexdigest(), "sizes": sizes, "families": {}}
        if file is not None and file.exists():
            earlier = json.loads(file.read_text())
            if all(earlier[key] == self.record[key] for key in ("code", "sizes")):
                self.record = earlier

    def get(self, name: str) -> tuple[Count, list[Failure]] | None:
        """Return the result of a family that is done."""
        found = self.record["families"].get(name)
        if found is None:
            return None
        return Count(**found["count"]), [Failure(**each) for each in found["failures"]]

    def put(self, name: str, count: Count, failures: list[Failure]) -> None:
        """Store the result of a family."""
        entry = {"count": asdict(count), "failures": [asdict(each) for each in failures]}
        self.record["families"][name] = entry
        if self.file is not None:
            self.file.write_text(json.dumps(self.record))


def main() -> int:
    """Run the families named on the command line."""
    arguments = _arguments()
    sys.addaudithook(watch)
    done = Done(arguments.resume, arguments)
    counts, failures = {}, []
    for name in arguments.family or FAMILIES:
        if done.get(name) is None:
            _run(name, arguments, done)
        counts[name], found = done.get(name) or (Count(0), [])
        failures += found
    text = table(counts, failures)
    print(f"\n{text}")
    if arguments.out:
        arguments.out.write_text(f"{ABOUT}\n{text}\n")
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
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
    parser.add_argument(
        "--resume", type=Path, help="a file that keeps the families that are done, to resume from"
    )
    parser.add_argument("--out", type=Path, help="also write the table into this Markdown file")
    arguments = parser.parse_args()
    if arguments.out and (arguments.family or arguments.small or arguments.cases < LEAST):
        parser.error(f"--out needs all families in full, and at least {LEAST} cases of each")
    return arguments


def _run(name: str, arguments: argparse.Namespace, done: Done) -> None:
    """Run a family and store its result."""
    began, before = time.monotonic(), USED.copy()
    cases = FAMILIES[name].cases(arguments.cases)
    numbers = range(arguments.first, arguments.first + cases)
    found = run(name, numbers, full=not arguments.small)
    done.put(name, Count(cases, **{kind: USED[kind] - before[kind] for kind in before}), found)
    seconds = time.monotonic() - began
    print(f"{name}: {cases} cases, {len(found)} failures, {seconds:.0f} s", flush=True)
    for each in found[:10]:
        print(f"  number {each.number}: {each.reason}")


if __name__ == "__main__":
    sys.exit(main())
