"""The cost of a phase of closed-form learning without the network's pass over its images: time, memory, file size.

Run with `python -m benchmarks.analytic [--threads 1] [--turns 3]`: features of a ResNet-32 at three stages (448 numbers) expanded
to M = 4096. Goals: 5000 images of 10 new classes take at most 10 s on two cores; the time to add images is proportional to
their number and independent of the number of classes seen; the file is smaller than 45 MB.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from geodl.closed_form.expansion import Expansion, Standardization, share_out
from geodl.closed_form.primal import Statistics

WIDTHS = {"stage1": 64, "stage2": 128, "stage3": 256}
BATCH = 500
NEW = 10
SHAPES = (2500, 60), (5000, 60), (10_000, 60), (5000, 10), (5000, 100), (5000, 1000)
"""Images of the phase, and classes seen after it."""


def features(images):
    """Return features like those of a ResNet: nonnegative and sparse."""
    generator = torch.Generator().manual_seed(images)
    return {
        name: torch.randn(images, width, generator=generator).relu()
        for name, width in WIDTHS.items()
    }


def phase(earlier, expansion, standardization, z, labels, classes):
    """Learn a phase; return the seconds of adding its images, rounding the statistics, and fitting the head."""
    times = [time.perf_counter()]
    for start in range(0, len(labels), BATCH):
        part = {name: block[start : start + BATCH] for name, block in z.items()}
        earlier.add(expansion(standardization(part)), labels[start : start + BATCH], classes)
    times.append(time.perf_counter())
    rounded = earlier.rounded()
    times.append(time.perf_counter())
    rounded.solve(0.01)
    times.append(time.perf_counter())
    return [later - earlier for earlier, later in pairwise(times)]


def peak_memory():
    """Return the peak memory of this process in MB; nan if the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next(
        (int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")), float("nan")
    )


def main():
    """Print a line for each size of a phase, then memory and file size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--width", type=int, default=4096, help="M, the number of expanded features"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    before = peak_memory()
    print(f"M = {options.width}, {options.threads} threads, median of {options.turns} turns")
    times = {shape: [] for shape in SHAPES}
    for _ in range(options.turns):  # in turns, so that load affects all shapes equally
        for images, seen in SHAPES:
            z, labels = features(images), torch.arange(images) % NEW + seen - NEW
            standardization, expansion = (
                Standardization.of(z),
                Expansion(share_out(options.width, WIDTHS), seed=1),
            )
            expansion({name: block[:1] for name, block in z.items()})  # draws the weights
            earlier = Statistics.empty(options.width, seen - NEW)
            times[images, seen].append(phase(earlier, expansion, standardization, z, labels, seen))
    for (images, seen), turns in times.items():
        add, rounding, fit = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"{images} images, {seen} classes seen: add {add:.2f} s, round {rounding:.2f} s, fit {fit:.2f} s; "
            f"in all {add + rounding + fit:.2f} s"
        )
    print(f"memory: at most {peak_memory() - before:.0f} MB above the {before:.0f} MB at the start")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics.safetensors"
        save_file(Statistics.empty(options.width, 100).to_tensors(), path)
        print(f"file of the statistics of 100 classes: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
