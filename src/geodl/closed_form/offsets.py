"""Score offsets for classes of very unequal size, so that large classes are not favored."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.choices import temperature
from geodl.closed_form.dual import class_weights

UNEQUAL = 3
"""Classes are of unequal size if one has more than this many times as many images as another."""
SHRINK = 0.01
"""The penalty on squared offsets, without which that of a class without mistakes would be unbounded."""


def unequal(counts: Tensor) -> bool:
    """Return whether the numbers of images, (classes,), are very unequal."""
    present = counts[counts > 0]
    return len(present) > 1 and int(present.max()) > UNEQUAL * int(present.min())


def class_offsets(scores: Tensor, labels: Tensor, counts: Tensor) -> Tensor | None:
    """Return offsets to add to the scores of each class, float64 (classes,); None if classes are of similar size.

    Ridge regression shrinks the scores of a small class, whatever its weight: for new images they are smaller than those of a
    large class. The offsets maximize the likelihood, in which each class counts the same.
    scores: (N, classes), leave-one-out; labels: (N,); counts: (classes,), learned images. A class without scores has the offset
    of the class nearest in size.
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
        losses = F.cross_entropy(logits + offsets, numbers, reduction="none")
        value: Tensor = (weights * losses).sum() + SHRINK * offsets.square().mean()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(loss)  # type: ignore[no-untyped-call]
    sizes = counts.double().clamp(min=1).log()
    nearest = (sizes.unsqueeze(1) - sizes[known]).abs().argmin(1)
    return (scale * (offsets.detach() - offsets.detach().mean()))[nearest]
