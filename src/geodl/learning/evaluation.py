"""Evaluation of a model's classifiers on labelled images."""

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
    """Return the confusion matrices by classifier, and the features of the images.

    Args:
        model: its option `classifiers` chooses the classifiers; None: all.
        images: their labels are rows of the head.
        read: ``read(images, mirror=False)`` returns features.
        seen: all training images of all classes; only with these is the oracle AME evaluated.
        mirror: whether classifiers may average over mirrored copies.
    """
    features = read(images)
    classifiers: dict[str, Classifier] = dict(model.classifiers)
    if seen is not None:
        most = model.config.ame_images
        some = seen if most is None else seen.select(first_of_each(seen.labels, most))
        classifiers[Ame.name] = Ame.of(read(some), len(model.classes))
    chosen = model.config.classifiers
    names = [
        name for name in CLASSIFIERS if name in classifiers and (chosen is None or name in chosen)
    ]
    if not names:
        raise ConfigError(f"classifiers = {chosen}: this model has {', '.join(classifiers)}")
    scorers = {name: classifiers[name].scorer(model.network) for name in names}
    copies = None
    if mirror and any(scorer.mirrors for scorer in scorers.values()):
        copies = read(images, mirror=True)
    confusions = {}
    for name, scorer in scorers.items():
        scores = scorer.in_chunks(features, copies if scorer.mirrors else None)
        confusions[name] = Confusion.of(features.labels, scores.argmax(dim=1), model.classes)
    return confusions, features
