"""The exemplar memory: which images of the old classes are kept, and how many."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.config import derive
from geodl.data.images import Images, concat, from_tensors, to_tensors
from geodl.errors import ConfigError, DataError, TrainingError

Budget = Literal["per_class", "total"]
Selection = Literal["herding", "nearest"]

# Rounding a unit vector moves a score by its machine precision times the lengths it is made of. Scores that differ by no
# more than some thousand times that are a tie: which of two equally good images is kept must not hang on rounding.
TIE = 1e-12

# Rows that are shorter count as zeros: the squares of such numbers leave float64. Those of any float32 are far longer.
SHORTEST = 1e-150

# Classes are herded together in stacks of at most this many numbers: small classes share the cost of a call, while
# the stack (25 MB) still fits a large processor's cache as the picks go over it again and again. It is filled block by block.
STACK = 3 << 22
BLOCK = 1 << 18


def unit(features: Tensor) -> Tensor:
    """Return the rows of `features: (..., d)` with length 1, in float64; rows of zeros stay zero.

    In float64 the square of any float32 is a normal number, so lengths of 1e-30 or 1e30 need no care.
    """
    return F.normalize(features.double(), dim=-1, eps=SHORTEST)


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
    if not len(features):
        return torch.empty(0, dtype=torch.int64, device=features.device)
    return herd_classes(features, torch.zeros(len(features), dtype=torch.int64, device=features.device), k, [0])[0]


def herd_classes(features: Tensor, labels: Tensor, k: int, classes: Sequence[int]) -> dict[int, Tensor]:
    """Herd each of `classes` in `features: (N, d)`, `labels: (N,)`: class -> (min(k, n),) ranked row numbers."""
    members = _members(labels, classes)
    stacks = list(_stacks(members, features.shape[1]))
    # Reduced precision is slower and less sure than float32 on other devices. One buffer serves all stacks: a
    # new one's pages may take longer to get from the operating system than to fill.
    precision = torch.float16 if features.device.type == "cpu" else torch.float32
    size = max((len(stack) * len(members[stack[-1]]) for stack in stacks), default=0) * features.shape[1]
    buffer = torch.empty(size, dtype=precision, device=features.device)
    herded: dict[int, Tensor] = {}
    for stack in stacks:
        longest = len(members[stack[-1]])
        index = torch.zeros(len(stack), longest, dtype=torch.int64, device=features.device)
        valid = torch.zeros(len(stack), longest, dtype=torch.bool, device=features.device)
        for row, c in enumerate(stack):
            index[row] = members[c][0]
            index[row, : len(members[c])] = members[c]
            valid[row, : len(members[c])] = True
        ranked = _herd(features, index, valid, min(k, longest), buffer)
        for row, c in enumerate(stack):
            herded[c] = members[c][ranked[row, : len(members[c])]]
    return {c: herded[c] for c in classes}


def _herd(features: Tensor, index: Tensor, valid: Tensor, picks: int, buffer: Tensor) -> Tensor:
    """Herd a stack of classes, whose rows in features (N, d) are index (c, n) where valid (c, n): (c, picks) places in it.

    |mean - (chosen + x) / k| is least where <x, k mean - chosen> - |x|^2 / 2 is largest. Products in half precision, which
    take half the time of float32 ones, say which rows may be that one; float64 decides among those few.
    """
    rough, lengths, mean = _stack(features, index, valid, buffer)
    if not mean.isfinite().all():
        raise TrainingError("exemplars cannot be chosen: the features hold NaN or infinite values")

    def product(w: Tensor) -> Tensor:
        return torch.bmm(w.to(rough.dtype).unsqueeze(1), rough.transpose(1, 2)).squeeze(1)

    stack = torch.arange(len(index), device=index.device)
    lowest = torch.full_like(mean[:, 0], -math.inf)
    base = product(mean) + torch.where(valid, (lengths < math.inf).float() / -2, -math.inf)
    slope, floor = _doubt(features.shape[1])
    # Of the product with the mean, and what does not depend on the lag in the product with that.
    doubt = torch.linalg.vector_norm(mean, dim=1) * slope + 2 * floor
    places, rows, lengths = index.shape[1], index.flatten(), lengths.flatten()
    lag = torch.zeros_like(mean)  # how far the sum of the picks is behind their number of means
    picked: list[Tensor] = []
    for _ in range(picks):
        scores = base + product(lag) if picked else base
        reach = torch.linalg.vector_norm(lag, dim=1)
        least = scores.amax(1) - torch.add(doubt, reach, alpha=slope).float()
        candidates = torch.nonzero((scores >= least.unsqueeze(1)).flatten()).squeeze(1)
        c = candidates // places
        x = features.index_select(0, rows.index_select(0, candidates)).double()
        x /= lengths.index_select(0, candidates).unsqueeze(1)
        # In terms of y = x - mean the score is <y, lag> - |y|^2 / 2, which keeps its digits when all features are alike.
        y = x - mean.index_select(0, c)
        size = torch.linalg.vector_norm(y, dim=1)
        score = (y * lag.index_select(0, c)).sum(1) - size.square() / 2
        best = lowest.scatter_reduce(0, c, score, "amax")
        slack = TIE * (reach.index_select(0, c) + size)
        tied = torch.nonzero(score + slack >= best.index_select(0, c)).squeeze(1)
        first = tied[torch.searchsorted(c[tied], stack)]  # of each class
        picked.append(candidates[first] % places)
        base.scatter_(1, picked[-1].unsqueeze(1), -math.inf)
        base[:, 0].clamp_(min=-1e30)  # where a class has run out, all its places would be candidates
        lag += mean - x[first]
    return torch.stack(picked, 1) if picked else index[:, :0]


def _doubt(d: int) -> tuple[float, float]:
    """Bound the error of a difference of two rough scores, products of unit rows with w (d,): by slope |w| + floor.

    Both factors and their product are rounded, by half an eps each, and numbers below `tiny` to multiples of tiny eps; the
    sum of d terms, and what is added to it, is rounded in float32.
    """
    half, single = torch.finfo(torch.float16), torch.finfo(torch.float32)
    floor = half.tiny * half.eps * (d + 3)
    return 3.1 * half.eps + 2 * d * single.eps + floor, floor


def _stack(features: Tensor, index: Tensor, valid: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit rows (c, n, d), written into the buffer, and in float64 their lengths (c, n), inf for zeros, and mean (c, d).

    Block by block: a float64 copy of a whole stack would leave the cache and cost as much as all the picks.
    """
    (c, n), d = index.shape, features.shape[1]
    rough = buffer[: c * n * d].view(c, n, d)
    lengths = torch.empty(c, n, dtype=torch.float64, device=index.device)
    total = torch.zeros(c, 1, d, dtype=torch.float64, device=index.device)
    step = max(1, BLOCK // max(c * d, 1))
    for start in range(0, n, step):
        part = slice(start, start + step)
        rows = features.index_select(0, index[:, part].flatten()).view(c, -1, d).double()
        length = torch.linalg.vector_norm(rows, dim=2)
        lengths[:, part] = length = torch.where(length > SHORTEST, length, math.inf)
        rows *= length.reciprocal().unsqueeze(2)
        rough[:, part] = rows
        total = torch.baddbmm(total, valid[:, None, part].double(), rows)
    return rough, lengths, total.squeeze(1) / valid.sum(1, keepdim=True).clamp(min=1)


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
    means:  (C, d) stored class means of NCM with drift compensation; None when they are not kept.
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
        counts = torch.bincount(self.images.labels).tolist()
        return {c: count for c, count in enumerate(counts) if count}

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
        images = concat(parts)
        if not len(images):
            return replace(self, images=None)
        # Stable, so that the ranks inside a class stay.
        return replace(self, images=images.select(images.labels.argsort(stable=True)))

    def hold_out(self, images: Images, fresh: Sequence[int], count: int, seed: int) -> tuple[Images, "Memory"]:
        """Set aside, for good, `count` images of each `fresh` class; give the rest, to train on, and the memory.

        At least one image of a class is left. Classes held out before keep their first `count`: a total budget shrinks.
        """
        held = self.held
        if held is not None:
            kept = [rows[:count] for rows in _members(held.labels, sorted(set(held.labels.tolist()))).values()]
            held = held.select(torch.cat(kept).sort().values)
        chosen = torch.zeros(len(images), dtype=torch.bool)
        for c, rows in _members(images.labels, fresh if count else ()).items():
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(derive(seed, "held out", c)))
            chosen[rows[order[: min(count, len(rows) - 1)]]] = True
        parts = [part for part in (held, images.select(chosen)) if part is not None and len(part)]
        return images.select(~chosen), replace(self, held=concat(parts) if parts else None)

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
