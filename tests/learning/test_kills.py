"""Killed with SIGKILL at random instants, the same command continues and ends with the same bytes."""

import random
import subprocess
import time
from pathlib import Path

import pytest
from tests.helpers.command import started
from tests.helpers.runs import result_files

OPTIONS = (
    "--preset digits --network convnet --base 6 --phases 2 --base-epochs 2 --epochs 1 --checkpoint-steps 2 "
    "--no-cache --quiet --out run"
)
METHODS = {
    "lucir": ["--method", "lucir", "--distill", "geodesic"],
    "bic": ["--method", "bic", "--correction-epochs", "20"],
    "adamw": ["--optimizer", "adamw", "--lr", "0.001"],
    "mnemonics": ["--method", "mnemonics", "--outer-steps", "6"],
    "icarl": ["--method", "icarl"],
    "lwf": ["--method", "lwf"],
    "joint": ["--method", "joint"],
    "analytic": ["--method", "analytic"],
}


def run_with_kills(directory: Path, options: list[str], kills: int, seed: int) -> None:
    """Start the run, kill it at a random instant of its work, start it again; the last time it may finish."""
    directory.mkdir()
    draw = random.Random(seed)
    assert start(directory, options).wait() == 0
    reference, stride = result_files(directory / "run"), max(events(directory) // (2 * kills), 1)
    (directory / "run").rename(directory / "whole")
    met = 0
    for _ in range(kills):
        # By what it has done, not by the clock: imports take longer than a run as small as this one, and machines differ.
        target = events(directory) + draw.randint(1, stride)
        process = start(directory, options)
        while process.poll() is None and events(directory) < target:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.wait()
        met += len(result_files(directory / "run")) < len(reference)
    assert met > kills / 2  # the others, if any, came after the end
    assert start(directory, options).wait() == 0
    assert result_files(directory / "run") == reference


def events(directory: Path) -> int:
    """Count what a run has noted down so far."""
    path = directory / "run" / "events.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def start(directory: Path, options: list[str]) -> subprocess.Popen[str]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": None}
    return started("run", *OPTIONS.split(), *options, cwd=directory, **quiet)


def test_three_kills(tmp_path):
    run_with_kills(tmp_path / "d", METHODS["bic"], kills=3, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_many_kills(tmp_path, method):
    run_with_kills(tmp_path / "d", METHODS[method], kills=25, seed=11)
