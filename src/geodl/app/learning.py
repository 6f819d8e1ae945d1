"""One learn step: images in, a state out. Nothing is kept of it until it is complete, except where to go on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geodl.app.before import announce
from geodl.app.choices import choose, explain, in_closed_form, stands_still, training_asked
from geodl.app.learned import Learned, already_learned, learned
from geodl.app.mending import released
from geodl.app.preparing import Prepared, mirrors, moving, prepare, set_aside
from geodl.app.reading import note_panoramas, read, reader_of, start_of
from geodl.app.state import State, save
from geodl.app.training import Training
from geodl.config import RunConfig
from geodl.core import events
from geodl.core.devices import available_cores
from geodl.core.errors import Interrupted
from geodl.core.text import count
from geodl.data.dataset import insist
from geodl.data.images import short_hashes
from geodl.data.intake import Intake
from geodl.data.squares import Colors, Decoded, sizes_of
from geodl.learning.reading import FeatureReader
from geodl.store import Directory


@contextmanager
def _keeping_threads() -> Iterator[None]:
    """Leave the process with as many threads as it had."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class LearnStep:
    """A learn step to be taken; whoever takes it holds the lock.

    last:     the state before; None: the step makes the model.
    options:  those that the user set.
    again:    learn also where the model in closed form knows all images.
    relabel:  move images that the model knows under another class to the class that they have here.
    group_by: what tells which images are of one series (`geodl.app.series`).
    strict:   the first image that cannot be used is an error.
    stop:     asked now and then whether to stop.
    confirm:  asked with an estimate in seconds before a training that takes long.
    """

    store: Directory
    last: State | None
    intake: Intake
    options: Mapping[str, Any]
    again: bool = False
    relabel: bool = False
    group_by: str = "auto"
    strict: bool = False
    listener: events.Listener = events.ignore
    stop: Callable[[], bool] = lambda: False
    confirm: Callable[[float], bool] = lambda seconds: True

    def __post_init__(self) -> None:
        self.before = self.last.config if self.last else None
        self.sizes = sizes_of(self.intake.images)
        self.start = {} if self.last else start_of(self.sizes.side, self.options)
        method = self.before.method if self.before else self.start.get("method")
        self.closed = in_closed_form(method)

    @_keeping_threads()
    def take(self) -> Learned:
        """Learn the images and save the new state."""
        reader = self._reader()
        decoded = self._decoded(reader)
        if self.relabel and self.last is not None:
            self.last = self._released(decoded, self.last)
        step = (self.last.steps if self.last else 0) + 1
        ready = prepare(self.intake, decoded, self.last, step, self.group_by)
        insist(self.strict, ready.problems)
        found = (len(ready.images), len(self.intake.classes), self.sizes.side, ready.problems)
        self.listener(events.IntakeDone(self.intake.title, *found))
        if ready.nothing_new and self.last is not None and not (self.again and ready.rows):
            return already_learned(self.last, ready.problems, repeatable=bool(ready.rows))
        # In closed form every image is judged by the fit without it: none has to be set aside.
        none = torch.zeros(len(ready.images), dtype=torch.bool)
        held = none if self.closed else set_aside(ready, self.last)
        config = self._chosen(ready, held, decoded.colors, asks=reader is None)
        now = reader.features(torch.tensor(ready.rows), ready.images.labels) if reader else None
        where = (self.store, self.last, ready, held, config, step, self.intake.key)
        training = Training(*where, self.listener, self.stop, now)
        state, images = training.learn(), len(training.train)
        if self.stop():
            raise Interrupted("stopped before anything was changed")
        save(self.store, state)
        result = learned(state, self.last, ready.present, images, ready.problems)
        done = {"step": step, "classes": list(result.new), "images": images}
        self.store.events("learned", phase=self.store.completed() - 1, **done)
        return result

    def _reader(self) -> FeatureReader | None:
        """Return what takes features while images are decoded, where the network stands still."""
        if not self.closed or not (self.last is not None or stands_still(self.start, self.options)):
            return None
        config = choose(None, len(self.intake.images), self.options, self.start, self.before).config
        names = {*self.intake.classes, *(self.last.names if self.last else ())}
        self._announce(config, len(self.intake.images), len(names))
        return reader_of(config, self.last)

    def _decoded(self, reader: FeatureReader | None) -> Decoded:
        """Read the images at the size that the network sees."""
        seen = self.last.transform if self.last else None
        size = seen.size if seen else int(self.start["image_size"])
        whole = seen.whole if seen else self.options.get("crop") == "whole"
        if not whole:
            note_panoramas(self.sizes, self.listener)
        return read(
            self.intake,
            size,
            int(self.options.get("workers") or available_cores()),
            reader,
            whole=whole,
            strict=self.strict,
            listener=self.listener,
            stop=self.stop,
        )

    def _released(self, decoded: Decoded, last: State) -> State:
        """Forget the images that the model knows under another class than they have here, and say so."""
        moved = moving(self.intake, decoded, last)
        if not moved:
            return last
        self.listener(events.Advised(f"Moved to another class: {count(len(moved), 'image')}."))
        keys = short_hashes([decoded.digests[i] for i in moved])
        return released(last, keys, decoded.images.select(moved))

    def _chosen(
        self, ready: Prepared, held: Tensor, colors: Colors | None, *, asks: bool
    ) -> RunConfig:
        """Choose the options of the step and show them. held: (N,) bool, images that are set aside; asks: whether to ask now."""
        images = int((~held).sum()) + (self.last.stored_exemplars if self.last else 0)
        mirrored = self.closed or "flip" in self.options or mirrors(ready.images)
        found = choose(colors, images, self.options, self.start, self.before, mirrors=mirrored)
        classes = len(ready.classes)
        choices = explain(found, colors, images, classes, first=self.last is None)
        self.listener(events.OptionsChosen(choices))
        if asks:
            self._announce(found.config, images, classes)
        return found.config

    def _announce(self, config: RunConfig, images: int, classes: int) -> None:
        asked = {"method", "weights"} & self.options.keys() or training_asked(self.options)
        announce(
            config,
            images,
            classes,
            first=self.last is None,
            unasked=not asked,
            listener=self.listener,
            confirm=self.confirm,
        )
