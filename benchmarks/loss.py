"""What the geodesic loss adds to a training step: whole steps with GeoDL beside the same steps with cosine distillation.

    OMP_NUM_THREADS=1 python -m benchmarks.loss [--turns 200] [--threads 1]

ResNet-32, a batch of 128 in float32, a frozen teacher. The steps take turns and ratios are taken within a turn, so that a busy machine
slows both alike; on a CPU they are of processor time, which does not count the waiting for other programs. Printed are the median
ratio and its 95 % interval from the order statistics.
"""

import argparse
import statistics
import time

import torch

from benchmarks.steps import CIFAR, ratio
from geodl.learning.timing import Step, take_turns


def main() -> None:
    """Time the steps and print their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=200, help="pairs of steps")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    times = take_turns(
        {name: Step(name, CIFAR) for name in ("cosine", "geodesic")}, arguments.turns, clock
    )
    for name, seconds in times.items():
        print(
            f"{name:<10}{statistics.median(seconds) * 1e3:8.1f} ms a step (fastest {min(seconds) * 1e3:.1f})"
        )
    found = ratio(times["geodesic"], times["cosine"])
    print(
        f"geodesic / cosine: {found.median:.4f} (95 % interval {found.low:.4f} to {found.high:.4f}, {found.pairs} pairs)"
    )


if __name__ == "__main__":
    main()
