"""The geodesic loss against Algorithm 2 as printed and against cosine distillation.

Forward and backward of the losses alone: batch 128, n = 127, d = 256 and 2048. Run with `python -m benchmarks.loss`; whole training steps and their memory are measured by `python -m benchmarks.time_memory`.

Whatever is compared takes turns in an order that changes, and ratios are taken within a turn, so that a busy machine slows
all alike: medians of paired ratios, with a 95 % interval from the order statistics (no assumption on their distribution).
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.literal import literal_loss
from geodl.losses import CosineDistillation, GeodesicDistillation
from geodl.reproduce.steps import ratio, take_turns

BATCH, DIM = 128, 127
Action = Callable[[], object]


def show(times: dict[str, list[float]], pairs: list[tuple[str, str]]) -> None:
    """Print the median times and the paired ratios."""
    for name, seconds in times.items():
        print(f"  {name:<28}{torch.tensor(seconds).median().item() * 1e3:9.2f} ms   (fastest {min(seconds) * 1e3:.2f})")
    for one, other in pairs:
        found = ratio(times[one], times[other])
        print(
            f"  {one} / {other}: {found.median:.3f}   (95 % interval {found.low:.3f} to {found.high:.3f}, {found.pairs} pairs)"
        )


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


def main() -> None:
    """Compare the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=40, help="paired repetitions (at least 30 for an interval)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s)")
    compare_losses(arguments.turns)


if __name__ == "__main__":
    main()
