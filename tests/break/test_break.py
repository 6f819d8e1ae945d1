"""A few cases of every family; and that the harness notices failures."""

import os
import time

import pytest

from geodl.errors import StoreError

from .harness import FAMILIES, Failure, Family, attempt, run, table

CASES = 18
FEW = 4
"""Of families whose cases are large."""


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    assert run(name, range(CASES if FAMILIES[name].most is None else FEW)) == []


def traceback(draw, folder):
    raise KeyError("x")


def two_lines(draw, folder):
    def fail():
        raise StoreError("one\ntwo")

    attempt(fail)


def pipe(draw, folder):
    os.mkfifo(folder / "pipe")
    (folder / "pipe").read_bytes()


def loop(draw, folder):
    while True:
        pass


@pytest.mark.parametrize("case", [traceback, two_lines, pipe, loop])
def test_failures_are_noticed(monkeypatch, case):
    monkeypatch.setitem(FAMILIES, "planted", Family(case))
    began = time.monotonic()
    (failure,) = run("planted", [7], seconds=0.2)
    assert (failure.family, failure.number) == ("planted", 7)
    assert time.monotonic() - began < 60


def test_the_table_counts():
    text = table({"kills": 20, "flips": 30}, [Failure("flips", 3, "why")])
    assert [line.split("|")[1:4] for line in text.splitlines()[2:]] == [
        [" kills  ", "      20 ", "        0 "],
        [" flips  ", "      30 ", "        1 "],
        [" all    ", "      50 ", "        1 "],
    ]
