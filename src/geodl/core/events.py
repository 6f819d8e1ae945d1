"""What happens while something is learned, each kind of event a class: whoever listens is told, and a misspelt one is an error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True)
class Event:
    """Something that happened; ``kind`` is its name in events.jsonl. A subclass names it and declares the fields."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        dataclass(frozen=True)(cls)

    def record(self) -> dict[str, Any]:
        """Return what events.jsonl keeps of it, ready for JSON."""
        return dict(vars(self))


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""


class RunStarted(Event, kind="run"):
    """A run begins, or goes on after ``done`` of its phases.

    sizes: the classes that each phase brings; work: the images that each phase trains on, over its epochs.
    """

    directory: str
    sizes: Sequence[int]
    done: int
    work: Sequence[int]


class PhaseStarted(Event, kind="phase"):
    """A phase begins: its classes by name, and how many images there are."""

    phase: int
    classes: Sequence[str]
    images: int


class BaseAwaited(Event, kind="waiting"):
    """The base phase is being trained by another run with the same options, which is waited for."""

    phase: int


class BaseCached(Event, kind="cached"):
    """The base phase was trained before with the same options, and is taken from the cache."""

    phase: int


class StageStarted(Event, kind="stage"):
    """A stage of training begins, or goes on after ``epoch`` epochs."""

    phase: int
    stage: str
    epochs: int
    steps: int
    epoch: int


class StepTaken(Event, kind="step"):
    """A step was taken; ``loss`` is the mean of the epoch so far, ``rate`` in images/s."""

    phase: int
    stage: str
    epoch: int
    step: int
    loss: float
    rate: float


def part_of(event: StepTaken, stage: StageStarted) -> float:
    """Return which part of a stage is over after a step."""
    return (event.epoch * stage.steps + event.step) / (stage.epochs * stage.steps)


class FeaturesTaken(Event, kind="features"):
    """The network has seen ``done`` of all images in a pass that does not train."""

    done: int
    total: int


FREQUENT = (StepTaken, FeaturesTaken)
"""Events that are too many for events.jsonl."""


class EpochEnded(Event, kind="epoch"):
    """Epoch ``epoch`` of ``epochs``, counted from 1, is over: its mean loss, the parts of that, images/s."""

    phase: int
    stage: str
    epoch: int
    epochs: int
    loss: float
    parts: Mapping[str, float]
    rate: float


class AnglesTaken(Event, kind="angles"):
    """Principal angles, in degrees, between the features of the old and of the new network after an epoch."""

    phase: int
    stage: str
    epoch: int
    angles: Sequence[float]


class PhaseEvaluated(Event, kind="evaluated"):
    """A phase is over; ``metrics`` is its metrics.json."""

    phase: int
    metrics: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the phase alone: the metrics have a file of their own."""
        return {"phase": self.phase}


class RunEnded(Event, kind="done"):
    """All phases are complete."""

    directory: str


class ImagesRead(Event, kind="reading"):
    """So many of all images have been read."""

    done: int
    total: int


class IntakeDone(Event, kind="read"):
    """All images of a learn step have been read: how many serve, of how many classes, their typical side, what was skipped."""

    title: str
    images: int
    classes: int
    side: int
    skipped: Sequence[tuple[str, str]]


class OptionsChosen(Event, kind="chosen"):
    """The options of a learn step, each as (option, value, why)."""

    choices: Sequence[tuple[str, str, str]]


class Advised(Event, kind="advised"):
    """A sentence for the person at the keyboard, before anything long begins."""

    sentence: str


class TimeEstimated(Event, kind="estimated"):
    """About how long training will take, from a few timed steps."""

    seconds: float


class StepContinued(Event, kind="continued"):
    """A learn step that was stopped goes on after ``epoch`` epochs."""

    epoch: int


class ImagesPredicted(Event, kind="predicted"):
    """So many more of all images have been predicted."""

    images: int
    total: int
