"""Algorithm 1 of the paper: learn a group of classes without forgetting the earlier ones.

Comments give the lines of the paper. Lines 6 to 13, the mini-batches, are the training loop (`learning/loop.py`)
and the method's loss; line 15, the evaluation, is the caller's.
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
from geodl.model.classifiers import fittable, levels_of
from geodl.model.features import Features, class_means
from geodl.model.memory import Memory
from geodl.model.model import Model, Weights
from geodl.nets import Backbone, CosineHead, frozen_copy


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
    """Return a model that also knows the classes of these images; `model` is not changed.

    Args:
        model: the model so far; None for the first group.
        images: D_t, with class names: new classes, more images of known ones, or both.
        method: what to minimize.
        trainer: the training loop and its devices.
        seen: all earlier images, for joint training.
        checkpoints: where checkpoints are kept; an interrupted group resumes from the last one.
        base: shared base phases.
        backbone: the backbone of a new model; None: built from the options.
        now: features of these images, if the network is not trained and they are known already.
    """
    phase = begin(model, images, method, trainer, seen, backbone)  # line 1
    if phase.classes > 1:  # a single class leaves nothing to separate
        run_stages(trainer, method, phase, checkpoints, base)  # lines 2 and 5 to 14
    phase.now = phase.read(phase.at_hand) if now is None else now
    share = method.share(phase.classes)
    phase.kept = method.exemplars(phase, share - method.held_out(share))  # lines 3 and 16
    return Model(
        config=method.config,
        classes=phase.names,
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
) -> Phase:
    """Return the next phase, ready for training: Phi_t begins as Phi_{t-1}, with rows for the new classes."""
    config, index = method.config, model.phases if model else 0
    images, names = _group(model, images, method, seen)
    transform = model.transform if model else transform_of(config, images)
    last = None if method.joint else model
    if last is None:
        old, memory = 0, Memory(store_images=config.store_images)
        network = method.initial_network(len(names), backbone)
    else:
        old, memory = len(last.classes), last.memory
        network = deepcopy(last.network)
        network.head.grow(len(names) - old, derive(config.seed, "rows", index))
    held = method.held_out(method.share(len(names)))
    images, memory = memory.hold_out(images, range(old, len(names)), held, config.seed)
    levels = levels_of(fittable(method.frozen), network, config)
    phase = Phase(
        index=index,
        config=config,
        transform=transform,
        network=trainer.place(network),
        teacher=None,
        images=images,
        memory=memory,
        old=old,
        names=names,
        features=partial(trainer.features, transform=transform, levels=levels),
        device=trainer.device,
        ranks=trainer.ranks,
        trained=method.trains(index),
        previous=last.classifiers if last else {},
        autocast=lambda: trainer.fabric.autocast(),
    )
    if last is not None and phase.trained:
        phase.teacher = frozen_copy(last.network).to(trainer.device)
        phase.before = phase.features(phase.teacher, phase.at_hand)
    _prepare_head(method, phase)
    return phase


def _group(
    model: Model | None, images: Images, method: Method, seen: Images | None
) -> tuple[Images, tuple[str, ...]]:
    """Return the images to learn, with rows of the head as labels, and the names of all classes, known ones first."""
    if method.joint and model is not None:
        if seen is None:
            raise ConfigError("joint training needs all earlier images: they are not saved")
        images = merged([seen, images])
    if not len(images):
        raise DataError("no images: at least one is needed")
    present = [images.names[label] for label in sorted(set(images.labels.tolist()))]
    names = tuple(dict.fromkeys([*(model.classes if model else ()), *present]))
    if model is None and len(names) == 1 and method.trains(0):
        raise ConfigError(
            f"method = {method.config.method!r}: the first group needs at least two classes"
        )
    return with_rows(images, names), names


def merged(parts: Sequence[Images]) -> Images:
    """Join images whose labels refer to different lists of class names."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    return concat([with_rows(part, names) for part in parts])


def _prepare_head(method: Method, phase: Phase) -> None:
    """Imprint the rows of new classes and freeze those of absent ones (LUCIR Sec. 3)."""
    head, old, before = phase.network.head, phase.old, phase.before
    if before is not None and isinstance(head, CosineHead) and phase.new:
        means = class_means(before.pooled, before.labels, phase.classes)
        head.imprint(range(old, phase.classes), means[old:])
    if old and method.freezes_old_rows:
        absent = torch.arange(phase.classes) < old
        absent[phase.images.labels] = False
        head.freeze(absent)
