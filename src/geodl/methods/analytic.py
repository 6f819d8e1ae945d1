"""Learning in closed form: a backbone that is trained once, or never, and ridge regression for every phase (ACIL, RanPAC)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from geodl.closed_form import (
    Blocks,
    Expansion,
    Fitted,
    Standardization,
    Statistics,
    kept,
    moved,
    share_out,
    targets_of,
    temperature,
    threshold,
)
from geodl.config import MANY, SEEDS, RunConfig, derive, option, restate
from geodl.errors import TrainingError
from geodl.herding import first_of_each
from geodl.memory import Memory
from geodl.methods.base import Method, Phase, register
from geodl.methods.kept_features import REJECTED, KeptFeatures, fit, mirroring_keeps_classes, same_image, share_of_each
from geodl.nets import Network
from geodl.predictors import Judged
from geodl.ranks import Ranks

CHUNK = 2048
"""Images that are expanded at a time."""
JUDGED = 512
"""Images of a phase whose leave-one-out scores fit temperature and threshold: at least so many and fewer than twice as many."""
MIRRORED = 8
"""Images of a class whose mirrored copies are looked at, to see whether mirroring keeps the class."""
MOST = 5000
"""Images whose features are kept one by one; of more, only the sums are kept."""


class AnalyticConfig(RunConfig):
    """Options of learning in closed form."""

    method: Literal["analytic"] = restate("method", "analytic")
    distill: str = restate("distill", "none", in_model="fixed")
    # The random features are drawn from it, and what was learned holds for these alone.
    seed: int = restate("seed", 1, in_model="fixed", ge=0, le=SEEDS)
    exemplars: int = option(
        0, "Memory", "Exemplars to keep all the same, for k-NME.", ge=0, le=MANY, in_model="kept", in_grid=True
    )
    gamma: float = option(
        0.01, "Method", "Ridge: lambda = gamma x the mean square of a random feature.", gt=0, in_model="kept"
    )
    expansion: int = option(
        4096, "Method", "Random features in all, shared out by the widths of the levels.", ge=1, le=65536
    )
    levels: tuple[str, ...] | None = option(
        None,
        "Method",
        "Levels of the network that are read, NAME or NAME@CELLS for a grid of CELLS x CELLS; unset: all.",
        in_model="fixed",
    )
    mirror: bool = option(True, "Method", "Average the scores of test images and their mirrored copies (needs flip).")
    mirror_training: bool = option(
        False, "Method", "Fit to the mean of each training image and its mirrored copy: a second pass over them."
    )
    keep_features: bool = option(
        False, "Method", "Keep all images' features: levels and ridge are chosen at each step.", in_model="fixed"
    )
    train_base: bool | None = option(
        None, "Method", "Train the backbone in phase 0, true or false; unset: unless it comes with weights."
    )

    @property
    def trains_base(self) -> bool:
        """Whether the backbone is trained in phase 0."""
        given = self.pretrained or self.weights is not None
        return not given if self.train_base is None else self.train_base

    @property
    def trains_later(self) -> bool:
        """Whether it goes on learning: with a distillation; then the features of all images are kept and moved along."""
        return self.distill != "none"

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if self.trains_later and not self.trains_base:
            raise ValueError(f"distill = {self.distill!r} needs a head that was trained in phase 0 (see train_base)")
        if self.trains_later and self.keep_features:
            raise ValueError(f"distill = {self.distill!r}: with keep_features the network stands still")
        if self.mirror_training and (self.trains_later or self.keep_features):
            raise ValueError("mirror_training = True: not where the features of all images are kept")
        if self.mirror_training and not (self.mirror and self.flip):
            raise ValueError("mirror_training = True needs mirror and flip: test images are then mirrored too")
        return self


@register
class Analytic(Method):
    """head = (G + lambda I)^-1 C over random features of a frozen network: the same whatever the cut into phases."""

    name = "analytic"
    title = "Closed form"
    summary = (
        "closed form: a backbone trained in phase 0 (with a distillation: later too), each phase is one linear system"
    )
    paper = (
        "Zhuang et al.: ACIL, NeurIPS 2022; McDonnell et al.: RanPAC, NeurIPS 2023 (several levels of features: ours)"
    )
    Config = AnalyticConfig
    base_loss = "cross-entropy"
    config: AnalyticConfig

    def trains(self, phase: int) -> bool:
        """Return whether the backbone moves: in phase 0, unless it comes with weights; later only where asked for."""
        return self.config.trains_later if phase else self.config.trains_base

    def only_to_learn(self, name: str) -> bool:
        """Return whether something kept is a sum over images, or the features of images that are moved along."""
        moves = self.config.trains_later and (name == "labels" or name.startswith("z."))
        return moves or name in ("gram", "sums", "counts")

    def mirrors(self, kept: Mapping[str, Tensor]) -> bool:
        """Return whether scores are averaged over mirrored test images: where asked for, and the data do not object."""
        return self.config.mirror and self.config.flip and bool(kept.get("mirrors", True))

    def levels(self, network: Network) -> tuple[str, ...]:
        """Return the levels that are read."""
        for name in self.config.levels or ():
            network.level_and_cells(name)
        return self.config.levels or network.level_names

    def exemplars(self, phase: Phase, quota: int) -> Memory:
        """Keep exemplars only where no features are kept: they would serve k-NME alone."""
        return replace(phase.memory, images=None) if self.config.keep_features else super().exemplars(phase, quota)

    def keep(self, phase: Phase) -> dict[str, Tensor]:
        """Return all that is kept of the images seen, and the classifier fitted to it."""
        assert phase.settled is not None
        # Without the exemplars of a class that comes back: they were counted when they were new.
        count, before = len(phase.images), phase.memory.own
        labels, classes = phase.settled.labels[:count], phase.old + phase.new
        z = {name: rows[:count] for name, rows in phase.settled.levels.items()}
        needed = {"labels"} if self.config.trains_later else {"gram", "labels"}
        if before and not needed & before.keys():
            raise TrainingError("the statistics of earlier classes are gone: only the newest phase of a run keeps them")
        if not self.config.trains_later and (not self.config.keep_features or "gram" in before):
            return self._statistics(phase, z, labels)
        known = KeptFeatures.of(z, labels)
        if self.config.trains_later:
            return self._solved_anew(
                self._moved(phase) + known if before else known, classes, phase.ranks, phase.device
            )
        return self._features(phase, KeptFeatures.from_tensors(before) if before else None, known)

    def _statistics(self, phase: Phase, z: Blocks, labels: Tensor) -> dict[str, Tensor]:
        """Add the phase's images to the sums and solve (primal form)."""
        classes, before = phase.old + phase.new, phase.memory.own
        views = [z, phase.read(phase.images, mirror=True).levels] if self.config.mirror_training else [z]
        last = self.fitted(before)
        # The first standardization for good: what was standardized otherwise is no longer there to be done again.
        expand = _RandomFeatures(last.standardization, last.expansion) if last else self._random_features(z)
        added = expand.sums(views, labels, classes, phase.ranks, phase.device)
        statistics = (Statistics.from_tensors(before) + added if before else added).rounded()

        def copies(rows: Tensor) -> Blocks:
            return phase.read(phase.images.select(rows), mirror=True).levels

        averaged = self.mirrors(before) and not self.config.mirror_training
        solved = self._solved(statistics, expand, views, labels, before, copies if averaged else None)
        return statistics.to_tensors() | solved

    def _moved(self, phase: Phase) -> KeptFeatures:
        """Return the features kept of old images as they are by now: the images at hand tell how they have moved."""
        known = KeptFeatures.from_tensors(phase.memory.own)
        assert phase.before is not None
        assert phase.settled is not None
        assert phase.read_teacher is not None
        before, after = phase.before.levels, phase.settled.levels
        if phase.memory.images is not None:  # exemplars tell it for their classes
            both = (phase.read_teacher, before), (phase.read, after)
            before, after = (_joined(levels, read(phase.memory.images).levels) for read, levels in both)
        return replace(known, z=kept(moved(known.z, before, after)))

    def _solved_anew(self, data: KeptFeatures, classes: int, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Fit to the features of all images, of which there are too many for the dual form."""
        expand = self._random_features(data.z)
        statistics = expand.sums([data.z], data.labels, classes, ranks, device)
        return data.to_tensors() | self._solved(statistics, expand, [data.z], data.labels, {})

    def _random_features(self, z: Blocks) -> "_RandomFeatures":
        widths = {name: z[name].shape[1] for name in sorted(z)}
        return _RandomFeatures(Standardization.of(z), Expansion(share_out(self.config.expansion, widths), self._seed))

    def _solved(
        self,
        statistics: Statistics,
        expand: "_RandomFeatures",
        views: Sequence[Blocks],
        labels: Tensor,
        chosen: Mapping[str, Tensor],
        copies: Callable[[Tensor], Blocks] | None = None,
    ) -> dict[str, Tensor]:
        """Return the head, with temperature and threshold fitted on what leave-one-out says of some of the images.

        chosen: has the ridge, and whether mirroring keeps the class, where they were chosen while features were kept.
        copies: gives the features of images' mirrored copies where scores are averaged over them, as they are in prediction.
        """
        solved = statistics.solve(float(chosen.get("gamma", self.config.gamma)))
        some = torch.arange(0, len(labels), max(1, len(labels) // JUDGED))
        # Without its only image nothing is known of a class, and of a single class there is nothing to judge.
        some = some[(statistics.counts[labels[some]] > 1) & (len(statistics.counts) > 1)]
        h, both = expand(views, some), None
        if copies is not None and len(some):
            both = (h + expand([copies(some)], torch.arange(len(some)))) / 2
        scores = solved.leave_one_out(h, targets_of(labels[some], len(statistics.counts)), both)
        fitted = Fitted(
            expand.standardization,
            expand.expansion,
            solved.head.float(),
            temperature(scores, labels[some]),
            threshold(scores.amax(1), REJECTED),
        )
        validated = torch.stack([labels[some], scores.argmax(1)], dim=1)
        confidences = (scores / fitted.temperature).softmax(dim=1).amax(1).float()
        return fitted.to_tensors() | _choices(chosen) | {"validated": validated, "confidences": confidences}

    def _features(self, phase: Phase, before: KeptFeatures | None, known: KeptFeatures) -> dict[str, Tensor]:
        """Fit anew to the features of all images (dual form), of which one that is given again counts once.

        Of more than MOST images only sums are kept: levels, ridge and mirroring are chosen on a part of them, for good.
        """
        data, last, classes = known, torch.arange(len(known.labels)), phase.old + phase.new
        if before is not None:
            last = before.places_of(known)
            data = before + known.select(last < 0)
            last[last < 0] = torch.arange(len(before.labels), len(data.labels))
        rows = share_of_each(data.labels, MOST)
        part = data.select(rows)
        found = fit(part, classes, self._seed)
        within = torch.isin(last, rows).nonzero().squeeze(1)
        if data.mirrors and self.config.flip and len(within):
            sample = within[first_of_each(phase.images.labels[within], MIRRORED)]
            copies = phase.read(phase.images.select(sample), mirror=True).levels
            places = torch.searchsorted(rows, last[sample])
            data = replace(data, mirrors=mirroring_keeps_classes(found, part, places, copies))
        if len(data.labels) <= MOST:
            return found.fitted.to_tensors() | found.validated(data.labels) | data.to_tensors() | {"last": last}
        expand = _RandomFeatures(found.fitted.standardization, found.fitted.expansion)
        statistics = expand.sums([data.z], data.labels, classes, phase.ranks, phase.device).rounded()
        chosen = {"gamma": torch.tensor(found.gamma), "mirrors": torch.tensor(data.mirrors)}
        return statistics.to_tensors() | self._solved(statistics, expand, [data.z], data.labels, chosen)

    def fitted(self, kept: Mapping[str, Tensor]) -> Fitted | None:
        """Return the head that was solved last."""
        return Fitted.from_tensors(kept, self._seed) if kept else None

    def validated(self, kept: Mapping[str, Tensor]) -> Judged | None:
        """Return what the fit without an image says of it, for images that were learned."""
        if "validated" not in kept:
            return None
        pairs = kept["validated"]
        return Judged(pairs[:, 0], pairs[:, 1], kept.get("confidences"))

    def recalled(self, kept: Mapping[str, Tensor], levels: Blocks) -> Tensor:
        """Return where in `validated` images are that were learned, told by their features, (N,); -1: not there."""
        if not {"labels", "rows"} <= kept.keys():
            return torch.full((len(next(iter(levels.values()))),), -1)
        name, known = list(KeptFeatures.from_tensors(kept).z.items())[-1]
        return same_image(levels[name], known[kept["rows"]])

    def without(self, kept: Mapping[str, Tensor], gone: int) -> dict[str, Tensor]:
        """Return what is kept, without a class: as if it had never been there, where the features are kept.

        Where only sums are, G still holds its images, which are then of no class.
        """
        fitted = self.fitted(kept)
        if fitted is None:
            return {}
        if "labels" in kept:
            data = KeptFeatures.from_tensors(kept).without(gone)
            if self.config.trains_later:
                return self._solved_anew(data, int(data.labels.max()) + 1, Ranks(), torch.device("cpu"))
            found = fit(data, int(data.labels.max()) + 1, self._seed)
            return data.to_tensors() | found.fitted.to_tensors() | found.validated(data.labels)
        pairs, stay = kept["validated"], (kept["validated"] != gone).all(1)
        rest = fitted.without(gone).to_tensors() | {"validated": (pairs - (pairs > gone).long())[stay]}
        rest |= _choices(kept) | ({"confidences": kept["confidences"][stay]} if "confidences" in kept else {})
        return rest | (Statistics.from_tensors(kept).without(gone).to_tensors() if "gram" in kept else {})

    @property
    def _seed(self) -> int:
        return derive(self.config.seed, "expansion")


@dataclass(frozen=True)
class _RandomFeatures:
    """From the features z of images to their random features h, and to the sums over them."""

    standardization: Standardization
    expansion: Expansion

    def __call__(self, views: Sequence[Blocks], rows: Tensor) -> Tensor:
        """Return h of some of the images: the mean over their views, as the head is linear and scores are averaged so too."""
        chosen = [{name: z[name][rows] for name in self.expansion.sizes} for z in views]
        return torch.stack([self.expansion(self.standardization(z)) for z in chosen]).mean(0)

    def sums(
        self, views: Sequence[Blocks], labels: Tensor, classes: int, ranks: Ranks, device: torch.device
    ) -> Statistics:
        """Return the sums over all images, each rank having added its share."""
        found = Statistics.empty(self.expansion.width, classes)
        for rows in torch.split(torch.arange(ranks.rank, len(labels), ranks.world), CHUNK):
            found.add(self(views, rows), labels[rows], classes)
        return Statistics(*(ranks.add_up(part, device) for part in (found.upper, found.sums, found.counts)))


def _choices(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what was chosen while features were kept, which the sums alone cannot tell."""
    return {name: kept[name] for name in ("gamma", "mirrors") if name in kept}


def _joined(z: Blocks, more: Blocks) -> dict[str, Tensor]:
    return {name: torch.cat([block, more[name]]) for name, block in z.items()}
