"""How much work the phases of a run are, how much of it is over, and how long the rest takes."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Self

from geodl.config import RunConfig
from geodl.methods import build
from geodl.model.memory import quota


def trained_images(config: RunConfig, images: Sequence[int], classes: Sequence[int]) -> list[int]:
    """Count the images that each phase trains on, over its epochs; those it reads once where it trains nothing.

    images, classes: how many training images and classes each phase brings.
    """
    method, found = build(config), []
    for t, new in enumerate(images):
        before = sum(classes[:t])
        kept = before * quota(before, config.exemplars, config.memory_budget)
        if method.joint:
            kept = sum(images[:t])
        epochs = method.main_schedule(t).epochs
        found.append(epochs * (new + kept) if method.trains(t) else new)
    return found


class Progress:
    """How far a run is, from its events as they come or from the records of events.jsonl.

    work: the work of each phase, in any unit; reached: how much of it is over.
    """

    def __init__(self) -> None:
        self.work = [1.0]
        self.reached = 0.0
        self._began, self._since = 0.0, 0.0  # where and when this start of the run began
        self._epochs, self._steps = 1, 1

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Read records of events.jsonl; a line that somebody else wrote is passed over."""
        progress = cls()
        for record in records:
            with suppress(LookupError, TypeError, ValueError, ZeroDivisionError):
                now = datetime.fromisoformat(record["time"]).timestamp()
                progress.hear(record["kind"], record, now)
        return progress

    def hear(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Take an event into account, of its kind and fields (core/events.py), at a time in seconds."""
        if kind == "run":
            self.work = [float(each) for each in fields["work"]]
            self.reached = sum(self.work[: fields["done"]])
        elif kind in ("stage", "step", "epoch") and fields["stage"] == "train":
            self._trained(fields)
        elif kind in ("evaluated", "cached"):
            self.reached = sum(self.work[: fields["phase"] + 1])
        resumed = kind == "stage" and fields["epoch"] > 0
        if kind in ("run", "cached") or resumed:  # what was there before took no time
            self._began, self._since = self.reached, now

    def _trained(self, fields: Mapping[str, Any]) -> None:
        """Count a part of a phase. Further stages are short: meanwhile the phase stands at its end."""
        self._epochs = fields.get("epochs", self._epochs)
        self._steps = fields.get("steps", self._steps)
        done = fields["epoch"] + fields.get("step", 0) / self._steps
        phase = fields["phase"]
        self.reached = sum(self.work[:phase]) + self.work[phase] * done / self._epochs

    @property
    def part(self) -> float:
        """The part of the work that is over, 0 to 1."""
        total = sum(self.work)
        return self.reached / total if total else 1.0

    def seconds_left(self, now: float) -> float | None:
        """Estimate the seconds left at the speed since the last start; None where nothing was done since."""
        if self.reached <= self._began:
            return None
        speed = (self.reached - self._began) / (now - self._since)
        return (sum(self.work) - self.reached) / speed
