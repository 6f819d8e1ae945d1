"""Series: near-duplicate images of one class, such as the frames of a video, which leave-one-out leaves out together.

Folders, file names and times are clues to series, which features confirm or refute. The clues of an image are five numbers
(`CLUES`), -1 if unknown.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form.expansion import Blocks

CLUES = ("given", "folder", "name", "frame", "time")
"""A hash of the series that the user names, which overrides everything else; hashes of the folder and of the file name without its
trailing number; this number; the time of the photograph in seconds."""
ALIKE = 0.8
"""Images whose standardized features have a larger cosine are of one series. Of several thousand photographs of flowers, one in
forty has such a neighbor."""
NEXT = 0.6
"""The threshold for consecutive images, by the numbers in their names or by their times."""
TWINS = 0.95
"""The threshold for images that differ only by compression, wherever they come from."""
PAUSE = 10
"""Seconds between photographs after which a new run starts."""


def no_clues(count: int) -> Tensor:
    """Return the clues (N, 5) of images without known origin."""
    return torch.full((count, len(CLUES)), -1)


def series_of(z: Blocks, labels: Tensor, clues: Tensor) -> Tensor:
    """Return the series of images: int64 (N,), equal for images of one series, which are of one class.

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
    """Return groups of near-duplicates: int64 (N,), equal within a group. z: (N, d), pixels or features.

    Groups are the connected components of pairs whose cosine is above `least`.
    """
    rows = F.normalize(z.float(), dim=1)
    return _joined(rows @ rows.T > least)


def _pairs(alike: Tensor, clues: Tensor) -> Tensor:
    """Return which pairs of images of a class are of one series, bool (n, n). alike: their cosines (n, n)."""
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
    """Return which pairs (n, n) have the same known number."""
    return (ids == ids.unsqueeze(1)) & (ids >= 0)


def _confirmed(ids: Tensor, alike: Tensor) -> bool:
    """Return whether features confirm a clue: the nearest neighbor of most images is of their own series.

    Most: more than halfway between chance and all. At least two series must have several images.
    """
    _, which, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    several = (counts[which] > 1) & (ids >= 0)
    if len(torch.unique(ids[several])) < 2:
        return False
    own = (ids[alike.argmax(1)] == ids)[several].double().mean()
    chance = ((counts[which] - 1)[several].double() / (len(ids) - 1)).mean()
    return bool(own >= (1 + chance) / 2)


def runs_of(times: Tensor) -> Tensor:
    """Return the runs (n,) of photographs by their times, numbered; -1: the time is unknown."""
    order = times.argsort()
    ordered = times[order]
    runs = torch.empty_like(times)
    runs[order] = F.pad((ordered.diff() > PAUSE).long().cumsum(0), (1, 0))[: len(times)]
    return runs.masked_fill_(times < 0, -1)


def _following(ids: Tensor, places: Tensor) -> Tensor:
    """Return which pairs (n, n) of images are consecutive by place among those with the same id."""
    pairs = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for each in torch.unique(ids[ids >= 0]):
        rows = (ids == each).nonzero().squeeze(1)
        rows = rows[places[rows].argsort(stable=True)]
        pairs[rows[:-1], rows[1:]] = True
    return pairs | pairs.T


def _joined(pairs: Tensor) -> Tensor:
    """Return the connected components (n,) of pairs (n, n), each numbered by its lowest row."""
    pairs = pairs.clone().fill_diagonal_(True)
    groups = torch.arange(len(pairs))
    while True:  # the lowest row spreads along pairs and along earlier paths
        first = torch.where(pairs, groups, len(pairs)).amin(1)
        first = first[first]
        if torch.equal(first, groups):
            return groups
        groups = first
