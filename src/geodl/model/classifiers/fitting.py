"""Fitting the closed form in a phase: to the features of all images, or to sums if there are more than `MOST`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from geodl.closed_form.doubts import doubts_at_sight
from geodl.closed_form.dual import targets_of
from geodl.closed_form.expansion import Blocks, Expansion, kept, selected
from geodl.closed_form.fitted import Fitted, Judgement, LeftOut, calibrated
from geodl.closed_form.kept_features import (
    Fit,
    KeptFeatures,
    fit,
    none_of,
    share_of_each,
    turned_classes,
)
from geodl.closed_form.novelty import Novelty, left_out_nearness
from geodl.closed_form.primal import Primal, Statistics
from geodl.closed_form.random_features import RandomFeatures
from geodl.closed_form.sampled import judge_by_sample, sample_of
from geodl.config import Options, RunConfig
from geodl.core.keys import derive
from geodl.data.images import Images
from geodl.model.herding import first_of_each
from geodl.model.phase import Phase

if TYPE_CHECKING:
    from geodl.model.classifiers.analytic import ClosedForm

JUDGED = 512
"""With sums, leave-one-out validates at least this many images of a phase, if it has them, and fewer than twice as many."""
MIRRORED = 8
"""Images per class whose mirrored copies decide whether mirroring keeps the class."""
MOST = 5000
"""The maximum number of images whose features are stored; of more images, only sums are."""
PART = 3000
"""With more images, levels, ridge and mirroring are chosen on about this many."""
WIDEST = 4096
"""The maximum number of random features with sums, which take 8 x WIDEST^2 bytes, three times that during a fit."""


class ClosedFormOptions(Options):
    """Options of the closed form."""

    fixed: ClassVar = frozenset({"levels", "keep_features"})
    research: ClassVar = frozenset({"expansion", "mirror", "mirror_training"})

    gamma: float = Field(0.01, gt=0)
    """Ridge: lambda = gamma x the mean square of a random feature."""
    expansion: int = Field(4096, ge=1, le=65536)
    """Total number of random features, divided in proportion to the widths of the levels."""
    levels: tuple[str, ...] | None = None
    """Levels of the network to use, NAME or NAME@CELLS for a grid of CELLS x CELLS; unset: all."""
    mirror: bool = True
    """Average the scores of test images and their mirrored copies (needs flip)."""
    mirror_training: bool = False
    """Fit to the mean of each training image and its mirrored copy, which takes a second pass over them."""
    keep_features: bool = False
    """Keep the features of all images: levels and ridge are chosen at each step."""

    def check(self, config: RunConfig) -> None:
        """Raise an error if other options contradict mirror_training."""
        if self.mirror_training and self.keep_features:
            raise ValueError(
                "mirror_training = True: only false is allowed with keep_features, which keeps the features of all images"
            )
        if self.mirror_training and not (self.mirror and config.flip):
            raise ValueError(
                "mirror_training = True needs mirror and flip: test images are mirrored too"
            )


@dataclass(frozen=True)
class Sums:
    """Sums over all images.

    gamma:  the ridge that was chosen while features were kept; None: as configured.
    sample: features of whole series of each class, which validate the fit; None: images of the phase do.
    """

    statistics: Statistics
    gamma: float | None = None
    sample: KeptFeatures | None = None

    def without(self, row: int) -> "Sums":
        """Return the sums without a class; its images still count, as images of no class."""
        sample = None if self.sample is None else self.sample.without(row)
        return replace(self, statistics=self.statistics.without(row), sample=sample)


Fitting = tuple[Fitted, LeftOut, tuple[int, ...], Sums | KeptFeatures]
"""Fields of a `ClosedForm`: fitted, judged, turned and state."""


def fit_sums(phase: Phase, last: "ClosedForm | None") -> Fitting:
    """Add the phase's images to the sums and solve (primal form)."""
    config, before = phase.config, last.state if last else None
    options = config.of(ClosedFormOptions)
    assert before is None or isinstance(before, Sums)
    images, z, labels = _new(phase)
    adapted = _adapted_to(images, phase, last)
    if before is not None and before.gamma is not None:
        z = kept(z)  # rounded, as the first images' features were
    views: list[Blocks] = [z]
    if options.mirror_training:
        views.append(phase.read(images, mirror=True).levels)
    if last is None:
        expand = RandomFeatures.of(z, options.expansion, derive(config.seed, "expansion"))
    else:
        # The standardization stays that of the first phase: earlier images are gone.
        expand = last.fitted.expand
    sums = Sums(expand.sums(views, labels, phase.classes, phase.ranks, phase.device))
    if before is not None:
        sums = replace(before, statistics=before.statistics + sums.statistics)
    sums = replace(sums, statistics=sums.statistics.rounded())
    if sums.sample is not None:
        new = KeptFeatures.of(z, labels, images.clues, adapted)
        sums = replace(sums, sample=sample_of(new, expand, phase.classes, sums.sample))
    turned = last.turned if last else ()

    def copies(rows: Tensor) -> Blocks:
        return phase.read(images.select(rows), mirror=True).levels

    averaged = mirrors(config) and not turned and not options.mirror_training
    rows = _validation_rows(adapted)
    validation = _Validation(views, labels, rows, copies if averaged else None)
    novelty = last.fitted.novelty if last else Novelty.unfitted(z)
    return *_solved(options.gamma, sums, expand, validation, novelty), turned, sums


def fit_features(phase: Phase, last: "ClosedForm | None") -> Fitting:
    """Fit to the features of all images (dual form); an image that is learned again counts once.

    If there are more than MOST images, only sums are kept, and levels, ridge and mirroring are chosen on a part of the
    images for the last time.
    """
    config, classes = phase.config, phase.classes
    data, latest = _joined(phase, last)
    rows = share_of_each(data.labels, MOST if len(data.labels) <= MOST else PART)
    part = data.select(rows)
    chosen = fit(part, classes, derive(config.seed, "expansion"))
    turned = last.turned if last else ()
    if config.flip and not turned:
        turned = _turned_by_mirroring(phase, chosen, part, rows, latest)
    fitted, judged, gamma = chosen.fitted, chosen.left_out, chosen.gamma
    del chosen  # it takes as much memory as the sums
    if len(data.labels) <= MOST:
        return fitted, replace(judged, latest=latest), turned, data
    expansion = fitted.expand.expansion
    narrow = {
        name: min(size, WIDEST // len(expansion.sizes)) for name, size in expansion.sizes.items()
    }
    expand = replace(fitted.expand, expansion=Expansion(narrow, expansion.seed))
    gamma = float(torch.tensor(gamma))  # rounded to float32, as it is stored
    total = expand.sums([data.z], data.labels, classes, phase.ranks, phase.device)
    sums = Sums(total.rounded(), gamma, sample_of(data, expand, classes))
    del total
    validation = _Validation([data.z], data.labels, _validation_rows(data.adapted))
    doubts = judged.doubts and judged.doubts.at(rows)
    novelty = Novelty.unfitted(data.z)
    if fitted.novelty is not None:
        novelty = replace(novelty, slack=fitted.novelty.slack)
    fitted, judged = _solved(gamma, sums, expand, validation, novelty)
    return fitted, replace(judged, latest=latest, doubts=doubts), turned, sums


def mirrors(config: RunConfig) -> bool:
    """Return whether scores are averaged over mirrored copies, if these keep the class."""
    return config.of(ClosedFormOptions).mirror and config.flip


def _new(phase: Phase) -> tuple[Images, dict[str, Tensor], Tensor]:
    """Return the phase's images, their features by level, and their labels.

    Exemplars of returning classes are left out: they counted when they were new.
    """
    assert phase.now is not None
    count = len(phase.images)
    z = {name: level[:count] for name, level in phase.now.levels.items()}
    return phase.images, z, phase.now.labels[:count]


def _adapted_to(images: Images, phase: Phase, last: "ClosedForm | None") -> Tensor:
    """Return a mask (N,) of the images that the network was adapted to, even if they were removed since."""
    adapted = phase.adapted or (last.adapted if last else None)
    return adapted.saw(images) if adapted else none_of(images.labels)


def _joined(phase: Phase, last: "ClosedForm | None") -> tuple[KeptFeatures, Tensor]:
    """Return the features of all images, and the positions (N,) of this phase's images among them."""
    images, z, labels = _new(phase)
    new = KeptFeatures.of(z, labels, images.clues, _adapted_to(images, phase, last))
    before = last.state if last else None
    if not isinstance(before, KeptFeatures):
        return new, torch.arange(len(labels))
    latest = before.places_of(new)
    data = before + new.select(latest < 0)
    latest[latest < 0] = torch.arange(len(before.labels), len(data.labels))
    return data, latest


def _turned_by_mirroring(
    phase: Phase, fit: Fit, part: KeptFeatures, rows: Tensor, latest: Tensor
) -> tuple[int, ...]:
    """Return the classes of this phase's images whose mirrored copies look like another class."""
    within = torch.isin(latest, rows).nonzero().squeeze(1)
    if not len(within):
        return ()
    images, _, labels = _new(phase)
    sample = within[first_of_each(labels[within], MIRRORED)]
    copies = phase.read(images.select(sample), mirror=True).levels
    return turned_classes(fit, part, torch.searchsorted(rows, latest[sample]), copies)


def _validation_rows(adapted: Tensor) -> Tensor:
    """Return about JUDGED rows of images, evenly spaced, without those that the network was `adapted` to: (N,) bool."""
    rows = (~adapted).nonzero().squeeze(1)
    return rows[:: max(1, len(rows) // JUDGED)]


@dataclass(frozen=True)
class _Validation:
    """Images of a phase: features by view, labels, and the rows of those that leave-one-out validates.

    copies: returns the features of mirrored copies of some rows; None: prediction does not average over copies.
    """

    views: Sequence[Blocks]
    labels: Tensor
    rows: Tensor
    copies: Callable[[Tensor], Blocks] | None = None

    def judged(
        self, solved: Primal, counts: Tensor, expand: RandomFeatures, novelty: Novelty | None
    ) -> tuple[Tensor, Judgement]:
        """Return the rows of the validated images and their leave-one-out judgement. counts: (classes,), all images."""
        # A class with one image is unknown without it; a single class leaves nothing to validate.
        rows = self.rows[(counts[self.labels[self.rows]] > 1) & (len(counts) > 1)]
        labels = self.labels[rows]
        h, both, copies = expand(*(selected(view, rows) for view in self.views)), None, None
        if self.copies is not None and len(rows):
            copies = self.copies(rows)
            both = (h + expand(copies)) / 2
        scores = solved.leave_one_out(h, targets_of(labels, len(counts)), both)
        near = None
        if novelty is not None:
            z = self.views[0][novelty.level][rows]
            near = left_out_nearness(z, labels, novelty.sums)
            if copies is not None:
                mirrored = copies[novelty.level]
                near = (near + left_out_nearness(z, labels, novelty.sums, views=mirrored)) / 2
        return rows, Judgement(labels, scores, near)


def _solved(
    gamma: float,
    sums: Sums,
    expand: RandomFeatures,
    validation: _Validation,
    novelty: Novelty | None,
) -> tuple[Fitted, LeftOut]:
    """Fit the head to sums, and temperature and novelty to leave-one-out predictions.

    gamma: the ridge, unless `sums` has one; novelty: of the previous phase; None: a model of version 0.2.
    """
    counts = sums.statistics.counts
    solved = sums.statistics.solve(gamma if sums.gamma is None else sums.gamma)
    if novelty is not None:
        novelty = novelty.learned(validation.views[0], validation.labels, len(counts))
    rows, by_image = validation.judged(solved, counts, expand, novelty)
    judgement, scores = by_image, by_image.scores
    if sums.sample is not None:  # leave whole series out instead
        judgement = judge_by_sample(solved, counts, sums.sample, expand, novelty)
        scores = scores if judgement.offsets is None else scores + judgement.offsets
        if novelty is not None and by_image.near is not None:
            novelty = novelty.fit(scores.amax(1), by_image.near).forgetful()
    fitted, judged = calibrated(expand, solved.head, judgement, novelty)
    return fitted, replace(judged, doubts=doubts_at_sight(scores, validation.labels[rows]).at(rows))
