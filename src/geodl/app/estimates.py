"""Estimates of how long a learn step takes: before a training begins, and while images are read."""

import time
from collections.abc import Callable
from dataclasses import replace

from geodl.app.choices import in_closed_form
from geodl.config import RunConfig
from geodl.learning.timing import Shape, measure, reading_speed
from geodl.methods.adaptation import APART, BATCH

LOOK = 2.0
"""Seconds of reading before its duration is estimated."""


def timed(
    total: int, report: Callable[[float], None], clock: Callable[[], float] = time.perf_counter
) -> Callable[[int], None]:
    """Return a callback for the number of images read so far, which reports one estimate in seconds for all."""
    began, reported = clock(), False

    def read(done: int) -> None:
        nonlocal reported
        elapsed = clock() - began
        if not reported and elapsed >= LOOK and 0 < done < total:
            reported = True
            report(elapsed / done * total)

    return read


def step_seconds(config: RunConfig, images: int, classes: int) -> float:
    """Estimate how long training or adapting a network takes, from a few passes over random images."""
    adapts = in_closed_form(config.method) and config["adapt"] != "no"
    shape = Shape(
        config.network,
        config.image_size or 224,
        BATCH // 4 if adapts else min(config.batch_size, 32),
        old=0,
        new=classes,
        accelerator=config.accelerator,
    )
    speed = measure(shape, ("none",), last=adapts).training["none"]
    if adapts:  # all images are read three times, and most of them trained on
        passes: float = (1 - APART) * config["adapt_epochs"]
        return images * (3 / reading_speed(replace(shape, batch=4)) + passes / speed)
    # In all steps but the first a teacher runs as well: a third of a student's work.
    return 1.3 * images * config.epochs / speed
