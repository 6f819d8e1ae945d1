"""Is a teacher faster with its batch norms folded into the convolutions? Both run in turns, in one process.

Run with `OMP_NUM_THREADS=1 python -m benchmarks.teacher [--network resnet32] [--batch 128] [--size 32] [--rounds 30]`.
"""

import argparse
import statistics
from copy import deepcopy

import torch

from benchmarks.steps import ratio
from geodl.learning.timing import take_turns
from geodl.nets import Network, build_network, frozen_copy
from geodl.nets.network import FrozenNetwork


def unfolded_copy(network: Network) -> FrozenNetwork:
    """Copy a network as a teacher that keeps its batch norms."""
    copy = deepcopy(network)
    return FrozenNetwork(copy.backbone, copy.head).requires_grad_(False).train(False)


def main() -> None:
    """Print the median time of both teachers and the median of the ratios within the rounds, with its 95 % interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet32")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()

    network = build_network(arguments.network, 100, head="cosine")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, generator=generator)
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(5):  # give the batch norms statistics that are not those of a new network
            network(images)
    plain, folded = unfolded_copy(network), frozen_copy(network)
    difference = (plain(images).pooled - folded(images).pooled).abs().max() / plain(
        images
    ).pooled.abs().max()

    times = take_turns(
        {"unfolded": lambda: plain(images), "folded": lambda: folded(images)}, arguments.rounds
    )
    gain = ratio(times["unfolded"], times["folded"])
    print(f"{arguments.network}, batch {arguments.batch}, {torch.get_num_threads()} thread(s)")
    print(
        ", ".join(f"{name} {statistics.median(each) * 1e3:.1f} ms" for name, each in times.items())
    )
    print(f"speed-up {gain.median:.2f}x ({gain.low:.2f} to {gain.high:.2f})")
    print(f"largest difference of the features, relative: {difference:.1e}")


if __name__ == "__main__":
    main()
