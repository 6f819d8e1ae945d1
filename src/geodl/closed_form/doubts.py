"""Finding mislabelled images by leave-one-out, first with all images and then without the suspects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from geodl.closed_form.choices import judged, temperature
from geodl.closed_form.dual import Dual, repeated

SUSPECT, AT_SIGHT, DOUBTFUL = 0.3, 0.5, 0.9
"""Margins by which the probability of another class exceeds that of the label: to leave an image out of the second fit, and to
doubt its label without and with a second fit."""


@dataclass(frozen=True)
class Doubts:
    """Images that look mislabelled, the most certain first.

    rows: (n,) their positions; likely: (n,) the classes that they look like; confidences: (n,) in these, 0 to 1.
    """

    rows: Tensor
    likely: Tensor
    confidences: Tensor

    @classmethod
    def none(cls) -> Self:
        """Return no doubts."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(nothing, nothing, torch.empty(0))

    def at(self, places: Tensor) -> Doubts:
        """Return the doubts with row r replaced by places[r]."""
        return Doubts(places[self.rows], self.likely, self.confidences)


def doubts(dual: Dual, labels: Tensor, groups: Tensor) -> Doubts:
    """Return the images of a fit that look mislabelled; labels: (N,); groups: (N,), left out together.

    Wrong labels blur a fit. So the suspects of a first look are left out; the fit to the rest, with the temperature of
    its own leave-one-out, then predicts every image without its group.
    """
    known = judged(labels, groups)
    scores = dual.leave_out(groups)
    suspects = known & _beyond(scores, labels, known, SUSPECT)[0]
    if not suspects.any():
        return Doubts.none()
    rest = ~suspects
    scores = leave_out_suspects(dual, suspects.nonzero().squeeze(1), groups)
    # Only images whose class has other images left, outside their own group.
    others = (labels.unsqueeze(1) == labels[rest]) & (groups.unsqueeze(1) != groups[rest])
    fair = others.any(1)
    if not (fair & rest).any():
        return Doubts.none()
    return _surest_first(fair, *_beyond(scores, labels, fair & rest, DOUBTFUL))


def doubts_at_sight(scores: Tensor, labels: Tensor) -> Doubts:
    """Return the images that look mislabelled by their leave-one-out scores (N, classes) alone; labels: (N,)."""
    if not len(labels):
        return Doubts.none()
    every = torch.ones_like(labels, dtype=torch.bool)
    return _surest_first(every, *_beyond(scores, labels, every, AT_SIGHT))


def _surest_first(fair: Tensor, doubtful: Tensor, likely: Tensor, confidences: Tensor) -> Doubts:
    """Return the doubts of the images that are both `doubtful` and `fair`; all arguments: (N,)."""
    rows = (fair & doubtful).nonzero().squeeze(1)
    rows = rows[confidences[rows].argsort(descending=True, stable=True)]
    return Doubts(rows, likely[rows], confidences[rows].float())


def _beyond(
    scores: Tensor, labels: Tensor, sound: Tensor, margin: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a mask (N,) of the images that look like another class by a margin, that class, and its probability.

    scores: (N, classes); sound: (N,) bool, the images to which the temperature is fitted.
    """
    probabilities = (scores / temperature(scores[sound], labels[sound])).softmax(dim=1)
    confidences, likely = probabilities.max(dim=1)
    own = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
    return confidences - own >= margin, likely, confidences


def leave_out_suspects(dual: Dual, gone: Tensor, groups: Tensor) -> Tensor:
    """Return each image's scores (N, classes) by the fit without the images `gone`, (S,), and without its group."""
    inverse = dual.inverse
    among = torch.zeros(len(inverse), dtype=torch.bool)
    among[gone] = True
    factor = torch.linalg.cholesky(inverse[gone][:, gone])
    # The reduced system: P = A_RS A_SS^-1, a' = a - P a_S, A' = A - P A_SR.
    through = torch.cholesky_solve(inverse[gone], factor).T
    rest = dual.coefficients - through @ dual.coefficients[gone]
    diagonal = inverse.diagonal() - (through * inverse[:, gone]).sum(1)
    lost = rest / diagonal.unsqueeze(1)
    lost[gone] = torch.cholesky_solve(dual.coefficients[gone], factor)
    for rows in repeated(groups):
        stay = torch.tensor([row for row in rows if not among[row]], dtype=torch.int64)
        suspects = torch.tensor([row for row in rows if among[row]], dtype=torch.int64)
        if len(stay):
            block = inverse[stay][:, stay] - through[stay] @ inverse[gone][:, stay]
            lost[stay] = torch.linalg.solve(block, rest[stay])
        if len(stay) and len(suspects):
            both = torch.cat([gone, stay])
            solution = torch.linalg.solve(inverse[both][:, both], dual.coefficients[both])
            lost[suspects] = solution[torch.isin(gone, suspects).nonzero().squeeze(1)]
    return dual.targets - lost
