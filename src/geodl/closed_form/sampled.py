"""Sums over all images, and the features of some: whole series of each class, by which a fit to the sums is judged."""

from dataclasses import replace

import torch
from torch import Tensor

from geodl.closed_form.dual import dual_of, targets_of
from geodl.closed_form.expansion import Standardization
from geodl.closed_form.fitted import Judgement
from geodl.closed_form.kept_features import KeptFeatures, judge
from geodl.closed_form.novelty import Novelty
from geodl.closed_form.primal import Primal
from geodl.closed_form.random_features import RandomFeatures
from geodl.closed_form.series import no_clues, series_of

LEAST, MOST, TOTAL = 20, 120, 3000
"""Images whose features are kept: of a class at least and at most, and of all classes about."""
CONSIDERED = 2000
"""They are taken of so many images of a class."""


def sample_of(
    data: KeptFeatures, expand: RandomFeatures, classes: int, before: KeptFeatures | None = None
) -> KeptFeatures:
    """Return features of whole series of each class: what was kept of them before, and of new classes some of these images.

    Clues name the series. Of a class that has only very long series there are the two shortest.
    """
    data = replace(data, z={name: data.z[name] for name in expand.expansion.sizes})
    number = min(max(TOTAL // classes, LEAST), MOST)
    # By all that is known: what a new class has in common sets its images apart from others, not from each other.
    standardization = Standardization.of((data if before is None else before + data).z)
    found, first = before, 0
    if before is not None and len(before.labels):
        data = data.select(~torch.isin(data.labels, before.labels))
        first = int(before.clues[:, 0].max()) + 1
    for label in torch.unique(data.labels).tolist():
        rows = (data.labels == label).nonzero().squeeze(1)[:CONSIDERED]
        mine = data.select(rows)
        groups = series_of(standardization(mine.z), mine.labels, mine.clues)
        series = [(groups == each).nonzero().squeeze(1) for each in torch.unique(groups)]
        fitting = [each for each in series if 2 * len(each) <= number]
        if len(fitting) < 2:
            fitting = sorted(series, key=len)[:2]
        chosen = torch.cat(fitting[:: max(1, sum(map(len, fitting)) // number)])
        clues = no_clues(len(chosen))
        clues[:, 0] = first + rows[groups[chosen]]
        part = replace(mine.select(chosen), clues=clues)
        found = part if found is None else found + part
    assert found is not None
    return found


def moved_within(sample: KeptFeatures, images: KeptFeatures, row: int) -> KeptFeatures:
    """Return a sample in which images, (N,), are of another class, or not there: -1. Each takes one place at most."""
    labels, clues = sample.labels.clone(), sample.clues.clone()
    for i in range(len(images.labels)):
        rest = replace(sample, labels=labels)  # an image that is alike finds the next place
        place = int(rest.places_of(images.select(torch.tensor([i]))))
        if place >= 0:
            labels[place] = row
    # A series is of one class.
    pairs = torch.stack([clues[:, 0], labels])
    clues[:, 0] = torch.unique(pairs, dim=1, return_inverse=True)[1]
    return replace(sample, labels=labels, clues=clues).select(labels >= 0)


def judge_by_sample(
    solved: Primal,
    counts: Tensor,
    sample: KeptFeatures,
    expand: RandomFeatures,
    novelty: Novelty | None = None,
) -> Judgement:
    """Leave series of a sample out of a fit to sums that hold them. counts: (classes,), all images, as `novelty` knows them."""
    labels, groups = sample.labels, sample.clues[:, 0]
    h, targets = expand(sample.z), targets_of(labels, len(counts))
    each = [(labels == label).nonzero().squeeze(1) for label in torch.unique(labels)]
    duals = [(rows, dual_of(solved, h[rows], targets[rows])) for rows in each]
    known = (counts[labels] > (groups.unsqueeze(1) == groups).sum(1)) & (len(counts) > 1)
    if sample.adapted is not None:
        known &= ~sample.adapted
    found, _ = judge(duals, sample, groups, counts, known, novelty)
    return replace(found, rows=None)  # the images are not those of the phase
