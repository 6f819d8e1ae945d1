"""Learned images are moved to their right class, or forgotten: as if that had been so from the start.

Where only sums over the images are kept, an image's share is subtracted: standardization, levels and ridge stay as they were
when the sums began, and what leave-one-out said of other images stays, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from geodl.app.finding import Found, closed_form, find, placed
from geodl.app.ledger import GONE, Ledger
from geodl.app.state import State
from geodl.core.errors import ConfigError, DataError
from geodl.data.images import Images, short_hashes
from geodl.model.classifiers import Classifier, ClosedForm
from geodl.model.metrics import to_metrics


def relabelled(state: State, images: Any, name: str) -> State:
    """Move learned images to another class that the model knows; the class that a doubtful one has already is confirmed."""
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
    return _mended(state, found, row, record | _which(state, found.places[moving]))


def forgotten(state: State, images: Any) -> State:
    """Forget learned images."""
    found = find(state, images)
    return _mended(state, found, GONE, {"action": "forget"} | _which(state, found.places))


def _which(state: State, places: Tensor) -> dict[str, Any]:
    """Return how many images a step is about, and where a single one came from."""
    record: dict[str, Any] = {"images": len(places)}
    name = state.ledger.names[int(places[0])] if len(places) == 1 else ""
    return record | ({"image": name} if name else {})


def released(state: State, keys: Tensor, pictures: Images) -> State:
    """Forget learned images, (N,), that are about to be learned as another class: nothing is fitted before that."""
    found = Found(placed(state, keys, pictures), keys, pictures)
    closed, ledger = closed_form(state), state.ledger.moved(found.places, GONE)
    _insist_on_rest(state, closed, ledger)
    if closed.kept_labels() is None:
        return _without(state, found, GONE, _subtracted(state, closed, found, GONE))
    return _without(state, found, GONE, closed.unfitted(ledger.labels))


def _mended(state: State, found: Found, row: int, record: Mapping[str, Any]) -> State:
    """Give learned images another class, or none, in all that is kept of them."""
    closed, ledger = closed_form(state), state.ledger.moved(found.places, row)
    _insist_on_rest(state, closed, ledger)
    if closed.kept_labels() is None:
        mended = _without(state, found, row, _subtracted(state, closed, found, row))
        return replace(mended, history=(*state.history, {**record, "subtracted": True}))
    mended = _without(state, found, row, closed.relabelled(ledger.labels))
    judged = mended.model.left_out()
    assert judged is not None
    found_now = {closed.name: judged}
    return replace(
        mended,
        history=(*state.history, record),
        metrics=to_metrics(state.metrics["phase"], found_now) if state.metrics else {},
        ledger=_doubted(mended.ledger, mended.model.default),
    )


def _insist_on_rest(state: State, closed: ClosedForm, after: Ledger) -> None:
    """Refuse to leave a class without images."""
    for name, left in zip(
        state.names, (closed.counts() + _change(state, after)).tolist(), strict=True
    ):
        if left <= 0:
            raise ConfigError(f"class {name!r} would have no image left; `geodl remove` removes it")


def _change(state: State, after: Ledger) -> Tensor:
    """Return how many images each class gains, (classes,)."""
    now, before = (
        torch.bincount(each.labels[each.labels >= 0], minlength=len(state.names))
        for each in (after, state.ledger)
    )
    return now - before


def _subtracted(state: State, closed: ClosedForm, found: Found, row: int) -> ClosedForm:
    """Return sums in which images count for another class, or for none."""
    if found.pictures is None:
        raise DataError("only sums over the images are kept: give the file of the image")
    z = state.model.recognizer().features(found.pictures).levels
    return closed.resummed(z, state.ledger.labels[found.places], row)


def _without(state: State, found: Found, row: int, closed: ClosedForm) -> State:
    """Return the state with a fit in which images have another class, or none."""
    ledger, memory = state.ledger.moved(found.places, row), state.model.memory
    model = replace(
        state.model,
        memory=replace(memory, images=_moved(memory.images, found.keys, row)),
        classifiers={**state.model.classifiers, closed.name: closed},
    )
    mended = replace(
        state,
        model=model,
        validation=_moved(state.validation, found.keys, row),
        classes=tuple(
            replace(known, images=max(known.images + more, 0))
            for known, more in zip(state.classes, _change(state, ledger).tolist(), strict=True)
        ),
        learned="",  # the same images may be learned again
        ledger=ledger.select(ledger.labels != GONE),
    )
    if row != GONE:
        return mended
    hashes, gone = short_hashes(list(state.stored)).tolist(), set(found.keys.tolist())
    sources = {
        digest: name
        for key, (digest, name) in zip(hashes, state.stored.items(), strict=True)
        if key not in gone
    }
    return replace(mended, stored=sources, seen=state.seen[~torch.isin(state.seen, found.keys)])


def _doubted(ledger: Ledger, fitted: Classifier) -> Ledger:
    """Return the learned images as a new fit doubts them."""
    judged = fitted.left_out()
    return ledger if judged is None or judged.doubts is None else ledger.doubting(judged.doubts)


def _moved(images: Images | None, keys: Tensor, row: int) -> Images | None:
    """Return stored images with another class for some of them, or without these, sorted by class."""
    if images is None:
        return None
    labels = images.labels.clone()
    labels[torch.isin(short_hashes(images.item_digests()), keys)] = row
    rows = labels.argsort(stable=True)
    rows = rows[labels[rows] >= 0]
    return replace(images.select(rows), labels=labels[rows]) if len(rows) else None
