"""What a model directory holds after a step: a learner, validation images, and the story of a person's images."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from geodl.config import RunConfig
from geodl.data.batches import Transform
from geodl.data.images import Images, from_tensors, to_tensors
from geodl.data.names import typed_name
from geodl.files import interpreting, part
from geodl.learner import Learner
from geodl.memory import insist_on_labels, without_class
from geodl.metrics import confusions_of, to_metrics
from geodl.predictors import default_classifier
from geodl.store import Phase, RunDirectory, read_steadily

UNDO = 3
"""So many steps can be taken back; states before them are removed."""


@dataclass(frozen=True)
class KnownClass:
    """A class that the model knows: its name, the learn step it first came in, how many images of it were seen."""

    name: str
    step: int
    images: int


@dataclass(frozen=True)
class State:
    """A complete state of a model; the position of a class in `classes` is its row in the learner's head and means.

    learner:    network, memory and class means.
    validation: images set aside to measure accuracy on; never trained on.
    seen:       short hashes (N,) of all images that were ever trained on: none of them can become a validation image.
    stored:     hash of a stored image -> where it came from.
    learned:    the key of the last learn step's images.
    history:    one record for every step since a learner was saved by itself, if ever; oldest first.
    metrics:    how good the model was on the validation images.
    """

    learner: Learner
    validation: Images | None
    seen: Tensor
    classes: tuple[KnownClass, ...]
    stored: Mapping[str, str]
    learned: str
    history: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """The options of the last learn step."""
        return self.learner.config

    @property
    def transform(self) -> Transform:
        """From a picture to the network's input."""
        assert self.learner.transform is not None
        return self.learner.transform

    @property
    def names(self) -> tuple[str, ...]:
        """The class names in the order of their rows."""
        return self.learner.classes

    @property
    def steps(self) -> int:
        """How many learn steps were taken; what a learner that was saved by itself knows counts as one."""
        return max((record["step"] for record in self.history if record["action"] == "learn"), default=1)

    @property
    def checks(self) -> Counter[int]:
        """How many validation images there are of each class, by its row."""
        return Counter(() if self.validation is None else self.validation.labels.tolist())

    @property
    def stored_images(self) -> int:
        """How many images the model keeps: exemplars and validation images."""
        return sum(len(part) for part in (self.learner.memory.images, self.validation) if part is not None)

    @property
    def stored_features(self) -> int:
        """Of how many images it keeps the features, one by one."""
        return len(self.learner.memory.own.get("labels", ()))

    @property
    def stored_bytes(self) -> int:
        """How many bytes they take: they are stored as pixels, at the size that the network sees."""
        return self.stored_images * 3 * self.transform.size**2


def save(store: RunDirectory, state: State) -> None:
    """Add a state as the next phase, whole or not at all, and remove states that are too old to go back to."""
    model, memory, statistics = state.learner.tensors()
    memory |= {"seen": state.seen}
    if state.validation is not None:
        memory |= {f"validation.{key}": tensor for key, tensor in to_tensors(state.validation).items()}
    extra = state.learner.facts() | {
        "known": [asdict(known) for known in state.classes],
        "stored": dict(state.stored),
        "learned": state.learned,
        "history": [dict(record) for record in state.history],
    }
    store.save_phase(store.completed(), model, memory, dict(state.metrics), extra, statistics)
    forget(store, before=store.completed() - 1 - UNDO)


def short_hashes(digests: Sequence[str]) -> Tensor:
    """Return the first 63 bits of hexadecimal digests: int64 (N,)."""
    return torch.tensor([int(digest[:16], 16) >> 1 for digest in digests], dtype=torch.int64)


def accuracy_of(metrics: Mapping[str, Any]) -> float | None:
    """Return the accuracy that is shown of a model, in %; None where it could not be measured."""
    accuracy = metrics.get("accuracy")
    return accuracy[default_classifier(accuracy)] if accuracy else None


def forget(store: RunDirectory, *, before: int) -> None:
    """Remove network and images of the states before a phase; what they were and how good they were stays."""
    for t in range(before):
        store.forget_phase(t)


def load(store: RunDirectory) -> State | None:
    """Read the last complete state; None where there is none."""
    return read_steadily(
        store.path, lambda here: _state(here.load_phase(done - 1)) if (done := here.completed()) else None
    )


def last_record(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the step that led to a state; a learner that was saved by itself has none."""
    history = extra.get("history")
    return dict(history[-1]) if history else {"action": "save"}


def _state(found: Phase) -> State:
    with interpreting(found.path):
        extra, held = found.extra, part(found.memory, "validation")
        learner = Learner.restored(found)
        # A learner that was saved by itself, or the learner of a run, has no story.
        unknown = [{"name": name, "step": 1, "images": 0} for name in learner.classes]
        validation = from_tensors(held) if held else None
        insist_on_labels(len(learner.classes), validation)
        if found.metrics:
            confusions_of(found.metrics)  # here, where what is wrong with them is the file's fault
        return State(
            learner=learner,
            validation=validation,
            seen=found.memory.get("seen", torch.empty(0, dtype=torch.int64)),
            classes=tuple(KnownClass(**known) for known in extra.get("known", unknown)),
            stored=extra.get("stored", {}),
            learned=extra.get("learned", ""),
            history=tuple(extra.get("history", ())),
            metrics=found.metrics,
        )


def renamed(state: State, old: str, new: str) -> State:
    """Give a class another name."""
    new = typed_name(new)
    position = state.learner.position(old)
    learner = copy(state.learner)
    learner.rename(old, new)
    classes = list(state.classes)
    classes[position] = replace(classes[position], name=new)
    return replace(
        state,
        learner=learner,
        classes=tuple(classes),
        history=(*state.history, {"action": "rename", "old": old, "new": new}),
        metrics=dict(state.metrics) | {"classes": list(learner.classes)} if state.metrics else {},
    )


def without(state: State, name: str, *, again: bool = False) -> State:
    """Remove a class: its row in the head, its mean, its images; `again`: one that was removed before is no error."""
    record = {"action": "remove", "class": name}
    if again and name not in state.names and record in state.history:
        return replace(state, history=(*state.history, record))
    gone = state.learner.position(name)
    learner = copy(state.learner)
    learner.remove(name)
    validation = None if state.validation is None else without_class(state.validation, gone)
    kept = [images for images in (learner.memory.images, validation) if images is not None]
    left = {digest for images in kept for digest in images.item_digests()}
    metrics: dict[str, Any] = {}
    if state.metrics:
        left_out = learner.left_out()  # where the fit is another without the class, so is what it says of the rest
        before = confusions_of(state.metrics) if left_out is None else {}
        rest = {each: confusion.without(gone) for each, confusion in before.items()}
        metrics = to_metrics(state.metrics["phase"], rest if left_out is None else {"analytic": left_out})
    # The key of the last step goes, too: the same images may be learned again.
    return replace(
        state,
        learner=learner,
        validation=validation,
        classes=tuple(known for i, known in enumerate(state.classes) if i != gone),
        stored={digest: source for digest, source in state.stored.items() if digest in left},
        learned="",
        history=(*state.history, record),
        metrics=metrics,
    )
