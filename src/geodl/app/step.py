"""One learn step: images in, a new state out. Nothing is saved before it is complete, except a checkpoint to resume from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from geodl.app import estimates
from geodl.app.choices import (
    choose,
    explain,
    has_pretrained,
    in_closed_form,
    stands_still,
    start_of,
    threads_of,
    training_asked,
)
from geodl.app.edits import released
from geodl.app.learned import Learned, figures
from geodl.app.outcome import Outcome
from geodl.app.preparing import Prepared, mirrors, moving, prepare, set_aside
from geodl.app.state import State, save
from geodl.app.training import Training
from geodl.config import RunConfig
from geodl.core import events
from geodl.core.content import fingerprint
from geodl.core.devices import available_cores
from geodl.core.errors import ConfigError, Interrupted, install
from geodl.core.text import count
from geodl.data.dataset import Skipped, insist
from geodl.data.images import short_hashes
from geodl.data.intake import Intake
from geodl.data.squares import Colors, Decoded, decode, sizes_of
from geodl.learning.learner import Learner
from geodl.learning.reading import FeatureReader
from geodl.methods import build
from geodl.store import Directory

PANORAMAS = 0.2
"""From this share of long pictures on, the user is told that their ends are cut off."""
LONG = 120.0
"""Estimated seconds from which on the user is asked to confirm."""
FROM_SCRATCH = (
    "The network will be trained from scratch, which takes minutes to hours and many images. With pre-trained features "
    f"({install('pretrained')}, 17 MB) photographs are learned in seconds, usually far better."
)


@contextmanager
def _keeping_threads() -> Iterator[None]:
    """Restore the number of torch's threads at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class LearnStep:
    """A learn step, which runs under the lock of the directory.

    last:    the state before; None if the step creates the model.
    options: those that the user set; all else as for `IncrementalClassifier.learn`.
    """

    store: Directory
    last: State | None
    intake: Intake
    options: Mapping[str, Any]
    again: bool
    relabel: bool
    group_by: str
    strict: bool
    listener: events.Listener
    stop: Callable[[], bool]
    confirm: Callable[[float], bool]

    def __post_init__(self) -> None:
        self.before = self.last.config if self.last else None
        self.sizes = sizes_of(self.intake.images)
        self.start = {} if self.last else start_of(self.sizes.side, self.options)
        method = self.before.method if self.before else self.start.get("method")
        self.closed = in_closed_form(method)

    @_keeping_threads()
    def take(self) -> Learned:
        """Learn the images and save the new state."""
        number = (self.last.steps if self.last else 0) + 1
        reader = self._reader()
        decoded = self._decoded(reader)
        if self.relabel and self.last is not None:
            self.last = self._released(decoded, self.last)
        ready = prepare(self.intake, decoded, self.last, number, self.group_by)
        insist(self.strict, ready.problems)
        found = (len(ready.images), len(self.intake.classes), self.sizes.side, ready.problems)
        self.listener(events.IntakeDone(self.intake.title, *found))
        if ready.nothing_new and self.last is not None and not (self.again and ready.rows):
            known = bool(ready.rows)
            return figures(self.last, self.last, problems=ready.problems, repeatable=known)
        # In closed form every image is judged by the fit without it: none has to be set aside.
        none = torch.zeros(len(ready.images), dtype=torch.bool)
        held = none if self.closed else set_aside(ready, self.last)
        config = self._chosen(ready, held, decoded.colors, asks=reader is None)
        model = self._training(config).learn(
            self.last.model if self.last else None,
            replace(ready.images.select(~held), names=ready.names_of_classes),
            ready.digests,
            reader.features(torch.tensor(ready.rows), ready.images.labels) if reader else None,
        )
        outcome = Outcome(self.last, ready, held, config, model)
        state = outcome.state(number, self.store.completed(), self.intake.key)
        if self.stop():
            raise Interrupted("stopped before anything was changed")
        save(self.store, state)
        images = int((~held).sum())
        result = figures(
            state, self.last, present=ready.present, images=images, problems=ready.problems
        )
        done = {"step": number, "classes": list(result.new), "images": images}
        self.store.events("learned", phase=self.store.completed() - 1, **done)
        return result

    def _reader(self) -> FeatureReader | None:
        """Return what computes features while images are decoded, if the network does not change."""
        if not self.closed or not (self.last is not None or stands_still(self.start, self.options)):
            return None
        config = choose(None, len(self.intake.images), self.options, self.start, self.before).config
        names = {*self.intake.classes, *(self.last.names if self.last else ())}
        self._announce(config, len(self.intake.images), len(names))
        torch.set_num_threads(threads_of(config))
        return FeatureReader(Learner(config, model=self.last.model if self.last else None))

    def _decoded(self, reader: FeatureReader | None) -> Decoded:
        """Read the images at the size that the network sees."""
        seen = self.last.transform if self.last else None
        size = seen.size if seen else int(self.start["image_size"])
        whole = seen.whole if seen else self.options.get("crop") == "whole"
        if not whole and self.sizes.long >= PANORAMAS:
            share = f"{100 * self.sizes.long:.0f} % of the pictures are twice as long as wide"
            remedy = "a new model with --whole sees all of each"
            words = f"{share}, or more, and only their middle square is seen; {remedy}."
            self.listener(events.Advised(words))
        chosen, total = self.options.get("workers"), len(self.intake.images)
        workers = available_cores() if chosen is None else int(chosen)
        estimate = estimates.timed(total, self._ask)

        def report(done: int, problems: Skipped) -> None:
            self.listener(events.ImagesRead(done, total))
            if reader is not None:  # reading is nearly all of the step
                estimate(done)
            insist(self.strict, problems)
            if self.stop():
                raise Interrupted("stopped while the images were read")

        if reader is None:
            return decode(self.intake, size, workers, report, whole=whole)
        use = reader.add
        return decode(self.intake, size, workers, report, whole=whole, colors=False, use=use)

    def _released(self, decoded: Decoded, last: State) -> State:
        """Forget the images that the model knows under another class than they have here."""
        moved = moving(self.intake, decoded, last)
        if not moved:
            return last
        self.listener(events.Advised(f"Moved to another class: {count(len(moved), 'image')}."))
        keys = short_hashes([decoded.digests[i] for i in moved])
        return released(last, keys, decoded.images.select(moved))

    def _chosen(
        self, ready: Prepared, held: Tensor, colors: Colors | None, *, asks: bool
    ) -> RunConfig:
        """Choose the options of the step and report them; `asks`: whether the user has yet to be asked to confirm."""
        exemplars = self.last.stored_exemplars if self.last else 0
        images = int((~held).sum()) + exemplars
        mirrored = self.closed or "flip" in self.options or mirrors(ready.images)
        found = choose(colors, images, self.options, self.start, self.before, mirrors=mirrored)
        classes = len(ready.classes)
        self.listener(events.OptionsChosen(explain(found, classes)))
        if asks:
            self._announce(found.config, images, classes)
        return found.config

    def _training(self, config: RunConfig) -> Training:
        identity = {
            "images": self.intake.key,
            "config": config.identity(),
            "phase": self.store.completed(),
        }
        return Training(self.store, config, fingerprint(identity), self.listener, self.stop)

    def _announce(self, config: RunConfig, images: int, classes: int) -> None:
        """Advise on better choices, estimate how long training takes, and ask if that is long."""
        first, closed = self.last is None, in_closed_form(config.method)
        asked = {"method", "weights"} & self.options.keys() or training_asked(self.options)
        if first and not asked and not closed and not has_pretrained():
            self.listener(events.Advised(FROM_SCRATCH))
        if config.exemplars and (few := build(config).advice(classes)) is not None:
            self.listener(events.Advised(few))
        # Without training, the estimate comes from the first images that are read.
        if classes > 1 and build(config).trains(0 if first else 1):
            self._ask(estimates.step_seconds(config, images, classes))

    def _ask(self, seconds: float) -> None:
        """Report an estimate, and ask the user to confirm if it is long."""
        self.listener(events.TimeEstimated(seconds))
        if seconds > LONG and not self.confirm(seconds):
            raise ConfigError("not confirmed: nothing was learned")
