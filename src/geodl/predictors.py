"""From features to predictions: the head itself, and the nearest class mean in its several forms."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geodl.data.batches import Batch
from geodl.errors import ConfigError, DataError
from geodl.geometry import unit
from geodl.nets import Network

# The classifiers, as tables and figures name them. AME needs the old classes' data, which a real learner has thrown away.
CLASSIFIERS = {
    "cnn": "CNN",
    "nme": "k-NME",
    "ame": "AME (oracle)",
    "ncm": "NCM (SDC)",
    "analytic": "closed form",
    "analytic_single": "closed form, no mirrored copies",
}


def default_classifier(names: Iterable[str]) -> str:
    """Return the classifier to use, or to show where there is room for one, of those there are: no oracle."""
    return next(name for name in ("analytic", "nme", "ncm", "cnn") if name in names)


# The weights of a drift are formed for at most this many (sample, class) pairs at a time.
PAIRS = 1 << 22


@dataclass(frozen=True)
class Features:
    """One pass over some images: pooled (N, d) float32, logits (N, C) float32, labels (N,) int64, all on the CPU.

    levels: where they were asked for, the features of several levels of the network by name, (N, d_l) float32 each.
    """

    pooled: Tensor
    logits: Tensor
    labels: Tensor
    levels: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Judged:
    """What a classifier makes of images whose class is known: labels and predictions int64 (N,), confidences 0..1 (N,)."""

    labels: Tensor
    predictions: Tensor
    confidences: Tensor | None
    """None where they were not kept."""


def features_of(
    network: Network,
    batches: Iterable[Batch],
    device: torch.device | str | None = None,
    levels: Sequence[str] = (),
) -> Features:
    """Run the network over un-augmented batches (those of `evaluation`) in eval mode; its own mode is restored."""
    pooled, logits, labels = [torch.empty(0, network.width)], [torch.empty(0, network.head.classes)], []
    more: dict[str, list[Tensor]] = {name: [] for name in levels}
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                output, maps = network.with_levels(batch.images.to(device), levels)
                pooled.append(output.pooled.float().cpu())
                logits.append(output.logits.float().cpu())
                labels.append(batch.labels)
                for name, part in maps.items():
                    more[name].append(part.float().cpu())
    finally:
        # Module by module: a part that was deliberately in eval mode (frozen batch norm) stays so.
        for module, training in modes.items():
            module.training = training
    # No image at all: there are no rows; levels have no width either.
    found = {name: torch.cat(parts) if parts else torch.empty(0, 0) for name, parts in more.items()}
    known = torch.cat(labels) if labels else torch.empty(0, dtype=torch.int64)
    return Features(torch.cat(pooled), torch.cat(logits), known, found)


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean direction of each class: the mean of its normalized rows, normalized again.

    features: (N, d), labels: (N,) -> (classes, d) in the dtype of the features; a class without rows has a row of zeros.
    """
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64).index_add_(0, labels, unit(features))
    return unit(sums).to(features.dtype)


def exemplar_means(views: Sequence[Features], classes: int) -> Tensor:
    """Return the (classes, d) means of k-NME over all views of the exemplars: as stored and, where it suits, mirrored."""
    pooled, labels = (torch.cat([getattr(view, part) for view in views]) for part in ("pooled", "labels"))
    return class_means(pooled, labels, classes)


def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Return the cosine of each of `features: (N, d)` with each of `means: (C, d)` as (N, C).

    A class whose mean is unknown (zeros) scores -inf, so that it is never predicted.
    """
    scores = unit(features) @ unit(means).T
    return scores.masked_fill((means == 0).all(dim=1), -torch.inf).to(features.dtype)


def drift(means: Tensor, old: Tensor, new: Tensor, width: float = 0.3) -> Tensor:
    """Move stored class means along with the network (semantic drift compensation, Yu et al. 2020, Eq. 8 and 9).

    means: (C, d); old, new: (N, d) features of the same samples under the network before and after. Each mean moves by
    the samples' average displacement, weighted by a Gaussian of `width` in their old distance to it, all on the unit
    sphere. Returns (C, d) unit rows in the dtype of `means`; unknown means (zeros) stay unknown.
    """
    if width <= 0:
        raise ConfigError(f"drift width = {width}: it must be greater than 0")
    if len(old) != len(new):
        raise DataError(f"the drift needs the same samples twice, but got {len(old)} old and {len(new)} new features")
    if len(old) == 0:
        return means
    centers, before = unit(means), unit(old)
    displacement = unit(new) - before
    moved = []
    for chunk in torch.split(centers, max(1, PAIRS // len(before))):
        # |z - m|^2 = 2 - 2 <z, m> on the sphere. The softmax is the normalized Gaussian weight, and unlike a quotient
        # of sums it does not become 0 / 0 when every sample is many widths away.
        weights = torch.softmax((chunk @ before.T - 1) / width**2, dim=1)
        moved.append(chunk + weights @ displacement)
    known = (means != 0).any(dim=1, keepdim=True)
    return (unit(torch.cat(moved)) * known).to(means.dtype)
