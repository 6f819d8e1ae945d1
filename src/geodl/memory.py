"""The exemplar memory: which images of the old classes are kept (METHODS section 4), and how many."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.data.images import Images, concat, from_tensors, to_tensors
from geodl.errors import ConfigError, DataError, TrainingError

Budget = Literal["per_class", "total"]
Selection = Literal["herding", "nearest"]

# Scores closer than this are a tie. Equal images must not be ranked by the rounding of a matrix product, which differs
# with the row's place in memory, the number of threads and the library.
TIE = 1e-12

# Classes are herded together in stacks of at most this many numbers: small classes share the cost of a call, large ones
# stay in the processor's cache while the picks go over them again and again.
STACK = 1 << 20


def unit(features: Tensor) -> Tensor:
    """Return the rows of `features: (..., d)` with length 1, in float64; rows of zeros stay zero.

    In float64 the square of any float32 is a normal number, so lengths of 1e-30 or 1e30 need no care.
    """
    return F.normalize(features.double(), dim=-1, eps=1e-300)


def quota(classes: int, exemplars: int, budget: Budget) -> int:
    """Say how many exemplars each of `classes` classes may keep.

    `per_class`: `exemplars` for every class; `total`: `exemplars` shared evenly by all classes, rounded down.
    """
    if exemplars < 0:
        raise ConfigError(f"exemplars = {exemplars}: allowed are 0 (no memory) and more")
    if budget == "per_class":
        return exemplars
    if budget == "total":
        return exemplars // max(classes, 1)
    raise ConfigError(f"budget = {budget!r}: allowed are 'per_class' and 'total'")


def herding(features: Tensor, k: int) -> Tensor:
    """Rank the first `k` exemplars of one class by herding (iCaRL Alg. 4).

    features: (N, d), normalised here. Returns (min(k, N),) row numbers: each pick brings the mean of the picks so far
    nearest to the mean of all; nothing is picked twice; the lowest row wins a tie.
    """
    whole = torch.ones(1, len(features), dtype=torch.bool, device=features.device)
    return _herd(features.unsqueeze(0), whole, min(k, len(features)))[0]


def _herd(features: Tensor, valid: Tensor, picks: int) -> Tensor:
    """Herd a stack of classes: features (c, N, d), valid (c, N) -> (c, picks) row numbers.

    |mean - (chosen + x) / k| is least where <x, r> - |x|^2 / 2 is largest, with r = k mean - chosen. So each pick is one
    product with the rows; no (N, d) difference is ever formed.
    """
    rows = unit(features) * valid.unsqueeze(2)
    mean = rows.sum(dim=1) / valid.sum(dim=1, keepdim=True).clamp(min=1)
    if not mean.isfinite().all():
        raise TrainingError("exemplars cannot be chosen: the features hold NaN or infinite values")
    penalty = rows.square().sum(dim=2) / 2
    penalty[~valid] = math.inf
    stack = torch.arange(len(rows), device=rows.device)
    transposed = rows.transpose(1, 2)
    residual = mean.clone()
    chosen = torch.empty(len(rows), picks, dtype=torch.int64, device=rows.device)
    for rank in range(picks):
        scores = torch.bmm(residual.unsqueeze(1), transposed).squeeze(1) - penalty
        best = _first_largest(scores)
        chosen[:, rank] = best
        penalty[stack, best] = math.inf
        residual += mean - rows[stack, best]
    return chosen


def _first_largest(scores: Tensor) -> Tensor:
    """Return for each row of `scores: (c, N)` the lowest index among those tied for the largest score."""
    tied = scores >= scores.amax(dim=1, keepdim=True) - TIE
    # A class that has run out of rows scores -inf everywhere and ties with itself; its picks are cut off by the caller.
    return tied.to(torch.uint8).argmax(dim=1)


def herd_classes(features: Tensor, labels: Tensor, k: int, classes: Sequence[int]) -> dict[int, Tensor]:
    """Herd each of `classes` in `features: (N, d)`, `labels: (N,)`: class -> (min(k, n),) ranked row numbers."""
    members = _members(labels, classes)
    herded: dict[int, Tensor] = {}
    for stack in _stacks(members, features.shape[1]):
        longest = len(members[stack[-1]])
        index = torch.zeros(len(stack), longest, dtype=torch.int64, device=features.device)
        valid = torch.zeros(len(stack), longest, dtype=torch.bool, device=features.device)
        for row, c in enumerate(stack):
            index[row, : len(members[c])] = members[c]
            valid[row, : len(members[c])] = True
        ranked = _herd(features[index], valid, min(k, longest))
        for row, c in enumerate(stack):
            herded[c] = members[c][ranked[row, : len(members[c])]]
    return {c: herded[c] for c in classes}


def _members(labels: Tensor, classes: Sequence[int]) -> dict[int, Tensor]:
    """List for each class the rows that carry its label, in order; a class without any is an error."""
    counts = torch.bincount(labels).tolist()
    groups = torch.split(labels.argsort(stable=True), counts)
    missing = [c for c in classes if c >= len(counts) or not counts[c]]
    if missing:
        raise DataError(f"class {missing[0]} has no image to choose exemplars from")
    return {c: groups[c] for c in classes}


def _stacks(members: Mapping[int, Tensor], width: int) -> Iterator[list[int]]:
    """Cut the classes, sorted by size so that little is padded, into stacks of at most STACK numbers."""
    stack: list[int] = []
    for c in sorted(members, key=lambda c: len(members[c])):
        if stack and (len(stack) + 1) * len(members[c]) * width > STACK:
            yield stack
            stack = []
        stack.append(c)
    if stack:
        yield stack


def nearest(features: Tensor, k: int) -> Tensor:
    """Rank the `k` rows of `features: (N, d)` nearest in cosine to the class mean; the lowest row wins a tie.

    Returns (min(k, N),) row numbers.
    """
    rows = unit(features)
    # A sum along each row, not a matrix product: equal rows then have equal scores to the last bit.
    scores = (rows * rows.mean(dim=0)).sum(dim=1)
    if not scores.isfinite().all():
        raise TrainingError("exemplars cannot be chosen: the features hold NaN or infinite values")
    return scores.argsort(descending=True, stable=True)[:k]


@dataclass(frozen=True)
class Memory:
    """What is kept of the classes learned so far.

    images: the exemplars, sorted by class and within a class by rank; None when there are none.
    held:   images held out for a bias correction (BiC), never trained on; None when there are none.
    means:  (C, d) stored class means of honest AME; None when they are not kept.
    embed:  whether image files are stored as their bytes or as references with content hashes.
    """

    images: Images | None = None
    held: Images | None = None
    means: Tensor | None = None
    embed: bool = True

    @classmethod
    def empty(cls, *, embed: bool = True) -> "Memory":
        """Return the memory before the first class is learned."""
        return cls(embed=embed)

    def per_class(self) -> dict[int, int]:
        """Count the exemplars: class -> number, for the classes that have any."""
        if self.images is None:
            return {}
        found, counts = self.images.labels.unique(return_counts=True)
        return dict(zip(found.tolist(), counts.tolist(), strict=True))

    @property
    def nbytes(self) -> int:
        """The number of bytes that the stored memory takes."""
        return sum(tensor.nbytes for tensor in self.to_tensors().values())

    def update(
        self, candidates: Images, features: Tensor, classes: Sequence[int], *, quota: int, selection: Selection
    ) -> "Memory":
        """Choose the exemplars of `classes` among the candidates and cut those of the others to their first `quota`.

        features: (N, d) of the candidates, un-augmented, in eval mode. A class that comes back is chosen anew: hand over
        its old exemplars together with its new images.
        """
        if len(features) != len(candidates):
            raise DataError(f"{len(candidates)} candidates have {len(features)} features: one each is needed")
        parts = []
        if self.images is not None:
            others = [c for c in self.per_class() if c not in set(classes)]
            parts.append(_take(self.images, [rows[:quota] for rows in _members(self.images.labels, others).values()]))
        parts.append(_take(candidates, _choose(candidates, features, classes, quota, selection)))
        parts = [part for part in parts if len(part)]
        if not parts:
            return replace(self, images=None)
        images = concat(parts)
        # Stable, so that the ranks inside a class stay.
        return replace(self, images=images.select(images.labels.argsort(stable=True)))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all that is kept as named tensors, ready for a safetensors file."""
        tensors = {"embed": torch.tensor(self.embed)}
        if self.means is not None:
            tensors["means"] = self.means
        for name, images in (("images", self.images), ("held", self.held)):
            if images is not None:
                parts = to_tensors(images, embed=self.embed)
                tensors.update({f"{name}.{key}": tensor for key, tensor in parts.items()})
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Memory":
        """Rebuild the memory from what `to_tensors` gave."""

        def images(name: str) -> Images | None:
            prefix = f"{name}."
            parts = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            return from_tensors(parts) if parts else None

        return cls(images("images"), images("held"), tensors.get("means"), bool(tensors["embed"]))


def _take(images: Images, rows: Sequence[Tensor]) -> Images:
    """Return the images of all the given rows."""
    return images.select(torch.cat([torch.empty(0, dtype=torch.int64), *rows]))


def _choose(candidates: Images, features: Tensor, classes: Sequence[int], k: int, selection: Selection) -> list[Tensor]:
    """Rank the first `k` candidates of each class by the selection asked for."""
    if selection == "herding":
        return list(herd_classes(features, candidates.labels, k, classes).values())
    if selection == "nearest":
        return [rows[nearest(features[rows], k)] for rows in _members(candidates.labels, classes).values()]
    raise ConfigError(f"selection = {selection!r}: allowed are 'herding' and 'nearest'")
