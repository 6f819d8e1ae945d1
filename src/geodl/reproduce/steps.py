"""Time and memory of single training steps with each distillation: for the paper's time-memory numbers and for estimates.

Whatever is compared takes turns in an order that changes, and ratios are taken within a turn, so that a busy machine slows
all alike. Peak memory is measured in a process for each distillation.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from geodl.config import Layer
from geodl.devices import device_kind
from geodl.errors import TrainingError
from geodl.losses import DISTILLATIONS
from geodl.methods import configure
from geodl.nets import Output, build_network, frozen_copy

LOSSES = ("none", "lwf", "cosine", "geodesic")
"""The distillations that the paper compares."""
PEAK_STEPS = 4
"""Steps after which memory no longer grows: the momenta are there after the first."""


@dataclass(frozen=True)
class Shape:
    """What a step works on: the network, images of size x size in batches, old and new classes; in 32 or bf16."""

    network: str
    size: int
    batch: int = 128
    old: int = 50
    new: int = 10
    precision: str = "32"


CIFAR = Shape("resnet32", 32)
IMAGENET = Shape("resnet18", 224)


def device() -> torch.device:
    """Return the device that a run would choose."""
    return torch.device(device_kind("auto"))


class Step:
    """A training step of an incremental phase with one distillation, on random images."""

    def __init__(self, distill: str, shape: Shape = CIFAR) -> None:
        self.distill, self.shape, self.device = distill, shape, device()
        base = build_network(shape.network, shape.old, head="cosine", seed=0)
        self.teacher = frozen_copy(base).to(self.device) if distill != "none" else None
        self.student = build_network(shape.network, shape.old + shape.new, head="cosine", seed=0)
        self.student.to(self.device).train()
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)
        self.loss = None
        if distill != "none":
            self.loss = DISTILLATIONS[distill].build(configure([Layer("step", {"distill": distill})]).config)
        rng = torch.Generator().manual_seed(1)
        images = torch.randn(shape.batch, 3, shape.size, shape.size, generator=rng)
        self.images = images.to(self.device, memory_format=torch.channels_last)
        self.labels = torch.randint(0, shape.old + shape.new, (shape.batch,), generator=rng).to(self.device)

    def __call__(self) -> None:
        """Take one step and wait until it is done."""
        with self._autocast():
            old = None if self.teacher is None else self.teacher(self.images)
            new = self.student(self.images)
            loss = F.cross_entropy(new.logits, self.labels)
            if old is not None:
                loss = loss + self.distillation(new, old)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        _wait(self.device)

    def distillation(self, new: Output, old: Output) -> Tensor:
        """Return the distillation loss of the student's and the teacher's output."""
        assert self.loss is not None
        value: Tensor = self.loss(*(self.loss.compared(output, self.shape.old) for output in (new, old)))
        return value

    def evaluate(self) -> None:
        """Run the network over the images without learning, as an evaluation does."""
        with torch.inference_mode(), self._autocast():
            self.student.eval()(self.images)
            self.student.train()
        _wait(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.shape.precision == "bf16")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------- time


def take_turns(
    actions: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time each action once a turn, in an order that rotates; one turn is thrown away to warm up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            actions[name]()
            if turn:
                times[name].append(clock() - start)
    return times


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios with its 95 % interval, which assumes nothing about their distribution."""

    median: float
    low: float
    high: float
    pairs: int


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Summarize the ratios of times, or of peaks, that were measured in the same turn."""
    ratios = sorted(one / other for one, other in zip(numerator, denominator, strict=True))
    n = len(ratios)
    reach = 0.98 * n**0.5  # 1.96 standard deviations of a binomial(n, 1/2)
    low, high = max(int(n / 2 - reach) - 1, 0), min(int(n / 2 + reach) + 1, n - 1)
    return Ratio(statistics.median(ratios), ratios[low], ratios[high], n)


def time_steps(shape: Shape, turns: int) -> dict[str, list[float]]:
    """Return the seconds of single steps with each distillation, in turns."""
    return take_turns({name: Step(name, shape) for name in LOSSES}, turns)


# -------------------------------------------------------------------------------------------------------- memory


STATUS = Path("/proc/self/status")


def _memory(field: str) -> int:
    """Return the bytes of this process that are in memory: now (VmRSS), or at most so far (VmHWM); Linux.

    Not getrusage's ru_maxrss: a process begins with that of the one that started it.
    """
    words = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")).split()
    return int(words[1]) * 1024


def peak_here(distill: str, shape: Shape) -> int:
    """Return the bytes that some steps need at most above what was there before the first; for a fresh process."""
    step = Step(distill, shape)
    cuda = step.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else _memory("VmRSS")
    for _ in range(PEAK_STEPS):
        step()
    return (torch.cuda.max_memory_allocated() if cuda else _memory("VmHWM")) - before


def peak(distill: str, shape: Shape) -> float:
    """Return the peak of a process of its own, in bytes; nan where the system does not tell (a CPU without Linux's /proc)."""
    if not torch.cuda.is_available() and not STATUS.exists():
        return math.nan
    task = json.dumps({"distill": distill, "threads": torch.get_num_threads(), "shape": asdict(shape)})
    command = [sys.executable, "-m", "geodl.reproduce.steps", task]
    # Each large block mapped on its own: else the C library keeps what was freed, as luck has it, and peaks differ by 20 %.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise TrainingError(f"the memory of a step with {distill} could not be measured: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    print(json.dumps(peak_here(given["distill"], Shape(**given["shape"]))))
