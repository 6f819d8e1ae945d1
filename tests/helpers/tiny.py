"""A dataset and options so small that a whole run takes a second: colored noise around one pattern a class."""

from typing import Any

import numpy as np
import torch

from geodl.config import Layer, RunConfig
from geodl.data import Dataset
from geodl.data.images import ArrayImages
from geodl.methods import configure

OPTIONS: dict[str, Any] = {
    "network": "convnet",
    "base": 2,
    "phases": 2,
    "epochs": 2,
    "batch_size": 8,
    "lr": 0.05,
    "scale": 5.0,
    "flip": False,
    "padding": 1,
    "exemplars": 3,
    "threads": 1,
    "precision": "32",
}


SMALL: dict[str, dict[str, Any]] = {
    "bic": {"correction_epochs": 3},
    "mnemonics": {"outer_steps": 2},
    "analytic": {"expansion": 32},
}
"""Options of methods that would take long as they are."""


def named(options: dict[str, Any]) -> str:
    """Name a case of a test by its options."""
    return "-".join(map(str, options.values()))


def dataset(
    classes: int = 4, train: int = 9, test: int = 5, size: int = 8, seed: int = 0
) -> Dataset:
    """Return `classes` classes with `train` and `test` images each."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(40, 216, (classes, 3, size, size), generator=generator)

    def images(count: int) -> ArrayImages:
        labels = torch.arange(classes).repeat_interleave(count)
        noise = torch.randint(-40, 40, (len(labels), 3, size, size), generator=generator)
        return ArrayImages((patterns[labels] + noise).clamp(0, 255).to(torch.uint8), labels)

    names = tuple(f"class {i}" for i in range(classes))
    return Dataset(
        "tiny",
        images(train),
        images(test),
        names,
        fingerprint=f"tiny-{classes}-{train}-{test}-{size}-{seed}",
    )


def shown(images: ArrayImages) -> tuple[np.ndarray, list[str]]:
    """Return pixels (N, height, width, 3) and the names of their classes, as a person would give them."""
    return images.pixels.permute(0, 2, 3, 1).numpy(), names_of(images)


def names_of(images: ArrayImages) -> list[str]:
    """Return the class of each image."""
    return [images.names[label] for label in images.labels.tolist()]


def config(**options: Any) -> RunConfig:
    """Return the tiny options with some replaced."""
    return configure([Layer("test", OPTIONS | options)]).config
