"""Killed with SIGKILL at random instants, the same command continues and ends with the same bytes."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.test_training import contents

COMMAND = [
    *(sys.executable, "-m", "geodl", "run", "--preset", "digits", "--quiet", "--no-cache", "--out", "run"),
    *(
        "--network",
        "convnet",
        "--base-epochs",
        "2",
        "--epochs",
        "1",
        "--base",
        "6",
        "--phases",
        "2",
        "--checkpoint-steps",
        "2",
    ),
]
METHODS = {
    "lucir": ["--method", "lucir", "--distill", "geodesic"],
    "bic": ["--method", "bic", "--correction-epochs", "20"],
    "mnemonics": ["--method", "mnemonics", "--outer-steps", "6"],
}


def run_with_kills(directory: Path, options: list[str], kills: int, seed: int) -> None:
    """Start the run, kill it after a random time, start it again; the last time it may finish."""
    directory.mkdir()
    draw = random.Random(seed)
    began = time.monotonic()
    subprocess.run([*COMMAND, *options], cwd=directory, check=True, capture_output=True, env=environment())
    whole = time.monotonic() - began
    reference = contents(directory / "run")
    (directory / "run").rename(directory / "whole")
    for _ in range(kills):
        process = subprocess.Popen([*COMMAND, *options], cwd=directory, env=environment(), stdout=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(0.3, 1.0) * whole)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    subprocess.run([*COMMAND, *options], cwd=directory, check=True, capture_output=True, env=environment())
    assert contents(directory / "run") == reference


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_three_kills(tmp_path):
    run_with_kills(tmp_path / "d", METHODS["bic"], kills=3, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_many_kills(tmp_path, method):
    run_with_kills(tmp_path / "d", METHODS[method], kills=25, seed=11)
