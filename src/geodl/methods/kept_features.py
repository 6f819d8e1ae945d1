"""Closed form with the features of all images kept (dual form): levels and ridge are chosen anew at each step, removal is exact."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from geodl.closed_form import (
    Blocks,
    Dual,
    Expansion,
    Fitted,
    Standardization,
    choose,
    class_weights,
    judged,
    kept,
    kernels,
    near_duplicates,
    solve_dual,
    targets_of,
    temperature,
    threshold,
)

EACH = 2048
"""Random features a level."""
REJECTED = 0.05
"""Share of known images that the threshold of "unknown" rejects."""
CONFUSED = 0.25
"""Mirrored copies of a class that are taken for other classes more often, by this share, tell that mirroring changes it."""
FEW = 1500
"""Levels and ridge are chosen on at most about so many images."""


@dataclass(frozen=True)
class KeptFeatures:
    """The features of all images, float16 (N, d_b) by level from shallow to deep, and their labels (N,).

    mirrors: whether a mirrored image is still of its class.
    """

    z: Mapping[str, Tensor]
    labels: Tensor
    mirrors: bool

    @classmethod
    def of(cls, levels: Blocks, labels: Tensor) -> Self:
        """Keep features, rounded before any use."""
        return cls(kept(levels), labels, True)

    def __add__(self, other: "KeptFeatures") -> "KeptFeatures":
        z = {name: torch.cat([block, other.z[name]]) for name, block in self.z.items()}
        return KeptFeatures(z, torch.cat([self.labels, other.labels]), self.mirrors and other.mirrors)

    def without(self, gone: int) -> "KeptFeatures":
        """Return what would be kept if a class had never been there."""
        stay = self.labels != gone
        labels = self.labels[stay] - (self.labels[stay] > gone).long()
        return replace(self, z={name: block[stay] for name, block in self.z.items()}, labels=labels)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all of it as named tensors; the order of the levels is in their names."""
        z = {f"z.{i}.{name}": block for i, (name, block) in enumerate(self.z.items())}
        return z | {"labels": self.labels, "mirrors": torch.tensor(self.mirrors)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Undo `to_tensors`."""
        found = sorted((key.split(".", 2)[1:], block) for key, block in tensors.items() if key.startswith("z."))
        return cls({name: block for (_, name), block in found}, tensors["labels"], bool(tensors["mirrors"]))


@dataclass(frozen=True)
class Fit:
    """A fit to kept features, and what leave-one-out says of it: the predicted class (N,), -1 where it cannot be judged.

    confidences: in that class, (N,).
    """

    fitted: Fitted
    dual: Dual
    h: Mapping[str, Tensor]
    left_out: Tensor
    confidences: Tensor

    def validated(self, labels: Tensor) -> dict[str, Tensor]:
        """Return what leave-one-out says of the images that it can judge, as named tensors, and which they are."""
        rows = (self.left_out >= 0).nonzero().squeeze(1)
        pairs = torch.stack([labels, self.left_out], dim=1)
        return {"validated": pairs[rows], "confidences": self.confidences[rows].float(), "rows": rows}


def fit(data: KeptFeatures, classes: int, seed: int) -> Fit:
    """Choose levels and ridge by leave-one-out, fit all images, every class with the same weight, and calibrate."""
    standardization = Standardization.of(data.z)
    expansion = Expansion(dict.fromkeys(data.z, EACH), seed)
    h = expansion.blocks(standardization(data.z))
    labels, names = data.labels, list(data.z)
    groups = near_duplicates(data.z[names[-1]])
    some = _spread(labels, FEW)
    part = {name: block[some] for name, block in h.items()}
    choice = choose(
        kernels(part, part),
        expansion.sizes,
        labels[some],
        [names[start:] for start in reversed(range(len(names)))],  # the deepest, with more and more of those below it
        balanced=True,
        groups=groups[some],
    )
    chosen = {name: h[name] for name in choice.blocks}
    kernel = torch.stack(list(kernels(chosen, chosen).values())).sum(0)
    dual = solve_dual(kernel, targets_of(labels, classes), choice.gamma, EACH * len(chosen), class_weights(labels))
    scores = dual.leave_out(groups)
    known = judged(labels, groups)
    left_out = torch.where(known, scores.argmax(1), -1)
    fitted = Fitted(
        Standardization(*({n: part[n] for n in chosen} for part in (standardization.mean, standardization.scale))),
        Expansion(dict.fromkeys(sorted(chosen), EACH), seed),
        dual.head(torch.cat([chosen[name] for name in sorted(chosen)], dim=1)).float(),
        temperature(scores[known], labels[known]),
        threshold(scores[known].amax(1), REJECTED),
    )
    confidences = (scores / fitted.temperature).softmax(dim=1).amax(1)
    return Fit(fitted, dual, chosen, left_out, confidences)


def mirroring_keeps_classes(found: Fit, data: KeptFeatures, rows: Tensor, mirrored: Blocks) -> bool:
    """Return whether mirrored copies stay in their class. mirrored: features of the copies of the images `rows`, (R, d_b)."""
    fitted, labels = found.fitted, data.labels
    h = fitted.expansion.blocks(fitted.standardization(kept({name: mirrored[name] for name in found.h})))
    products = torch.stack(list(kernels(h, {name: found.h[name] for name in h}).values())).sum(0)
    copies = found.dual.leave_out_for(rows, products).argmax(1)
    for label in sorted(set(labels[rows].tolist())):
        mine = (labels[rows] == label) & (found.left_out[rows] >= 0)
        worse = (copies[mine] != label).sum() - (found.left_out[rows][mine] != label).sum()
        if int(mine.sum()) and int(worse) >= max(2, math.ceil(CONFUSED * int(mine.sum()))):
            return False
    return True


def _spread(labels: Tensor, most: int) -> Tensor:
    """Return rows: at most about `most` images, of every class its share, at least two."""
    if len(labels) <= most:
        return torch.arange(len(labels))
    counts = torch.bincount(labels)
    share = (counts * most / len(labels)).long().clamp(min=2)
    chosen = [(labels == c).nonzero().squeeze(1)[: int(share[c])] for c in counts.nonzero().squeeze(1).tolist()]
    return torch.cat(chosen).sort().values
