"""Is a teacher faster with its batch norms folded into the convolutions? Both run in turns, in one process.

Run with `OMP_NUM_THREADS=1 python -m benchmarks.teacher [--network resnet32] [--batch 128] [--size 32] [--rounds 30]`.
"""

import argparse
import statistics
import time
from copy import deepcopy

import torch

from geodl.nets import Network, build_network, frozen_copy
from geodl.nets.network import FrozenNetwork


def unfolded_copy(network: Network) -> FrozenNetwork:
    """Copy a network as a teacher that keeps its batch norms."""
    copy = deepcopy(network)
    return FrozenNetwork(copy.backbone, copy.head).requires_grad_(False).train(False)


def seconds(network: Network, images: torch.Tensor) -> float:
    """Time one batch."""
    start = time.perf_counter()
    network(images)
    return time.perf_counter() - start


def main() -> None:
    """Print the median time of both teachers and the median of the ratios within the rounds."""
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
    difference = (plain(images).pooled - folded(images).pooled).abs().max() / plain(images).pooled.abs().max()

    pairs = [(seconds(plain, images), seconds(folded, images)) for _ in range(arguments.rounds)]
    unfolded_time, folded_time = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(before / after for before, after in pairs)
    quarter = len(ratios) // 4
    print(f"{arguments.network}, batch {arguments.batch}, {torch.get_num_threads()} thread(s)")
    print(f"unfolded {unfolded_time * 1e3:.1f} ms, folded {folded_time * 1e3:.1f} ms")
    print(f"speed-up {statistics.median(ratios):.2f}x (quartiles {ratios[quarter]:.2f} to {ratios[-quarter - 1]:.2f})")
    print(f"largest difference of the features, relative: {difference:.1e}")


if __name__ == "__main__":
    main()
