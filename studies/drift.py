"""Drift compensation: stored features of old images are moved along with the network."""

import torch
from torch import Tensor

from geodl.closed_form.expansion import Blocks

RIDGE = 1e-4
"""Relative to the mean square of a coordinate; directions that the images do not span move like their mean."""


def moved(z: Blocks, before: Blocks, after: Blocks) -> dict[str, Tensor]:
    """Return an affine estimate of the features z (N, d_b) under the current network.

    before, after: features (m, d_b) of other images under the old and the current network; their shift is fitted to their old
    position by ridge regression, block by block.
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
