"""One learn step: images in, a state out. Nothing is kept of it until it is complete, except where to go on."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl import events
from geodl.app.advice import advise
from geodl.app.before import announce
from geodl.app.choices import TINY, VALIDATION, choose, choose_start, explain, training_asked
from geodl.app.preparing import Prepared, mirrors, prepare, set_aside
from geodl.app.state import State, accuracy_of, save, short_hashes
from geodl.config import RunConfig
from geodl.data.batches import fit
from geodl.data.dataset import Skipped, insist
from geodl.data.images import ArrayImages, Images, concat
from geodl.data.intake import Decoded, Intake, decode, typical_side
from geodl.devices import available_cores, device_kind
from geodl.errors import Interrupted
from geodl.files import fingerprint
from geodl.learner import Learner
from geodl.memory import Memory
from geodl.metrics import confusions_of, finite, to_metrics
from geodl.nets import build_network
from geodl.predictors import default_classifier
from geodl.store import RunDirectory
from geodl.training.angles import SAMPLE


@dataclass(frozen=True)
class Learned:
    """What a learn step did; accuracies in %, on the validation images; None where there are none.

    interval: of the accuracy, 95 %; judged: on how many images it rests; left_out: whether these were learned too, each judged
    by the model without it.
    before, after: the accuracy on the classes that were known before the step, and on those that it added.
    stored_features: of how many images the features are kept.
    earlier_images: whether the state before the step, which `undo` would bring back, holds images.
    """

    already: bool
    step: int
    classes: tuple[str, ...]
    new: tuple[str, ...]
    returning: tuple[str, ...]
    images: int
    accuracy: float | None
    interval: tuple[float, float]
    judged: int
    left_out: bool
    before: float | None
    after: float | None
    per_class: dict[str, float | None]
    stored_images: int
    stored_bytes: int
    stored_features: int
    earlier_images: bool
    warnings: tuple[str, ...]
    skipped: Skipped


@contextmanager
def _keeping_threads() -> Iterator[None]:
    """Leave the process with as many threads as it had."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_keeping_threads()
def learn_step(
    store: RunDirectory,
    last: State | None,
    intake: Intake,
    options: Mapping[str, Any],
    *,
    strict: bool = False,
    listener: events.Listener = events.ignore,
    stop: Callable[[], bool] = lambda: False,
    confirm: Callable[[float], bool] = lambda seconds: True,
) -> Learned:
    """Learn the classes and images of an intake and save the new state; the caller holds the lock.

    confirm: asked with an estimate in seconds before a training that takes long.
    """
    step = (last.steps if last else 0) + 1
    side = typical_side(intake.images)
    start = {} if last else _start(side, options)
    size = last.transform.size if last else int(start["image_size"])
    workers = int(options.get("workers") or available_cores())
    decoded = _decoded(intake, size, workers, strict=strict, listener=listener, stop=stop)
    ready = prepare(intake, decoded, last, step)
    insist(strict, ready.problems)
    listener(events.IntakeDone(intake.title, len(ready.images), len(intake.classes), side, ready.problems))
    closed = (last.config.method if last else start.get("method")) == "analytic"
    # In closed form every image is judged by the fit without it: none has to be set aside.
    held = torch.zeros(len(ready.images), dtype=torch.bool) if closed else set_aside(ready, last)
    train = ready.images.select(~held)
    kept = 0 if last is None or last.learner.memory.images is None else len(last.learner.memory.images)
    images, classes = len(train) + kept, len(ready.classes)
    chosen = choose(
        decoded,
        images,
        options,
        start,
        last.config if last else None,
        trained=last is not None and last.learner.trained,
        mirrors=closed or "flip" in options or mirrors(ready.images),
    )
    listener(events.OptionsChosen(explain(chosen, decoded, images, classes, first=last is None)))
    unasked = last is None and not {"method", "weights"} & options.keys() and not training_asked(options)
    announce(chosen.config, images, classes, unasked=unasked, listener=listener, confirm=confirm)
    state = _Step(store, last, ready, chosen.config, step, intake.key, listener, stop).learn(train, held)
    if stop():
        raise Interrupted("stopped before anything was changed")
    save(store, state)
    earlier = last is not None and last.stored_images > 0
    result = summarize(
        state, ready.known, ready.present, problems=ready.problems, images=len(train), earlier_images=earlier
    )
    store.events("learned", phase=store.completed() - 1, step=step, classes=list(result.new), images=len(train))
    return result


def _start(side: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Choose what a new model is made with; a network that cannot be built is named before thousands of images are read."""
    start = choose_start(side, options, device_kind(str(options.get("accelerator") or "auto")))
    weights = Path(options["weights"]) if options.get("weights") else None
    build_network(start["network"], 1, head="cosine", weights=weights, pretrained=bool(start.get("pretrained")))
    return start


def _decoded(
    intake: Intake, size: int, workers: int, *, strict: bool, listener: events.Listener, stop: Callable[[], bool]
) -> Decoded:
    """Read the images, and tell how far that is."""

    def told(done: int, problems: Skipped) -> None:
        listener(events.ImagesRead(done, len(intake.images)))
        insist(strict, problems)
        if stop():
            raise Interrupted("stopped while the images were read")

    return decode(intake, size, workers, told)


@dataclass
class _Step:
    """What is around the learner in one step: progress, validation images, the story of the images.

    The store's checkpoint is valid only for the same images, options and place in the model's life.
    """

    store: RunDirectory
    last: State | None
    ready: Prepared
    config: RunConfig
    step: int
    learned: str
    listener: events.Listener
    stop: Callable[[], bool]

    def __post_init__(self) -> None:
        store, last, config, listener = self.store, self.last, self.config, self.listener
        identity = {"images": self.learned, "config": config.identity(), "phase": store.completed()}
        self.key = fingerprint(identity)
        unfinished = self.load_progress()
        if unfinished is None and store.load_progress() is not None:
            listener(
                events.Advised("A learn step of other images or options was stopped before; this one gives it up.")
            )
        # Another number of threads gives other last digits: a step is finished with as many as it was begun with.
        began = unfinished[1]["threads"] if unfinished else None
        # Work on tiny pictures is over before a second thread has begun.
        usual = 1 if (config.image_size or 0) <= TINY else available_cores()
        if unfinished:
            listener(events.StepContinued(unfinished[1]["epoch"]))
        how: dict[str, Any] = {"listener": self._tell, "stop": self.stop}
        self.learner = last.learner.continued(config, **how) if last else Learner(config, **how)
        torch.set_num_threads(began or config.threads or usual)

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.store.save_progress(tensors, {**state, "key": self.key, "threads": torch.get_num_threads()})

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        found = self.store.load_progress()
        return found if found is not None and found[1].get("key") == self.key else None

    def _tell(self, event: events.Event) -> None:
        self.listener(event)
        # A long pass asks nobody whether to stop. The sample after an epoch is short, and its epoch is not saved yet.
        if isinstance(event, events.FeaturesTaken) and event.total > SAMPLE and self.stop():
            raise Interrupted("stopped before anything was changed")
        if not isinstance(event, events.FREQUENT):
            self.store.events(event.kind, **event.record())

    def learn(self, train: Images, aside: Tensor) -> State:
        """Learn, and see how good the network is on all validation images, `aside` (N,) being new ones."""
        learner, last, ready = self.learner, self.last, self.ready
        learner.memory = _without_incoming(learner.memory, ready.digests)
        learner.learn(replace(train, names=ready.names_of_classes), progress=self)
        if learner.memory.images is not None and not isinstance(learner.memory.images, ArrayImages):
            learner.memory = replace(learner.memory, images=self._fitted(learner.memory.images))
        left_out = learner.left_out()
        held = ready.images.select(aside if left_out is None else self._shown())
        parts = [held] if last is None or last.validation is None else [last.validation, held]
        checks = self._fitted(concat(parts))
        checks = checks.select(checks.labels.argsort(stable=True))
        labelled = replace(checks, names=ready.names_of_classes)
        found = learner.evaluate(labelled) if left_out is None else {"analytic": left_out}
        metrics = to_metrics(self.store.completed(), found)
        keeps = bool(self.config.exemplars and len(checks))
        learner.known()[0].cpu().eval()
        return State(
            learner=learner,
            validation=checks if keeps else None,
            seen=self._seen(aside),
            classes=ready.classes,
            stored=self._sources(learner.memory.images, checks if keeps else None),
            learned=self.learned,
            history=(*(last.history if last else ()), self._record(len(train), metrics)),
            metrics=metrics,
        )

    def _fitted(self, images: Images) -> ArrayImages:
        assert self.config.image_size is not None
        return fit(images, self.config.image_size, workers=self.config.workers)

    def _shown(self) -> Tensor:
        """Choose pictures to keep and show, (N,) bool: of each class, as many as are wanted and it lacks, mistaken ones first."""
        labels, own = self.ready.images.labels, self.learner.memory.own
        order = torch.arange(len(labels))
        if "last" in own:  # where the images of this step are among those whose features are kept
            truth, said = own["validated"].T
            mistaken = torch.isin(own["last"][: len(labels)], own["rows"][truth != said])
            order = order[mistaken.logical_not().long().argsort(stable=True)]
        have = self.last.checks if self.last else Counter[int]()
        chosen = torch.zeros(len(labels), dtype=torch.bool)
        for label in self.ready.present:
            lacking = min(self.config.exemplars, VALIDATION) - have[label]
            chosen[order[labels[order] == label][: max(lacking, 0)]] = True
        return chosen

    def _record(self, images: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        names, known = self.ready.names_of_classes, self.ready.known
        found = confusions_of(metrics)
        judged = found[default_classifier(found)].counts.sum(dim=1)
        return {
            "action": "learn",
            "step": self.step,
            "new": list(names[known:]),
            "returning": [names[i] for i in self.ready.present if i < known],
            "images": images,
            "accuracy": accuracy_of(metrics),
            "validated": int((judged > 0).sum()),
        }

    def _seen(self, aside: Tensor) -> Tensor:
        """Return the short hashes of all images trained on so far."""
        now = short_hashes(self.ready.digests)[~aside]
        return now if self.last is None else torch.cat([self.last.seen, now[~torch.isin(now, self.last.seen)]])

    def _sources(self, *parts: Images | None) -> dict[str, str]:
        """Say where each stored image came from."""
        before = dict(self.last.stored) if self.last else {}
        known = before | dict(zip(self.ready.digests, self.ready.names, strict=True))
        digests = [digest for part in parts if part is not None for digest in part.item_digests()]
        return {digest: known.get(digest, "unknown") for digest in digests}


def _without_incoming(memory: Memory, digests: Sequence[str]) -> Memory:
    """Leave out exemplars that come again in this step, so that no picture counts twice."""
    if memory.images is None:
        return memory
    incoming = set(digests)
    rows = [i for i, digest in enumerate(memory.images.item_digests()) if digest not in incoming]
    return replace(memory, images=memory.images.select(rows) if rows else None)


def summarize(
    state: State,
    known: int,
    present: Sequence[int],
    *,
    already: bool = False,
    problems: Skipped = (),
    images: int = 0,
    earlier_images: bool = False,
) -> Learned:
    """Put a state into figures; `known` classes were there before the step, which brought images of those `present`."""
    names, found = state.names, confusions_of(state.metrics)
    confusion = found[default_classifier(found)]
    return Learned(
        already=already,
        step=state.steps,
        classes=names,
        new=names[known:],
        returning=tuple(names[i] for i in present if i < known),
        images=images,
        accuracy=finite(confusion.accuracy),
        interval=confusion.interval,
        judged=confusion.images,
        left_out=state.learner.left_out() is not None,
        before=finite(confusion.rate(range(known))),
        after=finite(confusion.rate(range(known, len(names)))),
        per_class={name: finite(value) for name, value in confusion.per_class.items()},
        stored_images=state.stored_images,
        stored_bytes=state.stored_bytes,
        stored_features=state.stored_features,
        earlier_images=earlier_images,
        warnings=(*advise(confusion, state.classes, state.config, present), *_mirrored(state)),
        skipped=problems,
    )


def _mirrored(state: State) -> list[str]:
    """Say so where the images have shown that mirroring changes the class."""
    if state.learner.memory.own.get("mirrors", True):
        return []
    return [
        "Mirrored images of a class look like another class: images are not mirrored, neither learning nor predicting."
    ]
