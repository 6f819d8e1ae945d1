"""Folders of digits, as a person would hand them over, and options for learning them quickly."""

from pathlib import Path

import torch

from geodl.app.state import State
from geodl.data import Dataset
from geodl.data.images import Images

QUICK = {"epochs": 3, "threads": 1, "workers": 1, "precision": "32"}


def rows_of(images: Images, label: int, count: int, start: int = 0) -> list[int]:
    """Return the positions of some images of a class."""
    return (images.labels == label).nonzero().flatten()[start : start + count].tolist()


def digits_of(digits: Dataset, classes, count: int, start: int = 0) -> tuple[torch.Tensor, list]:
    """Return digits (N, 3, 8, 8) of each class and the names of their classes."""
    rows = [i for label in classes for i in rows_of(digits.train, label, count, start)]
    names = [f"digit {label}" for label in digits.train.labels[rows].tolist()]
    return digits.train.pixels[rows], names


def write_digits(
    root: Path, digits: Dataset, classes, count: int, start: int = 0, name: str = "digit {}"
) -> Path:
    """Write digits of each class into its folder."""
    for label in classes:
        (root / name.format(label)).mkdir(parents=True, exist_ok=True)
        for i in rows_of(digits.train, label, count, start):
            digits.train.decode(i).save(root / name.format(label) / f"{i}.png")
    return root


def exemplars_of(state: State, label: int) -> Images:
    memory = state.model.memory.images
    return memory.select(memory.labels == label)


class Heard(list):
    """A listener that keeps the events of one kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __call__(self, event):
        if isinstance(event, self.kind):
            self.append(event)
