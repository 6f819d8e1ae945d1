"""How long a grid will take: the images that it shows the network, times the measured time for an image."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from geodl.config import RunConfig
from geodl.devices import choose_precision, device_kind
from geodl.memory import quota
from geodl.methods import build
from geodl.reproduce.steps import LOSSES, PEAK_STEPS, Shape, Step, take_turns
from geodl.sweep.jobs import Job, base_of


@dataclass(frozen=True)
class Size:
    """A dataset: its classes, about how many training and test images each has, and the side of an image."""

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
MNEMONICS = 1.5
"""Optimizing exemplars may take at most half as long again as the phase."""
STEPS = 3
BATCH = 16
"""Images in a timed batch where they are large."""


@dataclass(frozen=True)
class Speed:
    """Measured images a second: in training steps by distillation, and in evaluation."""

    training: dict[str, float]
    evaluation: float


@dataclass(frozen=True)
class Work:
    """The images of one phase that are trained on, over all its epochs, and that are only evaluated."""

    trained: int
    evaluated: int


def work(config: RunConfig) -> list[Work]:
    """Return the work of each phase."""
    size, method = SIZES[config.data], build(config)
    base = size.classes // 2 if config.base is None else config.base
    found = []
    for t in range(config.phases + 1):
        before = 0 if t == 0 else base + (size.classes - base) * (t - 1) // config.phases
        seen = base + (size.classes - base) * t // max(config.phases, 1)
        images = size.train * (seen if method.keeps_all_data else seen - before)
        kept = 0 if method.keeps_all_data else before * quota(max(before, 1), config.exemplars, config.memory_budget)
        # Evaluated: for imprinting, for herding and the stored means, and for their drift; then the test images, the
        # exemplars and their mirrored copies, and for AME all images seen.
        passes = 1 if t == 0 or method.keeps_all_data else 3
        exemplars = 2 * seen * quota(seen, config.exemplars, config.memory_budget)
        oracle = seen * min(size.train, config.ame_images or size.train) if config.ame else 0
        evaluated = passes * images + seen * size.test + exemplars + oracle
        found.append(Work(method.main_schedule(t).epochs * (images + kept), evaluated))
    return found


def seconds(config: RunConfig, works: Sequence[Work], speed: Speed) -> list[float]:
    """Estimate the time of each phase from its work."""
    found = []
    for t, each in enumerate(works):
        alone = t == 0 or build(config).keeps_all_data
        training = each.trained / speed.training["none" if alone else config.distill]
        factor = MNEMONICS if config.method == "mnemonics" and t else 1.0
        found.append(factor * training + each.evaluated / speed.evaluation)
    return found


def plan(jobs: Sequence[Job], done: Sequence[int]) -> list[list[Work]]:
    """Return the work of each phase of each job; none for complete phases, no training for base phases that another job trains.

    done: the number of complete phases of each job.
    """
    trained = {base_of(job.config) for job, phases in zip(jobs, done, strict=True) if phases}
    found = []
    for job, phases in zip(jobs, done, strict=True):
        works = work(job.config)
        works[:phases] = [Work(0, 0)] * phases
        base = base_of(job.config)
        if not phases and base in trained:
            works[0] = replace(works[0], trained=0)
        trained.add(base)
        found.append(works)
    return found


def shape_of(config: RunConfig) -> Shape:
    """Return what a step of a run works on."""
    precision = choose_precision(config.precision, device_kind(config.accelerator))
    return Shape(config.network, config.image_size or SIZES[config.data].side, config.batch_size, precision=precision)


def measure(shape: Shape) -> Speed:
    """Time a few steps of each distillation, and of evaluation; large images in smaller batches."""
    shape = shape if shape.size <= 64 else replace(shape, batch=min(shape.batch, BATCH))
    steps = {name: Step(name, shape) for name in LOSSES}
    times = take_turns({**steps, "evaluation": steps["none"].evaluate}, STEPS)
    speeds = {name: shape.batch / statistics.median(each) for name, each in times.items()}
    return Speed({name: speeds[name] for name in steps}, speeds["evaluation"])


def steps_seconds(shape: Shape, turns: int, speed: Speed) -> float:
    """Estimate how long it takes to measure time and memory: the turns, one to warm up, and the steps for the peaks."""
    return (turns + 1 + PEAK_STEPS) * shape.batch * sum(1 / rate for rate in speed.training.values())
