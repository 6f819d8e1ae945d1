"""Which learned images a person means: by files, arrays, names, or the identity of each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geodl.app.kept import IDENTITY
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
    """Learned images. places: (N,) in the ledger; keys: short hashes (N,); pictures: where they were given or are stored."""

    places: Tensor
    keys: Tensor
    pictures: Images | None


def closed_form(state: State) -> ClosedForm:
    """Return the closed form of a model; any other cannot take an image out."""
    found = state.model.default
    if not isinstance(found, ClosedForm):
        raise ConfigError("a trained network cannot forget or move a single image")
    return found


def find(state: State, given: Any) -> Found:
    """Return learned images, each once: of files, arrays, names, or what `Kept.id` says."""
    kept = closed_form(state).kept_labels() is not None
    keys: dict[int, int] = {}  # by the place of an image
    pixels: dict[int, Tensor] = {}
    for part in given if isinstance(given, list | tuple) else [given]:
        place = _named(state, part) if isinstance(part, str | Path) else None
        if place is not None and kept:
            keys[place] = int(state.ledger.keys[place])
            continue
        if place is None:
            squares = _pixels(state, part)
        else:
            squares = _stored(state, int(state.ledger.keys[place]))
        if not len(squares):
            continue
        pictures = ArrayImages(squares, torch.zeros(len(squares), dtype=torch.int64))
        places = _places(state, pictures).tolist()
        keys |= dict(zip(places, short_hashes(pictures.item_digests()).tolist(), strict=True))
        pixels |= dict(zip(places, squares, strict=True))
    if not keys:
        raise DataError("no images given")
    found = torch.tensor(list(keys)), torch.tensor(list(keys.values()))
    if len(pixels) < len(keys):
        return Found(*found, None)
    labels = torch.zeros(len(keys), dtype=torch.int64)
    return Found(*found, ArrayImages(torch.stack([pixels[place] for place in keys]), labels))


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
    """Return the pixels (N, 3, size, size) of one file, folder, array, or an image that an earlier version has stored."""
    named = _stored_keys(state, str(given)) if isinstance(given, str | Path) else []
    if named and not Path(given).exists():
        if len(named) > 1:
            raise DataError(f"{given}: {len(named)} stored images have this name; give the file")
        return _stored(state, named[0])
    pictures, names, problems = as_images(given if hasattr(given, "shape") else [given])
    parts = [torch.empty(0, 3, state.transform.size, state.transform.size, dtype=torch.uint8)]
    bad = list(problems)
    for _, pixels, unread in squares(pictures, state.transform.size, 1, state.transform.whole):
        parts.append(pixels)
        bad += [(names[i], reason) for i, reason in unread]
    if bad:
        raise DataError(f"{bad[0][0]}: {bad[0][1]}")
    return torch.cat(parts)


def _stored_keys(state: State, given: str) -> list[int]:
    """Return the short hashes of the stored images with this identity or name."""
    keys = short_hashes(list(state.stored)).tolist()
    if IDENTITY.fullmatch(given) and int(given, 16) in keys:
        return [int(given, 16)]
    return [key for key, source in zip(keys, state.stored.values(), strict=True) if source == given]


def _stored(state: State, key: int) -> Tensor:
    """Return the pixels (1, 3, size, size) of a kept picture."""
    found, seen = state.picture(key), state.transform
    if found is None:
        raise DataError("the image is not stored; give the file")
    images, row = found
    return resized(images.select([row]), seen.size, whole=seen.whole).pixels


def _places(state: State, pictures: ArrayImages) -> Tensor:
    """Return the places of these pictures among the learned ones, (N,), where all are."""
    keys, ledger = short_hashes(pictures.item_digests()), state.ledger
    places = placed(state, keys, pictures)
    missing = places < 0
    if bool(missing.any()):
        words = "the model never learned it"
        lost = bool((ledger.keys == UNKNOWN_KEY).any())
        kept = closed_form(state).kept_labels() is not None
        if lost and not kept and bool(torch.isin(keys[missing], state.seen).any()):
            words = "an earlier version learned it, and only sums are kept: it cannot be taken out"
        raise DataError(f"{int(missing.sum())} of {len(places)} images: {words}")
    return places


def placed(state: State, keys: Tensor, pictures: Images) -> Tensor:
    """Return the places of pictures with these keys, (N,), among the learned ones, (N,); -1: not there."""
    ledger = state.ledger
    known = {key: i for i, key in enumerate(ledger.keys.tolist())}
    places = torch.tensor([known.get(key, -1) for key in keys.tolist()], dtype=torch.int64)
    lost = bool((places < 0).any()) and bool((ledger.keys == UNKNOWN_KEY).any())
    if lost and closed_form(state).kept_labels() is not None:
        # An earlier version has kept no more than features of an image, and the hash that tells it from near-duplicates.
        alike = closed_form(state).kept_rows(state.model.recognizer().features(pictures))
        places = torch.where((places < 0) & torch.isin(keys, state.seen), alike, places)
    return places
