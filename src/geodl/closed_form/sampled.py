"""Validation of a fit to sums by a sample: the kept features of whole series of each class."""

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
"""The minimum and maximum number of images per class, and roughly the total."""
CONSIDERED = 2000
"""The number of images of a class from which they are sampled."""


def sample_of(
    data: KeptFeatures, expand: RandomFeatures, classes: int, before: KeptFeatures | None = None
) -> KeptFeatures:
    """Return a sample of whole series of each class: the earlier sample, and some of these images for new classes.

    Clues identify the series. A class with only long series has its two shortest.
    """
    data = replace(data, z={name: data.z[name] for name in expand.expansion.sizes})
    number = min(max(TOTAL // classes, LEAST), MOST)
    # By all images: what the images of a new class have in common must not be standardized away.
    standardization = Standardization.of((data if before is None else before + data).z)
    sample, first = before, 0
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
        sample = part if sample is None else sample + part
    assert sample is not None
    return sample


def moved_within(sample: KeptFeatures, images: KeptFeatures, row: int) -> KeptFeatures:
    """Return a sample with images moved to class `row`; -1: removed. Each image matches at most one of the sample."""
    labels, clues = sample.labels.clone(), sample.clues.clone()
    for i in range(len(images.labels)):
        rest = replace(sample, labels=labels)  # so that equal images match different rows
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
    """Return the leave-one-out results of a sample by a fit to sums that contain it. counts: (classes,), all images."""
    labels, groups = sample.labels, sample.clues[:, 0]
    h, targets = expand(sample.z), targets_of(labels, len(counts))
    classes = [(labels == label).nonzero().squeeze(1) for label in torch.unique(labels)]
    duals = [(rows, dual_of(solved, h[rows], targets[rows])) for rows in classes]
    known = (counts[labels] > (groups.unsqueeze(1) == groups).sum(1)) & (len(counts) > 1)
    known &= ~sample.adapted
    judgement, _ = judge(duals, sample, groups, counts, known, novelty)
    return replace(judgement, rows=None)  # rows are of the phase's images
