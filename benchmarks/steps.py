"""Ratios of times measured in turns, and the peak memory of training steps measured in child processes.

Ratios are taken within a turn, so that load on the machine affects both sides equally.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from geodl.learning.timing import Shape, Step

CIFAR = Shape("resnet32", 32)
IMAGENET = Shape("resnet18", 224)
PEAK_STEPS = 4
"""Steps after which memory no longer grows."""
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with a distribution-free 95 % interval."""

    median: float
    low: float
    high: float
    pairs: int


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Summarize the ratios of times or peaks measured in the same turn."""
    ratios = sorted(one / other for one, other in zip(numerator, denominator, strict=True))
    n = len(ratios)
    reach = 0.98 * n**0.5  # 1.96 standard deviations of a binomial(n, 1/2)
    low, high = max(int(n / 2 - reach) - 1, 0), min(int(n / 2 + reach) + 1, n - 1)
    return Ratio(statistics.median(ratios), ratios[low], ratios[high], n)


def _memory(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) memory of this process in bytes; Linux.

    Not getrusage's ru_maxrss, which starts with that of the parent process.
    """
    lines = STATUS.read_text().splitlines()
    words = next(line for line in lines if line.startswith(f"{field}:")).split()
    return int(words[1]) * 1024


def peak_here(distill: str, shape: Shape) -> int:
    """Return the peak memory of some steps in bytes, above the memory before the first; for a fresh process."""
    step = Step(distill, shape)
    cuda = step.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else _memory("VmRSS")
    for _ in range(PEAK_STEPS):
        step()
    return (torch.cuda.max_memory_allocated() if cuda else _memory("VmHWM")) - before


def peak(distill: str, shape: Shape) -> float:
    """Return the peak memory measured in a child process, in bytes; nan if the system does not report it."""
    if not torch.cuda.is_available() and not STATUS.exists():
        return math.nan
    task = {"distill": distill, "threads": torch.get_num_threads(), "shape": asdict(shape)}
    command = [sys.executable, "-m", "benchmarks.steps", json.dumps(task)]
    # Map large blocks separately: otherwise the C library retains freed memory and peaks vary by 20 %.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return float(done.stdout)


if __name__ == "__main__" and len(sys.argv) > 1:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    print(json.dumps(peak_here(given["distill"], Shape(**given["shape"]))))
