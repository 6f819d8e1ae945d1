"""Families of cases, each run under a time limit and judged; and the table of what happened."""

import logging
import random
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from geodl.core.errors import GeodlError

Case = Callable[..., None]
MEMORY = Path("/dev/shm")
"""A file system in memory, if there is one, so that thousands of cases need not wait for the disk."""
SECONDS = 60.0
"""A case that computes longer, or waits ten times as long, counts as a hang; the slowest takes a second."""
LARGE_SECONDS = 1200.0
"""The same for a case at its full size."""
LEAST = 500
"""Cases of each family that a table needs."""


@dataclass(frozen=True)
class Family:
    """A function that makes a case; for large cases their number, `most`, and their `full` sizes."""

    case: Case
    most: int | None = None
    full: Mapping[str, int] = field(default_factory=dict)

    def cases(self, wanted: int) -> int:
        """Return the number of cases to run if `wanted` are asked of each family."""
        return wanted if self.most is None else min(wanted, self.most)

    @property
    def least(self) -> int:
        """The number of cases that a table needs: all cases of a large family."""
        return self.cases(LEAST)


FAMILIES: dict[str, Family] = {}
EVENTS = {
    "os.fork": "processes",
    "os.posix_spawn": "processes",
    "subprocess.Popen": "processes",
    "socket.connect": "sockets",
}
"""The events of Python's audit that are counted."""
USED = Counter(dict.fromkeys(EVENTS.values(), 0))
"""The processes that were started and the connections that were opened so far, once `watch` is an audit hook."""


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Count an event of Python's audit."""
    if event in EVENTS:
        USED[EVENTS[event]] += 1


def family(name: str, most: int | None = None, **full: int) -> Callable[[Case], Case]:
    """Register a family: a function that makes one case of (randomness, empty folder, sizes), and raises where it fails."""

    def register(case: Case) -> Case:
        FAMILIES[name] = Family(case, most, full)
        return case

    return register


@dataclass(frozen=True)
class Refused:
    """A proper refusal: an error of the package, in one line."""

    message: str


@dataclass(frozen=True)
class Count:
    """The number of cases of a family that were run, and the processes and sockets that they used."""

    cases: int
    processes: int = 0
    sockets: int = 0


@dataclass(frozen=True)
class Failure:
    """A case that failed; family and number reproduce it."""

    family: str
    number: int
    reason: str


class Hang(BaseException):
    """Not an Exception, so that no handler catches it."""


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its refusal; any other error is a failure, and so is a message of several lines."""
    try:
        return call()
    except GeodlError as error:
        assert str(error).isprintable(), f"not one clean line: {str(error)!r}"
        assert str(error), "an error without words"
        return Refused(str(error))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` in a block that computes longer, or takes ten times as long, as other programs may use the processor."""
    with (
        _timed(signal.ITIMER_PROF, signal.SIGPROF, seconds, "of processor time"),
        _timed(signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds, "of waiting"),
    ):
        yield


@contextmanager
def _timed(timer: int, number: int, seconds: float, kind: str) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no end after {seconds:g} seconds {kind}")

    handler = signal.signal(number, ring)
    left, _ = signal.setitimer(timer, seconds)  # pytest's own time limit uses the same timer
    try:
        yield
    finally:
        signal.setitimer(timer, left)
        signal.signal(number, handler)


def run(
    name: str, numbers: Iterable[int], seconds: float | None = None, *, full: bool = False
) -> list[Failure]:
    """Run the cases of a family with these numbers, `full`: at their full size; return those that failed."""
    failures = []
    family = FAMILIES[name]
    sizes = family.full if full else {}
    seconds = seconds or (LARGE_SECONDS if sizes else SECONDS)
    logging.getLogger("geodl").setLevel(logging.ERROR)
    with mock.patch("os.fsync"):
        for number in numbers:
            folder = Path(
                tempfile.mkdtemp(prefix="geodl-break-", dir=MEMORY if MEMORY.is_dir() else None)
            )
            try:
                with limited(seconds):
                    family.case(random.Random(f"{name} {number}"), folder, **sizes)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                words = " ".join(f"{type(error).__name__}: {error}".split())
                failures.append(
                    Failure(
                        name, number, f"{words[:300]} ({Path(where.filename).name}:{where.lineno})"
                    )
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    logging.getLogger("geodl").setLevel(logging.NOTSET)
    return failures


def table(counts: dict[str, Count], failures: list[Failure]) -> str:
    """Return the table of families in Markdown: least and run cases, processes, sockets, failures."""
    rows = []
    for name, count in counts.items():
        wrong = sum(each.family == name for each in failures)
        used = (count.processes, count.sockets)
        rows.append((FAMILIES[name].least, count.cases, *used, wrong))
    totals = tuple(sum(column) for column in zip(*rows, strict=True))
    heads = ("at least", "cases", "processes", "sockets", "failures")
    width = max(len(name) for name in ["family", *counts])
    lines = [f"| {'family':{width}} | {' | '.join(f'{head:>9}' for head in heads)} |"]
    lines.append(f"|{'-' * (width + 2)}|{'----------:|' * len(heads)}")
    for name, row in zip([*counts, "all"], [*rows, totals], strict=True):
        lines.append(f"| {name:{width}} | {' | '.join(f'{value:9d}' for value in row)} |")
    return "\n".join(lines)
