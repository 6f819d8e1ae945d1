"""Events that report the progress of learning to listeners; each kind is a class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True)
class Event:
    """Base class of events; ``kind`` is the name in events.jsonl. A subclass sets it and declares the fields."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        dataclass(frozen=True)(cls)

    def record(self) -> dict[str, Any]:
        """Return the fields that events.jsonl stores, ready for JSON."""
        return dict(vars(self))


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Ignore the event: the default listener."""


class RunStarted(Event, kind="run"):
    """A run starts, or resumes after ``done`` of its phases.

    sizes: the number of new classes of each phase; work: the images that each phase trains on, summed over its epochs.
    """

    directory: str
    sizes: Sequence[int]
    done: int
    work: Sequence[int]


class PhaseStarted(Event, kind="phase"):
    """A phase starts: the names of its classes and the number of its images."""

    phase: int
    classes: Sequence[str]
    images: int


class BaseAwaited(Event, kind="waiting"):
    """Another run with the same options is training the base phase; this one waits for it."""

    phase: int


class BaseCached(Event, kind="cached"):
    """The base phase was trained before with the same options and is loaded from the cache."""

    phase: int


class StageStarted(Event, kind="stage"):
    """A stage of training starts, or resumes after ``epoch`` epochs."""

    phase: int
    stage: str
    epochs: int
    steps: int
    epoch: int


class StepTaken(Event, kind="step"):
    """A training step is done; ``loss`` is the mean of the epoch so far, ``rate`` in images/s."""

    phase: int
    stage: str
    epoch: int
    step: int
    loss: float
    rate: float


def part_of(event: StepTaken, stage: StageStarted) -> float:
    """Return the fraction of a stage that is done after a step."""
    return (event.epoch * stage.steps + event.step) / (stage.epochs * stage.steps)


class FeaturesTaken(Event, kind="features"):
    """The network has computed features of ``done`` images in a pass without training."""

    done: int
    total: int


FREQUENT = (StepTaken, FeaturesTaken)
"""Events that are too frequent for events.jsonl."""


class EpochEnded(Event, kind="epoch"):
    """Epoch ``epoch`` of ``epochs``, counted from 1, is done: its mean loss, the terms of the loss, images/s."""

    phase: int
    stage: str
    epoch: int
    epochs: int
    loss: float
    parts: Mapping[str, float]
    rate: float


class AnglesTaken(Event, kind="angles"):
    """Principal angles, in degrees, between the features of the old and the new network after an epoch."""

    phase: int
    stage: str
    epoch: int
    angles: Sequence[float]


class PhaseEvaluated(Event, kind="evaluated"):
    """A phase is evaluated; ``metrics`` is the content of its metrics.json."""

    phase: int
    metrics: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the phase only: the metrics have a file of their own."""
        return {"phase": self.phase}


class RunEnded(Event, kind="done"):
    """All phases are complete."""

    directory: str


class ImagesRead(Event, kind="reading"):
    """``done`` of ``total`` images are read."""

    done: int
    total: int


class IntakeDone(Event, kind="read"):
    """All images of a learn step are read: the number of usable ones, of classes, the typical side, the skipped files."""

    title: str
    images: int
    classes: int
    side: int
    skipped: Sequence[tuple[str, str]]


class OptionsChosen(Event, kind="chosen"):
    """The options of a learn step, each as (option, value, reason)."""

    choices: Sequence[tuple[str, str, str]]


class Advised(Event, kind="advised"):
    """Advice for the user, given before training starts."""

    sentence: str


class TimeEstimated(Event, kind="estimated"):
    """The estimated duration of training, from a few timed steps."""

    seconds: float


class StepContinued(Event, kind="continued"):
    """An interrupted learn step resumes after ``epoch`` epochs."""

    epoch: int


class ImagesPredicted(Event, kind="predicted"):
    """``images`` more of ``total`` images are predicted."""

    images: int
    total: int
