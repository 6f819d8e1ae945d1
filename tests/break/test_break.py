"""A few cases of every family, and tests of the harness."""

import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest

from geodl.core.errors import StoreError

from .harness import FAMILIES, Count, Failure, Family, attempt, run, table

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="time limits of cases need a timer of Unix"
)
CASES = 18
FEW = 4
"""Of families whose cases are large."""


PROCESSES = ("full disk in a sweep", "killed run in a sweep")
"""Families whose cases start processes that load torch."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in PROCESSES])
def test_family(name):
    assert run(name, range(CASES if FAMILIES[name].most is None else FEW)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_family_with_processes(name):
    assert run(name, range(1), seconds=600) == []


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
    counts = {"server": Count(20, sockets=30), "weights": Count(600, processes=2)}
    text = table(counts, [Failure("weights", 3, "why")])
    rows = [line.replace("|", " ").split() for line in text.splitlines()]
    assert rows[0] == "family at least cases processes sockets failures".split()
    assert rows[2:] == [
        ["server", "20", "20", "0", "30", "0"],
        ["weights", "500", "600", "2", "0", "1"],
        ["all", "520", "620", "2", "30", "1"],
    ]


def test_processes_and_sockets_are_counted_apart():
    command = [sys.executable, "-m", "tests.break", "--family", "server", "--small", "--cases", "1"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *_, processes, sockets, failures = out.splitlines()[-1].replace("|", " ").split()
    assert (processes, failures) == ("0", "0")
    assert int(sockets) > 40  # those of the case, and its owner's


@pytest.mark.parametrize("words", [["--cases", "499"], ["--family", "links"], ["--small"]])
def test_a_table_needs_the_least_of_every_family(monkeypatch, capsys, tmp_path, words):
    monkeypatch.setattr("sys.argv", ["break", "--out", str(tmp_path / "table.md"), *words])
    with pytest.raises(SystemExit):
        import_module("tests.break.__main__").main()
    assert "at least 500 cases of each" in capsys.readouterr().err
    assert not (tmp_path / "table.md").exists()


def test_an_interrupted_run_resumes(monkeypatch, tmp_path):
    # another module than the harness imported above
    command = import_module("tests.break.__main__")
    ran = []
    for name in ("first", "second"):
        case = Family(lambda draw, folder, name=name: ran.append(name))
        monkeypatch.setitem(command.FAMILIES, name, case)
    words = ["--cases", "2", "--resume", str(tmp_path / "done.json"), "--family", "first"]
    for more in ([], ["--family", "second"], ["--family", "second", "--first", "5"]):
        monkeypatch.setattr("sys.argv", ["break", *words, *more])
        assert command.main() == 0
    assert ran == ["first"] * 2 + ["second"] * 2 + ["first"] * 2 + ["second"] * 2
