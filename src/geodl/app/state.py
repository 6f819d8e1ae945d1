"""The state of a model directory after a step: the model, and notes about the user's images."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from geodl.app.choices import in_closed_form
from geodl.app.ledger import Ledger
from geodl.app.pictures import Pictures, as_pictures, from_files, to_files
from geodl.config import RunConfig
from geodl.core.content import interpreting
from geodl.core.tensors import part
from geodl.data.batches import Transform
from geodl.data.images import Images, from_tensors, to_tensors
from geodl.learning.saving import MEMORY, METRICS, RECORD, load_model, save_model
from geodl.model.classifiers import ClosedForm, default_classifier
from geodl.model.memory import insist_on_labels
from geodl.model.metrics import Confusion, confusions_of
from geodl.model.model import Model
from geodl.store import Directory, File, SavedPhase, reading

Use = Literal["exemplar", "validation"]
"""What the model keeps an image for."""
UNDO = 3
"""Steps that can be undone; older states are removed."""


@dataclass(frozen=True)
class KnownClass:
    """A class that the model knows: its name, its first learn step, and the number of its images so far."""

    name: str
    step: int
    images: int


@dataclass(frozen=True)
class State:
    """A complete state of a model directory.

    model:      everything that was learned.
    validation: images set aside to measure accuracy on, never trained on; in closed form, pictures to show.
    seen:       short hashes (N,) of all images ever trained on: none becomes a validation image.
    classes:    notes about each class, in the order of the model's rows.
    stored:     hash of a stored image -> where it came from.
    learned:    the key of the last learn step's images.
    history:    one record for every step, oldest first; none for a model that `Learner.save` wrote.
    metrics:    the confusion matrices of the last step.
    ledger:     the images that a model in closed form has learned.
    """

    model: Model
    validation: Images | None
    seen: Tensor
    classes: tuple[KnownClass, ...]
    stored: Mapping[str, str]
    learned: str
    history: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger.empty)

    @property
    def config(self) -> RunConfig:
        """The options of the last learn step."""
        return self.model.config

    @property
    def transform(self) -> Transform:
        """From a picture to the network's input."""
        return self.model.transform

    @property
    def names(self) -> tuple[str, ...]:
        """The class names in the order of their rows."""
        return self.model.classes

    @property
    def steps(self) -> int:
        """The number of learn steps; a model that `Learner.save` wrote counts as one."""
        steps = [record["step"] for record in self.history if record["action"] == "learn"]
        return max(steps, default=1)

    @property
    def confusion(self) -> Confusion:
        """The confusion matrix of the default classifier; all zeros if its accuracy was not measured."""
        size = len(self.names)
        zeros = torch.zeros(size, size, dtype=torch.int64)
        return confusion_of(self.metrics) or Confusion(zeros, self.names)

    @property
    def checks(self) -> Counter[int]:
        """The number of validation images of each class, by its row."""
        return Counter(() if self.validation is None else self.validation.labels.tolist())

    @property
    def pictures(self) -> Images | None:
        """Stored images like those that the model learned: validation images, or exemplars."""
        return self.model.memory.images if self.validation is None else self.validation

    @property
    def stored_exemplars(self) -> int:
        """The number of exemplars."""
        return 0 if self.model.memory.images is None else len(self.model.memory.images)

    def parts(self) -> Iterator[tuple[Use, Images]]:
        """Yield the images that the model keeps, with their use."""
        if self.model.memory.images is not None:
            yield "exemplar", self.model.memory.images
        if self.validation is not None:
            yield "validation", self.validation

    @property
    def stored_images(self) -> int:
        """The number of images that the model keeps: exemplars and validation images."""
        return sum(len(images) for _, images in self.parts())

    @property
    def stored_bytes(self) -> int:
        """Their bytes: pictures to show as files, others as pixels at the size that the network sees."""
        square = 3 * self.transform.size**2
        if isinstance(self.validation, Pictures):
            return self.stored_exemplars * square + self.validation.nbytes
        return self.stored_images * square


def save(store: Directory, state: State, *, states: int = UNDO + 1) -> None:
    """Add a state as the next phase, whole or not at all; `states` of them are kept."""
    tensors = {"seen": state.seen} | state.ledger.to_tensors()
    pictures: list[dict[str, Any]] = []
    files: dict[str, bytes | File] = {}
    if state.validation is not None and in_closed_form(state.config.method):
        pictures, files = to_files(as_pictures(state.validation))
    elif state.validation is not None:
        stored = to_tensors(state.validation)
        tensors |= {f"validation.{key}": tensor for key, tensor in stored.items()}
    notes = {
        "pictures": pictures,
        "known": [asdict(known) for known in state.classes],
        "stored": dict(state.stored),
        "names": list(state.ledger.names),
        "learned": state.learned,
        "history": [*map(unnamed, state.history[:-UNDO]), *map(dict, state.history[-UNDO:])],
    }
    save_model(
        store,
        state.model,
        action=state.history[-1],
        metrics=state.metrics,
        notes=notes,
        tensors=tensors,
        files=files,
        states=states,
    )


def unnamed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a step without the name of an image, which is kept only while the step can be undone."""
    return {key: value for key, value in record.items() if key != "image"}


def confusion_of(metrics: Mapping[str, Any]) -> Confusion | None:
    """Return the confusion matrix of the default classifier; None if its accuracy was not measured."""
    found = confusions_of(metrics) if metrics else {}
    return found[default_classifier(found)] if found else None


def load(store: Directory) -> State | None:
    """Read the last complete state; None if there is none."""
    return reading(store.path, lambda here: _state(here.phase(-1)) if here.completed() else None)


def _state(found: SavedPhase) -> State:
    model = load_model(found)
    with interpreting(found.path):
        notes, metrics, tensors = found.json(RECORD), found.json(METRICS), found.tensors(MEMORY)
        # A model that `Learner.save` or a run wrote has no notes.
        unknown = [{"name": name, "step": 1, "images": 0} for name in model.classes]
        validation: Images | None = None
        if notes.get("pictures"):
            validation = from_files(found, notes["pictures"])
        elif held := part(tensors, "validation"):
            validation = from_tensors(held)
        insist_on_labels(len(model.classes), validation)
        if metrics:
            confusions_of(metrics)  # here, so that an error in them names the file
        ledger = Ledger.from_tensors(tensors, notes.get("names", ()), len(model.classes))
        return State(
            model=model,
            validation=validation,
            seen=tensors.get("seen", torch.empty(0, dtype=torch.int64)),
            classes=tuple(KnownClass(**known) for known in notes.get("known", unknown)),
            stored=notes.get("stored", {}),
            learned=notes.get("learned", ""),
            history=tuple(notes.get("history", ())),
            metrics=metrics,
            ledger=ledger.beside(model.default.kept_labels()),
        )


def counted(classes: Sequence[KnownClass], model: Model) -> tuple[KnownClass, ...]:
    """Return the classes with the numbers of images that the closed form counts; a trained network counts none."""
    found = model.default
    if not isinstance(found, ClosedForm):
        return tuple(classes)
    counts = found.counts().long().tolist()
    return tuple(replace(each, images=n) for each, n in zip(classes, counts, strict=True))
