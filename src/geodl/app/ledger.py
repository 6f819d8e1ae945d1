"""Which images a model in closed form has learned: known by their pixels, with their class and where each came from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from geodl.closed_form.doubts import Doubts
from geodl.core.tensors import part, shaped
from geodl.data.images import short_hashes
from geodl.model.classifiers import LeftOut

UNKNOWN_KEY = 0
"""The key of an image that an earlier version learned and of which the features alone are known."""
NONE = -1
"""No class."""
GONE = -2
"""The class of an image that is forgotten."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """The learned images; where their features are kept, in the same order.

    keys:        int64 (N,), short hashes of the pixels that the network sees.
    labels:      int64 (N,), the rows of their classes.
    likely:      int64 (N,), the class that an image with a doubtful label looks like; -1: not doubted.
    confidences: float32 (N,), in that class.
    confirmed:   bool (N,), images whose class a person has set or confirmed: never doubted.
    names:       where each came from.
    """

    keys: Tensor
    labels: Tensor
    likely: Tensor
    confidences: Tensor
    confirmed: Tensor
    names: tuple[str, ...]

    @classmethod
    def empty(cls, size: int = 0) -> Self:
        """Return so many images that nothing is known of."""
        nothing = torch.full((size,), NONE, dtype=torch.int64)
        unsure = torch.zeros(size)
        keys = torch.full((size,), UNKNOWN_KEY, dtype=torch.int64)
        return cls(keys, nothing, nothing, unsure, unsure.bool(), ("",) * size)

    def __len__(self) -> int:
        return len(self.keys)

    def padded(self, size: int) -> "Ledger":
        """Return at least so many images, nothing being known of those that are added."""
        more = Ledger.empty(max(0, size - len(self)))
        joined = {
            name: torch.cat([mine, more._columns[name]]) for name, mine in self._columns.items()
        }
        return Ledger(**joined, names=self.names + more.names)

    def beside(self, labels: Tensor | None) -> "Ledger":
        """Return as many images as features are kept; nothing but the class, (N,), is known of those that others have learned."""
        return self if labels is None else replace(self.padded(len(labels)), labels=labels)

    def select(self, rows: Tensor) -> "Ledger":
        """Return some of the images: a mask, or their places."""
        places = torch.arange(len(self))[rows]
        columns = {name: each[places] for name, each in self._columns.items()}
        return Ledger(**columns, names=tuple(self.names[i] for i in places.tolist()))

    def learned(
        self, digests: Sequence[str], names: Sequence[str], labels: Tensor, left_out: LeftOut
    ) -> "Ledger":
        """Return the images after a step that learned some, as leave-one-out places and doubts them."""
        keys = short_hashes(digests)
        places = self._places(keys) if left_out.latest is None else left_out.latest
        if not len(places):
            return self
        found = self.padded(int(places.max()) + 1)
        new = found.keys[places] == UNKNOWN_KEY
        all_keys, all_labels, all_names = (
            found.keys.clone(),
            found.labels.clone(),
            list(found.names),
        )
        all_keys[places[new]] = keys[new]
        all_labels[places[new]] = labels[new]
        for i in new.nonzero().squeeze(1).tolist():
            all_names[int(places[i])] = names[i]
        found = replace(found, keys=all_keys, labels=all_labels, names=tuple(all_names))
        if left_out.doubts is None:
            return found
        if left_out.latest is None:
            return found.doubting(left_out.doubts.at(places), places)
        return found.doubting(left_out.doubts)

    def _places(self, keys: Tensor) -> Tensor:
        """Return the place of each key, (n,): where it is, or after all that are there."""
        known = {key: i for i, key in enumerate(self.keys.tolist()) if key != UNKNOWN_KEY}
        unknown = len(self) - len(known)
        places = [known.setdefault(key, unknown + len(known)) for key in keys.tolist()]
        return torch.tensor(places, dtype=torch.int64)

    def doubting(self, doubts: Doubts, among: Tensor | None = None) -> "Ledger":
        """Return the images with these doubts, instead of those before; among: of these images, (n,), alone."""
        likely, confidences = self.likely.clone(), self.confidences.clone()
        likely[slice(None) if among is None else among] = NONE
        likely[doubts.rows], confidences[doubts.rows] = doubts.likely, doubts.confidences
        likely[self.confirmed] = NONE
        return replace(self, likely=likely, confidences=torch.where(likely >= 0, confidences, 0.0))

    def moved(self, places: Tensor, row: int) -> "Ledger":
        """Return the images with the class that a person has set for some of them."""
        labels, confirmed, likely = self.labels.clone(), self.confirmed.clone(), self.likely.clone()
        labels[places], confirmed[places], likely[places] = row, True, NONE
        return replace(self, labels=labels, confirmed=confirmed, likely=likely)

    def without_class(self, row: int) -> "Ledger":
        """Return the images of the other classes; those after it move up."""
        rest = self.select(self.labels != row)
        likely = torch.where(rest.likely == row, NONE, rest.likely)
        labels, likely = (each - (each > row).long() for each in (rest.labels, likely))
        return replace(rest, labels=labels, likely=likely)

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "names"
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all but the names, by name."""
        return {f"learned.{name}": each for name, each in self._columns.items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], names: Sequence[Any], classes: int
    ) -> Self:
        """Undo `to_tensors`; nothing is known where an earlier version wrote none."""
        found = part(tensors, "learned")
        if not found:
            return cls.empty()
        ledger = cls(**found, names=tuple(str(name) for name in names))
        for name, empty in cls.empty()._columns.items():
            shaped(found[name], name, len(ledger.names), dtype=empty.dtype)
        for rows in (ledger.labels, ledger.likely):
            if bool((rows < NONE).any() or (rows >= classes).any()):
                raise ValueError(f"a learned image of none of {classes} classes")
        return ledger
