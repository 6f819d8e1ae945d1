"""Families of cases, each run under a time limit and judged; and the table of what happened."""

import logging
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from geodl.errors import GeodlError

Case = Callable[..., None]
MEMORY = Path("/dev/shm")
"""A file system in the memory, where there is one: thousands of cases need not wait for the disk."""
SECONDS = 20.0
"""A case that takes longer hangs: the slowest takes a second."""
LARGE_SECONDS = 3600.0
"""The same for a case at its full size."""


@dataclass(frozen=True)
class Family:
    """How a case is made; of a large one there are `most` cases, whose sizes are small unless `full` ones are asked for."""

    case: Case
    most: int | None = None
    full: Mapping[str, int] = field(default_factory=dict)

    def cases(self, wanted: int) -> int:
        """Return how many cases are run where so many are wanted of each family."""
        return wanted if self.most is None else min(wanted, self.most)


FAMILIES: dict[str, Family] = {}


def family(name: str, most: int | None = None, **full: int) -> Callable[[Case], Case]:
    """Register a family: a function that makes one case of (randomness, empty folder, sizes), and raises where it fails."""

    def register(case: Case) -> Case:
        FAMILIES[name] = Family(case, most, full)
        return case

    return register


@dataclass(frozen=True)
class Refused:
    """What was refused as it should be: by an error of the package, in one line."""

    message: str


@dataclass(frozen=True)
class Failure:
    """A case that failed, which the same family and number make again."""

    family: str
    number: int
    reason: str


class Hang(BaseException):
    """Not an Exception, so that nobody catches it."""


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or how it was refused; any other error is a failure, and so are several lines."""
    try:
        return call()
    except GeodlError as error:
        assert str(error).isprintable(), f"not one clean line: {str(error)!r}"
        assert str(error), "an error without words"
        return Refused(str(error))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` in a block that takes longer."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no end after {seconds:g} seconds")

    handler = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # pytest's own time limit uses the same timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def run(name: str, numbers: Iterable[int], seconds: float | None = None, *, full: bool = False) -> list[Failure]:
    """Run the cases of a family with these numbers, `full`: at their full size; return those that failed."""
    failures = []
    family = FAMILIES[name]
    sizes = family.full if full else {}
    seconds = seconds or (LARGE_SECONDS if sizes else SECONDS)
    logging.getLogger("geodl").setLevel(logging.ERROR)
    with mock.patch("os.fsync"):
        for number in numbers:
            folder = Path(tempfile.mkdtemp(prefix="geodl-break-", dir=MEMORY if MEMORY.is_dir() else None))
            try:
                with limited(seconds):
                    family.case(random.Random(f"{name} {number}"), folder, **sizes)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                words = " ".join(f"{type(error).__name__}: {error}".split())
                failures.append(Failure(name, number, f"{words[:300]} ({Path(where.filename).name}:{where.lineno})"))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    logging.getLogger("geodl").setLevel(logging.NOTSET)
    return failures


def table(counts: dict[str, int], failures: list[Failure]) -> str:
    """Return the table family x cases x failures in Markdown."""
    rows = [(name, count, sum(each.family == name for each in failures)) for name, count in counts.items()]
    rows.append(("all", sum(counts.values()), len(failures)))
    width = max(len(name) for name in ["family", *counts])
    lines = [f"| {'family':{width}} | {'cases':>7} | failures |", f"|{'-' * (width + 2)}|--------:|---------:|"]
    return "\n".join([*lines, *(f"| {name:{width}} | {count:7d} | {wrong:8d} |" for name, count, wrong in rows)])
