"""What a step says about the model in plain sentences: which classes are tiny, weak or mixed up, and what would help."""

from collections.abc import Iterator, Sequence

from geodl.app.choices import in_closed_form
from geodl.app.state import KnownClass
from geodl.config import RunConfig
from geodl.core.errors import install
from geodl.core.text import listed
from geodl.model.memory import quota
from geodl.model.metrics import Confusion

TINY = 10  # images: below, a class is called tiny
FEW = 100  # images a class: below, training from scratch is called hard
UNLIKE, MANY = 95.0, 300  # below so many % accuracy on so many images, adapting the network may pay
WEAK = 60.0  # % accuracy on its validation images: below, a class is called weak
ENOUGH = 2  # validation images: with fewer, a class is not judged


def advise(
    confusion: Confusion, classes: Sequence[KnownClass], config: RunConfig, present: Sequence[int]
) -> list[str]:
    """Return the sentences. confusion: of the validation images; `present`: the step's classes."""
    if len(classes) == 1:
        return [
            f"The model knows one class, {classes[0].name!r}: there is nothing to tell apart until a second one comes."
        ]
    sentences = [*_tiny([classes[i] for i in present])]
    if max(known.step for known in classes) == 1:  # later it is too late for another network
        sentences += [*_few(classes, config), *_unlike(confusion, config)]
    sentences += [*_weak(confusion), *_mixed(confusion)]
    if not in_closed_form(config.method) and not quota(
        len(classes), config.exemplars, config.memory_budget
    ):
        sentences.append(
            f"No images are kept (exemplars {config.exemplars}, {config.memory_budget}): earlier classes will be forgotten faster"
            + ("." if config.exemplars else ", and their accuracy cannot be measured any more.")
        )
    return sentences


def _tiny(classes: Sequence[KnownClass]) -> Iterator[str]:
    tiny = [f"{known.name} ({known.images})" for known in classes if known.images < TINY]
    if tiny:
        yield f"Very few images: {listed(tiny)}. Predictions of such classes are shaky; {TINY} or more images help."


def _few(classes: Sequence[KnownClass], config: RunConfig) -> Iterator[str]:
    """Recommend a pre-trained network where photographs are too few to learn from scratch what an image is."""
    middle = sorted(known.images for known in classes)[len(classes) // 2]
    if middle < FEW and not config.pretrained and (config.image_size or 0) >= 24:
        yield (
            f"About {middle} images a class are few to train a network from scratch: a pre-trained one would help "
            f"(in a new model, after {install('pretrained')})."
        )


def _unlike(confusion: Confusion, config: RunConfig) -> Iterator[str]:
    """Offer to adapt a network whose features do not suit the images: whether that pays, images set apart tell."""
    if not (config.pretrained and in_closed_form(config.method)) or config["adapt"] != "no":
        return
    if confusion.images >= MANY and confusion.accuracy < UNLIKE:
        yield (
            "The images may be unlike those that the network was trained on. In a new model --adapt auto tries to adapt it, "
            "which takes minutes, and keeps that only where images set apart tell that it pays."
        )


def _weak(confusion: Confusion) -> Iterator[str]:
    counts, right = confusion.counts.sum(dim=1).tolist(), confusion.counts.diagonal().tolist()
    weak = [
        f"{name} ({right[i]} of {counts[i]} correct)"
        for i, name in enumerate(confusion.classes)
        if counts[i] >= ENOUGH and confusion.rate([i]) < WEAK
    ]
    if weak:
        yield f"Weak on the validation images: {listed(weak)}. More, and more varied, images of them help."


def _mixed(confusion: Confusion) -> Iterator[str]:
    counts = confusion.counts.sum(dim=1).tolist()
    worst: dict[int, tuple[int, int]] = {}
    for true, other, count in confusion.mistakes():
        worst.setdefault(true, (other, count))
    found = [
        f"{confusion.classes[true]} is taken for {confusion.classes[other]} ({count} of {counts[true]})"
        for true, (other, count) in sorted(worst.items())
        if count >= 2 and 10 * count >= 3 * counts[true]
    ]
    if found:
        yield f"Mixed up: {listed(found)}."
