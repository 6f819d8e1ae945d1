"""The exemplar memory: which images of the old classes are kept, and how many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from geodl.config import derive
from geodl.data.images import Images, concat, from_tensors, to_tensors
from geodl.errors import ConfigError, DataError
from geodl.herding import herd_classes, members, nearest

Budget = Literal["per_class", "total"]
Selection = Literal["herding", "nearest"]


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
            parts.append(_take(self.images, [rows[:quota] for rows in members(self.images.labels, others).values()]))
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
            kept = [rows[:count] for rows in members(held.labels, sorted(set(held.labels.tolist()))).values()]
            held = held.select(torch.cat(kept).sort().values)
        chosen = torch.zeros(len(images), dtype=torch.bool)
        for c, rows in members(images.labels, fresh if count else ()).items():
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
        return [rows[nearest(features[rows], k)] for rows in members(candidates.labels, classes).values()]
    raise ConfigError(f"selection = {selection!r}: allowed are 'herding' and 'nearest'")
