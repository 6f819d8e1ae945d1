"""Edits of a model: classes are renamed or removed, learned images are moved to another class or forgotten.

In closed form the result is as if it had been so from the start. Where only sums over the images are kept, the share of an
image is subtracted: standardization, feature levels and regularization stay, and so do the leave-one-out predictions of others.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from geodl.app.choices import in_closed_form
from geodl.app.ledger import GONE, UNKNOWN_KEY, Ledger
from geodl.app.lookup import Found, closed_form, find, placed
from geodl.app.state import State, counted, unnamed
from geodl.core.errors import ConfigError, DataError
from geodl.data.images import Images, short_hashes
from geodl.data.names import typed_name
from geodl.methods import build
from geodl.model.classifiers import ClosedForm
from geodl.model.memory import without_class
from geodl.model.metrics import confusions_of, to_metrics
from geodl.model.model import Model

# ----------------------------------------------------------------------------------------------------------- classes


def renamed(state: State, old: str, new: str) -> State:
    """Rename a class."""
    new = typed_name(new)
    model = state.model.renamed(old, new)
    row, classes = state.model.row(old), list(state.classes)
    classes[row] = replace(classes[row], name=new)
    return replace(
        state,
        model=model,
        classes=tuple(classes),
        # In closed form the images of a folder with the old name are recognized one by one, and reported.
        learned="" if in_closed_form(state.config.method) else state.learned,
        history=(*state.history, {"action": "rename", "old": old, "new": new}),
        metrics=dict(state.metrics) | {"classes": list(model.classes)} if state.metrics else {},
    )


def removed(state: State, name: str, *, again: bool = False) -> State:
    """Remove a class with all notes about it; `again`: one that was removed before is no error."""
    record = {"action": "remove", "class": name}
    history = (*map(unnamed, state.history), record)
    if again and name not in state.names and record in state.history:
        return replace(state, seen=_seen_without(state, state.ledger), history=history)
    row, model = state.model.row(name), state.model.without(name)
    ledger = state.ledger.without_class(row)
    rest = replace(
        state,
        model=model,
        validation=None if state.validation is None else without_class(state.validation, row),
        seen=_seen_without(state, ledger),
        classes=tuple(known for i, known in enumerate(state.classes) if i != row),
        learned="",  # the same images may be learned again
        history=history,
        metrics=_metrics(state, model, row),
        ledger=_doubted(ledger, model),
    )
    return _without_other_sources(rest)


def _seen_without(state: State, rest: Ledger) -> Tensor:
    """Return the hashes that stay when the closed form knows only the images `rest`; a trained network keeps all."""
    if not in_closed_form(state.config.method):
        return state.seen
    kept = torch.isin(state.seen, rest.keys)
    if bool((rest.keys == UNKNOWN_KEY).any()):  # any other hash may be that of such an image
        kept |= ~torch.isin(state.seen, state.ledger.keys)
    return state.seen[kept]


def traces(state: State, name: str) -> str:
    """Return what stays of a class that is removed; "" if the model is then as if it had never learned the class."""
    steps = [known.step for known in state.classes if known.name == name] or [1]
    found, default = [], state.model.default
    adapted = default.adapted if isinstance(default, ClosedForm) else None
    if build(state.config).trains(steps[0] - 1) and (adapted is None or adapted.kept):
        found.append("the network, which was trained on it too,")
        if adapted is not None or not in_closed_form(state.config.method):
            found.append("hashes of its images, which tell whether a picture was learned,")
    if default.stored().sums:
        found.append("sums over the features of all images, in which it had its share,")
    turned = default.turned if isinstance(default, ClosedForm) else ()
    if name in state.names and state.model.row(name) in turned:
        found.append("the results of a test on its mirrored images, so that none are mirrored,")
    return " and ".join(found)


# ------------------------------------------------------------------------------------------------------------ images


def relabelled(state: State, images: Any, name: str) -> State:
    """Move learned images to another known class; the class of doubtful images that are in it already is confirmed."""
    row, found = state.model.row(name), find(state, images)
    old = state.ledger.labels[found.places]
    moving = old != row
    if not bool(moving.any()):
        if not bool((state.ledger.likely[found.places] >= 0).all()):
            raise ConfigError(f"the image is of class {name!r} already")
        record = {"action": "confirm", "class": name} | _which(state, found.places)
        ledger = state.ledger.moved(found.places, row)
        return replace(state, ledger=ledger, history=(*state.history, record))
    record = {"action": "relabel", "old": state.names[int(old[moving][0])], "new": name}
    return _refitted(state, found, row, record | _which(state, found.places[moving]))


def forgotten(state: State, images: Any) -> State:
    """Forget learned images."""
    found = find(state, images)
    return _refitted(state, found, GONE, {"action": "forget"} | _which(state, found.places))


def _which(state: State, places: Tensor) -> dict[str, Any]:
    """Return the number of images that a step is about, and where a single one came from."""
    record: dict[str, Any] = {"images": len(places)}
    name = state.ledger.names[int(places[0])] if len(places) == 1 else ""
    return record | ({"image": name} if name else {})


def released(state: State, keys: Tensor, pictures: Images) -> State:
    """Forget learned images with these keys (N,) that are about to be learned as another class, without a new fit."""
    found = Found(placed(state, keys, pictures), keys, pictures)
    closed, ledger = closed_form(state), state.ledger.moved(found.places, GONE)
    _insist_on_rest(state, closed, found.places, GONE)
    if closed.kept_labels() is None:
        return _moved(state, found, GONE, _resummed(state, closed, found, GONE))
    return _moved(state, found, GONE, closed.unfitted(ledger.labels))


def _refitted(state: State, found: Found, row: int, record: Mapping[str, Any]) -> State:
    """Move learned images to another class, or GONE, and fit again."""
    closed, ledger = closed_form(state), state.ledger.moved(found.places, row)
    _insist_on_rest(state, closed, found.places, row)
    if closed.kept_labels() is None:
        moved = _moved(state, found, row, _resummed(state, closed, found, row))
        return replace(moved, history=(*state.history, {**record, "subtracted": True}))
    moved = _moved(state, found, row, closed.relabelled(ledger.labels))
    return replace(
        moved,
        history=(*state.history, record),
        metrics=_metrics(state, moved.model),
        ledger=_doubted(moved.ledger, moved.model),
    )


def _insist_on_rest(state: State, closed: ClosedForm, places: Tensor, row: int) -> None:
    """Refuse to leave a class without images."""
    moving = torch.bincount(state.ledger.labels[torch.unique(places)], minlength=len(state.names))
    for i, left in enumerate((closed.counts() - moving).tolist()):
        if left <= 0 and i != row:
            name = state.names[i]
            raise ConfigError(f"class {name!r} would have no image left; `geodl remove` removes it")


def _resummed(state: State, closed: ClosedForm, found: Found, row: int) -> ClosedForm:
    """Return sums in which images count for another class, or for none."""
    if found.pictures is None:
        raise DataError("only sums over the images are kept: give the file of the image")
    z = state.model.recognizer().features(found.pictures).levels
    return closed.resummed(z, state.ledger.labels[found.places], row)


def _moved(state: State, found: Found, row: int, closed: ClosedForm) -> State:
    """Return the state with a fit in which learned images are of another class, or GONE."""
    ledger, memory = state.ledger.moved(found.places, row), state.model.memory
    model = replace(
        state.model,
        memory=replace(memory, images=_with_label(memory.images, found.keys, row)),
        classifiers={**state.model.classifiers, closed.name: closed},
    )
    gone = found.keys if row == GONE else found.keys[:0]
    moved = replace(
        state,
        model=model,
        validation=_with_label(state.validation, found.keys, row),
        seen=state.seen[~torch.isin(state.seen, gone)],
        classes=counted(state.classes, model),
        learned="",  # the same images may be learned again
        ledger=ledger.select(ledger.labels != GONE),
    )
    return _without_other_sources(moved)


def _with_label(images: Images | None, keys: Tensor, row: int) -> Images | None:
    """Return stored images with another class for some of them, or without these, sorted by class."""
    if images is None:
        return None
    labels = images.labels.clone()
    labels[torch.isin(short_hashes(images.item_digests()), keys)] = row
    rows = labels.argsort(stable=True)
    rows = rows[labels[rows] >= 0]
    return replace(images.select(rows), labels=labels[rows]) if len(rows) else None


# ------------------------------------------------------------------------------------------------------------- notes


def _doubted(ledger: Ledger, model: Model) -> Ledger:
    """Return the learned images with the doubts of a new fit."""
    judged = model.default.left_out()
    return ledger if judged is None else ledger.doubting(judged.doubts)


def _metrics(state: State, model: Model, removed: int = GONE) -> dict[str, Any]:
    """Return the metrics after an edit: of the new fit by leave-one-out, else the old ones without a class."""
    if not state.metrics:
        return {}
    left_out = model.left_out()
    if left_out is not None:
        found = {model.default.name: left_out}
    else:
        old = confusions_of(state.metrics)
        found = {name: confusion.without(removed) for name, confusion in old.items()}
    return to_metrics(state.metrics["phase"], found)


def _without_other_sources(state: State) -> State:
    """Return the state with the sources of images that are still stored."""
    left: set[str] = set()
    for _, images in state.parts():
        left.update(images.item_digests())
    stored = {digest: source for digest, source in state.stored.items() if digest in left}
    return replace(state, stored=stored)
