"""Time and memory of one training iteration with each distillation, beside the paper's ratios.

Run with `python -m benchmarks.time_memory [--turns 30] [--threads 1] [--out DIR] [cifar] [imagenet]`: the networks and images of
CIFAR-100 and of ImageNet. ImageNet's batch of 128 needs about 10 GB and most of a minute per step on a CPU; `--batch` makes it smaller.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.steps import CIFAR, IMAGENET, peak, ratio
from geodl.bench.report.published import numbers
from geodl.bench.report.results import label_of
from geodl.bench.report.tables import Cell, Table
from geodl.learning.timing import LOSSES, Step, take_turns

SHAPES = {"cifar": CIFAR, "imagenet": IMAGENET}


def time_memory(
    times: Mapping[str, Sequence[float]], peaks: Mapping[str, float], about: str
) -> Table:
    """Return a table of measured times and peaks, and of their ratios beside the paper's.

    times: seconds of single steps, in turns; peaks: bytes; both by distillation.
    """
    rows: list[list[Cell]] = []
    for name in LOSSES:
        size = None if math.isnan(peaks[name]) else peaks[name] / 2**20
        by_memory = _against("memory_gb", {loss: [value] for loss, value in peaks.items()}, name)
        row: list[Cell] = [label_of("finetune", name), 1e3 * statistics.median(times[name]), size]
        rows.append([*row, *_against("time_ratio", times, name), *by_memory])
    header = ["loss", "ms an iteration", "peak MB", "GeoDL takes x times as long", "published"]
    header += ["GeoDL takes x times the memory", "published memory ratio"]
    notes = [
        f"{about}. Steps took turns ({len(times['geodesic'])} each); ratios are medians of paired ratios with their 95 % interval.",
        "Memory: the peak of training steps above what was there before the first, each loss in a process of its own. The paper "
        "states the whole process on an NVIDIA GTX Titan X (2.4, 2.1 and 1.7 GB); its ratios are shown.",
    ]
    return Table(header, rows, notes)


def _against(metric: str, measured: Mapping[str, Sequence[float]], other: str) -> list[Cell]:
    """Return GeoDL's ratio to another loss, ours and the paper's."""
    if other == "geodesic":
        return [None, None]
    found = [n for n in numbers() if n.metric == metric]
    if metric == "time_ratio":
        theirs = next((n.value for n in found if n.against == other), None)
    else:
        gb = {n.distill: n.value for n in found}
        theirs = gb["geodesic"] / gb[other] if other in gb else None
    if any(map(math.isnan, measured["geodesic"])):
        return [None, theirs]
    ours = ratio(measured["geodesic"], measured[other])
    if ours.pairs == 1:
        return [ours.median, theirs]
    return [f"{ours.median:.2f} ({ours.low:.2f} to {ours.high:.2f})", theirs]


def main() -> None:
    """Print a table for each shape, and write it on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=[], help="cifar, imagenet (default: both)")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, help="also write Markdown, CSV and LaTeX to it")
    arguments = parser.parse_args()
    if unknown := set(arguments.shapes) - set(SHAPES):
        parser.error(f"unknown shape {', '.join(sorted(unknown))}: choose from {', '.join(SHAPES)}")
    torch.set_num_threads(arguments.threads)
    for name in arguments.shapes or SHAPES:
        shape = replace(SHAPES[name], batch=arguments.batch)
        times = take_turns({loss: Step(loss, shape) for loss in LOSSES}, arguments.turns)
        peaks = {loss: peak(loss, shape) for loss in LOSSES}
        about = f"{shape.network}, {shape.size} x {shape.size} images, batch {shape.batch}, threads: {arguments.threads}"
        table = time_memory(times, peaks, f"{about}, torch {torch.__version__}")
        print(table.markdown())
        if arguments.out:
            table.write(arguments.out / f"time-memory-{name}", "Time and memory of one iteration")


if __name__ == "__main__":
    main()
