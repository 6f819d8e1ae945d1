"""One learned image is moved to its right class, or some are forgotten: as if that had been so from the start."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl.app.ledger import UNKNOWN_KEY, Ledger, short_hashes
from geodl.app.state import State
from geodl.closed_form.kept_features import KeptFeatures
from geodl.core.errors import ConfigError, DataError
from geodl.data.batches import fit
from geodl.data.images import ArrayImages, Images
from geodl.data.intake import as_images, squares
from geodl.model.classifiers import Classifier, ClosedForm
from geodl.model.metrics import to_metrics

GONE = -1
"""The label of an image that is forgotten."""
IDENTITY = re.compile("[0-9a-f]{16}")
"""How `Doubt.image` names a learned image."""


@dataclass(frozen=True)
class _Found:
    """Learned images. places: (N,) in the ledger; keys: short hashes (N,)."""

    places: Tensor
    keys: Tensor


def relabelled(state: State, images: Any, name: str) -> State:
    """Move learned images to another class that the model knows; of an image that is there already, and doubted, it is confirmed."""
    row, found = state.model.row(name), _found(state, images)
    old = state.ledger.labels[found.places]
    if bool((old == row).all()):
        if not bool((state.ledger.likely[found.places] >= 0).all()):
            raise ConfigError(f"the image is of class {name!r} already")
        record = {"action": "confirm", "class": name, "images": len(old)}
        ledger = state.ledger.moved(found.places, row)
        return replace(state, ledger=ledger, history=(*state.history, record))
    record = {"action": "relabel", "old": state.names[int(old[old != row][0])], "new": name}
    return _mended(state, found, row, record | {"images": len(old)})


def forgotten(state: State, images: Any) -> State:
    """Forget learned images."""
    found = _found(state, images)
    return _mended(state, found, GONE, {"action": "forget", "images": len(found.places)})


def _closed_form(state: State) -> tuple[ClosedForm, KeptFeatures]:
    """Return the closed form and what it keeps; any other model cannot take an image out."""
    found = state.model.default
    if not isinstance(found, ClosedForm):
        raise ConfigError("a trained network cannot forget or move a single image")
    if not isinstance(found.state, KeptFeatures):
        raise ConfigError(
            "this model keeps only sums over all images: no single image can be taken out of them"
        )
    return found, found.state


def _found(state: State, given: Any) -> _Found:
    """Return learned images, each once: of files, arrays, names, or what `Doubt.image` says."""
    _closed_form(state)
    keys: dict[int, int] = {}  # by the place of an image
    pixels = []
    for part in given if isinstance(given, list | tuple) else [given]:
        place = _named(state, part) if isinstance(part, str | Path) else None
        if place is None:
            pixels.append(_pixels(state, part))
        else:
            keys[place] = int(state.ledger.keys[place])
    if sum(map(len, pixels)):
        squares = torch.cat(pixels)
        pictures = ArrayImages(squares, torch.zeros(len(squares), dtype=torch.int64))
        hashes = short_hashes(pictures.item_digests()).tolist()
        keys |= dict(zip(_places(state, pictures).tolist(), hashes, strict=True))
    if not keys:
        raise DataError("no images given")
    return _Found(torch.tensor(list(keys)), torch.tensor(list(keys.values())))


def _named(state: State, given: str | Path) -> int | None:
    """Return the place of a learned image by its identity or its name; None where it is a file, or no image has it."""
    name, ledger = str(given), state.ledger
    if IDENTITY.fullmatch(name):
        places = (ledger.keys == int(name, 16)).nonzero().squeeze(1).tolist()
        if places:
            return int(places[0])
    if Path(given).exists():
        return None
    places = [i for i, known in enumerate(ledger.names) if known == name]
    if len(places) > 1:
        raise DataError(f"{given}: {len(places)} learned images have this name; give the file")
    return places[0] if places else None


def _pixels(state: State, given: Any) -> Tensor:
    """Return the pixels (N, 3, size, size) of one file, folder, array, or stored image."""
    named = [digest for digest, source in state.stored.items() if source == str(given)]
    if named and isinstance(given, str | Path) and not Path(given).exists():
        if len(named) > 1:
            raise DataError(f"{given}: {len(named)} stored images have this name; give the file")
        return _stored(state, named[0])
    pictures, names, problems = as_images(given if hasattr(given, "shape") else [given])
    parts = [torch.empty(0, 3, state.transform.size, state.transform.size, dtype=torch.uint8)]
    bad = list(problems)
    for _, pixels, unread in squares(pictures, state.transform.size, 1):
        parts.append(pixels)
        bad += [(names[i], reason) for i, reason in unread]
    if bad:
        raise DataError(f"{bad[0][0]}: {bad[0][1]}")
    return torch.cat(parts)


def _stored(state: State, digest: str) -> Tensor:
    """Return the pixels (1, 3, size, size) of a stored image."""
    for images in (state.validation, state.model.memory.images):
        if images is not None and digest in images.item_digests():
            row = images.item_digests().index(digest)
            return fit(images.select([row]), state.transform.size).pixels
    raise DataError("the image is not stored any more; give the file")


def _places(state: State, pictures: ArrayImages) -> Tensor:
    """Return the places of these pictures among the learned ones, (N,)."""
    keys, ledger = short_hashes(pictures.item_digests()), state.ledger
    known = {key: i for i, key in enumerate(ledger.keys.tolist())}
    places = torch.tensor([known.get(key, -1) for key in keys.tolist()])
    if bool((places < 0).any()) and bool((ledger.keys == UNKNOWN_KEY).any()):
        # An earlier version has kept no more than features of an image, and the hash that tells it from near-duplicates.
        closed, _ = _closed_form(state)
        alike = closed.kept_rows(state.model.recognizer().features(pictures))
        places = torch.where((places < 0) & torch.isin(keys, state.seen), alike, places)
    if bool((places < 0).any()):
        raise DataError(
            f"{int((places < 0).sum())} of {len(places)} images: the model never learned it"
        )
    return places


def _mended(state: State, found: _Found, row: int, record: Mapping[str, Any]) -> State:
    """Give learned images another class, or none, in all that is kept of them."""
    closed, data = _closed_form(state)
    labels = data.labels.clone()
    labels[found.places] = row
    before, after = (
        torch.bincount(each[each >= 0], minlength=len(state.names))
        for each in (data.labels, labels)
    )
    for name, left in zip(state.names, after.tolist(), strict=True):
        if not left:
            raise ConfigError(f"class {name!r} would have no image left; `geodl remove` removes it")
    default = closed.name
    memory = state.model.memory
    model = replace(
        state.model,
        memory=replace(memory, images=_moved(memory.images, found.keys, row)),
        classifiers={**state.model.classifiers, default: closed.relabelled(labels)},
    )
    judged, change = model.left_out(), (after - before).tolist()
    assert judged is not None
    mended = replace(
        state,
        model=model,
        validation=_moved(state.validation, found.keys, row),
        classes=tuple(
            replace(known, images=max(known.images + more, 0))
            for known, more in zip(state.classes, change, strict=True)
        ),
        learned="",  # the same images may be learned again
        history=(*state.history, record),
        metrics=to_metrics(state.metrics["phase"], {default: judged}) if state.metrics else {},
        ledger=_entered(state.ledger.moved(found.places, row), model.default),
    )
    if row != GONE:
        return mended
    gone = set(found.keys.tolist())
    hashes = short_hashes(list(state.stored)).tolist()
    sources = {
        digest: name
        for key, (digest, name) in zip(hashes, state.stored.items(), strict=True)
        if key not in gone
    }
    return replace(mended, stored=sources, seen=state.seen[~torch.isin(state.seen, found.keys)])


def _entered(ledger: Ledger, fitted: Classifier) -> Ledger:
    """Return the images that are still learned, as a new fit doubts them."""
    ledger, judged = ledger.select(ledger.labels != GONE), fitted.left_out()
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
