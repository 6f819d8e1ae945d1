"""One learned image is moved to its right class, or some are forgotten: as if that had been so from the start."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl.app.state import State, short_hashes
from geodl.closed_form.kept_features import KeptFeatures
from geodl.core.errors import ConfigError, DataError
from geodl.data.batches import fit
from geodl.data.images import ArrayImages, Images
from geodl.data.intake import as_images, squares
from geodl.model.classifiers import ClosedForm
from geodl.model.metrics import to_metrics

GONE = -1
"""The label of an image that is forgotten."""


def relabelled(state: State, image: Any, name: str) -> State:
    """Move one learned image to another class that the model knows."""
    row, pictures = state.model.row(name), _pictures(state, image)
    if len(pictures) != 1:
        raise DataError(f"{len(pictures)} images given: relabel takes one")
    old = int(_learned_as(state, pictures)[0])
    if old == row:
        raise ConfigError(f"the image is of class {name!r} already")
    record = {"action": "relabel", "old": state.names[old], "new": name}
    return _mended(state, pictures, row, record)


def forgotten(state: State, images: Any) -> State:
    """Forget learned images."""
    pictures = _pictures(state, images)
    return _mended(state, pictures, GONE, {"action": "forget", "images": len(pictures)})


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


def _pictures(state: State, given: Any) -> ArrayImages:
    """Return pictures as the model has learned them, each once: of files, arrays, or names that `info --images` lists."""
    parts = [given] if isinstance(given, str | Path) else given
    if isinstance(parts, list | tuple):
        pixels = torch.cat([_pixels(state, part) for part in parts or [[]]])
    else:
        pixels = _pixels(state, parts)
    if not len(pixels):
        raise DataError("no images given")
    found = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
    rows = {digest: i for i, digest in enumerate(found.item_digests())}
    return found.select(sorted(rows.values()))


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
    """Return the rows of kept features that are of these pictures, (N,)."""
    closed, _ = _closed_form(state)
    places = closed.kept_rows(state.model.recognizer().features(pictures))
    # The hash tells the picture from near-duplicates, its features where it is.
    known = torch.isin(short_hashes(pictures.item_digests()), state.seen) & (places >= 0)
    if not bool(known.all()):
        raise DataError(f"{int((~known).sum())} of {len(known)} images: the model never learned it")
    return places


def _learned_as(state: State, pictures: ArrayImages) -> Tensor:
    """Return the rows of the classes that pictures were learned as, (N,)."""
    return _closed_form(state)[1].labels[_places(state, pictures)]


def _mended(state: State, pictures: ArrayImages, row: int, record: Mapping[str, Any]) -> State:
    """Give learned pictures another class, or none, in all that is kept of them."""
    closed, data = _closed_form(state)
    labels = data.labels.clone()
    labels[_places(state, pictures)] = row
    before, after = (
        torch.bincount(each[each >= 0], minlength=len(state.names))
        for each in (data.labels, labels)
    )
    for name, left in zip(state.names, after.tolist(), strict=True):
        if not left:
            raise ConfigError(f"class {name!r} would have no image left; `geodl remove` removes it")
    default = closed.name
    digests = pictures.item_digests()
    memory = state.model.memory
    model = replace(
        state.model,
        memory=replace(memory, images=_moved(memory.images, digests, row)),
        classifiers={**state.model.classifiers, default: closed.relabelled(labels)},
    )
    judged, change = model.left_out(), (after - before).tolist()
    assert judged is not None
    mended = replace(
        state,
        model=model,
        validation=_moved(state.validation, digests, row),
        classes=tuple(
            replace(known, images=max(known.images + more, 0))
            for known, more in zip(state.classes, change, strict=True)
        ),
        learned="",  # the same images may be learned again
        history=(*state.history, record),
        metrics=to_metrics(state.metrics["phase"], {default: judged}) if state.metrics else {},
    )
    if row != GONE:
        return mended
    sources = {digest: each for digest, each in state.stored.items() if digest not in digests}
    seen = state.seen[~torch.isin(state.seen, short_hashes(digests))]
    return replace(mended, stored=sources, seen=seen)


def _moved(images: Images | None, digests: list[str], row: int) -> Images | None:
    """Return stored images with another class for some of them, or without these, sorted by class."""
    if images is None:
        return None
    labels = images.labels.clone()
    labels[torch.tensor([digest in digests for digest in images.item_digests()])] = row
    rows = labels.argsort(stable=True)
    rows = rows[labels[rows] >= 0]
    return replace(images.select(rows), labels=labels[rows]) if len(rows) else None
