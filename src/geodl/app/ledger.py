"""The images that a model in closed form has learned: hashes of their pixels, classes, doubts and origins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from geodl.closed_form.doubts import Doubts
from geodl.core.tensors import part, shaped
from geodl.data.images import short_hashes
from geodl.model.classifiers import LeftOut

UNKNOWN_KEY = 0
"""The key of an image of version 0.2, which kept only its features."""
NONE = -1
"""No class."""
GONE = -2
"""The class of an image that is forgotten."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """The learned images; where their features are kept, in the same order.

    keys:        int64 (N,), short hashes of the pixels that the network sees.
    labels:      int64 (N,), the rows of their classes.
    likely:      int64 (N,), the class that an image with a doubtful label looks like; -1: not doubtful.
    confidences: float32 (N,), in that class.
    confirmed:   bool (N,), images whose class the user has set or confirmed: never doubtful.
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
        """Return `size` images of which nothing is known."""
        keys = torch.full((size,), UNKNOWN_KEY, dtype=torch.int64)
        no_class, zeros = torch.full((size,), NONE, dtype=torch.int64), torch.zeros(size)
        return cls(keys, no_class, no_class, zeros, zeros.bool(), ("",) * size)

    def __len__(self) -> int:
        return len(self.keys)

    def padded(self, size: int) -> "Ledger":
        """Return at least `size` images; nothing is known of those that are added."""
        more = Ledger.empty(max(0, size - len(self)))._columns
        columns = {name: torch.cat([each, more[name]]) for name, each in self._columns.items()}
        return Ledger(**columns, names=self.names + ("",) * len(more["keys"]))

    def beside(self, labels: Tensor | None) -> "Ledger":
        """Return one image for each label (N,) of the kept features; only the class of those of version 0.2 is known."""
        return self if labels is None else replace(self.padded(len(labels)), labels=labels)

    def select(self, rows: Tensor) -> "Ledger":
        """Return some of the images: a mask, or their places."""
        places = torch.arange(len(self))[rows]
        columns = {name: each[places] for name, each in self._columns.items()}
        return Ledger(**columns, names=tuple(self.names[i] for i in places.tolist()))

    def learned(
        self, digests: Sequence[str], names: Sequence[str], labels: Tensor, left_out: LeftOut
    ) -> "Ledger":
        """Return the images after a step that learned some, with the places and doubts of leave-one-out."""
        keys, doubts = short_hashes(digests), left_out.doubts
        places = self._places(keys) if left_out.latest is None else left_out.latest
        if not len(places):
            return self
        found = self.padded(int(places.max()) + 1)
        new = found.keys[places] == UNKNOWN_KEY
        all_keys, all_labels, origins = found.keys.clone(), found.labels.clone(), list(found.names)
        all_keys[places[new]], all_labels[places[new]] = keys[new], labels[new]
        for i in new.nonzero().squeeze(1).tolist():
            origins[int(places[i])] = names[i]
        found = replace(found, keys=all_keys, labels=all_labels, names=tuple(origins))
        if left_out.latest is None and doubts is not None:
            return found.doubting(doubts.at(places), places)
        return found.doubting(doubts)

    def _places(self, keys: Tensor) -> Tensor:
        """Return the place of each key, (n,); new ones come after all others."""
        known = {key: i for i, key in enumerate(self.keys.tolist()) if key != UNKNOWN_KEY}
        unknown = len(self) - len(known)
        places = [known.setdefault(key, unknown + len(known)) for key in keys.tolist()]
        return torch.tensor(places, dtype=torch.int64)

    def doubting(self, doubts: Doubts | None, among: Tensor | None = None) -> "Ledger":
        """Return the images with these doubts, or the old ones for None; among: only those of these images, (n,), change."""
        if doubts is None:
            return self
        likely, confidences = self.likely.clone(), self.confidences.clone()
        likely[slice(None) if among is None else among] = NONE
        likely[doubts.rows], confidences[doubts.rows] = doubts.likely, doubts.confidences
        likely[self.confirmed] = NONE
        return replace(self, likely=likely, confidences=torch.where(likely >= 0, confidences, 0.0))

    def moved(self, places: Tensor, row: int) -> "Ledger":
        """Return the images after the user has set the class of some of them."""
        labels, confirmed, likely = self.labels.clone(), self.confirmed.clone(), self.likely.clone()
        labels[places], confirmed[places], likely[places] = row, True, NONE
        return replace(self, labels=labels, confirmed=confirmed, likely=likely)

    def without_class(self, row: int) -> "Ledger":
        """Return the images of the other classes; the rows of later ones move up."""
        rest = self.select(self.labels != row)
        likely = torch.where(rest.likely == row, NONE, rest.likely)
        labels, likely = (each - (each > row).long() for each in (rest.labels, likely))
        return replace(rest, labels=labels, likely=likely)

    @property
    def _columns(self) -> dict[str, Tensor]:
        """Return all but the names, by name."""
        return {key: each for key, each in vars(self).items() if key != "names"}

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the columns as tensors to store."""
        return {f"learned.{name}": each for name, each in self._columns.items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], names: Sequence[Any], classes: int
    ) -> Self:
        """Undo `to_tensors`; a model of version 0.2 has no such tensors."""
        columns = part(tensors, "learned")
        if not columns:
            return cls.empty()
        ledger = cls(**columns, names=tuple(map(str, names)))
        for name, empty in cls.empty()._columns.items():
            shaped(columns[name], name, len(ledger.names), dtype=empty.dtype)
        for rows in (ledger.labels, ledger.likely):
            if bool((rows < NONE).any() or (rows >= classes).any()):
                raise ValueError(f"a learned image of none of {classes} classes")
        return ledger
