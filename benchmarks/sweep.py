"""The speedup of a sweep over the same runs one after the other, each with one thread.

Run with `python -m benchmarks.sweep [--runs 8] [--epochs 70] [--jobs 2]`: on two idle cores, eight runs of half a minute or more.
Goal: at least 1.7 times as fast. Both sides start the same processes and load torch; no base phase is shared.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from geodl.store import Directory

SHORTEST = 30
"""Minimum seconds of a run; in shorter ones loading torch dominates."""


def options(epochs):
    """Return the options of the runs: small images, long phases."""
    words = f"--preset digits --base-epochs {epochs} --epochs {epochs} --method lucir --distill geodesic"
    return words.split()


def results(run):
    """Return the checksums of a run's files that must not depend on how it was executed."""
    store = Directory(run)
    phases = [dict(store.phase(t).files) for t in range(store.completed())]
    return [{**files, "extra.json": None} for files in phases]


def timed(command, folder):
    """Run a geodl command in a folder; return its seconds."""
    started = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GEODL_CACHE": str(folder / "cache")}
    program = [sys.executable, "-m", "geodl", *command]
    subprocess.run(program, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main():
    """Print the seconds of both, and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=70)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    seeds = range(1, given.runs + 1)
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "one", Path(folder) / "other"
        one.mkdir()
        other.mkdir()
        single = [
            timed(["run", *options(given.epochs), "--seed", str(seed), "--quiet"], one)
            for seed in seeds
        ]
        grid = f"seed={','.join(map(str, seeds))}"
        together = timed(
            ["sweep", *options(given.epochs), "--grid", grid, "--jobs", str(given.jobs)], other
        )
        same = all(
            results(run) == results(other / run.relative_to(one)) for run in one.glob("runs/*")
        )
    print(f"cores: {len(os.sched_getaffinity(0))}, load when it ended: {os.getloadavg()[0]:.1f}")
    print(
        f"one after the other: {sum(single):.1f} s ({min(single):.1f} to {max(single):.1f} s a run)"
    )
    if min(single) < SHORTEST:
        print(f"too short to judge: a run should take {SHORTEST} s at least; give more --epochs")
    print(
        f"sweep, {given.jobs} at a time: {together:.1f} s; the same bytes: {'yes' if same else 'NO'}"
    )
    print(f"{sum(single) / together:.2f} times as fast")


if __name__ == "__main__":
    main()
