"""What a fit leaves for prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from geodl.closed_form.expansion import Blocks, Expansion, Standardization
from geodl.closed_form.novelty import KNOWN, Novelty
from geodl.core.tensors import shaped


@dataclass(frozen=True)
class Fitted:
    """All that maps features to scores: standardization, expansion, head (M, classes) float32.

    temperature: of the softmax that makes confidences of the scores; novelty: what gives the probability that an image is of a
    known class; threshold: of that probability, below which an image is called unknown. Without novelty, as in models of version
    0.2, it is that of the largest score. offsets: (classes,) float32, added to the scores where classes are of very unequal size.
    """

    standardization: Standardization
    expansion: Expansion
    head: Tensor
    temperature: float
    threshold: float = -math.inf
    novelty: Novelty | None = None
    offsets: Tensor | None = None

    def with_novelty(self, novelty: Novelty) -> Fitted:
        """Return the fit with what separates known images from others."""
        return replace(self, novelty=novelty, threshold=KNOWN if novelty.fitted else -math.inf)

    def confidences(self, scores: Tensor, near: Tensor) -> Tensor:
        """Return the confidence (N,) in the likeliest class for scores (N, classes) and nearness (N,)."""
        found = (scores / self.temperature).softmax(dim=1).amax(1)
        return found if self.novelty is None else found * self.novelty.known(scores, near)

    def scores(self, z: Blocks) -> Tensor:
        """Return the scores (N, classes) of features z: (N, d_b) by block."""
        scores = self.expand(z).to(self.head.dtype) @ self.head
        return scores if self.offsets is None else scores + self.offsets

    def expand(self, z: Blocks) -> Tensor:
        """Return the random features h (N, M) of features z: (N, d_b) by block."""
        return self.expansion(
            self.standardization({name: z[name] for name in self.expansion.sizes})
        )

    def without(self, gone: int) -> Fitted:
        """Return the head without the column of a class."""
        stay = torch.arange(self.head.shape[1]) != gone
        offsets = None if self.offsets is None else self.offsets[stay]
        novelty = self.novelty and self.novelty.without(gone)
        head = self.head[:, stay].contiguous()
        return replace(self, head=head, novelty=novelty, offsets=offsets)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all numbers as named tensors; the expansion as its sizes, in the order of the blocks' names."""
        sizes = torch.tensor([self.expansion.sizes[name] for name in sorted(self.expansion.sizes)])
        numbers = torch.tensor([self.temperature, self.threshold], dtype=torch.float64)
        found = {"head": self.head, "numbers": numbers, "sizes": sizes}
        if self.offsets is not None:
            found["offsets"] = self.offsets
        novelty = self.novelty.to_tensors() if self.novelty else {}
        return self.standardization.to_tensors() | found | novelty

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], seed: int) -> Fitted:
        """Undo `to_tensors`; the expansion is drawn again from its seed."""
        standardization = Standardization.from_tensors(tensors)
        sizes = dict(
            zip(
                sorted(standardization.mean),
                shaped(tensors["sizes"], "sizes", None, dtype=torch.int64).tolist(),
                strict=True,
            )
        )
        temperature, threshold = tensors["numbers"].tolist()
        if not 0 < temperature < math.inf or math.isnan(threshold):
            raise ValueError(f"temperature {temperature}, threshold {threshold}")
        head, offsets = shaped(tensors["head"], "head", sum(sizes.values()), None), None
        classes, novelty = head.shape[1], Novelty.from_tensors(tensors)
        if "offsets" in tensors:
            offsets = shaped(tensors["offsets"], "offsets", classes)
        if novelty is not None and novelty.fitted:
            shaped(novelty.sums, "directions", classes, None)
        return cls(
            standardization,
            Expansion(sizes, seed),
            head,
            temperature,
            threshold,
            novelty,
            offsets,
        )
