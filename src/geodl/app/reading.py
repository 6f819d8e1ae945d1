"""The images of a learn step are read once: decoded, and where the network stands still, their features taken with it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from geodl.app.choices import TINY, choose_start
from geodl.app.state import State
from geodl.config import RunConfig
from geodl.core import events
from geodl.core.devices import available_cores, device_kind
from geodl.core.errors import Interrupted
from geodl.data.dataset import Skipped, insist
from geodl.data.intake import Intake
from geodl.data.squares import Decoded, Sizes, decode
from geodl.learning.learner import Learner
from geodl.learning.reading import FeatureReader
from geodl.nets import build_network

PANORAMAS = 0.2
"""From this share of long pictures on it is said that their ends are not seen."""


def start_of(side: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Choose what a new model is made with; a network that cannot be built is named before thousands of images are read."""
    start = choose_start(side, options, device_kind(str(options.get("accelerator") or "auto")))
    weights = Path(options["weights"]) if options.get("weights") else None
    build_network(
        start["network"],
        1,
        head="cosine",
        weights=weights,
        pretrained=bool(start.get("pretrained")),
    )
    return start


def reader_of(config: RunConfig, last: State | None) -> FeatureReader:
    """Return what takes features while images are decoded."""
    torch.set_num_threads(threads_of(config))
    return FeatureReader(Learner(config, model=last.model if last else None))


def threads_of(config: RunConfig) -> int:
    """Return how many threads a step uses."""
    # Work on tiny pictures is over before a second thread has begun.
    return config.threads or (1 if (config.image_size or 0) <= TINY else available_cores())


def note_panoramas(sizes: Sizes, listener: events.Listener) -> None:
    """Advise to look at whole pictures where the center squares of many leave most of them out."""
    if sizes.long >= PANORAMAS:
        share = f"{100 * sizes.long:.0f} % of the pictures are twice as long as wide, or more"
        remedy = "a new model with --whole sees all of each"
        listener(events.Advised(f"{share}, and only their middle square is seen; {remedy}."))


def read(
    intake: Intake,
    size: int,
    workers: int,
    reader: FeatureReader | None,
    *,
    whole: bool,
    strict: bool,
    listener: events.Listener,
    stop: Callable[[], bool],
) -> Decoded:
    """Read the images, and tell how far that is; with a reader their features too, and no colors.

    whole: all of each image, not its center square.
    """

    def told(done: int, problems: Skipped) -> None:
        listener(events.ImagesRead(done, len(intake.images)))
        insist(strict, problems)
        if stop():
            raise Interrupted("stopped while the images were read")

    if reader is None:
        return decode(intake, size, workers, told, whole=whole)
    return decode(intake, size, workers, told, whole=whole, colors=False, use=reader.add)
