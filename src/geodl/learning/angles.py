"""Principal angles between the old and the new features during training."""

from collections.abc import Iterator
from contextlib import contextmanager

from geodl.core.events import AnglesTaken, EpochEnded, Event
from geodl.learning.loop import SAMPLE, Trainer, evenly
from geodl.methods import Phase
from geodl.model.analysis import leading_angles


@contextmanager
def watching_angles(trainer: Trainer, phase: Phase) -> Iterator[None]:
    """Report the principal angles between the old and the new features after each epoch of training."""
    if phase.teacher is None or not phase.config.analysis:
        yield
        return
    listener, sample = trainer.listener, evenly(phase.training_images, SAMPLE)
    before = trainer.features(phase.teacher, sample, phase.transform).pooled

    def with_angles(event: Event) -> None:
        listener(event)
        if isinstance(event, EpochEnded) and event.stage == "train":
            now = trainer.features(phase.network, sample, phase.transform).pooled
            angles = leading_angles(before, now)
            listener(AnglesTaken(event.phase, event.stage, event.epoch, angles))

    trainer.listener = with_angles
    try:
        yield
    finally:
        trainer.listener = listener
