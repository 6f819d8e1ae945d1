"""Closed form: ridge regression on random features of a frozen network (ACIL, RanPAC).

Its state is `KeptFeatures`, the features of all images, or `Sums` over them. With sums, the fit does not depend on how the
images are divided into phases. With kept features, levels and ridge are chosen at each step, an image that is learned
again counts once, and the removal of a class is exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from geodl.closed_form.expansion import Blocks, kept
from geodl.closed_form.fitted import Fitted, LeftOut
from geodl.closed_form.kept_features import KeptFeatures, fit, same_image
from geodl.closed_form.primal import Statistics
from geodl.closed_form.sampled import moved_within
from geodl.config import RunConfig
from geodl.core.devices import return_memory
from geodl.core.errors import TrainingError
from geodl.core.keys import derive
from geodl.core.tensors import part, shaped
from geodl.core.text import listed
from geodl.model.classifiers.base import Adapted, Classifier, Scorer, Stored, Tensors
from geodl.model.classifiers.fitting import (
    ClosedFormOptions,
    Sums,
    fit_features,
    fit_sums,
    mirrors,
)
from geodl.model.features import Features
from geodl.model.phase import Phase
from geodl.nets import Network

UNNAMED = -1
"""Stands for an unknown class that mirroring changes."""


@dataclass(frozen=True)
class ClosedForm(Classifier):
    """head = (G + lambda I)^-1 C over random features h of a frozen network.

    mirror:  whether scores are averaged over mirrored copies, if that keeps the class.
    turned:  the rows of the classes that mirroring is found to change.
    state:   None in older phases of a run, which drop it.
    adapted: the adaptation of the network to the first images; None: there was none.
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
        """Return the levels that are used, by default all."""
        levels = config.of(ClosedFormOptions).levels or network.level_names
        for name in levels:
            network.level_and_cells(name)
        return levels

    @classmethod
    def fit(cls, phase: Phase) -> Self:
        """Add the phase's images to the state, and fit."""
        last = phase.previous.get(cls.name)
        assert last is None or isinstance(last, cls)
        if last is not None and last.state is None:
            raise TrainingError("only the newest phase has the sums that further learning needs")
        return_memory()  # a fit allocates and frees many large matrices
        switched = last is not None and isinstance(last.state, Sums)
        keeps = phase.config.of(ClosedFormOptions).keep_features and not switched
        fitted, judged, turned, state = (fit_features if keeps else fit_sums)(phase, last)
        adapted = phase.adapted or (last.adapted if last else None)
        return cls(fitted, judged, mirrors(phase.config), turned, state, adapted)

    @property
    def keeps(self) -> bool:
        """Whether no class is found to be changed by mirroring."""
        return not self.turned

    def scorer(self, network: Network) -> Scorer:
        """Return the scorer of the fitted head."""
        return Scorer(
            lambda features: self.fitted.scores(features.levels),
            scale=1 / self.fitted.temperature,
            novelty=self.fitted.novelty,
            threshold=self.fitted.threshold,
            mirrors=self.mirror and self.keeps,
            levels=tuple(self.fitted.expand.expansion.sizes),
        )

    def without(self, row: int) -> Self:
        """Return the classifier without a class: with kept features, as if it had never been learned.

        With sums, G still contains its images, as images of no class.
        """
        moved = {row: UNNAMED}
        turned = tuple(moved.get(each, each - (each > row)) for each in self.turned)
        if isinstance(self.state, KeptFeatures):
            return replace(self._refitted(self.state.without(row)), turned=turned)
        sums = self.state and self.state.without(row)
        rest = self.judged.without(row)
        fitted = self.fitted.without(row)
        return replace(self, fitted=fitted, judged=rest, turned=turned, state=sums)

    def relabelled(self, labels: Tensor) -> Self:
        """Return a fit to the kept features with other labels (N,); -1 removes an image."""
        assert isinstance(self.state, KeptFeatures)
        return self._refitted(replace(self.state, labels=labels).select(labels >= 0))

    def resummed(self, z: Blocks, old: Tensor, row: int) -> Self:
        """Return a fit to sums in which images move to class `row`; -1: removed. z: (N, d_b) by level; old: (N,), their classes.

        Standardization, levels, ridge, temperature, threshold and the leave-one-out predictions stay.
        """
        z = kept(z)  # rounded, as when they were added
        assert isinstance(self.state, Sums)
        statistics, gamma, sample = self.state.statistics, self.state.gamma, self.state.sample
        expand, classes = self.fitted.expand, len(statistics.counts)
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
        """Return the classifier with other labels (N,) of the kept features, as `relabelled`, but without a new fit."""
        assert isinstance(self.state, KeptFeatures)
        return replace(self, state=replace(self.state, labels=labels).select(labels >= 0))

    def _refitted(self, data: KeptFeatures) -> Self:
        refit = fit(data, int(data.labels.max()) + 1, self.fitted.expand.expansion.seed)
        return replace(self, fitted=refit.fitted, judged=refit.left_out, state=data)

    def kept_rows(self, features: Features) -> Tensor:
        """Return the rows (N,) of the kept features that are of the same images; -1: none."""
        assert isinstance(self.state, KeptFeatures)
        name, known = list(self.state.z.items())[-1]
        return same_image(features.levels[name], known)

    def tensors(self) -> Tensors:
        """Return head, standardization, leave-one-out predictions and kept features."""
        tensors = self.fitted.to_tensors() | self.judged.to_tensors()
        tensors["mirrors"] = torch.tensor(self.keeps)
        tensors["turned"] = torch.tensor(self.turned, dtype=torch.int64)
        if self.adapted is not None:
            tensors |= self.adapted.to_tensors()
        if isinstance(self.state, KeptFeatures):
            tensors |= self.state.to_tensors()
        elif self.state is not None and self.state.gamma is not None:
            tensors["gamma"] = torch.tensor(self.state.gamma)
        return tensors

    def statistics(self) -> Tensors:
        """Return the sums and the sample."""
        if not isinstance(self.state, Sums):
            return {}
        sample = {} if self.state.sample is None else self.state.sample.to_tensors()
        more = {f"sample.{name}": each for name, each in sample.items()}
        return self.state.statistics.to_tensors() | more

    @classmethod
    def from_tensors(cls, tensors: Tensors, config: RunConfig) -> Self:
        """Return the classifier of `tensors` and `statistics`."""
        state: Sums | KeptFeatures | None = None
        if "labels" in tensors:
            state = KeptFeatures.from_tensors(tensors)
        elif "gram" in tensors:
            gamma = shaped(tensors["gamma"], "gamma").item() if "gamma" in tensors else None
            sample = part(tensors, "sample")
            state = Sums(
                Statistics.from_tensors(tensors),
                gamma,
                KeptFeatures.from_tensors(sample) if sample else None,
            )
        fitted = Fitted.from_tensors(tensors, derive(config.seed, "expansion"))
        judged, classes = LeftOut.from_tensors(tensors), fitted.head.shape[1]
        kept = state.sample if isinstance(state, Sums) else state
        if kept is not None and bool((kept.labels >= classes).any()):
            raise ValueError(f"an image of class {int(kept.labels.max())} of {classes}")
        if isinstance(state, KeptFeatures) and judged.rows is not None:
            state.select(judged.rows)  # raises an error for rows out of range
        return cls(
            fitted,
            judged,
            mirror=mirrors(config),
            turned=_turned(tensors),
            state=state,
            adapted=Adapted.from_tensors(tensors),
        )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.fitted.head.shape[1]

    def left_out(self) -> LeftOut:
        """Return the leave-one-out predictions of learned images."""
        return self.judged

    def places(self, features: Features) -> Tensor:
        """Return the positions (N,) in `left_out` of images, found by their features; -1: not found."""
        if not isinstance(self.state, KeptFeatures) or self.judged.rows is None:
            return torch.full((len(features.pooled),), -1)
        name, known = list(self.state.z.items())[-1]
        return same_image(features.levels[name], known[self.judged.rows])

    def counts(self) -> Tensor:
        """Return the number of learned images of each class, (classes,)."""
        if isinstance(self.state, KeptFeatures):
            return torch.bincount(self.state.labels, minlength=self.fitted.head.shape[1])
        assert isinstance(self.state, Sums)
        return self.state.statistics.counts

    def kept_labels(self) -> Tensor | None:
        """Return the classes (N,) of the images whose features are kept; None with sums."""
        return self.state.labels if isinstance(self.state, KeptFeatures) else None

    def threshold(self) -> float | None:
        """Return the measure below which an image is unknown; None: no image is."""
        threshold = self.fitted.threshold
        return threshold if math.isfinite(threshold) else None

    def stored(self) -> Stored:
        """Return the number of images whose features are kept, and their size."""
        if isinstance(self.state, KeptFeatures):
            return Stored(len(self.state.labels), self.state.nbytes)
        if self.state is None or self.state.sample is None:
            return Stored(sums=self.state is not None)
        return Stored(len(self.state.sample.labels), self.state.sample.nbytes, sums=True)

    def notes(self, classes: Sequence[str] = ()) -> tuple[str, ...]:
        """Return sentences about the adaptation of the network, and about classes that mirroring changes."""
        notes = () if self.adapted is None else (str(self.adapted),)
        if self.keeps:
            return notes
        named = [classes[row] for row in self.turned if 0 <= row < len(classes)]
        return (
            *notes,
            f"Mirrored images of {listed(named) or 'a class'} look like another class: images are not mirrored, "
            "neither in learning nor in prediction.",
        )


def _turned(tensors: Tensors) -> tuple[int, ...]:
    """Return the classes that mirroring changes; version 0.2 stored only whether there are any."""
    if "turned" in tensors:
        return tuple(tensors["turned"].tolist())
    return () if bool(tensors.get("mirrors", torch.tensor(True)).all()) else (UNNAMED,)
