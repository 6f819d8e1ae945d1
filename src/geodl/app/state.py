"""What a model directory holds after a step: a model, and notes about a person's images."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from geodl.app.choices import in_closed_form
from geodl.app.ledger import UNKNOWN_KEY, Ledger
from geodl.app.pictures import Pictures, as_pictures, from_files, to_files
from geodl.config import RunConfig
from geodl.core.content import interpreting
from geodl.core.tensors import part
from geodl.data.batches import Transform
from geodl.data.images import Images, from_tensors, short_hashes, to_tensors
from geodl.data.names import typed_name
from geodl.learning.saving import MEMORY, METRICS, RECORD, load_model, save_model
from geodl.methods import build
from geodl.model.classifiers import ClosedForm, default_classifier
from geodl.model.memory import insist_on_labels, without_class
from geodl.model.metrics import Confusion, confusions_of, to_metrics
from geodl.model.model import Model
from geodl.store import Directory, File, SavedPhase, reading

Use = Literal["exemplar", "validation"]
"""What the model keeps an image for."""
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
    """A complete state of a model directory.

    model:      all that was learned.
    validation: images set aside to measure accuracy on; never trained on. Of a model in closed form, which sets none aside:
                pictures to show.
    seen:       short hashes (N,) of all images ever trained on: none becomes a validation image.
    classes:    notes about each class, in the order of the model's rows.
    stored:     hash of a stored image -> where it came from.
    learned:    the key of the last learn step's images.
    history:    one record for every step, oldest first; a model that `Learner.save` wrote has none.
    metrics:    how good the model was on the validation images.
    ledger:     which images a model in closed form has learned.
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
        """How many learn steps were taken; a model that `Learner.save` wrote counts as one."""
        return max(
            (record["step"] for record in self.history if record["action"] == "learn"), default=1
        )

    @property
    def confusion(self) -> Confusion:
        """The confusion matrix that is shown of the model; of no image where its accuracy was not measured."""
        size = len(self.names)
        nothing = torch.zeros(size, size, dtype=torch.int64)
        return confusion_of(self.metrics) or Confusion(nothing, self.names)

    @property
    def checks(self) -> Counter[int]:
        """How many validation images there are of each class, by its row."""
        return Counter(() if self.validation is None else self.validation.labels.tolist())

    @property
    def pictures(self) -> Images | None:
        """Some images like those that the model learned: validation images, or exemplars."""
        return self.model.memory.images if self.validation is None else self.validation

    @property
    def stored_exemplars(self) -> int:
        """How many exemplars the model keeps."""
        return 0 if self.model.memory.images is None else len(self.model.memory.images)

    def parts(self) -> Iterator[tuple[Use, Images]]:
        """Yield the images that the model keeps, by what they are kept for."""
        if self.model.memory.images is not None:
            yield "exemplar", self.model.memory.images
        if self.validation is not None:
            yield "validation", self.validation

    def picture(self, key: int) -> tuple[Images, int] | None:
        """Return the kept images that hold the one with this short hash, and its place there; None where none do."""
        for _, images in self.parts():
            keys = short_hashes(images.item_digests()).tolist()
            if key in keys:
                return images, keys.index(key)
        return None

    @property
    def stored_images(self) -> int:
        """How many images the model keeps: exemplars and validation images."""
        return sum(len(images) for _, images in self.parts())

    @property
    def stored_features(self) -> int:
        """Of how many images it keeps the features, one by one."""
        return self.model.default.stored().images

    @property
    def stored_sums(self) -> bool:
        """Whether it keeps sums over all images, and features of some of them at most."""
        return self.model.default.stored().sums

    @property
    def stored_bytes(self) -> int:
        """How many bytes they take: pictures to show as files, others as pixels at the size that the network sees."""
        square = 3 * self.transform.size**2
        if isinstance(self.validation, Pictures):
            return self.stored_exemplars * square + self.validation.nbytes
        return self.stored_images * square


def save(store: Directory, state: State, *, states: int = UNDO + 1) -> None:
    """Add a state as the next phase, whole or not at all; so many states are kept."""
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
    """Return the record of a step without the name of an image, which is kept while the step can be undone."""
    return {key: value for key, value in record.items() if key != "image"}


def confusion_of(metrics: Mapping[str, Any]) -> Confusion | None:
    """Return the confusion matrix that is shown of a model; None where its accuracy was not measured."""
    found = confusions_of(metrics) if metrics else {}
    return found[default_classifier(found)] if found else None


def load(store: Directory) -> State | None:
    """Read the last complete state; None where there is none."""
    return reading(store.path, lambda here: _state(here.phase(-1)) if here.completed() else None)


def _state(found: SavedPhase) -> State:
    model = load_model(found)
    with interpreting(found.path):
        notes, metrics, tensors = found.json(RECORD), found.json(METRICS), found.tensors(MEMORY)
        held = part(tensors, "validation")
        # A model that `Learner.save` or a run wrote has no notes.
        unknown = [{"name": name, "step": 1, "images": 0} for name in model.classes]
        validation: Images | None = from_tensors(held) if held else None
        if notes.get("pictures"):
            validation = from_files(found, notes["pictures"])
        insist_on_labels(len(model.classes), validation)
        if metrics:
            confusions_of(metrics)  # here, where what is wrong with them is the file's fault
        return State(
            model=model,
            validation=validation,
            seen=tensors.get("seen", torch.empty(0, dtype=torch.int64)),
            classes=tuple(KnownClass(**known) for known in notes.get("known", unknown)),
            stored=notes.get("stored", {}),
            learned=notes.get("learned", ""),
            history=tuple(notes.get("history", ())),
            metrics=metrics,
            ledger=Ledger.from_tensors(tensors, notes.get("names", ()), len(model.classes)).beside(
                model.default.kept_labels()
            ),
        )


def renamed(state: State, old: str, new: str) -> State:
    """Give a class another name."""
    new = typed_name(new)
    model = state.model.renamed(old, new)
    row, classes = state.model.row(old), list(state.classes)
    classes[row] = replace(classes[row], name=new)
    return replace(
        state,
        model=model,
        classes=tuple(classes),
        # In closed form images that come again under the old name are found one by one, and named.
        learned="" if in_closed_form(state.config.method) else state.learned,
        history=(*state.history, {"action": "rename", "old": old, "new": new}),
        metrics=dict(state.metrics) | {"classes": list(model.classes)} if state.metrics else {},
    )


def without(state: State, name: str, *, again: bool = False) -> State:
    """Remove a class with all notes of it; `again`: one that was removed before is no error."""
    record = {"action": "remove", "class": name}
    if again and name not in state.names and record in state.history:
        seen = _seen_without(state, state.ledger)
        return replace(state, seen=seen, history=(*map(unnamed, state.history), record))
    row, model = state.model.row(name), state.model.without(name)
    validation = None if state.validation is None else without_class(state.validation, row)
    kept = [images for images in (model.memory.images, validation) if images is not None]
    left = {digest for images in kept for digest in images.item_digests()}
    judged, ledger = model.default.left_out(), state.ledger.without_class(row)
    if judged is not None and judged.doubts is not None:
        ledger = ledger.doubting(judged.doubts)
    # The key of the last step goes, too: the same images may be learned again.
    return replace(
        state,
        model=model,
        validation=validation,
        seen=_seen_without(state, ledger),
        classes=tuple(known for i, known in enumerate(state.classes) if i != row),
        stored={digest: source for digest, source in state.stored.items() if digest in left},
        learned="",
        history=(*map(unnamed, state.history), record),
        metrics=_metrics_without(state, model, row),
        ledger=ledger,
    )


def _seen_without(state: State, rest: Ledger) -> Tensor:
    """Return the hashes that are kept where the closed form knows no images but `rest`; a trained network keeps all."""
    if not in_closed_form(state.config.method):
        return state.seen
    kept = torch.isin(state.seen, rest.keys)
    if bool((rest.keys == UNKNOWN_KEY).any()):  # which are theirs, nobody knows
        kept |= ~torch.isin(state.seen, state.ledger.keys)
    return state.seen[kept]


def traces(state: State, name: str) -> str:
    """Return what stays of a class that is removed: "" where the model is then as if it had never learned the class."""
    steps = [known.step for known in state.classes if known.name == name] or [1]
    found = []
    default = state.model.default
    adapted = default.adapted if isinstance(default, ClosedForm) else None
    if build(state.config).trains(steps[0] - 1) and (adapted is None or adapted.kept):
        found.append("the network, which was trained on it too,")
        if adapted is not None or not in_closed_form(state.config.method):
            found.append("hashes of its images, which tell whether a given picture was learned,")
    if default.stored().sums:
        found.append("sums over the features of all images, in which it had its share,")
    return " and ".join(found)


def _metrics_without(state: State, model: Model, row: int) -> dict[str, Any]:
    """Return how good the model is without a class; where its fit is another, by that fit."""
    if not state.metrics:
        return {}
    left_out = model.left_out()
    if left_out is not None:
        return to_metrics(state.metrics["phase"], {model.default.name: left_out})
    before = confusions_of(state.metrics)
    rest = {each: confusion.without(row) for each, confusion in before.items()}
    return to_metrics(state.metrics["phase"], rest)
