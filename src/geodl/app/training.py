"""Training, or solving in closed form, on the images of one learn step, with checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from geodl.app.choices import threads_of
from geodl.config import RunConfig
from geodl.core import events
from geodl.core.errors import Interrupted
from geodl.data.batches import resized
from geodl.data.images import ArrayImages, Images
from geodl.learning.learner import Learner
from geodl.learning.loop import SAMPLE
from geodl.model.features import Features
from geodl.model.memory import Memory
from geodl.model.model import Model
from geodl.store import Directory


@dataclass(frozen=True)
class Training:
    """The training of one step, which keeps its own checkpoints.

    key: of the step's images, options and phase; a checkpoint is valid only for the same key.
    """

    store: Directory
    config: RunConfig
    key: str
    listener: events.Listener
    stop: Callable[[], bool]

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        more = {"key": self.key, "threads": torch.get_num_threads()}
        self.store.save_progress(tensors, {**state, **more})

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last checkpoint of this step, as the learner saved it."""
        found = self._saved()
        if found is None:
            return None
        tensors, state = found
        return tensors, {name: state[name] for name in state.keys() - {"key", "threads"}}

    def _saved(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        found = self.store.load_progress()
        return found if found is not None and found[1].get("key") == self.key else None

    def learn(
        self, model: Model | None, images: Images, digests: Sequence[str], now: Features | None
    ) -> Model:
        """Learn images; an interrupted step resumes with the number of threads it began with.

        model: the one before; images: with class names; digests: of all images of the step, none of which stays an exemplar;
        now: the features of the images, if they were computed while these were read.
        """
        unfinished, threads = self._saved(), threads_of(self.config)
        if unfinished is not None:
            threads = unfinished[1]["threads"]
            self.listener(events.StepContinued(unfinished[1]["epoch"]))
        elif self.store.load_progress() is not None:
            words = "A learn step of other images or options was interrupted; this one discards it."
            self.listener(events.Advised(words))
        if model is not None:
            model = replace(model, memory=_without_incoming(model.memory, digests))
        learner = Learner(self.config, model=model, listener=self._report, stop=self.stop)
        torch.set_num_threads(threads)
        learner.learn(images, progress=self, now=now)
        model = learner.known
        model.network.cpu().eval()
        exemplars = model.memory.images
        if exemplars is None or isinstance(exemplars, ArrayImages):
            return model
        return replace(model, memory=replace(model.memory, images=fitted(exemplars, self.config)))

    def _report(self, event: events.Event) -> None:
        self.listener(event)
        # Nobody else checks during a long pass whether to stop. The sample after an epoch is short, and its epoch
        # is not saved yet.
        if isinstance(event, events.FeaturesTaken) and event.total > SAMPLE and self.stop():
            raise Interrupted("stopped before anything was changed")
        if not isinstance(event, events.FREQUENT):
            self.store.events(event.kind, **event.record())


def fitted(images: Images, config: RunConfig) -> ArrayImages:
    """Return images in memory at the size that the network sees."""
    assert config.image_size is not None
    return resized(images, config.image_size, whole=config.crop == "whole", workers=config.workers)


def _without_incoming(memory: Memory, digests: Sequence[str]) -> Memory:
    """Leave out exemplars that come again in this step, so that no picture counts twice."""
    if memory.images is None:
        return memory
    incoming = set(digests)
    rows = [i for i, digest in enumerate(memory.images.item_digests()) if digest not in incoming]
    return replace(memory, images=memory.images.select(rows) if rows else None)
