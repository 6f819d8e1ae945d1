"""The work of a run by phases, its progress, and the time left."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Self

from geodl.config import RunConfig
from geodl.methods import build
from geodl.model.memory import quota


def trained_images(config: RunConfig, images: Sequence[int], classes: Sequence[int]) -> list[int]:
    """Return the number of images that each phase trains on, over all epochs; a phase without training reads its images once.

    images, classes: the numbers of training images and of classes that each phase adds.
    """
    method, work = build(config), []
    for t, new in enumerate(images):
        before = sum(classes[:t])
        kept = before * quota(before, config.exemplars, config.memory_budget)
        if method.joint:
            kept = sum(images[:t])
        epochs = method.main_schedule(t).epochs
        work.append(epochs * (new + kept) if method.trains(t) else new)
    return work


class Progress:
    """The progress of a run, computed from its events or from the records of events.jsonl.

    work: the work of each phase, in any unit; reached: the work done.
    """

    def __init__(self) -> None:
        self.work = [1.0]
        self.reached = 0.0
        self._began, self._since = 0.0, 0.0  # work and time when the run was last (re)started
        self._epochs, self._steps = 1, 1

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Read records of events.jsonl; malformed records are ignored."""
        progress = cls()
        for record in records:
            with suppress(LookupError, TypeError, ValueError, ZeroDivisionError):
                now = datetime.fromisoformat(record["time"]).timestamp()
                progress.hear(record["kind"], record, now)
        return progress

    def hear(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Update the progress by an event: its kind and fields (core/events.py), and its time in seconds."""
        if kind == "run":
            self.work = [float(phase) for phase in fields["work"]]
            self.reached = sum(self.work[: fields["done"]])
        elif kind in ("stage", "step", "epoch") and fields["stage"] == "train":
            self._trained(fields)
        elif kind in ("evaluated", "cached"):
            self.reached = sum(self.work[: fields["phase"] + 1])
        resumed = kind == "stage" and fields["epoch"] > 0
        if kind in ("run", "cached") or resumed:  # earlier work took no time now
            self._began, self._since = self.reached, now

    def _trained(self, fields: Mapping[str, Any]) -> None:
        """Count training within a phase; the short stages after it do not count."""
        self._epochs = fields.get("epochs", self._epochs)
        self._steps = fields.get("steps", self._steps)
        done = fields["epoch"] + fields.get("step", 0) / self._steps
        phase = fields["phase"]
        self.reached = sum(self.work[:phase]) + self.work[phase] * done / self._epochs

    @property
    def part(self) -> float:
        """The fraction of the work that is done."""
        total = sum(self.work)
        return self.reached / total if total else 1.0

    def seconds_left(self, now: float) -> float | None:
        """Estimate the seconds left from the speed since the last start; None before any work was done."""
        if self.reached <= self._began:
            return None
        speed = (self.reached - self._began) / (now - self._since)
        return (sum(self.work) - self.reached) / speed
