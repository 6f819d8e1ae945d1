"""Advice on how to improve a model, shown at the end of a step and on the page of the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from geodl.app.choices import in_closed_form
from geodl.app.state import KnownClass
from geodl.config import RunConfig
from geodl.core.errors import install
from geodl.core.text import listed
from geodl.methods import build
from geodl.model.classifiers.fitting import MOST
from geodl.model.metrics import Confusion

FEW, WEAK, MIXED, WIDE = 10, 80.0, 0.05, 10.0
"""Thresholds: images of a class (few), its accuracy in % (weak), share of two classes (mixed up), interval in points (wide)."""
ENOUGH = 2
"""Fewer images of a class, or mistakes between two, are no ground for advice."""
SCRATCH = 100
"""With fewer images a class, training a network from scratch is called hard."""
UNLIKE, MANY = 95.0, 300
"""Below this accuracy in %, on at least this many images, adapting the network is suggested."""

ONLY_SUMS = (
    f"More than {MOST:,} images: from now on the model keeps sums over all images, and the features of a sample of each class to measure "
    "accuracy on. Feature levels and regularization no longer change, and a class that is removed leaves its share in the sums."
)
"""What changes once the features of all images would take too much space."""

Advice = tuple[str, str]
"""A heading, and what to do."""


@dataclass(frozen=True)
class Pair:
    """Two classes that are confused with each other.

    ways:   (class, predicted class, mistakes, images of the class), the more frequent way first; a second one only with mistakes.
    images: of both classes.
    """

    ways: tuple[tuple[str, str, int, int], ...]
    images: int

    @property
    def names(self) -> tuple[str, str]:
        """The two classes."""
        return self.ways[0][:2]

    @property
    def wrong(self) -> int:
        """The number of mistakes."""
        return sum(mistakes for _, _, mistakes, _ in self.ways)


def mixed_up(confusion: Confusion) -> list[Pair]:
    """Return the classes that are confused with each other, the most frequent mistakes first."""
    counts, names = confusion.counts, confusion.classes
    totals, pairs = counts.sum(dim=1).tolist(), []
    for i, j in (counts + counts.T).triu(1).nonzero().tolist():
        both = [(names[a], names[b], int(counts[a, b]), totals[a]) for a, b in ((i, j), (j, i))]
        ways = sorted((way for way in both if way[2]), key=lambda way: -way[2])
        pairs.append(Pair(tuple(ways), totals[i] + totals[j]))
    return sorted(pairs, key=lambda pair: (-pair.wrong, pair.images))


def advice(confusion: Confusion, images: Mapping[str, int]) -> list[Advice]:
    """Return the advice, the most useful first.

    confusion: on images that were not learned; images: how many were learned of each class of interest.
    """
    if len(confusion.classes) == 1:
        words = "There is nothing to tell apart until the model knows two classes or more."
        return [("Add a second class", words)]
    found = []
    for pair in mixed_up(confusion)[:3]:
        if pair.wrong >= ENOUGH and pair.wrong >= MIXED * pair.images:
            words = f"{pair.wrong} of their {pair.images} images were predicted as the other."
            remedy = (
                "Check for images in the wrong folder; then add images that show the difference."
            )
            found.append(("Look at " + " and ".join(pair.names), f"{words} {remedy}"))
    weak = [
        f"{row.name} ({row.right} of {row.judged} right)"
        for row in confusion.weakest
        if row.judged >= ENOUGH and (row.accuracy or 0.0) < WEAK
    ]
    if weak:
        words = f"{listed(weak)}. More, and more varied, images of them help."
        found.append(("Weak classes", words))
    few = [f"{name} ({number})" for name, number in images.items() if 0 < number < FEW]
    if few:
        words = f"{listed(few)}. Predictions of them are unreliable; {FEW} or more images help."
        found.append(("Very few images", words))
    return found


def uncertain(confusion: Confusion) -> Iterator[Advice]:
    """Yield a warning about an accuracy that was measured on few images."""
    low, high = confusion.interval
    if len(confusion.classes) > 1 and confusion.images and high - low > WIDE:
        basis = f"{confusion.images} images"
        if confusion.units < confusion.images:
            basis += f" in {confusion.units} series"
        words = f"It was measured on {basis}: it may as well be {low:.0f} % or {high:.0f} %."
        yield "The accuracy is uncertain", f"{words} More images give a better estimate."


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
    """Name the classes of a single series: without it nothing is left to judge them by."""
    pairs = zip(classes, confusion.rows, strict=True)
    single = [known.name for known, row in pairs if not row.judged and known.images > 1]
    if single:
        words = f"All images of {listed(single)} are of one series, such as the frames of a video. Add images of another occasion,"
        remedy = "or learn a new model with --group-by none, which counts each image by itself."
        yield "Cannot be judged", f"{words} {remedy}"


def _from_scratch(classes: Sequence[KnownClass], config: RunConfig) -> Iterator[Advice]:
    """Recommend a pre-trained network for few photographs."""
    middle = sorted(known.images for known in classes)[len(classes) // 2]
    if middle < SCRATCH and not config.pretrained and (config.image_size or 0) >= 24:
        words = f"About {middle} images a class are few to train a network from scratch."
        yield "Use a pre-trained network", f"{words} In a new model, after {install('pretrained')}."


def _unlike(confusion: Confusion, config: RunConfig) -> Iterator[Advice]:
    """Suggest adapting a network whose features do not suit the images."""
    if not (config.pretrained and in_closed_form(config.method)) or config["adapt"] != "no":
        return
    if confusion.images >= MANY and confusion.accuracy < UNLIKE:
        words = "The images may be unlike those that the network was trained on. In a new model --adapt auto tries to adapt it, "
        words += "which takes minutes, and keeps the result only if it is right on clearly more of the images set apart. It can cost accuracy on classes of later steps."
        yield "Adapt the network", words
