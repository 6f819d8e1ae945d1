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
from geodl.data.images import Images, concat
from geodl.data.intake import with_rows
from geodl.learning.checkpoint import Checkpoints
from geodl.learning.loop import Trainer
from geodl.learning.shared_base import SharedBase, run_stages
from geodl.methods import Method, Phase
from geodl.model.classifiers import Evidence, fittable
from geodl.model.features import Features, class_means
from geodl.model.memory import Memory, quota
from geodl.model.model import Model, Weights
from geodl.nets import CosineHead, Network, Own, build_network, frozen_copy


def learn(
    model: Model | None,
    images: Images,
    method: Method,
    trainer: Trainer,
    *,
    seen: Images | None = None,
    checkpoints: Checkpoints | None = None,
    base: SharedBase | None = None,
    backbone: Own | None = None,
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
        backbone: of a new model, in place of the one that the options name.
        now: the network's features of these images, where it stands still and they were taken before.
    """
    phase, classes = begin(model, images, method, trainer, seen, backbone)
    if len(classes) > 1:  # of a single class there is nothing to learn
        run_stages(trainer, method, phase, checkpoints, base)  # lines 2 and 5 to 14
    phase.now = phase.read(phase.at_hand) if now is None else now
    memory = _exemplars(method, phase)  # lines 3 and 16
    evidence = _evidence(model, method, phase, memory)
    return Model(
        config=method.config,
        classes=classes,
        weights=Weights.of(method.config.network, phase.network),
        transform=phase.transform,
        memory=memory,
        classifiers=evidence.fit_all(fittable(method.frozen)),
        phases=phase.index + 1,
    )


def begin(
    model: Model | None,
    images: Images,
    method: Method,
    trainer: Trainer,
    seen: Images | None = None,
    backbone: Own | None = None,
) -> tuple[Phase, tuple[str, ...]]:
    """Return the next phase, ready to be trained, and the names of all classes known with it."""
    config, index = method.config, model.phases if model else 0
    if method.joint and model is not None:
        if seen is None:
            raise ConfigError("joint training needs all earlier images: they are not saved")
        images = merged([seen, images])
    images, classes = _numbered(images, model.classes if model else ())
    if model is None and len(classes) == 1 and method.trains(0):
        raise ConfigError(
            f"method = {config.method!r}: the first group needs two classes or more, since one "
            "leaves nothing to tell apart"
        )
    transform = model.transform if model else transform_of(config, images)
    last = None if model is None or method.joint else model.network
    old = 0 if last is None else last.head.classes
    network = _grown(last, len(classes), method, index, backbone)  # line 1, or Phi_t from Phi_{t-1}
    trainer.place(network)
    memory = model.memory if model and last else Memory(store_images=config.store_images)
    held = method.held_out(quota(len(classes), config.exemplars, config.memory_budget))
    images, memory = memory.hold_out(images, range(old, len(classes)), held, config.seed)
    levels = levels_of(method, network)
    teacher = None
    if last is not None and method.trains(index):
        teacher = frozen_copy(last).to(trainer.device)
    phase = Phase(
        index=index,
        config=config,
        transform=transform,
        network=network,
        teacher=teacher,
        images=images,
        memory=memory,
        old=old,
        new=len(classes) - old,
        read=partial(trainer.features, network, transform=transform, levels=levels),
        device=trainer.device,
        ranks=trainer.ranks,
        autocast=lambda: trainer.fabric.autocast(),
    )
    if teacher is not None:
        phase.before = trainer.features(teacher, phase.at_hand, transform, levels=levels)
    _prepare_head(method, phase)
    return phase, classes


def merged(parts: Sequence[Images]) -> Images:
    """Join images whose labels are positions in names of their own."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    return concat([with_rows(part, names) for part in parts])


def _numbered(images: Images, known: Sequence[str]) -> tuple[Images, tuple[str, ...]]:
    """Return the images with rows of the head as labels, and all class names: known ones first."""
    if not len(images):
        raise DataError("no images given: at least one is needed")
    new = [images.names[label] for label in sorted(set(images.labels.tolist()))]
    classes = tuple(dict.fromkeys([*known, *new]))
    return with_rows(images, classes), classes


def _grown(
    last: Network | None, classes: int, method: Method, index: int, backbone: Own | None
) -> Network:
    """Return the network that is trained, with a row of the head for each class."""
    config = method.config
    if last is None:
        return initial_network(method, classes, backbone)
    network = deepcopy(last)
    if classes > network.head.classes:
        new = classes - network.head.classes
        network.head.grow(new, derive(config.seed, "rows", index))
    return network


def initial_network(method: Method, classes: int, backbone: Own | None = None) -> Network:
    """Return the network that the first phase starts from."""
    config = method.config
    return build_network(
        backbone or config.network,
        classes,
        head=method.head,
        scale=config.scale,
        seed=derive(config.seed, "network"),
        weights=config.weights,
        pretrained=config.pretrained,
    )


def _prepare_head(method: Method, phase: Phase) -> None:
    """Imprint the rows of new classes and freeze those of absent ones (LUCIR Sec. 3)."""
    head, old, before = phase.network.head, phase.old, phase.before
    classes = old + phase.new
    if before is not None and isinstance(head, CosineHead) and phase.new:
        head.imprint(range(old, classes), class_means(before.pooled, before.labels, classes)[old:])
    if old and method.freezes_old_rows:
        absent = torch.arange(classes) < old
        absent[phase.images.labels] = False
        head.freeze(absent)


def _exemplars(method: Method, phase: Phase) -> Memory:
    """Return the memory for the next phase, chosen under the network as it is now."""
    config = phase.config
    share = quota(phase.old + phase.new, config.exemplars, config.memory_budget)
    return method.exemplars(phase, share - method.held_out(share))


def _evidence(model: Model | None, method: Method, phase: Phase, memory: Memory) -> Evidence:
    """Return what the classifiers are fitted from."""
    assert phase.now is not None
    return Evidence(
        config=phase.config,
        network=phase.network,
        at_hand=phase.at_hand,
        count=len(phase.images),
        before=phase.before,
        now=phase.now,
        memory=memory,
        old=phase.old,
        new=phase.new,
        trained=method.trains(phase.index),
        read=phase.read,
        device=phase.device,
        ranks=phase.ranks,
        adapted=phase.adapted,
        previous=model.classifiers if model and phase.old else {},
    )


def levels_of(method: Method, network: Network) -> tuple[str, ...]:
    """Return the levels that some classifier wants, each once."""
    kinds = fittable(method.frozen)
    wanted = [name for kind in kinds for name in kind.levels(network, method.config)]
    return tuple(dict.fromkeys(wanted))
