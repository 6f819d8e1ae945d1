"""Which labels the rest of the data contradicts: leave-one-out of a fit, first with and then without the suspects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from geodl.closed_form.choices import judged, temperature
from geodl.closed_form.dual import Dual, repeated

SUSPECT, AT_SIGHT, DOUBTFUL = 0.3, 0.5, 0.9
"""By so much the probability of another class must exceed that of its own: for an image to be left out of the second look, for
its label to be doubted where there is no second look, and there."""


@dataclass(frozen=True)
class Doubts:
    """Images whose labels are doubted, the surest first.

    rows: (n,) their places; likely: (n,) the class that they look like; confidences: 0..1 (n,), in that class.
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
        """Return them with places among other images, (N,) by today's place."""
        return Doubts(places[self.rows], self.likely, self.confidences)


def doubts(dual: Dual, labels: Tensor, groups: Tensor) -> Doubts:
    """Return the doubtful ones of the images of a fit; labels: (N,); groups: (N,), left out together.

    Wrong labels blur what a fit says of all images. So the suspects are left out first; the rest, with the temperature of
    its own leave-one-out, then judges every image without its group.
    """
    known = judged(labels, groups)
    scores = dual.leave_out(groups)
    suspects = known & _beyond(scores, labels, known, SUSPECT)[0]
    if not suspects.any():
        return Doubts.none()
    rest = ~suspects
    scores = leave_out_suspects(dual, suspects.nonzero().squeeze(1), groups)
    # An image is judged where others of its class are left, beyond its own group.
    kin = (labels.unsqueeze(1) == labels[rest]) & (groups.unsqueeze(1) != groups[rest])
    fair = kin.any(1)
    if not (fair & rest).any():
        return Doubts.none()
    return _surest_first(fair, *_beyond(scores, labels, fair & rest, DOUBTFUL))


def doubts_at_sight(scores: Tensor, labels: Tensor) -> Doubts:
    """Return the doubtful ones of some images by their leave-one-out scores (N, classes) alone; labels: (N,)."""
    if not len(labels):
        return Doubts.none()
    every = torch.ones_like(labels, dtype=torch.bool)
    return _surest_first(every, *_beyond(scores, labels, every, AT_SIGHT))


def _surest_first(fair: Tensor, found: Tensor, likely: Tensor, confidences: Tensor) -> Doubts:
    """Return the doubts of images that were found, where they can be judged: all (N,)."""
    rows = (fair & found).nonzero().squeeze(1)
    rows = rows[confidences[rows].argsort(descending=True, stable=True)]
    return Doubts(rows, likely[rows], confidences[rows].float())


def _beyond(
    scores: Tensor, labels: Tensor, sound: Tensor, margin: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which images (N,) look like another class by a margin, which class, and how probable it is.

    scores: (N, classes); sound: (N,), the images that the temperature of the probabilities is fitted on.
    """
    found = (scores / temperature(scores[sound], labels[sound])).softmax(dim=1)
    confidences, likely = found.max(dim=1)
    own = found.gather(1, labels.unsqueeze(1)).squeeze(1)
    return confidences - own >= margin, likely, confidences


def leave_out_suspects(dual: Dual, gone: Tensor, groups: Tensor) -> Tensor:
    """Return each image's scores (N, classes) by the fit without the images `gone`, (S,), and without its group."""
    inverse = dual.inverse
    among = torch.zeros(len(inverse), dtype=torch.bool)
    among[gone] = True
    factor = torch.linalg.cholesky(inverse[gone][:, gone])
    # Of the system that is left: P = A_RS A_SS^-1, a' = a - P a_S, A' = A - P A_SR.
    through = torch.cholesky_solve(inverse[gone], factor).T
    rest = dual.coefficients - through @ dual.coefficients[gone]
    diagonal = inverse.diagonal() - (through * inverse[:, gone]).sum(1)
    lost = rest / diagonal.unsqueeze(1)
    lost[gone] = torch.cholesky_solve(dual.coefficients[gone], factor)
    for rows in repeated(groups):
        stay = torch.tensor([row for row in rows if not among[row]], dtype=torch.int64)
        kin = torch.tensor([row for row in rows if among[row]], dtype=torch.int64)
        if len(stay):
            block = inverse[stay][:, stay] - through[stay] @ inverse[gone][:, stay]
            lost[stay] = torch.linalg.solve(block, rest[stay])
        if len(stay) and len(kin):
            both = torch.cat([gone, stay])
            found = torch.linalg.solve(inverse[both][:, both], dual.coefficients[both])
            lost[kin] = found[torch.isin(gone, kin).nonzero().squeeze(1)]
    return dual.targets - lost
