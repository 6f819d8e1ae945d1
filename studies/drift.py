"""Drift compensation: where the network has moved, the features kept of old images are moved along."""

import torch
from torch import Tensor

from geodl.closed_form.expansion import Blocks

RIDGE = 1e-4
"""Of the mean square of a coordinate: what the images at hand say nothing about moves as their mean does."""


def moved(z: Blocks, before: Blocks, after: Blocks) -> dict[str, Tensor]:
    """Return features z, (N, d_b), as the network gives them now, as far as an affine map can tell.

    before, after: (m, d_b), features of other images by the network as it was and as it is; how far they moved is fitted
    by ridge regression on where they were, block by block.
    """
    return {
        name: _map(z[name].double(), before[name].double(), after[name].double()).float()
        for name in z
    }


def _map(z: Tensor, before: Tensor, after: Tensor) -> Tensor:
    shift = after - before
    x, y = before - before.mean(0), shift - shift.mean(0)
    gram = x.T @ x
    ridge = (RIDGE * gram.trace() / len(gram)).clamp_min(torch.finfo(gram.dtype).tiny)
    gram.diagonal().add_(ridge)
    weight: Tensor = torch.linalg.solve(gram, x.T @ y)
    return z + (z - before.mean(0)) @ weight + shift.mean(0)
