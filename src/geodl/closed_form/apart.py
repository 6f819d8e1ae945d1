"""Setting whole series of images apart for validation, and validating a fit to the others."""

import torch
from torch import Tensor

from geodl.closed_form.expansion import Blocks, Standardization
from geodl.closed_form.kept_features import KeptFeatures, fit, share_of_each
from geodl.closed_form.series import series_of
from geodl.core.keys import derive

MOST = 3000
"""The maximum number of other images that are fitted, roughly."""


def series_apart(
    levels: Blocks, labels: Tensor, clues: Tensor | None, share: float, seed: int
) -> Tensor:
    """Return a mask (N,) of the images to set apart: whole series, at most a share of each class."""
    data = KeptFeatures.of(levels, labels, clues)
    groups = series_of(Standardization.of(data.z)(data.z), labels, data.clues)
    return set_apart(labels, groups, share, seed)


def set_apart(labels: Tensor, groups: Tensor, share: float, seed: int) -> Tensor:
    """Return a mask (N,) of the images to set apart: whole groups, at most a share of each class."""
    apart = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        mine = labels == label
        generator = torch.Generator().manual_seed(derive(seed, "set apart", label))
        series = sorted(set(groups[mine].tolist()))
        for i in torch.randperm(len(series), generator=generator).tolist():
            rows = mine & (groups == series[i])
            if int((apart & mine).sum() + rows.sum()) <= share * int(mine.sum()):
                apart |= rows
    return apart


def right(levels: Blocks, labels: Tensor, clues: Tensor | None, apart: Tensor, seed: int) -> Tensor:
    """Return which of the images set apart a fit to the others gets right, (n,) bool."""
    data = KeptFeatures.of(levels, labels, clues)
    rest = data.select(~apart)
    rest = rest.select(share_of_each(rest.labels, MOST))
    fitted = fit(rest, int(labels.max()) + 1, seed).fitted
    validation = data.select(apart)
    return fitted.scores(validation.z).argmax(1) == validation.labels
