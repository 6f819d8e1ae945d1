"""How long a learn step will take: estimated before a training begins, and early in reading."""

import time
from collections.abc import Callable
from dataclasses import replace

from geodl.app.choices import in_closed_form
from geodl.config import RunConfig
from geodl.learning.timing import Shape, measure, reading_speed
from geodl.methods.adaptation import APART, BATCH

LOOK = 2.0
"""Seconds of reading after which it is estimated how long it takes."""


def timed(
    total: int, tell: Callable[[float], None], clock: Callable[[], float] = time.perf_counter
) -> Callable[[int], None]:
    """Return what is called with the number of images read so far, and once tells an estimate in seconds for all."""
    began, told = clock(), False

    def read(done: int) -> None:
        nonlocal told
        elapsed = clock() - began
        if not told and elapsed >= LOOK and 0 < done < total:
            told = True
            tell(elapsed / done * total)

    return read


def step_seconds(config: RunConfig, images: int, classes: int) -> float:
    """Estimate how long a network is trained or adapted, from a few passes over made-up images."""
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
    # A teacher looks on in all steps but the first: a third of a student's work.
    return 1.3 * images * config.epochs / speed
