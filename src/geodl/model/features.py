"""Features of images, which classifiers are fitted to, and class means."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from geodl.data.batches import Batch
from geodl.geometry import unit
from geodl.nets import Network

PIXELS = 8 * 192 * 192
"""Pixels per pass on a CPU: more do not fit its caches, and take up to twice as long."""


@dataclass(frozen=True)
class Features:
    """Features of N images: pooled (N, d), logits (N, C), labels (N,) int64; float32, on the CPU.

    levels: the features of further levels by name, (N, d_l) each.
    """

    pooled: Tensor
    logits: Tensor
    labels: Tensor
    levels: Mapping[str, Tensor] = field(default_factory=dict)

    def chunks(self, size: int) -> Iterator["Features"]:
        """Yield the features in chunks of `size` images, at least one chunk."""
        for start in range(0, max(len(self.pooled), 1), size):
            rows = slice(start, start + size)
            yield self.map(itemgetter(rows))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Features":
        """Apply a function to each tensor."""
        levels = {name: function(level) for name, level in self.levels.items()}
        return Features(function(self.pooled), function(self.logits), function(self.labels), levels)


def features_of(
    network: Network,
    batches: Iterable[Batch],
    device: torch.device | str | None = None,
    levels: Sequence[str] = (),
) -> Features:
    """Run the network over un-augmented batches in eval mode and float32; its modes are restored afterwards."""
    pooled, logits = [torch.empty(0, network.width)], [torch.empty(0, network.head.classes)]
    labels = [torch.empty(0, dtype=torch.int64)]
    more: dict[str, list[Tensor]] = {name: [] for name in levels}
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.inference_mode():
            for images, classes in _chunks(batches, device):
                output, maps = network.with_levels(images, levels)
                pooled.append(output.pooled.float().cpu())
                logits.append(output.logits.float().cpu())
                labels.append(classes)
                for name, part in maps.items():
                    more[name].append(part.float().cpu())
    finally:
        # Module by module: frozen batch norms, in eval mode during training, stay so.
        for module, training in modes.items():
            module.training = training
    # Without images, the width of the levels is unknown.
    joined = {name: torch.cat(parts or [torch.empty(0, 0)]) for name, parts in more.items()}
    return Features(torch.cat(pooled), torch.cat(logits), torch.cat(labels), joined)


def _chunks(
    batches: Iterable[Batch], device: torch.device | str | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images on the device with their labels: whole batches on a GPU, at most PIXELS on a CPU."""
    for batch in batches:
        images = batch.images.to(device)
        size = max(len(images), 1)
        if images.device.type == "cpu":
            size = max(PIXELS // (images.shape[-2] * images.shape[-1]), 1)
        parts = (torch.split(each, size) for each in (images, batch.labels))
        yield from zip(*parts, strict=True)


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean direction of each class: the mean of its normalized rows, normalized again.

    features: (N, d), labels: (N,) -> (classes, d) in the dtype of the features; zeros for a class
    without rows.
    """
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    return unit(sums.index_add_(0, labels, unit(features))).to(features.dtype)


def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Return the cosines (N, C) of features: (N, d) with means: (C, d).

    A class with an unknown mean (zeros) scores -inf, so that it is never predicted.
    """
    scores = unit(features) @ unit(means).T
    return scores.masked_fill((means == 0).all(dim=1), -torch.inf).to(features.dtype)


def filled(means: Tensor, others: Tensor) -> Tensor:
    """Return the means (C, d), with unknown ones (zeros) replaced by those of `others`."""
    return torch.where((means != 0).any(dim=1, keepdim=True), means, others)
