"""One evaluation for all: what every classifier of a model makes of labelled images."""

from collections.abc import Callable

from geodl.core.errors import ConfigError
from geodl.data.images import Images
from geodl.model.classifiers import CLASSIFIERS, Ame, Classifier
from geodl.model.features import Features
from geodl.model.herding import first_of_each
from geodl.model.metrics import Confusion
from geodl.model.model import Model


def evaluate(
    model: Model,
    images: Images,
    read: Callable[..., Features],
    *,
    seen: Images | None = None,
    mirror: bool = True,
) -> tuple[dict[str, Confusion], Features]:
    """Return the confusions by classifier, of those that the model's options name, and the features that they come from.

    images: labels are rows; read: ``read(images, mirror=False)`` gives features; seen: all training
    images of all classes, labels being rows: only with them AME, the oracle, is evaluated; mirror:
    False evaluates the images alone, without mirrored copies.
    """
    found = read(images)
    classifiers: dict[str, Classifier] = dict(model.classifiers)
    if seen is not None:
        most = model.config.ame_images
        some = seen if most is None else seen.select(first_of_each(seen.labels, most))
        classifiers[Ame.name] = Ame.of(read(some), len(model.classes))
    names = _wanted(model.config.classifiers, classifiers)
    scorers = {name: classifiers[name].scorer(model.network) for name in names}
    copies = None
    if mirror and any(scorer.mirrors for scorer in scorers.values()):
        copies = read(images, mirror=True)
    confusions = {}
    for name, scorer in scorers.items():
        scores = scorer.in_chunks(found, copies if scorer.mirrors else None)
        confusions[name] = Confusion.of(found.labels, scores.argmax(dim=1), model.classes)
    return confusions, found


def _wanted(given: tuple[str, ...] | None, there: dict[str, Classifier]) -> list[str]:
    """Return the names of the classifiers to evaluate, in the order of tables."""
    names = [name for name in CLASSIFIERS if name in there and (given is None or name in given)]
    if not names:
        raise ConfigError(f"classifiers = {given}: this model has {', '.join(there)}")
    return names
