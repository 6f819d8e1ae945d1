"""How to read a frozen network: width of the expansion, ridge, grids, views of the training and test images.

Run with `python -m studies.reading CIFAR_DIR MODEL [READING ...] [--out FILE.json]`, where MODEL is a network of `studies.base`. The split
is the same: 40 of the 50 base classes were trained on, the other 10 arrive later, 100 training images per class are held out for evaluation.
With --out, readings in the file are not computed again.
"""

import argparse
import json
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from geodl import Learner
from geodl.bench.paper.beyond import SHIFTS, shifted
from geodl.closed_form.expansion import Expansion, Standardization, kept, share_out
from geodl.closed_form.primal import Statistics, solve
from geodl.data.batches import Batches, evaluation
from geodl.data.images import concat
from geodl.model.features import class_means, nearest_mean
from geodl.nets import folded
from studies.base import SEEN, parts

CHUNK = 1000
CLASSES = SEEN + 10
STAGES = ("stage1", "stage2", "stage3")
COARSE, FINE = (tuple(f"{name}@{cells}" for name in STAGES) for cells in (2, 4))
POOLED = ("stage3@1",)


class View(NamedTuple):
    """A view of an image: mirrored, shifted by some pixels, rotated by some quarter turns.

    draw: instead, the number of a random augmentation as in training.
    """

    mirror: bool = False
    down: int = 0
    right: int = 0
    turns: int = 0
    draw: int | None = None


ONE = (View(),)
PAIR = (View(), View(mirror=True))
SHIFTED = tuple(View(mirror, *by) for mirror in (False, True) for by in SHIFTS)
TURNED = tuple(View(mirror, turns=turns) for turns in range(4) for mirror in (False, True))
DRAWN = tuple(View(draw=draw) for draw in range(4))


@dataclass(frozen=True)
class Reading:
    """Ridge regression over random features of some levels.

    fitted: the training views: the head is fitted to their mean h or, with `each`, to each view; tested: the views whose scores are
    averaged. Each rotation has its own head.
    targets: (of the true class, of the others); intercept: an unpenalized intercept, which makes the targets irrelevant.
    """

    expansion: int = 4096
    gamma: float = 0.01
    levels: tuple[str, ...] = COARSE
    fitted: tuple[View, ...] = ONE
    each: bool = False
    targets: tuple[int, int] = (1, 0)
    intercept: bool = False
    tested: tuple[View, ...] = PAIR

    def scores(self, split):
        """Return the scores (N, classes) of the held-out images: the sum over the turns."""
        turns = sorted({view.turns for view in self.tested})
        return sum(
            self.scores_of(split, *(of_turn(views, turn) for views in (self.fitted, self.tested)))
            for turn in turns
        )

    def scores_of(self, split, fitted, tested):
        """Return the scores of test views by a head fitted to training views."""
        expand, statistics = split.statistics(self.expansion, self.levels, fitted, self.each)
        gram, sums, counts = statistics.gram, statistics.sums.T, statistics.counts.double()
        total, mean = counts.sum(), sums.sum(1) / counts.sum()
        one, other = self.targets
        cross, constant = (one - other) * sums + other * total * mean[:, None], 0.0
        if self.intercept:
            gram, cross = gram - total * mean.outer(mean), sums - mean.outer(counts)
        head = solve(gram, cross, self.gamma).head
        if self.intercept:
            constant = (counts / total - mean @ head).float()
        return sum(expand(split.aside(view)) @ head.float() + constant for view in tested)


def of_turn(views, turns):
    """Return the views with a number of quarter turns."""
    return tuple(view for view in views if view.turns == turns)


@dataclass(frozen=True)
class NearestMean:
    """The nearest class mean of pooled features, by cosine."""

    def scores(self, split):
        """Return the cosines (N, classes)."""
        z, test = (part(ONE[0])[POOLED[0]].float() for part in (split.train, split.aside))
        return nearest_mean(test, class_means(z, split.labels, CLASSES))


@dataclass(frozen=True)
class Discriminant:
    """Linear discriminant analysis: class means and one covariance, shrunk a little."""

    levels: tuple[str, ...] = POOLED

    def scores(self, split):
        """Return the log-likelihoods (N, classes) up to a constant."""
        z, test = (
            torch.cat([part(ONE[0])[name].double() for name in self.levels], dim=1)
            for part in (split.train, split.aside)
        )
        means = torch.stack([z[split.labels == label].mean(0) for label in range(CLASSES)])
        covariance = (z - means[split.labels]).T.cov()
        covariance += 1e-2 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
        weights = torch.linalg.solve(covariance, means.T)
        return test @ weights - (means.T * weights).sum(0) / 2


BEYOND = {"expansion": 8192, "levels": COARSE + FINE, "gamma": 0.03}
WIDE = BEYOND | {"expansion": 16384}
READINGS: dict[str, Any] = {
    "as cifar100-analytic has it: M = 4096, gamma = 0.01, grids of 2 x 2": Reading(),
    "M = 2048": Reading(expansion=2048),
    "M = 8192": Reading(expansion=8192),
    "gamma = 0.001": Reading(gamma=0.001),
    "gamma = 0.1": Reading(gamma=0.1),
    "stages 2 and 3": Reading(levels=COARSE[1:]),
    "stage 3": Reading(levels=COARSE[2:]),
    "no grids: averages": Reading(levels=tuple(f"{name}@1" for name in STAGES)),
    "grids of 4 x 4": Reading(levels=FINE),
    "mirrored training images": Reading(fitted=PAIR),
    "M = 8192, mirrored": Reading(expansion=8192, fitted=PAIR),
    "M = 8192, mirrored, 4 x 4": Reading(expansion=8192, fitted=PAIR, levels=FINE),
    "M = 8192, mirrored, 2 x 2 and 4 x 4": Reading(
        expansion=8192, fitted=PAIR, levels=COARSE + FINE
    ),
    "beyond, fitted to pairs": Reading(**BEYOND, fitted=PAIR),
    "beyond, fitted to pairs, one view": Reading(**BEYOND, fitted=PAIR, tested=ONE),
    "beyond, fitted to single images, one view": Reading(**BEYOND, tested=ONE),
    "beyond, fitted to single images": Reading(**BEYOND),
    "the same, gamma = 0.01, one view": Reading(**BEYOND | {"gamma": 0.01}, tested=ONE),
    "the same, gamma = 0.1, one view": Reading(**BEYOND | {"gamma": 0.1}, tested=ONE),
    "the same, gamma = 0.3, one view": Reading(**BEYOND | {"gamma": 0.3}, tested=ONE),
    "the same, gamma = 1, one view": Reading(**BEYOND | {"gamma": 1.0}, tested=ONE),
    "the same, targets of +-1, one view": Reading(**BEYOND, targets=(1, -1), tested=ONE),
    "the same, an intercept, one view": Reading(**BEYOND, intercept=True, tested=ONE),
    "beyond, fitted to image and mirrored copy one by one, one view": Reading(
        **BEYOND, fitted=PAIR, each=True, tested=ONE
    ),
    "beyond, fitted to image and mirrored copy one by one": Reading(
        **BEYOND, fitted=PAIR, each=True
    ),
    "beyond, fitted to an augmented draw, one view": Reading(
        **BEYOND, fitted=DRAWN[:1], tested=ONE
    ),
    "beyond, fitted to an augmented draw": Reading(**BEYOND, fitted=DRAWN[:1]),
    "beyond, fitted to four augmented draws one by one, one view": Reading(
        **BEYOND, fitted=DRAWN, each=True, tested=ONE
    ),
    "beyond, fitted to four augmented draws one by one": Reading(**BEYOND, fitted=DRAWN, each=True),
    "beyond, fitted to pairs, tested on shifted views too": Reading(
        **BEYOND, fitted=PAIR, tested=SHIFTED
    ),
    "beyond, fitted to and tested on shifted views too": Reading(
        **BEYOND, fitted=SHIFTED, tested=SHIFTED
    ),
    "beyond, fitted to pairs, a head for each of four rotations": Reading(
        **BEYOND, fitted=TURNED, tested=TURNED
    ),
    "ACIL's: pooled, M = 8192, one view": Reading(expansion=8192, levels=POOLED, tested=ONE),
    "nearest class mean, pooled, one view": NearestMean(),
    "LDA, pooled, one view": Discriminant(),
    "LDA, grids of 2 x 2, one view": Discriminant(COARSE),
    "M = 16384, fitted to single images, one view": Reading(**WIDE, tested=ONE),
    "M = 16384, fitted to pairs": Reading(**WIDE, fitted=PAIR),
}
"""The readings compared; scores are averaged over the mirrored copy unless the name says one view."""


class Split:
    """The training and held-out images of the split with a network; features are computed on first use."""

    def __init__(self, learner, data_dir):
        first, later, aside = parts(data_dir)
        self.learner, self.images = learner, (concat([first, later]), aside)
        self.labels, self.test_labels = (images.labels for images in self.images)
        self.train, self.aside = (cache(partial(self._features, images)) for images in self.images)
        self.statistics = lru_cache(maxsize=1)(self._statistics)

    def _features(self, images, view):
        """Return the features of a view of images, by level."""
        levels = {name for each in READINGS.values() for name in getattr(each, "levels", POOLED)}
        network, bf16 = folded(self.learner.network), self.learner.trainer.precision == "bf16"
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            parts = [
                network.with_levels(batch.images, sorted(levels))[1] | {"": batch.indices}
                for batch in self._batches(images, view)
            ]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        order = found.pop("").argsort()
        return kept({name: block[order] for name, block in found.items()})

    def _batches(self, images, view):
        """Return a view of images in batches."""
        if view.draw is not None:
            return Batches(images, self.learner.transform, 128, view.draw).epoch(0)
        pixels = images.pixels.flip(3) if view.mirror else images.pixels
        pixels = shifted(pixels, view.down, view.right).rot90(view.turns, (2, 3))
        return evaluation(replace(images, pixels=pixels.contiguous()), self.learner.transform)

    def _statistics(self, width, levels, views, each):
        """Return the expansion and the sums over the training images."""
        plain = self.train(ONE[0])
        standardization = Standardization.of(
            {name: plain[name][self.labels < SEEN] for name in levels}
        )
        random = Expansion(
            share_out(width, {name: plain[name].shape[1] for name in sorted(levels)}), seed=1
        )

        def expand(z, rows=None):
            rows = torch.arange(len(z[levels[0]])) if rows is None else rows
            some = [{name: z[name][part] for name in levels} for part in rows.split(CHUNK)]
            return torch.cat([random(standardization(part)) for part in some])

        found = Statistics.empty(width, CLASSES)
        for rows in torch.arange(len(self.labels)).split(CHUNK):
            h = [expand(self.train(view), rows) for view in views]
            for part in h if each else [sum(h) / len(h)]:
                found.add(part, self.labels[rows], CLASSES)
        return expand, found


def accuracies(scores, labels):
    """Return the accuracy in % on all classes, on those trained on, on those that came later."""
    right, later = scores.argmax(1) == labels, labels >= SEEN
    return [100 * part.double().mean().item() for part in (right, right[~later], right[later])]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "readings", nargs="*", metavar="READING", default=list(READINGS), help="default: all"
    )
    parser.add_argument("--out", type=Path, help="a JSON file to keep the accuracies in")
    options = parser.parse_args()
    split = Split(Learner.load(options.model), options.data_dir)
    found = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    print("| reading | all 50 | the 40 trained on | the 10 later |\n|---|---:|---:|---:|")
    for name in options.readings:
        if name not in found:
            found[name] = accuracies(READINGS[name].scores(split), split.test_labels)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))
        print(f"| {name} | {' | '.join(f'{each:.1f}' for each in found[name])} |", flush=True)


if __name__ == "__main__":
    main()
