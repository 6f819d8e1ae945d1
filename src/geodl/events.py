"""What happens while something is learned, each kind of event a class: whoever listens is told, and a misspelt one is an error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Something that happened; ``kind`` is its name in events.jsonl."""

    kind: ClassVar[str]

    def record(self) -> dict[str, Any]:
        """Return what events.jsonl keeps of it, ready for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get("record", True)}


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class RunStarted(Event):
    """A run begins, or goes on after ``done`` of its phases.

    sizes: the classes that each phase brings; work: the images that each phase trains on, over its epochs.
    """

    kind = "run"
    directory: str
    sizes: Sequence[int]
    done: int
    work: Sequence[int]


@dataclass(frozen=True)
class PhaseStarted(Event):
    """A phase begins: its classes by name, and how many images there are."""

    kind = "phase"
    phase: int
    classes: Sequence[str]
    images: int


@dataclass(frozen=True)
class BaseAwaited(Event):
    """The base phase is being trained by another run with the same options, which is waited for."""

    kind = "waiting"
    phase: int


@dataclass(frozen=True)
class BaseCached(Event):
    """The base phase was trained before with the same options, and is taken from the cache."""

    kind = "cached"
    phase: int


@dataclass(frozen=True)
class StageStarted(Event):
    """A stage of training begins, or goes on after ``epoch`` epochs."""

    kind = "stage"
    phase: int
    stage: str
    epochs: int
    steps: int
    epoch: int


@dataclass(frozen=True)
class StepTaken(Event):
    """A step was taken; ``loss`` is the mean of the epoch so far, ``rate`` in images/s."""

    kind = "step"
    phase: int
    stage: str
    epoch: int
    step: int
    loss: float
    rate: float


def part_of(event: StepTaken, stage: StageStarted) -> float:
    """Return which part of a stage is over after a step."""
    return (event.epoch * stage.steps + event.step) / (stage.epochs * stage.steps)


@dataclass(frozen=True)
class FeaturesTaken(Event):
    """The network has seen ``done`` of all images in a pass that does not train."""

    kind = "features"
    done: int
    total: int


FREQUENT = (StepTaken, FeaturesTaken)
"""Events that are too many for events.jsonl."""


@dataclass(frozen=True)
class EpochEnded(Event):
    """Epoch ``epoch`` of ``epochs``, counted from 1, is over: its mean loss, the parts of that, images/s."""

    kind = "epoch"
    phase: int
    stage: str
    epoch: int
    epochs: int
    loss: float
    parts: Mapping[str, float]
    rate: float


@dataclass(frozen=True)
class AnglesTaken(Event):
    """Principal angles, in degrees, between the features of the old and of the new network after an epoch."""

    kind = "angles"
    phase: int
    stage: str
    epoch: int
    angles: Sequence[float]


@dataclass(frozen=True)
class PhaseEvaluated(Event):
    """A phase is over; ``metrics`` is its metrics.json."""

    kind = "evaluated"
    phase: int
    metrics: Mapping[str, Any] = field(metadata={"record": False})


@dataclass(frozen=True)
class RunEnded(Event):
    """All phases are complete."""

    kind = "done"
    directory: str


@dataclass(frozen=True)
class ImagesRead(Event):
    """So many of all images have been read."""

    kind = "reading"
    done: int
    total: int


@dataclass(frozen=True)
class IntakeDone(Event):
    """All images of a learn step have been read: how many serve, of how many classes, their typical side, what was skipped."""

    kind = "read"
    title: str
    images: int
    classes: int
    side: int
    skipped: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class OptionsChosen(Event):
    """The options of a learn step, each as (option, value, why)."""

    kind = "chosen"
    choices: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Advised(Event):
    """A sentence for the person at the keyboard, before anything long begins."""

    kind = "advised"
    sentence: str


@dataclass(frozen=True)
class TimeEstimated(Event):
    """About how long training will take, from a few timed steps."""

    kind = "estimated"
    seconds: float


@dataclass(frozen=True)
class StepContinued(Event):
    """A learn step that was stopped goes on after ``epoch`` epochs."""

    kind = "continued"
    epoch: int


@dataclass(frozen=True)
class ImagesPredicted(Event):
    """So many more of all images have been predicted."""

    kind = "predicted"
    images: int
    total: int
