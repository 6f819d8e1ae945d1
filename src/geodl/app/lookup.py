"""Which learned images a user refers to: by files, arrays, names or identities."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl.app.kept import IDENTITY
from geodl.app.kept import find as find_picture
from geodl.app.ledger import UNKNOWN_KEY
from geodl.app.state import State
from geodl.core.errors import ConfigError, DataError
from geodl.data.batches import resized
from geodl.data.images import ArrayImages, Images, short_hashes
from geodl.data.intake import as_images
from geodl.data.squares import squares
from geodl.model.classifiers import ClosedForm


@dataclass(frozen=True)
class Found:
    """Learned images: places (N,) in the ledger, keys (N,), and the pictures where all of them are at hand."""

    places: Tensor
    keys: Tensor
    pictures: Images | None


def closed_form(state: State) -> ClosedForm:
    """Return the closed form of a model; only it can move or forget single images."""
    found = state.model.default
    if not isinstance(found, ClosedForm):
        raise ConfigError("a trained network cannot forget or move a single image")
    return found


def find(state: State, images: Any) -> Found:
    """Return learned images, each once, by files, arrays, names, or values of `Kept.id`."""
    by_features = closed_form(state).kept_labels() is not None
    learned = {key: place for place, key in enumerate(state.ledger.keys.tolist())}
    keys: dict[int, int] = {}  # by place
    pixels: dict[int, Tensor] = {}
    for part in images if isinstance(images, list | tuple) else [images]:
        key = _named(state, part) if isinstance(part, str | Path) else None
        if key is not None and key in learned and by_features:
            keys[learned[key]] = key
            continue
        read = _read(state, part) if key is None else _stored(state, key)
        pictures = ArrayImages(read, torch.zeros(len(read), dtype=torch.int64))
        places = _places(state, pictures).tolist()
        keys |= dict(zip(places, short_hashes(pictures.item_digests()).tolist(), strict=True))
        pixels |= dict(zip(places, read, strict=True))
    if not keys:
        raise DataError("no images given")
    found = torch.tensor(list(keys)), torch.tensor(list(keys.values()))
    if len(pixels) < len(keys):
        return Found(*found, None)
    labels = torch.zeros(len(keys), dtype=torch.int64)
    return Found(*found, ArrayImages(torch.stack([pixels[place] for place in keys]), labels))


def _named(state: State, image: str | Path) -> int | None:
    """Return the key of a learned or stored image by its identity or name; None for a file or an unknown name."""
    name, learned = str(image), state.ledger.keys.tolist()
    stored = dict(
        zip(short_hashes(list(state.stored)).tolist(), state.stored.values(), strict=True)
    )
    if IDENTITY.fullmatch(name) and (key := int(name, 16)) in {*learned, *stored}:
        return key
    if Path(image).exists():
        return None
    pairs = zip(learned, state.ledger.names, strict=True)
    keys = [key for key, known in pairs if known == name]
    keys = keys or [key for key, source in stored.items() if source == name]
    if len(keys) > 1:
        raise DataError(f"{image}: {len(keys)} learned images have this name; use the file")
    return keys[0] if keys else None


def _read(state: State, source: Any) -> Tensor:
    """Return the pixels (N, 3, size, size) of a file, a folder or an array."""
    size, whole = state.transform.size, state.transform.whole
    pictures, names, skipped = as_images(source if hasattr(source, "shape") else [source])
    parts, bad = [torch.empty(0, 3, size, size, dtype=torch.uint8)], list(skipped)
    for _, pixels, unread in squares(pictures, size, 1, whole):
        parts.append(pixels)
        bad += [(names[i], reason) for i, reason in unread]
    if bad:
        raise DataError(f"{bad[0][0]}: {bad[0][1]}")
    return torch.cat(parts)


def _stored(state: State, key: int) -> Tensor:
    """Return the pixels (1, 3, size, size) of a stored picture."""
    try:
        images, row = find_picture(state, f"{key:016x}")
    except DataError as error:
        raise DataError(f"{error}; give the file") from error
    return resized(images.select([row]), state.transform.size, whole=state.transform.whole).pixels


def _places(state: State, pictures: ArrayImages) -> Tensor:
    """Return the places of pictures among the learned ones, (N,); one that was never learned is an error."""
    keys, ledger = short_hashes(pictures.item_digests()), state.ledger
    places = placed(state, keys, pictures)
    missing = places < 0
    if bool(missing.any()):
        words = "the model never learned it"
        lost = bool((ledger.keys == UNKNOWN_KEY).any())
        by_features = closed_form(state).kept_labels() is not None
        if lost and not by_features and bool(torch.isin(keys[missing], state.seen).any()):
            words = "an earlier version learned it, and only sums are kept: it cannot be taken out"
        raise DataError(f"{int(missing.sum())} of {len(places)} images: {words}")
    return places


def placed(state: State, keys: Tensor, pictures: Images) -> Tensor:
    """Return the places (N,) of pictures with these keys (N,) among the learned ones; -1: not learned."""
    ledger = state.ledger
    known = {key: place for place, key in enumerate(ledger.keys.tolist())}
    places = torch.tensor([known.get(key, -1) for key in keys.tolist()], dtype=torch.int64)
    lost = bool((places < 0).any()) and bool((ledger.keys == UNKNOWN_KEY).any())
    if lost and closed_form(state).kept_labels() is not None:
        # Version 0.2 kept only the features of an image, and the hash that distinguishes it from near-duplicates.
        alike = closed_form(state).kept_rows(state.model.recognizer().features(pictures))
        places = torch.where((places < 0) & torch.isin(keys, state.seen), alike, places)
    return places
