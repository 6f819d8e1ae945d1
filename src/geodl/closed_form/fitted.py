"""The result of a fit: what prediction needs, and leave-one-out predictions of the learned images."""

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
    """A fitted map from features to scores.

    expand:      from features to random features.
    head:        (M, classes) float32.
    temperature: confidences are softmax(scores / temperature).
    threshold:   an image is unknown if its probability of a known class is below; without novelty, if its largest score is.
    novelty:     estimates the probability of a known class; None: in models of version 0.2.
    offsets:     (classes,) float32, added to the scores if classes are of very unequal size; None: none.
    """

    expand: RandomFeatures
    head: Tensor
    temperature: float
    threshold: float = -math.inf
    novelty: Novelty | None = None
    offsets: Tensor | None = None

    def confidences(self, scores: Tensor, near: Tensor | None) -> Tensor:
        """Return the confidence (N,) in the most likely class for scores (N, classes) and nearness (N,)."""
        confidences = (scores / self.temperature).softmax(dim=1).amax(1)
        if self.novelty is None or near is None:
            return confidences
        return confidences * self.novelty.known(scores, near)

    def scores(self, z: Blocks) -> Tensor:
        """Return the scores (N, classes) of features z: (N, d_b) by block."""
        scores = self.expand(z).to(self.head.dtype) @ self.head
        return scores if self.offsets is None else scores + self.offsets

    def without(self, gone: int) -> Fitted:
        """Return the fit without the column of a class."""
        stay = torch.arange(self.head.shape[1]) != gone
        offsets = None if self.offsets is None else self.offsets[stay]
        novelty = self.novelty and self.novelty.without(gone)
        head = self.head[:, stay].contiguous()
        return replace(self, head=head, novelty=novelty, offsets=offsets)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the fit as named tensors; of the expansion only the sizes, in the order of the blocks' names."""
        blocks = self.expand.expansion.sizes
        sizes = torch.tensor([blocks[name] for name in sorted(blocks)])
        numbers = torch.tensor([self.temperature, self.threshold], dtype=torch.float64)
        tensors = {"head": self.head, "numbers": numbers, "sizes": sizes}
        if self.offsets is not None:
            tensors["offsets"] = self.offsets
        novelty = self.novelty.to_tensors() if self.novelty else {}
        return self.expand.standardization.to_tensors() | tensors | novelty

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], seed: int) -> Fitted:
        """Return the fit of `to_tensors`; the expansion is drawn again from its seed."""
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
    """Leave-one-out results for learned images, each by a fit without the image or without its whole series.

    labels:    int64 (n,).
    scores:    (n, classes).
    near:      (n,) nearness; None: without novelty.
    offsets:   (classes,), included in the scores; None: none.
    rows, series, gains: as in `LeftOut`.
    strangers: (m, 2), scores and nearness of images whose whole class is left out; None: not known.
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
    """Leave-one-out predictions of learned images.

    labels, predictions: int64 (N,).
    confidences: (N,), 0 to 1; None: not stored.
    rows:        (N,), the images' rows in the kept features; None with sums.
    latest:      (n,), the rows of the last phase's images in the kept features; not stored.
    doubts:      images that look mislabelled, by row in the kept features or, with sums, by position in the last phase; not
                 stored.
    series:      (N,), equal for images of one series, which were left out together; None: each was left out alone.
    gains:       (N,), how much more often they would be right with all series of their class.
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
        """Return the stored fields as named tensors; `validated`: labels beside predictions."""
        pairs = torch.stack([self.labels, self.predictions], dim=1)
        optional = {name: getattr(self, name) for name in _STORED}
        present = {name: each for name, each in optional.items() if each is not None}
        return {"validated": pairs} | present

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the predictions of `to_tensors`."""
        pairs = shaped(tensors["validated"], "validated", None, 2, dtype=torch.int64)
        more: dict[str, Any] = {"confidences": None}
        for name in tensors.keys() & _STORED.keys():
            more[name] = shaped(tensors[name], name, len(pairs), dtype=_STORED[name])
        labels, predictions = (each.contiguous() for each in pairs.T)
        return cls(labels, predictions, **more)

    @property
    def mistaken(self) -> Tensor | None:
        """A mask (n,) of the last phase's images that are predicted wrongly; None with sums."""
        if self.latest is None or self.rows is None:
            return None
        return torch.isin(self.latest, self.rows[self.labels != self.predictions])

    def without(self, row: int) -> LeftOut:
        """Return the predictions without images that are, or are predicted to be, of a class; later classes move up."""
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
    expand: RandomFeatures, head: Tensor, judgement: Judgement, novelty: Novelty | None
) -> tuple[Fitted, LeftOut]:
    """Fit temperature, novelty and threshold to leave-one-out scores; return the fit and the predictions of the scores.

    head: (M, classes); novelty: with the directions of all images; None: a model of version 0.2.
    """
    best = judgement.scores.amax(1)
    if novelty is None:
        least = threshold(best, REJECTED)
    else:
        assert judgement.near is not None
        novelty = novelty.fit(best, judgement.near, judgement.strangers)
        least = KNOWN if novelty.fitted else -math.inf
    fitted = Fitted(
        expand,
        head.float().contiguous(),
        temperature(judgement.scores, judgement.labels),
        least,
        novelty,
        None if judgement.offsets is None else judgement.offsets.float(),
    )
    left_out = LeftOut(
        judgement.labels,
        judgement.scores.argmax(1),
        fitted.confidences(judgement.scores, judgement.near).float(),
        judgement.rows,
        series=judgement.series,
        gains=None if judgement.gains is None else judgement.gains.float(),
    )
    return fitted, left_out
