"""Ridge regression on the kept features of all images: levels and ridge are chosen at each fit."""

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
"""Random features per level."""
CONFUSED = 0.25
"""Mirroring changes a class if this share of its mirrored copies more than of its images is predicted as another class."""
FEW = 1500
"""Levels and ridge are chosen on at most about this many images."""
SAME, EQUAL = 0.05, 0.005
"""Relative differences of features up to which they are of the same image: read from a smaller copy or in another precision, and
read again in the same way."""


@dataclass(frozen=True)
class KeptFeatures:
    """The features of all images, float16 (N, d_b) by level from shallow to deep; labels (N,).

    clues:   (N, 5), clues to series (`geodl.closed_form.series`).
    adapted: (N,) bool, the images that the network was adapted to, which validate nothing.
    """

    z: Mapping[str, Tensor]
    labels: Tensor
    clues: Tensor
    adapted: Tensor

    @classmethod
    def of(
        cls,
        levels: Blocks,
        labels: Tensor,
        clues: Tensor | None = None,
        adapted: Tensor | None = None,
    ) -> Self:
        """Return kept features, rounded before any use."""
        clues = no_clues(len(labels)) if clues is None else clues
        return cls(kept(levels), labels, clues, none_of(labels) if adapted is None else adapted)

    def __add__(self, other: "KeptFeatures") -> "KeptFeatures":
        z = {name: torch.cat([block, other.z[name]]) for name, block in self.z.items()}
        names = ("labels", "clues", "adapted")
        rest = [torch.cat([getattr(self, name), getattr(other, name)]) for name in names]
        return KeptFeatures(z, *rest)

    def select(self, rows: Tensor) -> "KeptFeatures":
        """Return the features of some images; rows: int64 or bool."""
        rest = (each[rows] for each in (self.labels, self.clues, self.adapted))
        return KeptFeatures(selected(self.z, rows), *rest)

    def without(self, gone: int) -> "KeptFeatures":
        """Return the features without a class; later labels move up."""
        rest = self.select(self.labels != gone)
        return replace(rest, labels=rest.labels - (rest.labels > gone).long())

    def places_of(self, other: "KeptFeatures") -> Tensor:
        """Return the rows (N,) of these features that are of the same images as `other`; -1: none.

        Images are compared by their class and their deepest features.
        """
        name = list(self.z)[-1]
        places = torch.full_like(other.labels, -1)
        for label in sorted(set(other.labels.tolist())):
            ours, theirs = ((each.labels == label).nonzero().squeeze(1) for each in (self, other))
            rows = same_image(other.z[name][theirs], self.z[name][ours], EQUAL)
            places[theirs[rows >= 0]] = ours[rows[rows >= 0]]
        return places

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the fields as named tensors; the names include the order of the levels."""
        z = {f"z.{i}.{name}": block for i, (name, block) in enumerate(self.z.items())}
        adapted = {"adapted": self.adapted} if self.adapted.any() else {}
        return z | {"labels": self.labels, "clues": self.clues} | adapted

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the features of `to_tensors`."""
        keys = [key for key in tensors if key.startswith("z.")]
        keys.sort(key=lambda key: int(key.split(".")[1]))
        labels = shaped(tensors["labels"], "labels", None, dtype=torch.int64)
        rows = len(labels)
        z = {key.split(".", 2)[2]: shaped(tensors[key], key, rows, None) for key in keys}
        clues = tensors.get("clues", no_clues(rows))  # missing in version 0.2
        shaped(clues, "clues", rows, len(CLUES), dtype=torch.int64)
        adapted = shaped(tensors.get("adapted", none_of(labels)), "adapted", rows, dtype=torch.bool)
        if not z or (rows and int(labels.min()) < 0):
            raise ValueError("images without features, or of no class")
        return cls(z, labels, clues, adapted)

    @property
    def nbytes(self) -> int:
        """The size of the features in bytes."""
        return sum(block.nbytes for block in self.z.values())


@dataclass(frozen=True)
class Fit:
    """A fit to kept features, and its leave-one-out predictions.

    gamma: the chosen ridge; h: the images' random features by level, of the chosen levels.
    """

    fitted: Fitted
    left_out: LeftOut
    gamma: float
    dual: Dual
    h: Mapping[str, Tensor]


def fit(data: KeptFeatures, classes: int, seed: int) -> Fit:
    """Choose levels and ridge by leave-one-out, fit all images, every class with the same weight, and calibrate.

    Temperature and threshold are fitted without mirrored copies, even if prediction averages over them: that would need the
    features of all copies.
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
    """Choose the ridge and the levels, the deepest one and some number of those below it, on a part of the images."""
    names, some = list(h), share_of_each(data.labels, FEW)
    part = selected(h, some)
    return choose(
        kernels(part, part),
        dict.fromkeys(names, EACH),
        data.labels[some],
        [names[start:] for start in reversed(range(len(names)))],
        balanced=True,
        groups=groups[some],
        barred=data.adapted[some],
    )


def _judged(
    dual: Dual, data: KeptFeatures, groups: Tensor, novelty: Novelty
) -> tuple[Dual, Judgement]:
    """Return the fit, with offsets, and the leave-one-out results of the images without their series."""
    labels, counts = data.labels, torch.bincount(data.labels, minlength=dual.targets.shape[1])
    known, every = judged(labels, groups, data.adapted), torch.arange(len(labels))
    judgement, (dual,) = judge([(every, dual)], data, groups, counts, known, novelty)
    if len(torch.unique(labels)) > 2:  # leaving out one of two classes leaves nothing to separate
        near = stranger_nearness(data.z[novelty.level], labels, novelty.sums).double()
        others = torch.stack([dual.strangers(labels), near], dim=1)
        judgement = replace(judgement, strangers=others[known])
    return dual, judgement


def judge(
    duals: Sequence[tuple[Tensor, Dual]],
    data: KeptFeatures,
    groups: Tensor,
    counts: Tensor,
    known: Tensor,
    novelty: Novelty | None,
) -> tuple[Judgement, list[Dual]]:
    """Return the leave-one-out results of the `known` images, (N,) bool, without their series, and the fits with offsets.

    duals: fits, each with the rows of the images that it leaves out; groups: (N,), equal for images of one series;
    counts: (classes,), the number of learned images; novelty: with their directions.
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
    labels = labels[known]
    judgement = Judgement(labels, scores[known], near, offsets, places, series, gains[known])
    return judgement, fits


def turned_classes(fit: Fit, data: KeptFeatures, rows: Tensor, mirrored: Blocks) -> tuple[int, ...]:
    """Return the classes whose mirrored copies look like another class. mirrored: features (R, d_b) of the copies of `rows`."""
    fitted, labels = fit.fitted, data.labels
    standardized = fitted.expand.standardization(kept({name: mirrored[name] for name in fit.h}))
    products = kernel_of(fitted.expand.expansion.blocks(standardized), fit.h)
    scores = fit.dual.leave_out_for(rows, products)
    copies = (scores if fitted.offsets is None else scores + fitted.offsets).argmax(1)
    # Leave out only the image itself for both: its series would help only the copies.
    originals = fit.dual.leave_out()[rows].argmax(1)
    turned = []
    assert fit.left_out.rows is not None
    judged = torch.isin(rows, fit.left_out.rows)
    for label in sorted(set(labels[rows].tolist())):
        mine = (labels[rows] == label) & judged
        worse = (copies[mine] != label).sum() - (originals[mine] != label).sum()
        if int(mine.sum()) and int(worse) >= max(2, math.ceil(CONFUSED * int(mine.sum()))):
            turned.append(label)
    return tuple(turned)


def mirroring_changes_nothing(z: Tensor, mirrored: Tensor, labels: Tensor) -> bool:
    """Return whether mirrored copies stay in their class. z, mirrored: (N, d); labels: (N,)."""
    data = KeptFeatures.of({"pixels": z}, labels)
    result = fit(data, int(labels.max()) + 1, seed=0)
    return not turned_classes(result, data, torch.arange(len(labels)), {"pixels": mirrored})


def none_of(labels: Tensor) -> Tensor:
    """Return a mask of none of the images: (N,)."""
    return torch.zeros_like(labels, dtype=torch.bool)


def same_image(z: Tensor, known: Tensor, share: float = SAME) -> Tensor:
    """Return for each row of z: (N, d) the row of known: (M, d) that is of the same image, (N,); -1: none."""
    if not len(known):
        return torch.full((len(z),), -1)
    distances, places = torch.cdist(z.float(), known.float()).min(dim=1)
    return torch.where(distances <= share * z.float().norm(dim=1), places, -1)


def share_of_each(labels: Tensor, most: int) -> Tensor:
    """Return the rows of at most about `most` images, in the classes' proportions but at least two of each."""
    if len(labels) <= most:
        return torch.arange(len(labels))
    counts = torch.bincount(labels)
    share = (counts * most / len(labels)).long().clamp(min=2)
    present = counts.nonzero().squeeze(1).tolist()
    chosen = [(labels == c).nonzero().squeeze(1)[: int(share[c])] for c in present]
    return torch.cat(chosen).sort().values
