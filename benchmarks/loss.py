"""The geodesic loss against Algorithm 2 as printed and against cosine and logit distillation: speed and memory.

Run with `python -m benchmarks.loss`. Three parts, each can be left out:
  loss    forward and backward of the losses alone, batch 128, n = 127, d = 256 and 2048
  step    a whole ResNet-32 training step: teacher forward, student forward, loss, backward, optimiser
  memory  the peak of such steps above what was resident before the first, each loss in a process of its own

Whatever is compared takes turns in an order that changes, and ratios are taken within a turn, so that a busy machine slows
all alike: medians of paired ratios, with a 95 % interval from the order statistics (no assumption on their distribution).
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.literal import literal_loss
from geodl.losses import CosineDistillation, GeodesicDistillation, LogitDistillation
from geodl.nets import build_network, frozen_copy

BATCH, DIM, OLD, NEW = 128, 127, 50, 10
Action = Callable[[], object]


def take_turns(actions: dict[str, Action], turns: int) -> dict[str, list[float]]:
    """Time each action once a turn, in an order that rotates; one turn is thrown away to warm up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            actions[name]()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(numerator: list[float], denominator: list[float]) -> tuple[float, float, float]:
    """Return the median of the paired ratios and its 95 % interval."""
    ratios = torch.tensor(numerator, dtype=torch.float64) / torch.tensor(denominator, dtype=torch.float64)
    ratios, n = ratios.sort().values, len(ratios)
    reach = 0.98 * n**0.5  # 1.96 standard deviations of a binomial(n, 1/2)
    low, high = max(int(n / 2 - reach), 0), min(int(n / 2 + reach), n - 1)
    return ratios.median().item(), ratios[low].item(), ratios[high].item()


def show(times: dict[str, list[float]], pairs: list[tuple[str, str]]) -> None:
    """Print the median times and the paired ratios."""
    for name, seconds in times.items():
        print(f"  {name:<28}{torch.tensor(seconds).median().item() * 1e3:9.2f} ms   (fastest {min(seconds) * 1e3:.2f})")
    for one, other in pairs:
        middle, low, high = ratio(times[one], times[other])
        print(f"  {one} / {other}: {middle:.3f}   (95 % interval {low:.3f} to {high:.3f}, {len(times[one])} pairs)")


# -------------------------------------------------------------------------------------------------- the losses


def compare_losses(turns: int) -> None:
    """Time forward and backward of the losses alone."""
    for d in (256, 2048):
        rng = torch.Generator().manual_seed(d)
        teacher = torch.randn(BATCH, d, generator=rng)
        student = (teacher + 0.5 * torch.randn(BATCH, d, generator=rng)).requires_grad_()
        ours, literal = GeodesicDistillation(DIM), literal_loss(student, teacher, DIM)
        difference = abs(ours(student, teacher) - literal).item()
        print(f"\nForward and backward, batch {BATCH}, n = {DIM}, d = {d} (the two losses differ by {difference:.1e})")

        def run(
            loss: Callable[[Tensor, Tensor], Tensor], student: Tensor = student, teacher: Tensor = teacher
        ) -> Action:
            return lambda: torch.autograd.grad(loss(student, teacher), student)

        actions = {
            "geodl": run(ours),
            "geodl, through the flow": run(GeodesicDistillation(DIM, through_flow=True)),
            "Algorithm 2 as printed": run(lambda s, t: literal_loss(s, t, DIM)),
            "cosine": run(CosineDistillation()),
        }
        show(take_turns(actions, turns), [("Algorithm 2 as printed", "geodl"), ("geodl", "cosine")])


# ------------------------------------------------------------------------------------------------ whole training steps


class Step:
    """A training step of an incremental phase with one distillation on a ResNet-32."""

    def __init__(self, distill: str, channels_last: bool = True) -> None:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        base = build_network("resnet32", OLD, head="cosine", seed=0)
        self.teacher = frozen_copy(base).to(memory_format=layout)
        self.student = build_network("resnet32", OLD + NEW, head="cosine", seed=0).to(memory_format=layout).train()
        self.optimiser = torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        self.distill = distill
        self.loss = {"geodesic": GeodesicDistillation(DIM), "cosine": CosineDistillation(), "lwf": LogitDistillation()}[
            distill
        ]
        rng = torch.Generator().manual_seed(1)
        self.images = torch.randn(BATCH, 3, 32, 32, generator=rng).to(memory_format=layout)
        self.labels = torch.randint(0, OLD + NEW, (BATCH,), generator=rng)

    def __call__(self) -> None:
        """Take one step."""
        with torch.no_grad():
            old = self.teacher(self.images)
        new = self.student(self.images)
        if self.distill == "geodesic":
            distillation = self.loss(new.grid, old.grid)
        elif self.distill == "cosine":
            distillation = self.loss(new.pooled, old.pooled)
        else:
            distillation = self.loss(new.logits[:, :OLD], old.logits)
        self.optimiser.zero_grad()
        (F.cross_entropy(new.logits, self.labels) + distillation).backward()
        self.optimiser.step()


def compare_steps(turns: int) -> None:
    """Time whole steps with each distillation."""
    print(f"\nA whole ResNet-32 step, batch {BATCH} (the paper: 1.3 x cosine, 1.4 x LwF)")
    times = take_turns({name: Step(name) for name in ("geodesic", "cosine", "lwf")}, turns)
    show(times, [("geodesic", "cosine"), ("geodesic", "lwf")])


# ------------------------------------------------------------------------------------------------------ memory


def resident() -> int:
    """Return the bytes of this process that are in memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure_memory(distill: str, steps: int) -> int:
    """Return the peak of some steps above what was resident before the first, in bytes; for a fresh process."""
    step = Step(distill)
    before = resident()
    for _ in range(steps):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def compare_memory(repeats: int, threads: int) -> None:
    """Measure each loss in processes of its own."""
    print("\nMemory of training steps: peak minus resident before the first step (the paper: 1.14 x cosine)")
    peaks: dict[str, list[float]] = {"geodesic": [], "cosine": [], "lwf": []}
    for _ in range(repeats):
        for name, values in peaks.items():
            command = [sys.executable, "-m", "benchmarks.loss", "--memory-of", name, "--threads", str(threads)]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            values.append(json.loads(result.stdout))
    for name, values in peaks.items():
        print(f"  {name:<28}{torch.tensor(values).median().item() / 2**20:9.1f} MB   (of {repeats} processes)")
    for other in ("cosine", "lwf"):
        middle, low, high = ratio(peaks["geodesic"], peaks[other])
        print(f"  geodesic / {other}: {middle:.3f}   (from {low:.3f} to {high:.3f})")


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], help="loss, step, memory (default: all)")
    parser.add_argument("--turns", type=int, default=40, help="paired repetitions (at least 30 for an interval)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-of", choices=["geodesic", "cosine", "lwf"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments.memory_of, steps=4)))
        return
    parts = arguments.parts or ["loss", "step", "memory"]
    if unknown := set(parts) - {"loss", "step", "memory"}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from loss, step, memory")
    print(f"torch {torch.__version__}, {arguments.threads} thread(s)")
    if "loss" in parts:
        compare_losses(arguments.turns)
    if "step" in parts:
        compare_steps(arguments.turns)
    if "memory" in parts:
        compare_memory(max(arguments.turns // 10, 1), arguments.threads)


if __name__ == "__main__":
    main()
