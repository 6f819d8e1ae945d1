"""Ridge regression where the features of all images are kept: levels and ridge are chosen at each fit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from geodl.closed_form import (
    Blocks,
    Doubts,
    Dual,
    Expansion,
    Fitted,
    Standardization,
    choose,
    class_offsets,
    class_weights,
    doubts,
    judged,
    kept,
    kernel_of,
    kernels,
    no_clues,
    series_of,
    solve_dual,
    targets_of,
    temperature,
)
from geodl.closed_form.novelty import Novelty, directions, left_out_nearness
from geodl.closed_form.series import CLUES
from geodl.core.tensors import shaped

EACH = 2048
"""Random features a level."""
CONFUSED = 0.25
"""Mirrored copies of a class that are taken for other classes more often, by this share, tell that mirroring changes it."""
FEW = 1500
"""Levels and ridge are chosen on at most about so many images."""
SAME, EQUAL = 0.05, 0.005
"""Features that differ by less than this share of their length are of the same image, read once more, perhaps from a smaller
copy or in another precision; and of the same image, read again in the same way."""


@dataclass(frozen=True)
class KeptFeatures:
    """The features of all images, float16 (N, d_b) by level from shallow to deep; labels (N,).

    clues:   to series (N, 5).
    adapted: (N,) bool, the images that the network was adapted to, which judge nothing; None: it was not adapted.
    """

    z: Mapping[str, Tensor]
    labels: Tensor
    clues: Tensor
    adapted: Tensor | None = None

    @classmethod
    def of(
        cls,
        levels: Blocks,
        labels: Tensor,
        clues: Tensor | None = None,
        adapted: Tensor | None = None,
    ) -> Self:
        """Keep features, rounded before any use."""
        found = no_clues(len(labels)) if clues is None else clues
        return cls(kept(levels), labels, found, adapted)

    def __add__(self, other: "KeptFeatures") -> "KeptFeatures":
        z = {name: torch.cat([block, other.z[name]]) for name, block in self.z.items()}
        labels, adapted = torch.cat([self.labels, other.labels]), None
        if self.adapted is not None or other.adapted is not None:
            adapted = torch.cat([self._judging_nothing, other._judging_nothing])
        return KeptFeatures(z, labels, torch.cat([self.clues, other.clues]), adapted)

    @property
    def _judging_nothing(self) -> Tensor:
        return torch.zeros(len(self.labels)).bool() if self.adapted is None else self.adapted

    def select(self, rows: Tensor) -> "KeptFeatures":
        """Return the features of some of the images: int64 or bool rows."""
        z = {name: block[rows] for name, block in self.z.items()}
        adapted = None if self.adapted is None else self.adapted[rows]
        return KeptFeatures(z, self.labels[rows], self.clues[rows], adapted)

    def without(self, gone: int) -> "KeptFeatures":
        """Return what would be kept if a class had never been there."""
        rest = self.select(self.labels != gone)
        return replace(rest, labels=rest.labels - (rest.labels > gone).long())

    def places_of(self, other: "KeptFeatures") -> Tensor:
        """Return where among these the images of others are, (N,); -1: nowhere.

        Images are known by their class and their deepest features.
        """
        name = list(self.z)[-1]
        places = torch.full_like(other.labels, -1)
        for label in sorted(set(other.labels.tolist())):
            ours, theirs = ((each.labels == label).nonzero().squeeze(1) for each in (self, other))
            found = same_image(other.z[name][theirs], self.z[name][ours], EQUAL)
            places[theirs[found >= 0]] = ours[found[found >= 0]]
        return places

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all of it as named tensors; the order of the levels is in their names."""
        z = {f"z.{i}.{name}": block for i, (name, block) in enumerate(self.z.items())}
        adapted = {} if self.adapted is None else {"adapted": self.adapted}
        return z | {"labels": self.labels, "clues": self.clues} | adapted

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Undo `to_tensors`."""
        keys = [key for key in tensors if key.startswith("z.")]
        keys.sort(key=lambda key: int(key.split(".")[1]))
        labels = shaped(tensors["labels"], "labels", None, dtype=torch.int64)
        rows, adapted = len(labels), tensors.get("adapted")
        z = {key.split(".", 2)[2]: shaped(tensors[key], key, rows, None) for key in keys}
        clues = tensors.get("clues", no_clues(rows))  # version 0.2 kept none
        shaped(clues, "clues", rows, len(CLUES), dtype=torch.int64)
        if adapted is not None:
            shaped(adapted, "adapted", rows, dtype=torch.bool)
        if not z or (rows and int(labels.min()) < 0):
            raise ValueError("images without features, or of no class")
        return cls(z, labels, clues, adapted)

    @property
    def nbytes(self) -> int:
        """How many bytes the features take."""
        return sum(block.nbytes for block in self.z.values())


@dataclass(frozen=True)
class Fit:
    """A fit to kept features, and what leave-one-out says of it: the predicted class (N,), -1 where it cannot be judged.

    confidences: in that class, (N,); gamma: the ridge that was chosen; doubts: of the labels.
    groups:      (N,), equal for images of one series, which is left out as a whole.
    gains:       (N,), how much more often they would be right with all series (`Dual.gains`).
    """

    fitted: Fitted
    gamma: float
    dual: Dual
    h: Mapping[str, Tensor]
    left_out: Tensor
    confidences: Tensor
    doubts: Doubts
    groups: Tensor
    gains: Tensor


def fit(data: KeptFeatures, classes: int, seed: int) -> Fit:
    """Choose levels and ridge by leave-one-out, fit all images, every class with the same weight, and calibrate.

    Temperature and threshold are fitted on the images as they are, also where prediction averages over mirrored copies: that
    would need the features of the copies of all images.
    """
    standardization = Standardization.of(data.z)
    expansion = Expansion(dict.fromkeys(data.z, EACH), seed)
    z = standardization(data.z)
    h = expansion.blocks(z)
    labels, names = data.labels, list(data.z)
    groups = series_of(z, labels, data.clues)
    some = share_of_each(labels, FEW)
    part = {name: block[some] for name, block in h.items()}
    choice = choose(
        kernels(part, part),
        expansion.sizes,
        labels[some],
        [
            names[start:] for start in reversed(range(len(names)))
        ],  # the deepest, with more and more of those below it
        balanced=True,
        groups=groups[some],
        barred=None if data.adapted is None else data.adapted[some],
    )
    chosen = {name: h[name] for name in choice.blocks}
    del h, z, part  # hundreds of megabytes
    dual = solve_dual(
        kernel_of(chosen, chosen),
        targets_of(labels, classes),
        choice.gamma,
        EACH * len(chosen),
        class_weights(labels),
        overwrite=True,
    )
    scores = dual.leave_out(groups)
    known = judged(labels, groups, data.adapted)
    counts = torch.bincount(labels, minlength=classes)
    offsets = class_offsets(scores[known], labels[known], counts)
    if offsets is not None:  # which all that leave-one-out says of the fit includes from here on
        scores, dual = scores + offsets, replace(dual, targets=dual.targets + offsets)
    left_out = torch.where(known, scores.argmax(1), -1)
    mean = {name: standardization.mean[name] for name in chosen}
    scale = {name: standardization.scale[name] for name in chosen}
    fitted = Fitted(
        Standardization(mean, scale),
        Expansion(dict.fromkeys(sorted(chosen), EACH), seed),
        torch.cat([dual.head(chosen[name]) for name in sorted(chosen)]).float().contiguous(),
        temperature(scores[known], labels[known]),
        offsets=None if offsets is None else offsets.float(),
    )
    novelty = Novelty.unfitted(data.z)
    deepest = data.z[novelty.level]
    sums = directions(deepest, labels, novelty.sums, classes)
    near = left_out_nearness(deepest, labels, sums, groups)
    novelty = novelty.fit(sums, scores[known].amax(1), near[known])
    fitted = fitted.with_novelty(novelty)
    confidences = fitted.confidences(scores, near)
    doubtful, gains = doubts(dual, labels, groups), dual.gains(labels, groups)
    return Fit(fitted, choice.gamma, dual, chosen, left_out, confidences, doubtful, groups, gains)


def turned_classes(
    found: Fit, data: KeptFeatures, rows: Tensor, mirrored: Blocks
) -> tuple[int, ...]:
    """Return the classes whose mirrored copies look like another. mirrored: features of the copies of the images `rows`, (R, d_b)."""
    fitted, labels = found.fitted, data.labels
    h = fitted.expansion.blocks(
        fitted.standardization(kept({name: mirrored[name] for name in found.h}))
    )
    products = kernel_of(h, found.h)
    scores = found.dual.leave_out_for(rows, products)
    copies = (scores if fitted.offsets is None else scores + fitted.offsets).argmax(1)
    # Without the image alone for both: its series would help the copies only.
    originals = found.dual.leave_out()[rows].argmax(1)
    turned = []
    for label in sorted(set(labels[rows].tolist())):
        mine = (labels[rows] == label) & (found.left_out[rows] >= 0)
        worse = (copies[mine] != label).sum() - (originals[mine] != label).sum()
        if int(mine.sum()) and int(worse) >= max(2, math.ceil(CONFUSED * int(mine.sum()))):
            turned.append(label)
    return tuple(turned)


def mirroring_changes_nothing(z: Tensor, mirrored: Tensor, labels: Tensor) -> bool:
    """Return whether mirrored copies stay in their class. z, mirrored: (N, d); labels: (N,)."""
    data = KeptFeatures.of({"pixels": z}, labels)
    found = fit(data, int(labels.max()) + 1, seed=0)
    return not turned_classes(found, data, torch.arange(len(labels)), {"pixels": mirrored})


def same_image(z: Tensor, known: Tensor, share: float = SAME) -> Tensor:
    """Return which row of known: (M, d) is of the same image as each row of z: (N, d), as (N,); -1: none."""
    if not len(known):
        return torch.full((len(z),), -1)
    distances, places = torch.cdist(z.float(), known.float()).min(dim=1)
    return torch.where(distances <= share * z.float().norm(dim=1), places, -1)


def share_of_each(labels: Tensor, most: int) -> Tensor:
    """Return rows: at most about `most` images, of every class its share, at least two."""
    if len(labels) <= most:
        return torch.arange(len(labels))
    counts = torch.bincount(labels)
    share = (counts * most / len(labels)).long().clamp(min=2)
    chosen = [
        (labels == c).nonzero().squeeze(1)[: int(share[c])]
        for c in counts.nonzero().squeeze(1).tolist()
    ]
    return torch.cat(chosen).sort().values
