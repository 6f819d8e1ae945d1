"""Algorithm 1 of the paper: learn one group of classes, and keep what was known.

Line numbers are those of the paper. Lines 6 to 13, the mini-batches, are the loop (`learning/loop.py`)
and the method's loss; line 15, the evaluation, is up to the caller.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import torch

from geodl.core.errors import ConfigError, DataError
from geodl.core.keys import derive
from geodl.data.batches import transform_of
from geodl.data.images import Images, concat, with_rows
from geodl.learning.checkpoint import Checkpoints
from geodl.learning.loop import Trainer
from geodl.learning.shared_base import SharedBase, run_stages
from geodl.methods import Method, Phase
from geodl.model.classifiers import fittable
from geodl.model.features import Features, class_means
from geodl.model.memory import Memory
from geodl.model.model import Model, Weights
from geodl.nets import Backbone, CosineHead, Network, Own, build_backbone, frozen_copy, with_head


def learn(
    model: Model | None,
    images: Images,
    method: Method,
    trainer: Trainer,
    *,
    seen: Images | None = None,
    checkpoints: Checkpoints | None = None,
    base: SharedBase | None = None,
    backbone: Backbone | None = None,
    now: Features | None = None,
) -> Model:
    """Return the model that also knows the classes of these images; `model` stays as it is.

    Args:
        model: what was learned so far; None: nothing.
        images: D_t, with class names; new classes, more images of known ones, or both.
        method: what to minimize.
        trainer: the loop and its devices.
        seen: all earlier images, which joint training alone needs.
        checkpoints: where checkpoints go; an interrupted group resumes from the last one.
        base: trained base phases that runs share.
        backbone: what a new network begins with; None: it is built as the options say.
        now: the network's features of these images, where it stands still and they were taken before.
    """
    phase, classes = begin(model, images, method, trainer, seen, backbone)  # line 1
    if len(classes) > 1:  # of a single class there is nothing to learn
        run_stages(trainer, method, phase, checkpoints, base)  # lines 2 and 5 to 14
    phase.now = phase.read(phase.at_hand) if now is None else now
    share = method.share(len(classes))
    phase.kept = method.exemplars(phase, share - method.held_out(share))  # lines 3 and 16
    return Model(
        config=method.config,
        classes=classes,
        weights=Weights.of(method.config.network, phase.network),
        transform=phase.transform,
        memory=phase.kept,
        classifiers=phase.fit_all(fittable(method.frozen)),
        phases=phase.index + 1,
    )


def begin(
    model: Model | None,
    images: Images,
    method: Method,
    trainer: Trainer,
    seen: Images | None = None,
    backbone: Backbone | None = None,
) -> tuple[Phase, tuple[str, ...]]:
    """Return the next phase, ready to be trained, and the names of all classes known with it."""
    config, index = method.config, model.phases if model else 0
    images, classes = _group(model, images, method, seen)
    transform = model.transform if model else transform_of(config, images)
    last = None if model is None or method.joint else model.network
    old = 0 if last is None else last.head.classes
    network = trainer.place(_network(method, last, len(classes), index, backbone))
    memory = model.memory if model and last else Memory(store_images=config.store_images)
    held = method.held_out(method.share(len(classes)))
    images, memory = memory.hold_out(images, range(old, len(classes)), held, config.seed)
    read = partial(trainer.features, transform=transform, levels=levels_of(method, network))
    phase = Phase(
        index=index,
        config=config,
        transform=transform,
        network=network,
        teacher=None,
        images=images,
        memory=memory,
        old=old,
        new=len(classes) - old,
        read=partial(read, network),
        device=trainer.device,
        ranks=trainer.ranks,
        trained=method.trains(index),
        previous=model.classifiers if model and old else {},
        autocast=lambda: trainer.fabric.autocast(),
    )
    if last is not None and method.trains(index):
        phase.teacher = frozen_copy(last).to(trainer.device)
        phase.before = read(phase.teacher, phase.at_hand)
    _prepare_head(method, phase)
    return phase, classes


def _group(
    model: Model | None, images: Images, method: Method, seen: Images | None
) -> tuple[Images, tuple[str, ...]]:
    """Return the images to learn with rows of the head as labels, and the names of all classes: known ones first."""
    if method.joint and model is not None:
        if seen is None:
            raise ConfigError("joint training needs all earlier images: they are not saved")
        images = merged([seen, images])
    if not len(images):
        raise DataError("no images given: at least one is needed")
    new = [images.names[label] for label in sorted(set(images.labels.tolist()))]
    classes = tuple(dict.fromkeys([*(model.classes if model else ()), *new]))
    if model is None and len(classes) == 1 and method.trains(0):
        raise ConfigError(
            f"method = {method.config.method!r}: the first group needs two classes or more, since one "
            "leaves nothing to tell apart"
        )
    return with_rows(images, classes), classes


def merged(parts: Sequence[Images]) -> Images:
    """Join images whose labels are positions in names of their own."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    return concat([with_rows(part, names) for part in parts])


def initial_backbone(method: Method, own: Own | None = None) -> Backbone:
    """Return the backbone that the first phase starts from; own: in place of the one that the options name."""
    config, seed = method.config, derive(method.config.seed, "network")
    weights, pretrained = config.weights, config.pretrained
    return build_backbone(own or config.network, seed=seed, weights=weights, pretrained=pretrained)


def initial_network(method: Method, classes: int, backbone: Backbone | None = None) -> Network:
    """Return the network that the first phase starts from, over a backbone that is there."""
    seed, scale = derive(method.config.seed, "network"), method.config.scale
    backbone = initial_backbone(method) if backbone is None else backbone
    return with_head(backbone, classes, head=method.head, scale=scale, seed=seed)


def _network(
    method: Method, last: Network | None, classes: int, index: int, backbone: Backbone | None
) -> Network:
    """Return Phi_t as it begins: Phi_{t-1} with a row of the head for each class."""
    if last is None:
        return initial_network(method, classes, backbone)
    network = deepcopy(last)
    if classes > network.head.classes:
        seed = derive(method.config.seed, "rows", index)
        network.head.grow(classes - network.head.classes, seed)
    return network


def _prepare_head(method: Method, phase: Phase) -> None:
    """Imprint the rows of new classes and freeze those of absent ones (LUCIR Sec. 3)."""
    head, old, before = phase.network.head, phase.old, phase.before
    classes = phase.classes
    if before is not None and isinstance(head, CosineHead) and phase.new:
        head.imprint(range(old, classes), class_means(before.pooled, before.labels, classes)[old:])
    if old and method.freezes_old_rows:
        absent = torch.arange(classes) < old
        absent[phase.images.labels] = False
        head.freeze(absent)


def levels_of(method: Method, network: Network) -> tuple[str, ...]:
    """Return the levels that some classifier wants, each once."""
    kinds = fittable(method.frozen)
    wanted = [name for kind in kinds for name in kind.levels(network, method.config)]
    return tuple(dict.fromkeys(wanted))
