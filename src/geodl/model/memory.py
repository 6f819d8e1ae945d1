"""The exemplar memory: stored images of the classes learned so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from geodl.core.keys import derive
from geodl.core.tensors import part
from geodl.data.images import Images, concat, from_tensors, to_tensors
from geodl.model.herding import SELECTORS, first_of_each, members

Budget = Literal["per_class", "total"]


def quota(classes: int, exemplars: int, budget: Budget) -> int:
    """Return the number of exemplars per class.

    `per_class`: `exemplars` for every class; `total`: `exemplars` shared by all classes, rounded down.
    """
    return exemplars if budget == "per_class" else exemplars // max(classes, 1)


@dataclass(frozen=True)
class Memory:
    """The stored images of the classes learned so far; labels are rows of the head.

    images: the exemplars, sorted by class and within a class by rank; None: there are none.
    held:   images held out for a bias correction (BiC), never trained on; None: there are none.
    store_images: whether image files are stored, or only references with content hashes.
    """

    images: Images | None = None
    held: Images | None = None
    store_images: bool = True

    def per_class(self) -> dict[int, int]:
        """Return the number of exemplars of each class that has any."""
        if self.images is None:
            return {}
        counts = torch.bincount(self.images.labels).tolist()
        return {c: count for c, count in enumerate(counts) if count}

    @property
    def nbytes(self) -> int:
        """The size of the stored memory in bytes."""
        return sum(tensor.nbytes for tensor in self.to_tensors().values())

    def update(
        self,
        candidates: Images,
        features: Tensor,
        classes: Sequence[int],
        *,
        quota: int,
        selection: str,
    ) -> "Memory":
        """Select the exemplars of `classes` and keep the first `quota` of the others.

        features: (N, d) of the candidates, un-augmented, in eval mode. For a returning class, the candidates are its old
        exemplars and its new images.
        """
        choose = SELECTORS[selection]
        mine = members(candidates.labels, classes).values()
        parts = [_take(candidates, [rows[choose(features[rows], quota)] for rows in mine])]
        if self.images is not None:
            others = [c for c in self.per_class() if c not in set(classes)]
            kept = [rows[:quota] for rows in members(self.images.labels, others).values()]
            parts.insert(0, _take(self.images, kept))
        images = concat(parts)
        if not len(images):
            return replace(self, images=None)
        # Stable: the order within a class is its ranking.
        return replace(self, images=images.select(images.labels.argsort(stable=True)))

    def hold_out(
        self, images: Images, fresh: Sequence[int], count: int, seed: int
    ) -> tuple[Images, "Memory"]:
        """Hold out `count` images of each `fresh` class permanently; return the rest and the memory.

        At least one image of a class remains for training. Of earlier classes the first `count` stay held out, since a
        total budget shrinks.
        """
        held = self.held
        if held is not None:
            held = held.select(first_of_each(held.labels, count).sort().values)
        chosen = torch.zeros(len(images), dtype=torch.bool)
        for c, rows in members(images.labels, fresh if count else ()).items():
            generator = torch.Generator().manual_seed(derive(seed, "held out", c))
            order = torch.randperm(len(rows), generator=generator)
            chosen[rows[order[: min(count, len(rows) - 1)]]] = True
        parts = [part for part in (held, images.select(chosen)) if part is not None and len(part)]
        return images.select(~chosen), replace(self, held=concat(parts) if parts else None)

    def without(self, row: int) -> "Memory":
        """Return the memory without a class; the rows of later classes move up."""
        images, held = without_class(self.images, row), without_class(self.held, row)
        return replace(self, images=images, held=held)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the memory as named tensors."""
        tensors = {"store_images": torch.tensor(self.store_images)}
        for name, images in (("images", self.images), ("held", self.held)):
            if images is not None:
                parts = to_tensors(images, store_images=self.store_images)
                tensors |= {f"{name}.{key}": tensor for key, tensor in parts.items()}
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], data_dir: Path | None = None) -> "Memory":
        """Return the memory of `to_tensors`; data_dir: where referenced files may be read."""
        images, held = part(tensors, "images"), part(tensors, "held")
        return cls(
            from_tensors(images, data_dir) if images else None,
            from_tensors(held, data_dir) if held else None,
            bool(tensors["store_images"]),
        )


def insist_on_labels(classes: int, *stored: Images | None) -> None:
    """Raise a ValueError if stored images have labels that are no class."""
    for images in stored:
        if images is None or not len(images):
            continue
        if not 0 <= images.labels.min() <= images.labels.max() < classes:
            worst = int(images.labels.max())
            raise ValueError(f"an image is labelled {worst} of {classes} classes")


def without_class(images: Images | None, row: int) -> Images | None:
    """Return the images without those of a class, later labels moved up; None if none are left."""
    if images is None:
        return None
    rest = images.select(images.labels != row)
    if not len(rest):
        return None
    return replace(rest, labels=rest.labels - (rest.labels > row).long(), names=())


def _take(images: Images, rows: Sequence[Tensor]) -> Images:
    """Return the images of all these rows."""
    return images.select(torch.cat([torch.empty(0, dtype=torch.int64), *rows]))
