"""Time and memory of one training iteration with each distillation, for the CIFAR and the ImageNet network.

Run with `python -m benchmarks.time_memory [--turns 30] [--threads 1] [cifar] [imagenet]`; `geodl reproduce time-memory` writes
the same as a table beside the paper's numbers. ImageNet's batch of 128 needs some 10 GB and most of a minute a step on a CPU:
`--batch` makes it smaller.
"""

import argparse
from dataclasses import replace

import torch

from geodl.reproduce import outputs, steps

SHAPES = {"cifar": steps.CIFAR, "imagenet": steps.IMAGENET}


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=[], help="cifar, imagenet (default: both)")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    if unknown := set(arguments.shapes) - set(SHAPES):
        parser.error(f"unknown shape {', '.join(sorted(unknown))}: choose from {', '.join(SHAPES)}")
    torch.set_num_threads(arguments.threads)
    for name in arguments.shapes or SHAPES:
        shape = replace(SHAPES[name], batch=arguments.batch)
        times = steps.time_steps(shape, arguments.turns)
        peaks = {distill: steps.peak(distill, shape) for distill in steps.LOSSES}
        about = (
            f"{shape.network}, {shape.size} x {shape.size} images, batch {shape.batch}, threads: {arguments.threads}"
        )
        print(outputs.time_memory(times, peaks, f"{about}, torch {torch.__version__}").markdown())


if __name__ == "__main__":
    main()
