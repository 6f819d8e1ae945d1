"""Series: images of one class that show nearly the same, such as the frames of a video, and are left out together.

Where images come from gives clues, and their features decide whether these are right. An image is described by five numbers
(`CLUES`), each -1 where it is not known.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.expansion import Blocks

CLUES = ("given", "folder", "name", "frame", "time")
"""The series that the user names (a hash; nothing else counts then); hashes of the folder and of the file name less the number
that it ends in; this number; the second in which the picture was taken."""
ALIKE = 0.8
"""Standardized features of images of one series have a larger cosine than this; of several thousand photographs of flowers one in
forty has it with another one."""
NEXT = 0.6
"""It is enough for images that follow each other, by the numbers in their names or by their times."""
TWINS = 0.95
"""Images that are the same but for compression belong together wherever they come from."""
PAUSE = 10
"""Seconds after which a picture does not belong to those taken before it."""


def no_clues(count: int) -> Tensor:
    """Return the clues (N, 5) of images of which nothing is known."""
    return torch.full((count, len(CLUES)), -1)


def series_of(z: Blocks, labels: Tensor, clues: Tensor) -> Tensor:
    """Return groups, int64 (N,), equal for images of one series; a series is of one class.

    Args:
        z: standardized features (N, d_b) by block.
        labels: int64 (N,).
        clues: int64 (N, 5), as in `CLUES`.
    """
    groups = torch.arange(len(labels))
    for label in torch.unique(labels).tolist():
        rows = (labels == label).nonzero().squeeze(1)
        parts = [F.normalize(block[rows].float(), dim=1) for block in z.values()]
        alike = torch.stack([part @ part.T for part in parts]).mean(0)
        groups[rows] = rows[_joined(_pairs(alike, clues[rows]))]
    return groups


def near_duplicates(z: Tensor, least: float) -> Tensor:
    """Return groups, int64 (N,), equal for images of one series. z: (N, d), pixels or features.

    Two images belong together where the cosine of their rows is above `least`, and so do friends of friends.
    """
    rows = F.normalize(z.float(), dim=1)
    return _joined(rows @ rows.T > least)


def _pairs(alike: Tensor, clues: Tensor) -> Tensor:
    """Return which images of a class belong together, bool (n, n). alike: their cosines (n, n)."""
    given, folder, name, frame, time = clues.T
    named = given >= 0
    alike = alike.clone().fill_diagonal_(-1).masked_fill_(named | named.unsqueeze(1), -1)
    runs = runs_of(time)
    sure = [ids for ids in (folder, name, runs) if _confirmed(ids, alike)]
    follow = _following(name, frame) | _following(runs, time)
    pairs = alike > TWINS if sure else (alike > ALIKE) | (follow & (alike > NEXT))
    for ids in sure:
        pairs |= _equal(ids) & (alike > -1)
    return pairs | _equal(given)


def _equal(ids: Tensor) -> Tensor:
    """Return which pairs (n, n) have the same number, which is known."""
    return (ids == ids.unsqueeze(1)) & (ids >= 0)


def _confirmed(ids: Tensor, alike: Tensor) -> bool:
    """Return whether there are several series of several images, and most images are most like one of their own series.

    Most: half as many more as would be by chance.
    """
    _, which, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    several = (counts[which] > 1) & (ids >= 0)
    if len(torch.unique(ids[several])) < 2:
        return False
    own = (ids[alike.argmax(1)] == ids)[several].double().mean()
    chance = ((counts[which] - 1)[several].double() / (len(ids) - 1)).mean()
    return bool(own >= (1 + chance) / 2)


def runs_of(times: Tensor) -> Tensor:
    """Return the number (n,) of the run of pictures that each was taken in; -1: no time is known."""
    order = times.argsort()
    ordered = times[order]
    runs = torch.empty_like(times)
    runs[order] = F.pad((ordered.diff() > PAUSE).long().cumsum(0), (1, 0))[: len(times)]
    return runs.masked_fill_(times < 0, -1)


def _following(ids: Tensor, places: Tensor) -> Tensor:
    """Return which pairs (n, n) of images follow each other by place, in what has the same number."""
    pairs = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for each in torch.unique(ids[ids >= 0]):
        rows = (ids == each).nonzero().squeeze(1)
        rows = rows[places[rows].argsort(stable=True)]
        pairs[rows[:-1], rows[1:]] = True
    return pairs | pairs.T


def _joined(pairs: Tensor) -> Tensor:
    """Return the least row (n,) that each row is joined to, through any number of pairs (n, n)."""
    pairs = pairs.clone().fill_diagonal_(True)
    groups = torch.arange(len(pairs))
    while True:  # the least number spreads, and takes the way of those whom it reached before
        first = torch.where(pairs, groups, len(pairs)).amin(1)
        first = first[first]
        if torch.equal(first, groups):
            return groups
        groups = first
