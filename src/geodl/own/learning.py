"""One learn step: images in, a state out. Nothing is kept of it until it is complete, except where to go on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl.config import RunConfig
from geodl.data.batches import Transform, fit
from geodl.data.images import ArrayImages, Images, concat
from geodl.devices import available_cores, device_kind
from geodl.errors import ConfigError
from geodl.files import fingerprint
from geodl.memory import Memory, quota
from geodl.methods import build
from geodl.metrics import confusion, dense, sparse
from geodl.nets import Network, build_network
from geodl.own.advice import advise
from geodl.own.choices import TINY, choose, choose_network, explain
from geodl.own.intake import Intake, Problems, decode, insist, typical_side
from geodl.own.preparing import Prepared, prepare, set_aside
from geodl.own.state import State, save, short_hashes, summary
from geodl.predictors import class_means, nearest_mean, predict
from geodl.store import RunDirectory
from geodl.training import Interrupted, Listener, Trainer


@dataclass(frozen=True)
class Learned:
    """What a learn step did; accuracies in %, on the check images; None where there are none.

    before, after: the accuracy on the classes that were known before the step, and on those that it added.
    earlier_images: whether the state before the step, which `undo` would bring back, holds images.
    """

    already: bool
    step: int
    classes: tuple[str, ...]
    new: tuple[str, ...]
    returning: tuple[str, ...]
    images: int
    accuracy: float | None
    before: float | None
    after: float | None
    per_class: dict[str, float | None]
    stored_images: int
    stored_bytes: int
    earlier_images: bool
    warnings: tuple[str, ...]
    skipped: Problems


def learn_step(
    store: RunDirectory,
    last: State | None,
    intake: Intake,
    options: Mapping[str, Any],
    *,
    strict: bool = False,
    listener: Listener = lambda kind, **fields: None,
    stop: Callable[[], bool] = lambda: False,
) -> Learned:
    """Learn the classes and images of an intake and save the new state; the caller holds the lock."""
    step = (last.steps if last else 0) + 1
    kind = device_kind(str(options.get("accelerator") or "auto"))
    side = typical_side(intake.images)
    network = {} if last else choose_network(side, options, kind)
    size = last.transform.size if last else int(network["image_size"])
    if last is None:  # a network that cannot be built is named before thousands of images are read
        weights = Path(options["weights"]) if options.get("weights") else None
        build_network(network["network"], 1, head="cosine", weights=weights, pretrained=bool(network.get("pretrained")))

    def told(done: int, problems: Problems) -> None:
        listener("reading", done=done, total=len(intake.images))
        insist(strict, problems)
        if stop():
            raise Interrupted("stopped while the images were read")

    decoded = decode(intake, size, int(options.get("workers") or available_cores()), told)
    ready = prepare(intake, decoded, last, step)
    insist(strict, ready.problems)
    listener("read", intake=intake, skipped=ready.problems, images=len(ready.images), side=side)
    held = set_aside(ready, last)
    train = ready.images.select(~held)
    kept = 0 if last is None or last.memory.images is None else len(last.memory.images)
    chosen = choose(
        decoded,
        len(train) + kept,
        options,
        network,
        last.config if last else None,
        trained=last is not None and last.trained,
    )
    listener("chosen", choices=explain(chosen, decoded, len(train) + kept, len(ready.classes), first=last is None))
    run = _Step(store, last, ready, chosen.config, step, intake.key, listener, stop)
    state = run.learn(train, held)
    save(store, state)
    earlier = last is not None and last.stored_images > 0
    result = summarise(
        state, ready.known, ready.present, problems=ready.problems, images=len(train), earlier_images=earlier
    )
    store.events("learned", phase=store.completed() - 1, step=step, classes=list(result.new), images=len(train))
    return result


class _Progress:
    """The store's checkpoint, valid only for the same images, options and place in the model's life."""

    def __init__(self, store: RunDirectory, key: str) -> None:
        self.store, self.key = store, key

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.store.save_progress(tensors, {**state, "key": self.key, "threads": torch.get_num_threads()})

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        found = self.store.load_progress()
        return found if found is not None and found[1].get("key") == self.key else None


class _Step:
    """The training of one step and what follows from it."""

    def __init__(
        self,
        store: RunDirectory,
        last: State | None,
        ready: Prepared,
        config: RunConfig,
        step: int,
        learned: str,
        listener: Listener,
        stop: Callable[[], bool],
    ) -> None:
        self.store, self.last, self.ready, self.config = store, last, ready, config
        self.step, self.learned, self.listener = step, learned, listener
        self.phase = store.completed()
        identity = {"images": learned, "config": config.identity(), "phase": self.phase}
        self.progress = _Progress(store, fingerprint(identity))
        unfinished = self.progress.load_progress()
        # Another number of threads gives other last digits: a step is finished with as many as it was begun with.
        began = unfinished[1]["threads"] if unfinished else None
        # Work on tiny pictures is over before a second thread has begun.
        usual = 1 if (config.image_size or 0) <= TINY else available_cores()
        torch.set_num_threads(began or config.threads or usual)
        if unfinished:
            listener("continued", epoch=unfinished[1]["epoch"])
        assert config.image_size is not None
        self.transform = Transform(
            config.image_size, config.mean, config.std, config.padding, config.flip, config.jitter, config.crop
        )
        self.trainer = Trainer(config, build(config), self.transform, listener=self._tell, stop=stop)

    def _tell(self, kind: str, **fields: Any) -> None:
        self.listener(kind, **fields)
        if kind != "step":
            self.store.events(kind, **fields)

    def learn(self, train: Images, aside: Tensor) -> State:
        """Train, choose what is kept, and see how good the network is on all check images, `aside` (N,) being new ones."""
        network, memory = self._train(train)
        size = self.transform.size
        if memory.images is not None and not isinstance(memory.images, ArrayImages):
            memory = replace(memory, images=fit(memory.images, size, workers=self.config.workers))
        held = self.ready.images.select(aside)
        parts = [held] if self.last is None or self.last.validation is None else [self.last.validation, held]
        checks = fit(concat(parts), size, workers=self.config.workers)
        checks = checks.select(checks.labels.argsort(stable=True))
        means = self._means(network, memory)
        metrics = self._check(network, means, checks)
        keeps = bool(self.config.exemplars and len(checks))
        record = {
            "action": "learn",
            "step": self.step,
            "new": [known.name for known in self.ready.classes[self.ready.known :]],
            "returning": [self.ready.classes[i].name for i in self.ready.present if i < self.ready.known],
            "images": len(train),
            "accuracy": metrics["accuracy"]["nme"],
            "checked": len(set(checks.labels.tolist())),
        }
        return State(
            config=self.config,
            transform=self.transform,
            network=network.cpu().eval(),
            trained=len(self.ready.classes) > 1,
            memory=memory,
            validation=checks if keeps else None,
            means=means,
            seen=self._seen(aside),
            classes=self.ready.classes,
            stored=self._sources(memory.images, checks if keeps else None),
            learned=self.learned,
            history=(*(self.last.history if self.last else ()), record),
            metrics=metrics,
        )

    def _train(self, train: Images) -> tuple[Network, Memory]:
        """Give the trained network and the new memory."""
        last, classes = self.last, len(self.ready.classes)
        memory = _without_incoming(last.memory, self.ready.digests) if last else Memory.empty()
        if last is not None and not last.trained and memory.images is not None:
            train, memory = concat([train, memory.images]), Memory.empty()  # the first real training: all is new
        if classes > 1:
            network = last.network if last is not None and last.trained else None
            phase = self.trainer.learn(self.phase, network, memory, train, classes, self.progress)
            return phase.network, phase.memory
        if not self.config.exemplars:
            raise ConfigError(
                "exemplars = 0: the first step needs two classes or more, since nothing can be kept of one"
            )
        # One class: nothing to train. Exemplars by the features of the untrained network.
        network = self.trainer.build(classes)
        share = quota(classes, self.config.exemplars, self.config.budget)
        features = self.trainer.features(network, train).pooled
        chosen = Memory.empty().update(train, features, [0], quota=share, selection=self.config.selection)
        return network, replace(chosen, means=class_means(features, train.labels, classes))

    def _means(self, network: Network, memory: Memory) -> Tensor:
        """Give the class means (C, d): of exemplars and their mirrored copies; else those stored, moved by drift."""
        classes = len(self.ready.classes)
        assert memory.means is not None
        if memory.images is None:
            return memory.means
        taken = self.trainer.exemplar_means(network, memory.images, classes)
        return torch.where((taken != 0).any(dim=1, keepdim=True), taken, memory.means)

    def _check(self, network: Network, means: Tensor, checks: Images) -> dict[str, Any]:
        """Give metrics.json: confusions of both classifiers on the check images, accuracies in %."""
        classes = len(self.ready.classes)
        found = self.trainer.features(network, checks)
        scores = {"nme": nearest_mean(found.pooled, means), "cnn": found.logits}
        matrices = {name: confusion(found.labels, predict(score), classes) for name, score in scores.items()}
        confusions = {name: sparse(matrix) for name, matrix in matrices.items()}
        names = [known.name for known in self.ready.classes]
        return {"phase": self.phase, "confusions": confusions} | summary(confusions, names)

    def _seen(self, aside: Tensor) -> Tensor:
        """Give the short hashes of all images trained on so far."""
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


def _percent(right: int, count: int) -> float | None:
    return 100 * right / count if count else None


def summarise(
    state: State,
    known: int,
    present: Sequence[int],
    *,
    already: bool = False,
    problems: Problems = (),
    images: int = 0,
    earlier_images: bool = False,
) -> Learned:
    """Put a state into words; `known` classes were there before the step, which brought images of those `present`."""
    names = state.names
    matrix = dense(state.metrics["confusions"]["nme"], len(names))
    counts, right = matrix.sum(dim=1).tolist(), matrix.diagonal().tolist()
    return Learned(
        already=already,
        step=state.steps,
        classes=tuple(names),
        new=tuple(names[known:]),
        returning=tuple(names[i] for i in present if i < known),
        images=images,
        accuracy=_percent(sum(right), sum(counts)),
        before=_percent(sum(right[:known]), sum(counts[:known])),
        after=_percent(sum(right[known:]), sum(counts[known:])),
        per_class={name: _percent(right[i], counts[i]) for i, name in enumerate(names)},
        stored_images=state.stored_images,
        stored_bytes=state.stored_bytes,
        earlier_images=earlier_images,
        warnings=tuple(advise(matrix, state.classes, state.config, present)),
        skipped=problems,
    )
