"""Herding at ImageNet's size against iCaRL's Algorithm 4 written pick by pick.

Run with `python -m benchmarks.herding`. The classes come in portions. In each, the literal loop is timed on some of them (it
is the same work for each) right after ours on all, and the median of the portions' ratios is told, so that it holds on a
busy machine; that both choose the same exemplars is checked.

The literal loop is also timed before ours has run. Then the allocator still gives the memory of each of its temporaries back to
the system and fetches it anew; after ours, which frees a larger buffer, it keeps it. A program that herds by the literal loop
alone is in the first state, the ratios are taken in the second, which favours the loop.
"""

import argparse
import time

import torch

from geodl.memory import herd_classes
from geodl.reproduce.steps import ratio


def literal(features: torch.Tensor, k: int) -> torch.Tensor:
    """Herd one class pick by pick in the precision of `features: (n, d)`, as iCaRL's Algorithm 4 is printed."""
    rows = features / features.norm(dim=1, keepdim=True)
    mean = rows.mean(dim=0)
    total = torch.zeros_like(mean)
    chosen: list[int] = []
    for rank in range(1, k + 1):
        distances = (mean - (total + rows) / rank).norm(dim=1)
        distances[chosen] = torch.inf
        chosen.append(int(distances.argmin()))
        total = total + rows[chosen[-1]]
    return torch.tensor(chosen)


def main() -> None:
    """Time both ways in turns and print the seconds for all classes and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1300, help="images a class")
    parser.add_argument("--width", type=int, default=512, help="features an image")
    parser.add_argument("--exemplars", type=int, default=20)
    parser.add_argument("--portion", type=int, default=50, help="classes that are herded at once")
    parser.add_argument("--literal", type=int, default=4, help="classes of a portion that the literal loop is timed on")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(options.portion).repeat(options.samples)  # the classes interleaved, as shuffled data are
    members = [torch.nonzero(labels == c).flatten() for c in range(options.literal)]

    def run_literal(features: torch.Tensor, dtype: torch.dtype) -> tuple[float, list[torch.Tensor]]:
        """Return the seconds for a portion of classes, from those of some, and the picks of those."""
        start = time.perf_counter()
        picks = [rows[literal(features[rows].to(dtype), options.exemplars)] for rows in members]
        return (time.perf_counter() - start) * options.portion / options.literal, picks

    own: list[float] = []
    loops: dict[torch.dtype, list[float]] = {torch.float32: [], torch.float64: []}
    alone = 0.0
    for portion in range(options.classes // options.portion + 1):
        features = torch.randn(len(labels), options.width, generator=generator) + 0.3
        if not portion:
            alone = run_literal(features, torch.float64)[0] * options.classes / options.portion
        start = time.perf_counter()
        herded = herd_classes(features, labels, options.exemplars, range(options.portion))
        own.append(time.perf_counter() - start)
        for dtype, seconds in loops.items():
            taken, picks = run_literal(features, dtype)
            seconds.append(taken)
            for c, expected in enumerate(picks if dtype == torch.float64 else ()):
                if not expected.equal(herded[c]):
                    raise SystemExit(f"class {c}: herd_classes and the literal loop in float64 differ")
        if not portion:  # the first one warms up
            for times in (own, *loops.values()):
                times.clear()
    size = f"{options.classes} classes x {options.samples} x {options.width}, {options.exemplars} each"
    print(f"{size}, {torch.get_num_threads()} threads: herd_classes {sum(own):.1f} s")
    print(f"literal loop in torch.float64, before ours has run: {alone:.1f} s")
    for dtype, seconds in loops.items():
        found = ratio(seconds, own)
        print(
            f"literal loop in {dtype}: {sum(seconds):.1f} s, ratio {found.median:.1f} "
            f"(95 % interval {found.low:.1f} to {found.high:.1f}, {found.pairs} pairs)"
        )


if __name__ == "__main__":
    main()
