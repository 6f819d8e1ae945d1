"""Closed form: ridge regression on random features of a frozen network (ACIL, RanPAC).

Two typed states hold what was seen of all images: `Sums` over them, or `KeptFeatures` of each while
there are at most `MOST`. With sums the fit is the same whatever the cut into phases; with kept features
levels and ridge are chosen at each step, an image that is given again counts once, and the removal of
a class is exact.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from geodl.closed_form import (
    Blocks,
    Expansion,
    Fitted,
    RandomFeatures,
    Statistics,
    doubts_at_sight,
    kept,
    targets_of,
    temperature,
    threshold,
)
from geodl.closed_form.kept_features import (
    Fit,
    KeptFeatures,
    fit,
    same_image,
    share_of_each,
    turned_classes,
)
from geodl.closed_form.novelty import REJECTED, Novelty, directions, left_out_nearness
from geodl.closed_form.sampled import Judgement, judge_by_sample, moved_within, sample_of
from geodl.config import Options, RunConfig
from geodl.core.errors import TrainingError
from geodl.core.files import part
from geodl.core.keys import derive
from geodl.core.text import listed
from geodl.data.images import Images
from geodl.model.classifiers.base import (
    Adapted,
    Classifier,
    Evidence,
    LeftOut,
    Scorer,
    Stored,
    Tensors,
)
from geodl.model.features import Features
from geodl.model.herding import first_of_each
from geodl.nets import Network

JUDGED = 512
"""Images of a phase that leave-one-out judges where sums are kept: fewer than twice as many."""
MIRRORED = 8
"""Images of a class whose mirrored copies tell whether mirroring keeps the class."""
UNNAMED = -1
"""A class that mirroring changes, and that is not known."""
MOST = 5000
"""Images whose features are kept one by one; of more, only the sums are kept."""
PART = 3000
"""Of more, levels, ridge and mirroring are chosen on about so many."""
WIDEST = 4096
"""Random features in all where only sums are kept: these take 8 x WIDEST^2 bytes of memory, thrice while a fit is made."""


class ClosedFormOptions(Options):
    """Options of the closed form."""

    fixed: ClassVar = frozenset({"levels", "keep_features"})
    research: ClassVar = frozenset({"expansion", "mirror", "mirror_training"})

    gamma: float = Field(0.01, gt=0)
    """Ridge: lambda = gamma x the mean square of a random feature."""
    expansion: int = Field(4096, ge=1, le=65536)
    """Random features in all, shared out by the widths of the levels."""
    levels: tuple[str, ...] | None = None
    """Levels of the network that are read, NAME or NAME@CELLS for a grid of CELLS x CELLS; unset: all."""
    mirror: bool = True
    """Average the scores of test images and their mirrored copies (needs flip)."""
    mirror_training: bool = False
    """Fit to the mean of each training image and its mirrored copy: a second pass over them."""
    keep_features: bool = False
    """Keep all images' features: levels and ridge are chosen at each step."""

    def check(self, config: RunConfig) -> None:
        """Refuse what contradicts mirrored copies of training images."""
        if self.mirror_training and self.keep_features:
            raise ValueError(
                "mirror_training = True: not where the features of all images are kept"
            )
        if self.mirror_training and not (self.mirror and config.flip):
            raise ValueError(
                "mirror_training = True needs mirror and flip: test images are mirrored too"
            )


@dataclass(frozen=True)
class Sums:
    """Sums over all images. gamma: the ridge chosen while features were kept; None: as configured.

    sample: features of whole series of each class, by which the fit is judged; None: images of the phase judge it.
    """

    statistics: Statistics
    gamma: float | None = None
    sample: KeptFeatures | None = None


@dataclass(frozen=True)
class ClosedForm(Classifier):
    """head = (G + lambda I)^-1 C over random features h of a frozen network.

    mirror: whether scores are averaged over mirrored copies, where that keeps the class.
    turned: the rows of the classes that mirroring changes, as far as the images have shown.
    state:  None in older phases of a run: a newer one has taken it over.
    adapted: how the network was adapted to the first images; None: it was not.
    """

    name = "analytic"
    title = "closed form"
    meaning = "softmax of the closed form's scores divided by the temperature, times the probability of being known"
    preference = 0
    needs_frozen = True
    Options = ClosedFormOptions
    rejects = True

    fitted: Fitted
    judged: LeftOut
    mirror: bool
    turned: tuple[int, ...]
    state: Sums | KeptFeatures | None
    adapted: Adapted | None = None

    @classmethod
    def levels(cls, network: Network, config: RunConfig) -> tuple[str, ...]:
        """Return the levels that are read, all by default."""
        wanted = config.of(ClosedFormOptions).levels or network.level_names
        for name in wanted:
            network.level_and_cells(name)
        return wanted

    @classmethod
    def fit(cls, evidence: Evidence) -> Self:
        """Add the phase's images to what is kept of all images, and solve."""
        last = evidence.previous.get(cls.name)
        assert last is None or isinstance(last, cls)
        if last is not None and last.state is None:
            raise TrainingError("only the newest phase keeps the sums that learning continues from")
        switched = last is not None and isinstance(last.state, Sums)
        keeps = evidence.config.of(ClosedFormOptions).keep_features and not switched
        found = (_fit_features if keeps else _fit_sums)(evidence, last)
        return cls(*found, evidence.adapted or (last.adapted if last else None))

    @property
    def keeps(self) -> bool:
        """Whether mirroring keeps the class, as far as the images have shown."""
        return not self.turned

    def scorer(self, network: Network) -> Scorer:
        """Return the scores of the head."""
        return Scorer(
            lambda found: self.fitted.scores(found.levels),
            scale=1 / self.fitted.temperature,
            novelty=self.fitted.novelty,
            threshold=self.fitted.threshold,
            mirrors=self.mirror and self.keeps,
            levels=tuple(self.fitted.expansion.sizes),
        )

    def without(self, row: int) -> Self:
        """Return the classifier without a class: as if never learned, where features are kept.

        Where only sums are, G still holds its images, which are then of no class.
        """
        moved = {row: UNNAMED}
        turned = tuple(moved.get(each, each - (each > row)) for each in self.turned)
        if isinstance(self.state, KeptFeatures):
            return replace(self._refitted(self.state.without(row)), turned=turned)
        sums = self.state
        if sums is not None:
            sample = None if sums.sample is None else sums.sample.without(row)
            sums = replace(sums, statistics=sums.statistics.without(row), sample=sample)
        rest = self.judged.without(row)
        fitted = self.fitted.without(row)
        return replace(self, fitted=fitted, judged=rest, turned=turned, state=sums)

    def relabelled(self, labels: Tensor) -> Self:
        """Return the fit to the kept features under these labels, (N,); -1: of an image never learned."""
        assert isinstance(self.state, KeptFeatures)
        return self._refitted(replace(self.state, labels=labels).select(labels >= 0))

    def resummed(self, z: Blocks, old: Tensor, row: int) -> Self:
        """Return the fit to sums in which images count for another class, -1 for none. z: (N, d_b) by level; old: (N,).

        Standardization, levels, ridge, temperature and threshold stay; so does what leave-one-out says of other images.
        """
        z = kept(z)  # as they were added
        assert isinstance(self.state, Sums)
        statistics, gamma, sample = self.state.statistics, self.state.gamma, self.state.sample
        expand = RandomFeatures(self.fitted.standardization, self.fitted.expansion)
        classes = len(statistics.counts)
        total = statistics - expand.sums([z], old, classes)
        if row >= 0:
            total = total + expand.sums([z], torch.full_like(old, row), classes)
        if sample is not None:
            sample = moved_within(sample, KeptFeatures.of(z, old), row)
        sums = replace(self.state, statistics=total.rounded(), sample=sample)
        assert gamma is not None
        head = sums.statistics.solve(gamma).head.float().contiguous()
        novelty = self.fitted.novelty and self.fitted.novelty.moved(z, old, row)
        return replace(self, fitted=replace(self.fitted, head=head, novelty=novelty), state=sums)

    def unfitted(self, labels: Tensor) -> Self:
        """Return what is kept, under these labels, (N,), without a new fit: to be learned further."""
        assert isinstance(self.state, KeptFeatures)
        return replace(self, state=replace(self.state, labels=labels).select(labels >= 0))

    def _refitted(self, data: KeptFeatures) -> Self:
        found = fit(data, int(data.labels.max()) + 1, self.fitted.expansion.seed)
        return replace(self, fitted=found.fitted, judged=_left_out(found, data), state=data)

    def kept_rows(self, found: Features) -> Tensor:
        """Return which of the kept features are of the same images, (N,), -1: none."""
        assert isinstance(self.state, KeptFeatures)
        name, known = list(self.state.z.items())[-1]
        return same_image(found.levels[name], known)

    def tensors(self) -> Tensors:
        """Return head, standardization, leave-one-out, and the kept features."""
        judged = self.judged
        found = self.fitted.to_tensors()
        found["validated"] = torch.stack([judged.labels, judged.predictions], dim=1)
        found["mirrors"] = torch.tensor(self.keeps)
        found["turned"] = torch.tensor(self.turned, dtype=torch.int64)
        names = ("confidences", "rows", "series", "gains")
        optional = {name: getattr(judged, name) for name in names}
        found |= {name: each for name, each in optional.items() if each is not None}
        if self.adapted is not None:
            found["adapting"] = self.adapted.to_tensor()
        if isinstance(self.state, KeptFeatures):
            found |= self.state.to_tensors()
        elif self.state is not None and self.state.gamma is not None:
            found["gamma"] = torch.tensor(self.state.gamma)
        return found

    def statistics(self) -> Tensors:
        """Return the sums."""
        if not isinstance(self.state, Sums):
            return {}
        sample = {} if self.state.sample is None else self.state.sample.to_tensors()
        more = {f"sample.{name}": each for name, each in sample.items()}
        return self.state.statistics.to_tensors() | more

    @classmethod
    def from_tensors(cls, tensors: Tensors, config: RunConfig) -> Self:
        """Undo `tensors` and `statistics`."""
        state: Sums | KeptFeatures | None = None
        if "labels" in tensors:
            state = KeptFeatures.from_tensors(tensors)
        elif "gram" in tensors:
            gamma = tensors.get("gamma")
            sample = part(tensors, "sample")
            state = Sums(
                Statistics.from_tensors(tensors),
                None if gamma is None else float(gamma),
                KeptFeatures.from_tensors(sample) if sample else None,
            )
        adapting = tensors.get("adapting")
        fitted = Fitted.from_tensors(tensors, derive(config.seed, "expansion"))
        judged, classes = LeftOut.from_tensors(tensors), fitted.head.shape[1]
        kept = state.sample if isinstance(state, Sums) else state
        if kept is not None and bool((kept.labels >= classes).any()):
            raise ValueError(f"an image of class {int(kept.labels.max())} of {classes}")
        if isinstance(state, KeptFeatures) and judged.rows is not None:
            state.select(judged.rows)  # rows that are not there are an error
        return cls(
            fitted,
            judged,
            mirror=config.of(ClosedFormOptions).mirror and config.flip,
            turned=_turned(tensors),
            state=state,
            adapted=None if adapting is None else Adapted.from_tensor(adapting),
        )

    @property
    def classes(self) -> int:
        """How many classes are told apart."""
        return self.fitted.head.shape[1]

    def left_out(self) -> LeftOut:
        """Return what leave-one-out says of learned images."""
        return self.judged

    def places(self, found: Features) -> Tensor:
        """Return where in `left_out` images are, by their features, (N,), -1: not there."""
        if not isinstance(self.state, KeptFeatures) or self.judged.rows is None:
            return torch.full((len(found.pooled),), -1)
        name, known = list(self.state.z.items())[-1]
        return same_image(found.levels[name], known[self.judged.rows])

    def counts(self) -> Tensor:
        """Return how many images of each class were learned, (classes,)."""
        if isinstance(self.state, KeptFeatures):
            return torch.bincount(self.state.labels, minlength=self.fitted.head.shape[1])
        assert isinstance(self.state, Sums)
        return self.state.statistics.counts

    def kept_labels(self) -> Tensor | None:
        """Return the classes of the images whose features are kept, (N,)."""
        return self.state.labels if isinstance(self.state, KeptFeatures) else None

    def threshold(self) -> float | None:
        """Return the measure below which an image is unknown, if there is one."""
        found = self.fitted.threshold
        return found if math.isfinite(found) else None

    def stored(self) -> Stored:
        """Return how many images' features are kept, and their bytes."""
        if isinstance(self.state, KeptFeatures):
            return Stored(len(self.state.labels), self.state.nbytes)
        if self.state is None or self.state.sample is None:
            return Stored(sums=self.state is not None)
        return Stored(len(self.state.sample.labels), self.state.sample.nbytes, sums=True)

    def notes(self, classes: Sequence[str] = ()) -> tuple[str, ...]:
        """Return a sentence each on how the network was adapted, and where mirroring changes the class."""
        found = () if self.adapted is None else (str(self.adapted),)
        if self.keeps:
            return found
        named = [classes[row] for row in self.turned if 0 <= row < len(classes)]
        return (
            *found,
            f"Mirrored images of {listed(named) or 'a class'} look like another class: images are not mirrored, "
            "neither in learning nor in prediction.",
        )


Fitting = tuple[Fitted, LeftOut, bool, tuple[int, ...], Sums | KeptFeatures]
"""The fields of a `ClosedForm`."""


def _turned(tensors: Tensors) -> tuple[int, ...]:
    """Return the classes that mirroring changes; an earlier version has not kept which."""
    if "turned" in tensors:
        return tuple(tensors["turned"].tolist())
    return () if bool(tensors.get("mirrors", True)) else (UNNAMED,)


def _fit_sums(evidence: Evidence, last: ClosedForm | None) -> Fitting:
    """Add the phase's images to the sums and solve (primal form)."""
    config, before = evidence.config, last.state if last else None
    options = config.of(ClosedFormOptions)
    assert before is None or isinstance(before, Sums)
    images, z, labels = _new(evidence)
    if before is not None and before.gamma is not None:
        z = kept(z)  # as those are that the sums began with
    views: list[Blocks] = [z]
    if options.mirror_training:
        views.append(evidence.read(images, mirror=True).levels)
    if last is None:
        expand = RandomFeatures.of(z, options.expansion, derive(config.seed, "expansion"))
    else:
        # The first standardization for good: the images of earlier phases are gone.
        expand = RandomFeatures(last.fitted.standardization, last.fitted.expansion)
    total = expand.sums(views, labels, evidence.classes, evidence.ranks, evidence.device)
    gamma = None
    if before is not None:
        total, gamma = before.statistics + total, before.gamma
    sums = Sums(total.rounded(), gamma)
    del total
    if before is not None and before.sample is not None:
        new = KeptFeatures.of(z, labels, images.clues)
        sums = replace(sums, sample=sample_of(new, expand, evidence.classes, before.sample))
    mirror, turned = options.mirror and config.flip, last.turned if last else ()

    def copies(rows: Tensor) -> Blocks:
        return evidence.read(images.select(rows), mirror=True).levels

    averaged = mirror and not turned and not options.mirror_training
    rows = _judges(len(labels), evidence.adapted.images if evidence.adapted else None)
    judging = _Judging(views, labels, rows, copies if averaged else None)
    novelty = last.fitted.novelty if last else Novelty.unfitted(z)
    fitted, judged = _solved(options, sums, expand, judging, novelty)
    return fitted, judged, mirror, turned, sums


def _fit_features(evidence: Evidence, last: ClosedForm | None) -> Fitting:
    """Fit to the features of all images (dual form), of which one that is given again counts once.

    Of more than MOST images only sums are kept: levels, ridge and mirroring are chosen on a part of
    them, for good.
    """
    config, classes = evidence.config, evidence.classes
    options = config.of(ClosedFormOptions)
    mirror, turned = options.mirror and config.flip, last.turned if last else ()
    data, latest = _joined(evidence, last)
    rows = share_of_each(data.labels, MOST if len(data.labels) <= MOST else PART)
    part = data.select(rows)
    found = fit(part, classes, derive(config.seed, "expansion"))
    if config.flip and not turned:
        turned = _turned_by_mirroring(evidence, found, part, rows, latest)
    if len(data.labels) <= MOST:
        return found.fitted, _left_out(found, data, latest), mirror, turned, data
    expand = RandomFeatures(found.fitted.standardization, _narrowed(found.fitted.expansion))
    gamma = float(torch.tensor(found.gamma))  # as it will be read from a file
    doubted = found.doubts.at(rows)
    del found  # it takes as much memory as the sums
    total = expand.sums([data.z], data.labels, classes, evidence.ranks, evidence.device)
    sums = Sums(total.rounded(), gamma, sample_of(data, expand, classes))
    del total
    judging = _Judging([data.z], data.labels, _judges(len(data.labels), data.adapted))
    fitted, judged = _solved(options, sums, expand, judging, Novelty.unfitted(data.z))
    judged = replace(judged, latest=latest, doubts=doubted)
    return fitted, judged, mirror, turned, sums


def _narrowed(expansion: Expansion) -> Expansion:
    """Return an expansion of at most WIDEST random features in all, as many of each level."""
    each = WIDEST // len(expansion.sizes)
    sizes = {name: min(size, each) for name, size in expansion.sizes.items()}
    return Expansion(sizes, expansion.seed)


def _new(evidence: Evidence) -> tuple[Images, dict[str, Tensor], Tensor]:
    """Return the phase's new images, their features by level and their labels.

    Without exemplars of a returning class: they were counted when they were new.
    """
    count = evidence.count
    z = {name: level[:count] for name, level in evidence.now.levels.items()}
    return evidence.at_hand.select(torch.arange(count)), z, evidence.now.labels[:count]


def _joined(evidence: Evidence, last: ClosedForm | None) -> tuple[KeptFeatures, Tensor]:
    """Return the features of all images, and the places of this phase's among them, (N,)."""
    images, z, labels = _new(evidence)
    adapted = evidence.adapted.images if evidence.adapted else None
    known = KeptFeatures.of(z, labels, images.clues, adapted)
    before = last.state if last else None
    if not isinstance(before, KeptFeatures):
        return known, torch.arange(len(labels))
    latest = before.places_of(known)
    data = before + known.select(latest < 0)
    latest[latest < 0] = torch.arange(len(before.labels), len(data.labels))
    return data, latest


def _turned_by_mirroring(
    evidence: Evidence, found: Fit, part: KeptFeatures, rows: Tensor, latest: Tensor
) -> tuple[int, ...]:
    """Return the classes whose mirrored copies, of this phase's images, look like another class."""
    within = torch.isin(latest, rows).nonzero().squeeze(1)
    if not len(within):
        return ()
    images, _, labels = _new(evidence)
    sample = within[first_of_each(labels[within], MIRRORED)]
    copies = evidence.read(images.select(sample), mirror=True).levels
    return turned_classes(found, part, torch.searchsorted(rows, latest[sample]), copies)


def _left_out(found: Fit, data: KeptFeatures, latest: Tensor | None = None) -> LeftOut:
    """Return what leave-one-out says of the images that it can judge."""
    rows = (found.left_out >= 0).nonzero().squeeze(1)
    labels, predictions = data.labels[rows], found.left_out[rows]
    return LeftOut(
        labels,
        predictions,
        found.confidences[rows].float(),
        rows,
        latest,
        found.doubts,
        series=found.groups[rows],
        gains=found.gains[rows].float(),
    )


def _judges(count: int, adapted: Tensor | None) -> Tensor:
    """Return about JUDGED rows of so many images, evenly spread; none that the network was adapted to, (N,) bool."""
    rows = torch.arange(count) if adapted is None else (~adapted).nonzero().squeeze(1)
    return rows[:: max(1, len(rows) // JUDGED)]


@dataclass(frozen=True)
class _Judging:
    """Images of a phase: their features by view, their labels, and the rows of those that leave-one-out judges.

    copies: gives the features of mirrored copies, where prediction averages over them.
    """

    views: Sequence[Blocks]
    labels: Tensor
    rows: Tensor
    copies: Callable[[Tensor], Blocks] | None = None


def _solved(
    options: ClosedFormOptions,
    sums: Sums,
    expand: RandomFeatures,
    judging: _Judging,
    novelty: Novelty | None,
) -> tuple[Fitted, LeftOut]:
    """Fit the head to sums, and temperature and novelty to leave-one-out of some of the images.

    novelty: that of the phase before; None: version 0.2 kept none.
    """
    views, labels, counts = judging.views, judging.labels, sums.statistics.counts
    solved = sums.statistics.solve(options.gamma if sums.gamma is None else sums.gamma)
    # Without its only image nothing is known of a class; a single class leaves nothing to judge.
    some = judging.rows
    some = some[(counts[labels[some]] > 1) & (len(counts) > 1)]
    h, both, copies = expand(views, some), None, None
    if judging.copies is not None and len(some):
        copies = judging.copies(some)
        both = (h + expand([copies], torch.arange(len(some)))) / 2
    scores = solved.leave_one_out(h, targets_of(labels[some], len(counts)), both)
    found = None if sums.sample is None else judge_by_sample(solved, counts, sums.sample, expand)
    offsets = None if found is None else found.offsets
    if offsets is not None:
        scores = scores + offsets
    fitted = Fitted(
        expand.standardization,
        expand.expansion,
        solved.head.float().contiguous(),
        found.temperature if found else temperature(scores, labels[some]),
        threshold(scores.amax(1), REJECTED),
        offsets=None if offsets is None else offsets.float(),
    )
    near = torch.zeros(len(some))
    if novelty is not None:
        z, own = views[0][novelty.level], labels[some]
        total = directions(z, labels, novelty.sums, len(counts))
        near = left_out_nearness(z[some], own, total)
        if copies is not None:
            near = (near + left_out_nearness(z[some], own, total, views=copies[novelty.level])) / 2
        novelty = novelty.fit(total, scores.amax(1), near)
        if found is not None:
            novelty = novelty.refitted(
                found.scores.amax(1), _near(novelty, sums.sample)[found.rows]
            )
        fitted = fitted.with_novelty(novelty)
    judged = LeftOut(labels[some], scores.argmax(1), fitted.confidences(scores, near).float())
    if found is not None:
        judged = _judged_by(found, fitted, sums.sample)
    return fitted, replace(judged, doubts=doubts_at_sight(scores, labels[some]).at(some))


def _near(novelty: Novelty, sample: KeptFeatures | None) -> Tensor:
    """Return the nearness (N,) of the images of a sample, each without its series."""
    assert sample is not None
    z = sample.z[novelty.level]
    return left_out_nearness(z, sample.labels, novelty.sums, sample.clues[:, 0])


def _judged_by(found: Judgement, fitted: Fitted, sample: KeptFeatures | None) -> LeftOut:
    """Return what leaving out whole series says of the images of a sample."""
    assert sample is not None
    labels, groups = sample.labels, sample.clues[:, 0]
    near = _near(fitted.novelty, sample) if fitted.novelty else torch.zeros(len(labels))
    rows, scores = found.rows, found.scores
    return LeftOut(
        labels[rows],
        scores.argmax(1),
        fitted.confidences(scores, near[rows]).float(),
        series=groups[rows],
        gains=found.gains.float(),
    )
