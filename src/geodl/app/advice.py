"""What would make a model better, in plain words: one list, for the page of a model and for the end of a step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from geodl.app.choices import in_closed_form
from geodl.app.state import KnownClass
from geodl.config import RunConfig
from geodl.core.errors import install
from geodl.core.text import listed
from geodl.methods import build
from geodl.model.classifiers.fitting import MOST
from geodl.model.metrics import Confusion

FEW, WEAK, MIXED, WIDE = 10, 80.0, 0.05, 10.0
"""Called few: images of a class; weak: % of them right; mixed up: share of two classes; wide: points of the interval."""
ENOUGH = 2
"""Fewer images say nothing of a class, and fewer mistakes nothing of two classes."""
SCRATCH = 100
"""Images a class: with fewer, training a network from scratch is called hard."""

UNLIKE, MANY = 95.0, 300
"""Below so many % accuracy on so many images, adapting the network may pay."""

ONLY_SUMS = (
    f"More than {MOST:,} images: from now on the model keeps sums over all images, and the features of a sample of each class to measure "
    "accuracy on. Feature levels and regularization stay as they are, and sums keep a share of a class that is removed."
)
"""What changes where the features of all images would be too many."""

Advice = tuple[str, str]
"""A heading, and what to do."""


def advice(confusion: Confusion, images: Mapping[str, int]) -> list[Advice]:
    """Return what would make a model better, the most useful first.

    confusion: of images that were not learned; images: how many were learned of the classes that are looked at.
    """
    if len(confusion.classes) == 1:
        words = "There is nothing to tell apart until the model knows two classes or more."
        return [("Add a second class", words)]
    found = []
    for pair in mixed_up(confusion)[:3]:
        if pair["wrong"] >= ENOUGH and pair["wrong"] >= MIXED * pair["images"]:
            words = f"{pair['wrong']} of their {pair['images']} images were predicted as the other."
            remedy = "See that none lies in the wrong folder; then add images that show what tells them apart."
            found.append(("Look at " + " and ".join(pair["names"]), f"{words} {remedy}"))
    weak = [
        f"{row.name} ({row.right} of {row.judged} right)"
        for row in confusion.weakest
        if row.judged >= ENOUGH and (row.accuracy or 0.0) < WEAK
    ]
    if weak:
        found.append(
            ("Weak classes", f"{listed(weak)}. More, and more varied, images of them help.")
        )
    few = [f"{name} ({number})" for name, number in images.items() if 0 < number < FEW]
    if few:
        words = f"{listed(few)}. Predictions of them are shaky; {FEW} or more images help."
        found.append(("Very few images", words))
    return found


def uncertain(confusion: Confusion) -> Iterator[Advice]:
    """Yield what to know of an accuracy that rests on few images."""
    low, high = confusion.interval
    if len(confusion.classes) > 1 and confusion.images and high - low > WIDE:
        rests = f"{confusion.images} images"
        if confusion.units < confusion.images:
            rests += f" in {confusion.units} series"
        words = f"It rests on {rests}: it may as well be {low:.0f} % or {high:.0f} %. More images tell more."
        yield "Do not trust the accuracy too far", words


def at_end_of_step(
    confusion: Confusion, classes: Sequence[KnownClass], config: RunConfig, present: Sequence[int]
) -> list[str]:
    """Return the advice at the end of a step as sentences. present: the step's classes."""
    found = advice(confusion, {classes[i].name: classes[i].images for i in present})
    if len(classes) > 1:
        if max(known.step for known in classes) == 1:  # later it is too late for another network
            found += [*_from_scratch(classes, config), *_unlike(confusion, config)]
        if in_closed_form(config.method):
            found += _not_judged(confusion, classes)
        if (few := build(config).advice(len(classes))) is not None:
            found.append(("No images are kept", few))
    return [f"{heading}: {words}" for heading, words in found]


def _not_judged(confusion: Confusion, classes: Sequence[KnownClass]) -> Iterator[Advice]:
    """Name the classes of a single series: without it nothing is known of them."""
    pairs = zip(classes, confusion.rows, strict=True)
    single = [known.name for known, row in pairs if not row.judged and known.images > 1]
    if single:
        words = f"All images of {listed(single)} are of one series, such as the frames of a video. Add images of another occasion"
        yield (
            "Cannot be judged",
            f"{words}, or learn a new model with --group-by none, which counts each image by itself.",
        )


def _from_scratch(classes: Sequence[KnownClass], config: RunConfig) -> Iterator[Advice]:
    """Recommend a pre-trained network where photographs are too few to learn from scratch what an image is."""
    middle = sorted(known.images for known in classes)[len(classes) // 2]
    if middle < SCRATCH and not config.pretrained and (config.image_size or 0) >= 24:
        words = f"About {middle} images a class are few to train one from scratch."
        yield "Use a pre-trained network", f"{words} In a new model, after {install('pretrained')}."


def _unlike(confusion: Confusion, config: RunConfig) -> Iterator[Advice]:
    """Offer to adapt a network whose features do not suit the images: images set apart decide whether it is kept."""
    if not (config.pretrained and in_closed_form(config.method)) or config["adapt"] != "no":
        return
    if confusion.images >= MANY and confusion.accuracy < UNLIKE:
        words = "The images may be unlike those that the network was trained on. In a new model --adapt auto tries to adapt it, "
        words += "which takes minutes, and keeps that only where it is right on clearly more of the images set apart. It can cost classes of later steps."
        yield "Adapt the network", words


def mixed_up(confusion: Confusion) -> list[dict[str, Any]]:
    """Return the classes that are confused with each other, the most frequent first."""
    totals, found = confusion.counts.sum(dim=1).tolist(), []
    both = confusion.counts + confusion.counts.T
    for i, j in both.triu(1).nonzero().tolist():
        there, back = int(confusion.counts[i, j]), int(confusion.counts[j, i])
        one, other = (
            ((i, j, there), (j, i, back)) if there >= back else ((j, i, back), (i, j, there))
        )
        ways = [
            (confusion.classes[a], confusion.classes[b], wrong, totals[a])
            for a, b, wrong in (one, other)
            if wrong
        ]
        names = ways[0][:2]
        found.append(
            {"names": names, "wrong": there + back, "images": totals[i] + totals[j], "ways": ways}
        )
    return sorted(found, key=lambda pair: (-pair["wrong"], pair["images"]))
