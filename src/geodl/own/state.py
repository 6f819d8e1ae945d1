"""What a model directory holds after a step: network, memory, check images, class means, names and history."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from geodl.config import Layer, RunConfig
from geodl.data.batches import Transform
from geodl.data.folder import is_text
from geodl.data.images import ArrayImages, Images, from_tensors, to_tensors
from geodl.errors import ConfigError, StoreError
from geodl.memory import Memory
from geodl.methods import METHODS, configure
from geodl.nets import Network, build_network
from geodl.store import RunDirectory

RECORD = {"kind": "model", "method": "lucir", "distill": "geodesic"}
"""The constant configuration of a model directory: what its steps were made with is kept with each step."""
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
    """A complete state of a model; the position of a class in `classes` is its row in the head and in the means.

    trained:    whether the network has been trained: not while there is only one class.
    validation: images set aside to check the model with; never trained on.
    means:      (C, d) class means of nearest-mean prediction.
    seen:       short hashes (N,) of all images that were ever trained on: none of them can become a check image.
    stored:     hash of a stored image -> where it came from.
    learned:    the key of the last learn step's images.
    history:    one record for every step, oldest first.
    metrics:    how good the model was on the check images.
    """

    config: RunConfig
    transform: Transform
    network: Network
    trained: bool
    memory: Memory
    validation: Images | None
    means: Tensor
    seen: Tensor
    classes: tuple[KnownClass, ...]
    stored: Mapping[str, str]
    learned: str
    history: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The class names in the order of their rows."""
        return [known.name for known in self.classes]

    @property
    def steps(self) -> int:
        """How many learn steps were taken."""
        return sum(record["action"] == "learn" for record in self.history)

    @property
    def stored_images(self) -> int:
        """How many images the model keeps: exemplars and check images."""
        return sum(len(part) for part in (self.memory.images, self.validation) if part is not None)

    @property
    def stored_bytes(self) -> int:
        """How many bytes they take: they are stored as pixels, at the size that the network sees."""
        return self.stored_images * 3 * self.transform.size**2

    def position(self, name: str) -> int:
        """Find a class by its name."""
        if name not in self.names:
            few = self.names[:20] + (["..."] if len(self.names) > 20 else [])
            raise ConfigError(f"no class {name!r}; the model knows {', '.join(few)}")
        return self.names.index(name)


def save(store: RunDirectory, state: State) -> None:
    """Add a state as the next phase, whole or not at all, and remove states that are too old to go back to."""
    memory = state.memory.to_tensors() | {"nme": state.means, "seen": state.seen}
    if state.validation is not None:
        memory |= {f"validation.{key}": tensor for key, tensor in to_tensors(state.validation).items()}
    extra = {
        "config": state.config.identity(),
        "transform": state.transform.to_dict(),
        "trained": state.trained,
        "classes": [asdict(known) for known in state.classes],
        "stored": dict(state.stored),
        "learned": state.learned,
        "history": [dict(record) for record in state.history],
    }
    store.save_phase(store.completed(), state.network.state_dict(), memory, dict(state.metrics), extra)
    forget(store, before=store.completed() - 1 - UNDO)


def short_hashes(digests: Sequence[str]) -> Tensor:
    """Give the first 63 bits of hexadecimal digests: int64 (N,)."""
    return torch.tensor([int(digest[:16], 16) >> 1 for digest in digests], dtype=torch.int64)


def summary(confusions: Mapping[str, list[list[int]]], names: Sequence[str]) -> dict[str, Any]:
    """Give the part of metrics.json that follows from confusions, as [true, predicted, count]: accuracies in %, words."""
    accuracy: dict[str, float | None] = {}
    for name, entries in confusions.items():
        total = sum(count for _, _, count in entries)
        right = sum(count for true, guess, count in entries if true == guess)
        accuracy[name] = 100 * right / total if total else None
    shown = "not checked" if accuracy["nme"] is None else f"{accuracy['nme']:.1f} %"
    return {"classes": list(names), "accuracy": accuracy, "headline": f"{shown} on {len(names)} classes"}


def forget(store: RunDirectory, *, before: int) -> None:
    """Remove network and images of the states before a phase; what they were and how good they were stays."""
    for t in range(before):
        store.forget_phase(t)


def load(store: RunDirectory) -> State | None:
    """Read the last complete state; None where there is none."""
    for attempt in (1, 2):
        done = store.completed()
        try:
            return _load(store, done - 1) if done else None
        except StoreError:
            # Between counting and reading, another process may have taken the last step back.
            if attempt == 2 or store.completed() == done:
                raise
    raise AssertionError("unreachable")


def _load(store: RunDirectory, phase: int) -> State:
    found = store.load_phase(phase)
    extra = found.extra
    # An option that another version had, and this one has not, is no reason not to open the model.
    known = METHODS[extra["config"]["method"]].Config.model_fields
    values = {key: value for key, value in extra["config"].items() if key in known}
    config = configure([Layer(f"{store.path}", values)]).config
    network = build_network(config.network, len(extra["classes"]), head="cosine", scale=config.scale, seed=config.seed)
    network.load_state_dict(found.model)
    prefix = "validation."
    held = {key.removeprefix(prefix): value for key, value in found.memory.items() if key.startswith(prefix)}
    return State(
        config=config,
        transform=Transform.from_dict(extra["transform"]),
        network=network.eval(),
        trained=extra["trained"],
        memory=Memory.from_tensors(found.memory),
        validation=from_tensors(held) if held else None,
        means=found.memory["nme"],
        seen=found.memory["seen"],
        classes=tuple(KnownClass(**known) for known in extra["classes"]),
        stored=extra["stored"],
        learned=extra["learned"],
        history=tuple(extra["history"]),
        metrics=found.metrics,
    )


def renamed(state: State, old: str, new: str) -> State:
    """Give a class another name."""
    position = state.position(old)
    new = unicodedata.normalize("NFC", new)  # as the names of folders are read
    if not new.strip() or new != new.strip():
        raise ConfigError(f"new name {new!r}: a name that is not empty and has no space at its ends is needed")
    if new.startswith(".") or "/" in new or not is_text(new):
        raise ConfigError(
            f"new name {new!r}: no folder of images could have it (a dot first, a slash, a control character)"
        )
    if new in state.names:
        raise ConfigError(f"new name {new!r}: the model has a class of that name already")
    classes = list(state.classes)
    classes[position] = replace(classes[position], name=new)
    names = [known.name for known in classes]
    record = {"action": "rename", "old": old, "new": new}
    return replace(
        state,
        classes=tuple(classes),
        history=(*state.history, record),
        metrics=dict(state.metrics) | {"classes": names},
    )


def without(state: State, name: str) -> State:
    """Remove a class: its row in the head, its mean, its images."""
    gone = state.position(name)
    if len(state.classes) == 1:
        raise ConfigError(f"{name!r} is the only class: a model without classes is no model (delete its directory)")
    rows = torch.tensor([i for i in range(len(state.classes)) if i != gone])
    tensors = state.network.state_dict()
    tensors |= {f"head.{key}": tensors[f"head.{key}"][rows] for key in ("weight", "alpha", "beta")}
    config = state.config
    network = build_network(config.network, len(rows), head="cosine", scale=config.scale, seed=config.seed)
    network.load_state_dict(tensors)
    means = state.memory.means
    memory = replace(
        state.memory, images=_drop(state.memory.images, gone), means=None if means is None else means[rows]
    )
    validation = _drop(state.validation, gone)
    left = {digest for images in (memory.images, validation) if images is not None for digest in images.item_digests()}
    classes = tuple(known for i, known in enumerate(state.classes) if i != gone)
    # The key of the last step goes, too: the same images may be learned again.
    return replace(
        state,
        network=network.eval(),
        memory=memory,
        validation=validation,
        means=state.means[rows],
        classes=classes,
        stored={digest: source for digest, source in state.stored.items() if digest in left},
        learned="",
        history=(*state.history, {"action": "remove", "class": name}),
        metrics=_without(state.metrics, gone, [known.name for known in classes]),
    )


def _drop(images: Images | None, gone: int) -> Images | None:
    """Leave out the images of a class and close the gap in the labels."""
    if images is None or not (images.labels != gone).any():
        return None
    rest = images.select(images.labels != gone)
    labels = rest.labels - (rest.labels > gone).long()
    return ArrayImages(rest.pixels, labels) if isinstance(rest, ArrayImages) else replace(rest, labels=labels)


def _without(metrics: Mapping[str, Any], gone: int, names: list[str]) -> dict[str, Any]:
    """Leave a class out of the confusions: images that were taken for it are no longer counted."""

    def rest(entries: list[list[int]]) -> list[list[int]]:
        return [[i - (i > gone), j - (j > gone), count] for i, j, count in entries if gone not in (i, j)]

    confusions = {name: rest(entries) for name, entries in metrics["confusions"].items()}
    return dict(metrics) | {"confusions": confusions} | summary(confusions, names)
