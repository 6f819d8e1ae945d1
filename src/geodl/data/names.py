"""The names of classes: one rule for labels of all kinds, checked before anything is learned."""

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
"""Characters of the longest name, as of a folder."""


def fault(name: str) -> str | None:
    """Say why a text cannot be the name of a class; None where it can."""
    if not name.strip():
        return "it is empty"
    if len(name) > LONGEST:
        return f"it has {len(name)} characters, {LONGEST} are allowed"
    # Control characters, halves of surrogate pairs (bytes that were no text), separators of lines.
    if any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in name):
        return "it is not valid text (a control character, or bytes that are none)"
    return None


def class_name(given: Any) -> str:
    """Return the name of a class, composed as those of folders are (NFC).

    A number is named by its digits, a whole one without a point: 0, 0.0 and "0" are one class.
    """
    if hasattr(given, "item") and getattr(given, "size", None) == 1:  # a number of numpy's
        given = given.item()
    given = _whole(given)
    if not isinstance(given, str | int | float) or (isinstance(given, float) and math.isnan(given)):
        raise DataError(f"class {_short(given)}: a name or a number is needed")
    try:
        name = unicodedata.normalize("NFC", str(given))
    except ValueError:  # an integer of thousands of digits
        raise DataError("a class is named by a number that is too long") from None
    if reason := fault(name):
        raise DataError(f"class {_short(name)}: {reason}")
    return name


def typed_name(given: Any) -> str:
    """Return a name that a person typed; one that no folder of images could have is a ConfigError."""
    try:
        name = class_name(given)
    except DataError as error:
        raise ConfigError(f"new name: {error}") from None
    if name != name.strip() or name.startswith(".") or "/" in name:
        odd = "a dot first, a slash, a space at its ends"
        raise ConfigError(f"new name {name!r}: no folder of images could have it ({odd})")
    if name == UNKNOWN:
        raise ConfigError(f"new name {name!r}: images unlike all classes are called that")
    return name


def class_names(given: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of several classes, no two of them equal."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DataError(f"classes: {type(given).__name__} given; a list of class names is needed")
    names = tuple(class_name(each) for each in given)
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DataError(f"two classes are called {twice[0]!r}; each needs a name of its own")
    return names


def natural_key(name: str) -> list[str | int]:
    """Sort numbers inside names by value: "class 2" before "class 10"."""
    parts: list[str | int] = list(re.split(r"(\d+)", name.casefold()))
    parts[1::2] = map(int, parts[1::2])  # text and digits in turn: like is compared with like
    return parts


def plain_labels(labels: Any) -> list[Any]:
    """Return labels, (N,) or (N, 1), as a list of plain values."""
    try:
        values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        for i, each in enumerate(values):
            if isinstance(each, Tensor | np.generic):
                values[i] = each.item()
    except (TypeError, ValueError, RuntimeError) as error:  # no list; several numbers in one; meta
        kind = type(labels).__name__
        raise DataError(f"labels: {kind} given; one name or number an image is needed") from error
    if all(isinstance(each, list | tuple) and len(each) == 1 for each in values):
        values = [each[0] for each in values]
    return [_whole(each) for each in values]


def numbered(
    labels: Sequence[Any], classes: Iterable[Any] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Return plain labels as positions in the names of their classes, int64 (N,), and these names.

    With `classes`, whole numbers are positions in it and anything else is one of its names. Without, each label is the
    name of a class; names are in natural order, those of numbers in the order of their values.
    """
    names = None if classes is None else class_names(classes)
    if names is not None and all(isinstance(label, int) for label in labels):
        wrong = [label for label in labels if not 0 <= label < len(names)]
        if wrong:
            given = count(len(names), "class name")
            raise DataError(f"label {_short(wrong[0])} has no name: {given} given")
        return torch.tensor(labels, dtype=torch.int64), names
    texts = [class_name(label) for label in labels]
    if names is None:
        values = dict(zip(texts, labels, strict=True))
        if all(isinstance(label, int | float) for label in labels):
            names = tuple(sorted(values, key=lambda text: (values[text], text)))
        else:
            names = tuple(sorted(values, key=lambda text: (natural_key(text), text)))
    position = {name: i for i, name in enumerate(names)}
    foreign = sorted(set(texts) - set(names))
    if foreign:
        raise DataError(f"label {foreign[0]!r} is not one of the classes given")
    return torch.tensor([position[text] for text in texts], dtype=torch.int64), names


def _whole(given: Any) -> Any:
    """Return a number without a fraction as an integer, whatever type it has; anything else as it is."""
    whole = isinstance(given, float) and given.is_integer() and abs(given) < 2**53
    return int(given) if whole else given


def _short(given: Any) -> str:
    """Show a value in a message, whatever it is."""
    try:
        text = repr(given) if isinstance(given, str | int | float | bytes | None) else ""
    except ValueError:  # an integer of thousands of digits
        text = ""
    text = text or type(given).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."
