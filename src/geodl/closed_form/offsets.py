"""Classes of very unequal size: an offset for the scores of each, so that none is favored."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.choices import temperature
from geodl.closed_form.dual import class_weights

UNEQUAL = 3
"""So many times as many images as another class makes a class large."""
SHRINK = 0.01
"""What the square of an offset costs: of a class that is never mistaken nothing else would bound it."""


def unequal(counts: Tensor) -> bool:
    """Return whether classes differ much in their numbers of images, (classes,)."""
    present = counts[counts > 0]
    return len(present) > 1 and int(present.max()) > UNEQUAL * int(present.min())


def class_offsets(scores: Tensor, labels: Tensor, counts: Tensor) -> Tensor | None:
    """Return what to add to the scores of each class, float64 (classes,); None where classes are about as large.

    Ridge regression shrinks the scores of a class of few images, whatever its weight: of an image that it was not fitted to,
    they are smaller than those of a large class are. The offsets have the largest likelihood in which each class counts the same.
    scores: (N, classes), leave-one-out; labels: (N,); counts: (classes,), images learned. A class without scores is given the
    offset of the one that is most like it in size.
    """
    known = torch.unique(labels)
    if len(known) < 2 or not unequal(counts):
        return None
    numbers = torch.searchsorted(known, labels)
    scale = temperature(scores[:, known], numbers)
    logits = scores[:, known] / scale
    weights = class_weights(numbers) / len(numbers)
    offsets = torch.zeros(len(known), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([offsets], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        each = F.cross_entropy(logits + offsets, numbers, reduction="none")
        found: Tensor = (weights * each).sum() + SHRINK * offsets.square().mean()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    search.step(loss)  # type: ignore[no-untyped-call]
    sizes = counts.double().clamp(min=1).log()
    nearest = (sizes.unsqueeze(1) - sizes[known]).abs().argmin(1)
    return (scale * (offsets.detach() - offsets.detach().mean()))[nearest]
