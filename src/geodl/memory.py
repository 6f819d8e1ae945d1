"""The exemplar memory: which images of the old classes are kept, and how many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from geodl.config import derive
from geodl.data.images import Images, concat, from_tensors, to_tensors
from geodl.errors import DataError
from geodl.files import part
from geodl.herding import first_of_each, herding, members, nearest

Budget = Literal["per_class", "total"]
Selection = Literal["herding", "nearest"]


def quota(classes: int, exemplars: int, budget: Budget) -> int:
    """Say how many exemplars each of `classes` classes may keep.

    `per_class`: `exemplars` for every class; `total`: `exemplars` shared evenly by all classes, rounded down.
    """
    return exemplars if budget == "per_class" else exemplars // max(classes, 1)


@dataclass(frozen=True)
class Memory:
    """What is kept of the classes learned so far.

    images: the exemplars, sorted by class and within a class by rank; None when there are none.
    held:   images held out for a bias correction (BiC), never trained on; None when there are none.
    means:  (C, d) class means of all samples, moved by drift since (NCM); None before the first class is learned.
    exemplar_means: (C, d) class means of the exemplars under the present network (k-NME); None when there are none.
    own:    what the method keeps besides, as named tensors.
    store_images: whether image files are stored as their bytes or as references with content hashes.
    """

    images: Images | None = None
    held: Images | None = None
    means: Tensor | None = None
    exemplar_means: Tensor | None = None
    own: Mapping[str, Tensor] = field(default_factory=dict)
    store_images: bool = True

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
        choose = herding if selection == "herding" else nearest
        chosen = [rows[choose(features[rows], quota)] for rows in members(candidates.labels, classes).values()]
        parts = [_take(candidates, chosen)]
        if self.images is not None:
            others = [c for c in self.per_class() if c not in set(classes)]
            kept = [rows[:quota] for rows in members(self.images.labels, others).values()]
            parts.insert(0, _take(self.images, kept))
        images = concat(parts)
        if not len(images):
            return replace(self, images=None)
        # Stable, so that the ranks inside a class stay.
        return replace(self, images=images.select(images.labels.argsort(stable=True)))

    def hold_out(self, images: Images, fresh: Sequence[int], count: int, seed: int) -> tuple[Images, "Memory"]:
        """Set aside, for good, `count` images of each `fresh` class; return the rest, to train on, and the memory.

        At least one image of a class is left. Classes held out before keep their first `count`: a total budget shrinks.
        """
        held = self.held
        if held is not None:
            held = held.select(first_of_each(held.labels, count).sort().values)
        chosen = torch.zeros(len(images), dtype=torch.bool)
        for c, rows in members(images.labels, fresh if count else ()).items():
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(derive(seed, "held out", c)))
            chosen[rows[order[: min(count, len(rows) - 1)]]] = True
        parts = [part for part in (held, images.select(chosen)) if part is not None and len(part)]
        return images.select(~chosen), replace(self, held=concat(parts) if parts else None)

    def without(self, gone: int) -> "Memory":
        """Return the memory without a class; those after it move up."""

        def rest(images: Images | None) -> Images | None:
            return None if images is None else without_class(images, gone)

        def rows(means: Tensor | None) -> Tensor | None:
            return None if means is None else torch.cat([means[:gone], means[gone + 1 :]])

        return replace(
            self,
            images=rest(self.images),
            held=rest(self.held),
            means=rows(self.means),
            exemplar_means=rows(self.exemplar_means),
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all that is kept as named tensors, ready for a safetensors file."""
        tensors = {"store_images": torch.tensor(self.store_images)}
        for name in ("means", "exemplar_means"):
            if (mean := getattr(self, name)) is not None:
                tensors[name] = mean
        tensors |= {f"own.{name}": tensor for name, tensor in self.own.items()}
        for name, images in (("images", self.images), ("held", self.held)):
            if images is not None:
                parts = to_tensors(images, store_images=self.store_images)
                tensors.update({f"{name}.{key}": tensor for key, tensor in parts.items()})
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Memory":
        """Rebuild the memory from what `to_tensors` gave."""

        def images(name: str) -> Images | None:
            parts = part(tensors, name)
            return from_tensors(parts) if parts else None

        means, exemplar_means = tensors.get("means"), tensors.get("exemplar_means")
        store_images = bool(tensors["store_images"])
        return cls(images("images"), images("held"), means, exemplar_means, part(tensors, "own"), store_images)


def insist_on_labels(classes: int, *stored: Images | None) -> None:
    """Raise a ValueError where stored images have labels of no class."""
    for images in stored:
        if images is not None and len(images) and not 0 <= images.labels.min() <= images.labels.max() < classes:
            raise ValueError(f"an image is labelled {int(images.labels.max())} of {classes} classes")


def without_class(images: Images, gone: int) -> Images | None:
    """Leave out the images of a class and close the gap in the labels; None where nothing is left."""
    rest = images.select(images.labels != gone)
    return replace(rest, labels=rest.labels - (rest.labels > gone).long(), names=()) if len(rest) else None


def _take(images: Images, rows: Sequence[Tensor]) -> Images:
    """Return the images of all the given rows."""
    return images.select(torch.cat([torch.empty(0, dtype=torch.int64), *rows]))
