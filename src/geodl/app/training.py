"""The images of a step become a new state: trained on or solved in closed form, judged, and noted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from geodl.app.choices import VALIDATION, in_closed_form, threads_of
from geodl.app.ledger import Ledger
from geodl.app.pictures import Pictures, as_pictures, pictures_of, together
from geodl.app.preparing import Prepared
from geodl.app.state import KnownClass, State, confusion_of
from geodl.config import RunConfig
from geodl.core import events
from geodl.core.content import fingerprint
from geodl.core.errors import Interrupted
from geodl.data.batches import resized
from geodl.data.images import ArrayImages, Images, concat, short_hashes
from geodl.learning.learner import Learner
from geodl.learning.loop import SAMPLE
from geodl.model.classifiers import ClosedForm, LeftOut
from geodl.model.features import Features
from geodl.model.memory import Memory
from geodl.model.metrics import finite, to_metrics
from geodl.model.model import Model

if TYPE_CHECKING:
    from geodl.app.learning import LearnStep


@dataclass
class Training:
    """What surrounds the training of one step: checkpoints, validation images, notes.

    held: (N,) bool, the images that are set aside; now: the features of all images, where they were taken as these were
    read. The store's checkpoint is valid only for the same images, options and place in the model's life.
    """

    step: "LearnStep"
    ready: Prepared
    held: Tensor
    config: RunConfig
    now: Features | None = None

    def __post_init__(self) -> None:
        self.train = self.ready.images.select(~self.held)
        phase = self.step.store.completed()
        identity = {
            "images": self.step.intake.key,
            "config": self.config.identity(),
            "phase": phase,
        }
        self.key = fingerprint(identity)

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        more = {"key": self.key, "threads": torch.get_num_threads()}
        self.step.store.save_progress(tensors, {**state, **more})

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last checkpoint of this step."""
        found = self.step.store.load_progress()
        return found if found is not None and found[1].get("key") == self.key else None

    def learn(self) -> State:
        """Learn, and evaluate on all validation images or by leave-one-out."""
        model, ready = self._learned(), self.ready
        left_out = model.left_out()
        ledger = self._ledger(model.default.left_out())
        known = self._known(model, ledger)
        checks = self._shown(model, known) if in_closed_form(self.config.method) else self._checks()
        if left_out is None:
            learner = Learner(self.config, model=model)
            found = learner.evaluate(replace(checks, names=ready.names_of_classes))
        else:
            found = {model.default.name: left_out}
        metrics = to_metrics(self.step.store.completed(), found)
        validation = checks if self.config.exemplars and len(checks) else None
        history = self.step.last.history if self.step.last else ()
        return State(
            model=model,
            validation=validation,
            seen=self._seen(known),
            classes=_counted(ready.classes, model),
            stored=self._sources(model.memory.images, validation),
            learned=self.step.intake.key,
            history=(*history, self._record(len(self.train), metrics)),
            metrics=metrics,
            ledger=ledger,
        )

    def _ledger(self, left_out: LeftOut | None) -> Ledger:
        """Return which images are learned by now; of a trained network nobody asks."""
        before = self.step.last.ledger if self.step.last else Ledger.empty()
        if left_out is None:
            return before
        ready = self.ready
        return before.learned(ready.digests, ready.names, ready.images.labels, left_out)

    def _known(self, model: Model, ledger: Ledger) -> Tensor:
        """Return which of the step's images count, (N,) bool: none that the closed form takes for one learned before."""
        keys = short_hashes(self.ready.digests)
        if not in_closed_form(self.config.method):
            return torch.ones(len(keys), dtype=torch.bool)
        return torch.isin(keys, ledger.keys)

    def _learned(self) -> Model:
        """Train on the step's images; an interrupted step resumes with the threads it began with."""
        config, unfinished = self.config, self.load_progress()
        if unfinished is not None:
            self.step.listener(events.StepContinued(unfinished[1]["epoch"]))
        elif self.step.store.load_progress() is not None:
            words = "A learn step of other images or options was interrupted; this one discards it."
            self.step.listener(events.Advised(words))
        model = self.step.last.model if self.step.last else None
        if model is not None:
            model = replace(model, memory=_without_incoming(model.memory, self.ready.digests))
        learner = Learner(config, model=model, listener=self._tell, stop=self.step.stop)
        began = unfinished[1]["threads"] if unfinished else None
        torch.set_num_threads(began or threads_of(config))
        named = replace(self.train, names=self.ready.names_of_classes)
        learner.learn(named, progress=self, now=self.now)
        model = learner.known
        model.network.cpu().eval()
        images = model.memory.images
        if images is None or isinstance(images, ArrayImages):
            return model
        return replace(model, memory=replace(model.memory, images=self._fitted(images)))

    def _tell(self, event: events.Event) -> None:
        self.step.listener(event)
        # A long pass asks nobody whether to stop. The sample after an epoch is short, and its epoch
        # is not saved yet.
        if isinstance(event, events.FeaturesTaken) and event.total > SAMPLE and self.step.stop():
            raise Interrupted("stopped before anything was changed")
        if not isinstance(event, events.FREQUENT):
            self.step.store.events(event.kind, **event.record())

    def _checks(self) -> ArrayImages:
        """Return all images that are set aside, sorted by class."""
        held = self.ready.images.select(self.held)
        before = self.step.last.validation if self.step.last else None
        checks = self._fitted(concat([held] if before is None else [before, held]))
        return checks.select(checks.labels.argsort(stable=True))

    def _fitted(self, images: Images) -> ArrayImages:
        assert self.config.image_size is not None
        whole = self.config.crop == "whole"
        return resized(images, self.config.image_size, whole=whole, workers=self.config.workers)

    def _shown(self, model: Model, known: Tensor) -> Pictures:
        """Return the pictures to keep and show: to those that there are what each class lacks, mistaken ones first.

        known: (N,) bool, the images that count.
        """
        ready, labels = self.ready, self.ready.images.labels
        order, left_out = torch.arange(len(labels)), model.default.left_out()
        if left_out is not None and left_out.mistaken is not None:
            order = (~left_out.mistaken).long().argsort(stable=True)
        order = order[known[order]]
        have = self.step.last.checks if self.step.last else Counter[int]()
        if self.step.last is not None and self.step.last.validation is not None:
            shown = short_hashes(self.step.last.validation.item_digests())
            order = order[~torch.isin(short_hashes(ready.digests), shown)[order]]
        chosen = torch.zeros(len(labels), dtype=torch.bool)
        for label in ready.present:
            lacking = min(self.config.exemplars, VALIDATION) - have[label]
            chosen[order[labels[order] == label][: max(lacking, 0)]] = True
        added = pictures_of(
            ready.originals.select(chosen),
            ready.images.select(chosen),
            model.transform.size,
            as_they_came=self.config.crop != "resized",
            whole=model.transform.whole,
        )
        before = self.step.last.validation if self.step.last else None
        return together([added] if before is None else [as_pictures(before), added])

    def _record(self, images: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        names, known = self.ready.names_of_classes, self.ready.known
        found = confusion_of(metrics)
        assert found is not None
        return {
            "action": "learn",
            "step": self.step.number,
            "new": list(names[known:]),
            "returning": [names[i] for i in self.ready.present if i < known],
            "images": images,
            "accuracy": finite(found.accuracy),
            "validated": int(found.counts.any(dim=1).sum()),
        }

    def _seen(self, known: Tensor) -> Tensor:
        """Return the short hashes of all images trained on so far. known: (N,) bool, those of the step that count."""
        now = short_hashes(self.ready.digests)[~self.held & known]
        if self.step.last is None:
            return now
        return torch.cat([self.step.last.seen, now[~torch.isin(now, self.step.last.seen)]])

    def _sources(self, *parts: Images | None) -> dict[str, str]:
        """Say where each stored image came from."""
        before = dict(self.step.last.stored) if self.step.last else {}
        known = before | dict(zip(self.ready.digests, self.ready.names, strict=True))
        digests = [digest for part in parts if part is not None for digest in part.item_digests()]
        return {digest: known.get(digest, "unknown") for digest in digests}


def _counted(classes: Sequence[KnownClass], model: Model) -> tuple[KnownClass, ...]:
    """Return the classes with as many images as the closed form counts; a trained network counts none."""
    found = model.default
    if not isinstance(found, ClosedForm):
        return tuple(classes)
    counts = found.counts().long().tolist()
    return tuple(replace(each, images=n) for each, n in zip(classes, counts, strict=True))


def _without_incoming(memory: Memory, digests: Sequence[str]) -> Memory:
    """Leave out exemplars that come again in this step, so that no picture counts twice."""
    if memory.images is None:
        return memory
    incoming = set(digests)
    rows = [i for i, digest in enumerate(memory.images.item_digests()) if digest not in incoming]
    return replace(memory, images=memory.images.select(rows) if rows else None)
