"""Ridge regression where the features of all images are kept: levels and ridge are chosen at each fit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from geodl.closed_form.choices import Choice, choose, judged
from geodl.closed_form.doubts import doubts
from geodl.closed_form.dual import Dual, class_weights, kernel_of, kernels, solve_dual, targets_of
from geodl.closed_form.expansion import Blocks, Expansion, Standardization, kept, selected
from geodl.closed_form.fitted import Fitted, Judgement, LeftOut, calibrated
from geodl.closed_form.novelty import Novelty, left_out_nearness, stranger_nearness
from geodl.closed_form.offsets import class_offsets
from geodl.closed_form.random_features import RandomFeatures
from geodl.closed_form.series import CLUES, no_clues, series_of
from geodl.core.tensors import shaped

EACH = 2048
"""Random features a level."""
CONFUSED = 0.25
"""Mirrored copies of a class that are predicted as other classes more often, by this share, show that mirroring changes it."""
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
        adapted = None if self.adapted is None else self.adapted[rows]
        return KeptFeatures(selected(self.z, rows), self.labels[rows], self.clues[rows], adapted)

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
    """A fit to kept features, and what leave-one-out says of it.

    gamma: the ridge that was chosen; h: the random features of the images by level, of the levels that were chosen.
    """

    fitted: Fitted
    left_out: LeftOut
    gamma: float
    dual: Dual
    h: Mapping[str, Tensor]


def fit(data: KeptFeatures, classes: int, seed: int) -> Fit:
    """Choose levels and ridge by leave-one-out, fit all images, every class with the same weight, and calibrate.

    Temperature and threshold are fitted on the images as they are, also where prediction averages over mirrored copies: that
    would need the features of the copies of all images.
    """
    expansion = Expansion(dict.fromkeys(data.z, EACH), seed)
    expand = RandomFeatures(Standardization.of(data.z), expansion)
    z = expand.standardization(data.z)
    h, groups = expansion.blocks(z), series_of(z, data.labels, data.clues)
    choice = _chosen(h, data, groups)
    chosen = {name: h[name] for name in choice.blocks}
    del h, z  # hundreds of megabytes
    dual = solve_dual(
        kernel_of(chosen, chosen),
        targets_of(data.labels, classes),
        choice.gamma,
        EACH * len(chosen),
        class_weights(data.labels),
        overwrite=True,
    )
    novelty = Novelty.unfitted(data.z).learned(data.z, data.labels, classes)
    dual, judgement = _judged(dual, data, groups, novelty)
    head = torch.cat([dual.head(chosen[name]) for name in sorted(chosen)])
    fitted, left_out = calibrated(expand.of_blocks(chosen), head, judgement, novelty)
    left_out = replace(left_out, doubts=doubts(dual, data.labels, groups))
    return Fit(fitted, left_out, choice.gamma, dual, chosen)


def _chosen(h: Blocks, data: KeptFeatures, groups: Tensor) -> Choice:
    """Choose the deepest level, with more and more of those below it, and the ridge, on a part of the images."""
    names, some = list(h), share_of_each(data.labels, FEW)
    part = selected(h, some)
    return choose(
        kernels(part, part),
        dict.fromkeys(names, EACH),
        data.labels[some],
        [names[start:] for start in reversed(range(len(names)))],
        balanced=True,
        groups=groups[some],
        barred=None if data.adapted is None else data.adapted[some],
    )


def _judged(
    dual: Dual, data: KeptFeatures, groups: Tensor, novelty: Novelty
) -> tuple[Dual, Judgement]:
    """Judge each image by the fit without its series; return the fit with offsets too."""
    labels, counts = data.labels, torch.bincount(data.labels, minlength=dual.targets.shape[1])
    known, every = judged(labels, groups, data.adapted), torch.arange(len(labels))
    found, (dual,) = judge([(every, dual)], data, groups, counts, known, novelty)
    if len(torch.unique(labels)) > 2:  # without a class of two nothing can be told apart
        near = stranger_nearness(data.z[novelty.level], labels, novelty.sums).double()
        others = torch.stack([dual.strangers(labels), near], dim=1)
        found = replace(found, strangers=others[known])
    return dual, found


def judge(
    duals: Sequence[tuple[Tensor, Dual]],
    data: KeptFeatures,
    groups: Tensor,
    counts: Tensor,
    known: Tensor,
    novelty: Novelty | None,
) -> tuple[Judgement, list[Dual]]:
    """Judge the `known` images, (N,) bool, each by the fit without its series; return the fits with offsets too.

    duals: fits, each with the rows of the images that are left out of it; groups: (N,), equal for images of one series;
    counts: (classes,), images learned, as `novelty` knows them.
    """
    labels, fits, near = data.labels, [dual for _, dual in duals], None
    scores = torch.zeros(len(labels), len(counts), dtype=torch.float64)
    for rows, dual in duals:
        scores[rows] = dual.leave_out(groups[rows])
    offsets = class_offsets(scores[known], labels[known], counts)
    if offsets is not None:
        scores = scores + offsets
        fits = [replace(dual, targets=dual.targets + offsets) for dual in fits]
    gains = torch.zeros(len(labels), dtype=torch.float64)
    for (rows, _), dual in zip(duals, fits, strict=True):
        gains[rows] = dual.gains(labels[rows], groups[rows])
    if novelty is not None:
        near = left_out_nearness(data.z[novelty.level], labels, novelty.sums, groups)[known]
    places, series = known.nonzero().squeeze(1), groups[known]
    found = Judgement(labels[known], scores[known], near, offsets, places, series, gains[known])
    return found, fits


def turned_classes(
    found: Fit, data: KeptFeatures, rows: Tensor, mirrored: Blocks
) -> tuple[int, ...]:
    """Return the classes whose mirrored copies look like another. mirrored: features of the copies of the images `rows`, (R, d_b)."""
    fitted, labels = found.fitted, data.labels
    standardized = fitted.expand.standardization(kept({name: mirrored[name] for name in found.h}))
    products = kernel_of(fitted.expand.expansion.blocks(standardized), found.h)
    scores = found.dual.leave_out_for(rows, products)
    copies = (scores if fitted.offsets is None else scores + fitted.offsets).argmax(1)
    # Without the image alone for both: its series would help the copies only.
    originals = found.dual.leave_out()[rows].argmax(1)
    turned = []
    assert found.left_out.rows is not None
    judged = torch.isin(rows, found.left_out.rows)
    for label in sorted(set(labels[rows].tolist())):
        mine = (labels[rows] == label) & judged
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
    present = counts.nonzero().squeeze(1).tolist()
    chosen = [(labels == c).nonzero().squeeze(1)[: int(share[c])] for c in present]
    return torch.cat(chosen).sort().values
