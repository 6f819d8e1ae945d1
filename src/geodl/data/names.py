"""Class names: one rule for labels of all types, checked before anything is learned."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geodl.core.errors import ConfigError, DataError
from geodl.core.text import UNKNOWN, count

LONGEST = 255
"""Maximum number of characters of a name, as for folders."""


def fault(name: str) -> str | None:
    """Return why a text cannot be a class name, or None."""
    if not name.strip():
        return "it is empty"
    if len(name) > LONGEST:
        return f"it has {len(name)} characters, {LONGEST} are allowed"
    # Control characters, lone surrogates (undecodable bytes), line and paragraph separators.
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        return "it is not valid text (a control character, or undecodable bytes)"
    return None


def class_name(label: Any) -> str:
    """Return the class name of a label, in Unicode normal form C as for folders.

    A number is named by its digits, a whole one without a point: 0, 0.0 and "0" are one class.
    """
    if hasattr(label, "item") and getattr(label, "size", None) == 1:  # a NumPy scalar
        label = label.item()
    label = _whole(label)
    if not isinstance(label, str | int | float) or (isinstance(label, float) and math.isnan(label)):
        raise DataError(f"class {_short(label)}: a name or a number is needed")
    try:
        name = unicodedata.normalize("NFC", str(label))
    except ValueError:  # an integer of thousands of digits
        raise DataError("a class is named by a number that is too long") from None
    if reason := fault(name):
        raise DataError(f"class {_short(name)}: {reason}")
    return name


def typed_name(label: Any) -> str:
    """Return the class name that a user typed; a ConfigError if no folder of images could have it."""
    try:
        name = class_name(label)
    except DataError as error:
        raise ConfigError(f"new name: {error}") from None
    if name != name.strip() or name.startswith(".") or "/" in name:
        odd = "a leading dot, a slash, or a space at its ends"
        raise ConfigError(f"new name {name!r}: no folder of images could have it ({odd})")
    if name == UNKNOWN:
        raise ConfigError(f"new name {name!r}: reserved for images unlike all classes")
    return name


def class_names(labels: Iterable[Any]) -> tuple[str, ...]:
    """Return the class names of labels, which must all be different."""
    scalar = isinstance(labels, str) or getattr(labels, "ndim", 1) == 0
    if scalar or not isinstance(labels, Iterable):
        raise DataError(f"classes: expected a list of class names, got {type(labels).__name__}")
    names = tuple(class_name(label) for label in labels)
    duplicates = [name for name, times in Counter(names).items() if times > 1]
    if duplicates:
        raise DataError(f"two classes are called {duplicates[0]!r}; each needs a name of its own")
    return names


def natural_key(name: str) -> list[str | int]:
    """Return a sort key for natural order: "class 2" before "class 10"."""
    parts: list[str | int] = list(re.split(r"(\d+)", name.casefold()))
    parts[1::2] = map(int, parts[1::2])  # text and numbers alternate
    return parts


def plain_labels(labels: Any) -> list[Any]:
    """Return labels, (N,) or (N, 1), as a list of plain values."""
    try:
        values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        for i, value in enumerate(values):
            if isinstance(value, Tensor | np.generic):
                values[i] = value.item()
    except (TypeError, ValueError, RuntimeError) as error:  # no list; several numbers; meta tensors
        kind = type(labels).__name__
        raise DataError(f"labels: expected one name or number per image, got {kind}") from error
    if all(isinstance(value, list | tuple) and len(value) == 1 for value in values):
        values = [value[0] for value in values]
    return [_whole(value) for value in values]


def labels_of(images: int, labels: Any) -> list[Any]:
    """Return `plain_labels`, checked to be as many as there are images."""
    values = plain_labels(labels)
    if len(values) != images:
        raise DataError(
            f"labels: {count(images, 'image')} with {count(len(values), 'label')} given"
        )
    return values


def numbered(
    labels: Sequence[Any], classes: Iterable[Any] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Return plain labels as positions in their class names, int64 (N,), and these names.

    With `classes`, labels that are all whole numbers are positions in it; other labels are its names. Without, each label
    names a class; names are in natural order, those of numbers in numerical order.
    """
    names = None if classes is None else class_names(classes)
    if names is not None and all(isinstance(label, int) for label in labels):
        wrong = [label for label in labels if not 0 <= label < len(names)]
        if wrong:
            known = count(len(names), "class name")
            raise DataError(f"label {_short(wrong[0])} has no name: {known} given")
        return torch.tensor(labels, dtype=torch.int64), names
    texts = [class_name(label) for label in labels]
    if names is None:
        values = dict(zip(texts, labels, strict=True))
        numeric = all(isinstance(label, int | float) for label in labels)
        key = values.__getitem__ if numeric else natural_key
        names = tuple(sorted(values, key=lambda text: (key(text), text)))
    position = {name: i for i, name in enumerate(names)}
    foreign = sorted(set(texts) - set(names))
    if foreign:
        raise DataError(f"label {foreign[0]!r} is not one of the classes given")
    return torch.tensor([position[text] for text in texts], dtype=torch.int64), names


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, anything else unchanged."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value


def _short(value: Any) -> str:
    """Return a short text for any value, for messages."""
    try:
        text = repr(value) if isinstance(value, str | int | float | bytes | None) else ""
    except ValueError:  # an integer of thousands of digits
        text = ""
    text = text or type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."
