"""What a fit leaves: for prediction, and what leave-one-out says of the learned images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from geodl.closed_form.choices import temperature, threshold
from geodl.closed_form.doubts import Doubts
from geodl.closed_form.expansion import Blocks, Expansion, Standardization
from geodl.closed_form.novelty import KNOWN, REJECTED, Novelty
from geodl.closed_form.random_features import RandomFeatures
from geodl.core.tensors import shaped


@dataclass(frozen=True)
class Fitted:
    """All that maps features to scores: random features, head (M, classes) float32.

    temperature: of the softmax that makes confidences of the scores; novelty: what gives the probability that an image is of a
    known class; threshold: of that probability, below which an image is called unknown. Without novelty, as in models of version
    0.2, it is that of the largest score. offsets: (classes,) float32, added to the scores where classes are of very unequal size.
    """

    expand: RandomFeatures
    head: Tensor
    temperature: float
    threshold: float = -math.inf
    novelty: Novelty | None = None
    offsets: Tensor | None = None

    def confidences(self, scores: Tensor, near: Tensor | None) -> Tensor:
        """Return the confidence (N,) in the likeliest class for scores (N, classes) and nearness (N,)."""
        found = (scores / self.temperature).softmax(dim=1).amax(1)
        if self.novelty is None or near is None:
            return found
        return found * self.novelty.known(scores, near)

    def scores(self, z: Blocks) -> Tensor:
        """Return the scores (N, classes) of features z: (N, d_b) by block."""
        scores = self.expand(z).to(self.head.dtype) @ self.head
        return scores if self.offsets is None else scores + self.offsets

    def without(self, gone: int) -> Fitted:
        """Return the head without the column of a class."""
        stay = torch.arange(self.head.shape[1]) != gone
        offsets = None if self.offsets is None else self.offsets[stay]
        novelty = self.novelty and self.novelty.without(gone)
        head = self.head[:, stay].contiguous()
        return replace(self, head=head, novelty=novelty, offsets=offsets)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all numbers as named tensors; the expansion as its sizes, in the order of the blocks' names."""
        blocks = self.expand.expansion.sizes
        sizes = torch.tensor([blocks[name] for name in sorted(blocks)])
        numbers = torch.tensor([self.temperature, self.threshold], dtype=torch.float64)
        found = {"head": self.head, "numbers": numbers, "sizes": sizes}
        if self.offsets is not None:
            found["offsets"] = self.offsets
        novelty = self.novelty.to_tensors() if self.novelty else {}
        return self.expand.standardization.to_tensors() | found | novelty

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], seed: int) -> Fitted:
        """Undo `to_tensors`; the expansion is drawn again from its seed."""
        standardization = Standardization.from_tensors(tensors)
        stored = shaped(tensors["sizes"], "sizes", None, dtype=torch.int64).tolist()
        sizes = dict(zip(sorted(standardization.mean), stored, strict=True))
        temperature, threshold = tensors["numbers"].tolist()
        if not 0 < temperature < math.inf or math.isnan(threshold):
            raise ValueError(f"temperature {temperature}, threshold {threshold}")
        head, offsets = shaped(tensors["head"], "head", sum(sizes.values()), None), None
        classes, novelty = head.shape[1], Novelty.from_tensors(tensors)
        if "offsets" in tensors:
            offsets = shaped(tensors["offsets"], "offsets", classes)
        if novelty is not None and novelty.fitted:
            shaped(novelty.sums, "directions", classes, None)
        expand = RandomFeatures(standardization, Expansion(sizes, seed))
        return cls(expand, head, temperature, threshold, novelty, offsets)


@dataclass(frozen=True)
class Judgement:
    """How leave-one-out judges learned images: scores (n, classes) and nearness (n,), each without its image or whole series.

    labels:  int64 (n,).
    near:    None where novelty is not known.
    strangers: (m, 2), scores and nearness of images whose whole class is left out; None: not known.
    offsets: (classes,), which the scores include; None: none.
    rows, series, gains: as in `LeftOut`.
    """

    labels: Tensor
    scores: Tensor
    near: Tensor | None
    offsets: Tensor | None = None
    rows: Tensor | None = None
    series: Tensor | None = None
    gains: Tensor | None = None
    strangers: Tensor | None = None


@dataclass(frozen=True)
class LeftOut:
    """What the fit without an image predicts for it, for learned images whose class can be judged.

    labels, predictions: int64 (N,).
    confidences: 0..1 (N,); None where they were not kept.
    rows:        (N,) places of the images among those whose features are kept; None without these.
    latest:      (n,) places of the last phase's images among those whose features are kept; not stored.
    doubts:      images whose labels the others contradict, by these places or, where no features are kept, by their position in
                 the last phase; not stored.
    series:      (N,), equal for images of one series, which was left out as a whole; None: each was left out alone.
    gains:       (N,), how much more often they would be right by a fit with all series of their class.
    """

    labels: Tensor
    predictions: Tensor
    confidences: Tensor | None
    rows: Tensor | None = None
    latest: Tensor | None = None
    doubts: Doubts | None = None
    series: Tensor | None = None
    gains: Tensor | None = None

    def to_tensors(self) -> dict[str, Tensor]:
        """Return what is stored: `validated`, labels beside predictions, and what else there is."""
        found = {"validated": torch.stack([self.labels, self.predictions], dim=1)}
        optional = {name: getattr(self, name) for name in _STORED}
        return found | {name: each for name, each in optional.items() if each is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Undo `to_tensors`."""
        pairs = shaped(tensors["validated"], "validated", None, 2, dtype=torch.int64)
        more: dict[str, Any] = {"confidences": None}
        for name in tensors.keys() & _STORED.keys():
            more[name] = shaped(tensors[name], name, len(pairs), dtype=_STORED[name])
        labels, predictions = (each.contiguous() for each in pairs.T)
        return cls(labels, predictions, **more)

    @property
    def mistaken(self) -> Tensor | None:
        """Which of the last phase's images are predicted wrongly, (n,) bool, where that is known."""
        if self.latest is None or self.rows is None:
            return None
        return torch.isin(self.latest, self.rows[self.labels != self.predictions])

    def without(self, row: int) -> LeftOut:
        """Leave out images that are, or are predicted to be, of a class; those after it move up."""
        stay = (self.labels != row) & (self.predictions != row)
        labels, predictions = self.labels[stay], self.predictions[stay]
        return LeftOut(
            labels - (labels > row).long(),
            predictions - (predictions > row).long(),
            None if self.confidences is None else self.confidences[stay],
            series=None if self.series is None else self.series[stay],
            gains=None if self.gains is None else self.gains[stay],
        )


_STORED = {"confidences": None, "rows": torch.int64, "series": torch.int64, "gains": None}


def calibrated(
    expand: RandomFeatures, head: Tensor, found: Judgement, novelty: Novelty | None
) -> tuple[Fitted, LeftOut]:
    """Fit temperature, novelty and threshold to leave-one-out scores; return the fit and what these say of the images.

    head: (M, classes); novelty: with the directions of all images; None: version 0.2 kept none.
    """
    best = found.scores.amax(1)
    if novelty is None:
        least = threshold(best, REJECTED)
    else:
        assert found.near is not None
        novelty = novelty.fit(best, found.near, found.strangers)
        least = KNOWN if novelty.fitted else -math.inf
    fitted = Fitted(
        expand,
        head.float().contiguous(),
        temperature(found.scores, found.labels),
        least,
        novelty,
        None if found.offsets is None else found.offsets.float(),
    )
    left_out = LeftOut(
        found.labels,
        found.scores.argmax(1),
        fitted.confidences(found.scores, found.near).float(),
        found.rows,
        series=found.series,
        gains=None if found.gains is None else found.gains.float(),
    )
    return fitted, left_out
