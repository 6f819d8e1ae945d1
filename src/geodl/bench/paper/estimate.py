"""Estimates of the time that a grid takes: its number of images times the measured time per image."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from geodl.bench.sweep.jobs import Job, base_of
from geodl.bench.work import trained_images
from geodl.config import RunConfig
from geodl.core.devices import choose_precision, device_kind
from geodl.learning.timing import Shape, Speed
from geodl.methods import build
from geodl.model.memory import quota


@dataclass(frozen=True)
class Size:
    """A dataset: classes, approximate numbers of training and test images per class, side of an image."""

    classes: int
    train: int
    test: int
    side: int


SIZES = {
    "cifar100": Size(100, 500, 100, 32),
    "imagenet-subset": Size(100, 1281, 50, 224),
    "imagenet": Size(1000, 1281, 50, 224),
    "digits": Size(10, 144, 36, 8),
}
BATCH = 16
"""Batch size when timing steps on large images."""


@dataclass(frozen=True)
class Work:
    """The numbers of images that one phase trains on, over all epochs, and that it only evaluates."""

    trained: int
    evaluated: int


def work(config: RunConfig) -> list[Work]:
    """Return the work of each phase."""
    size, method = SIZES[config.data], build(config)
    base = size.classes // 2 if config.base is None else config.base
    later = size.classes - base
    ends = [base + later * t // max(config.phases, 1) for t in range(config.phases + 1)]
    classes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    images = [size.train * count for count in classes]
    read = list(accumulate(images)) if method.joint else images
    phases = []
    for t, trained in enumerate(trained_images(config, images, classes)):
        # Evaluated: new images for imprinting, for herding and means, and for drift; test images; exemplars and their
        # mirrored copies; for AME all images seen.
        passes = 1 if t == 0 or method.joint else 3
        exemplars = 2 * ends[t] * quota(ends[t], config.exemplars, config.memory_budget)
        oracle = ends[t] * min(size.train, config.ame_images or size.train) if config.ame else 0
        phases.append(Work(trained, passes * read[t] + ends[t] * size.test + exemplars + oracle))
    return phases


def seconds(config: RunConfig, works: Sequence[Work], speed: Speed) -> list[float]:
    """Estimate the time of each phase from its work."""
    method, times = build(config), []
    for t, phase in enumerate(works):
        distill = "none" if t == 0 or method.joint else config.distill
        training = phase.trained / speed.training[distill]
        effort = method.effort if t else 1.0
        times.append(effort * training + phase.evaluated / speed.evaluation)
    return times


def plan(jobs: Sequence[Job], done: Sequence[int]) -> list[list[Work]]:
    """Return the work left in each phase of each job: none in complete phases, no training of a base phase shared with an earlier job.

    done: the number of complete phases of each job.
    """
    trained = {base_of(job.config) for job, phases in zip(jobs, done, strict=True) if phases}
    left = []
    for job, phases in zip(jobs, done, strict=True):
        works = work(job.config)
        works[:phases] = [Work(0, 0)] * phases
        base = base_of(job.config)
        if not phases and base in trained:
            works[0] = replace(works[0], trained=0)
        trained.add(base)
        left.append(works)
    return left


def shape_of(config: RunConfig) -> Shape:
    """Return the network and batch with which to time the steps of a run; large images in smaller batches."""
    size = config.image_size or SIZES[config.data].side
    batch = config.batch_size if size <= 64 else min(config.batch_size, BATCH)
    precision = choose_precision(config.precision, device_kind(config.accelerator))
    return Shape(config.network, size, batch, precision=precision, accelerator=config.accelerator)
