"""The names of classes: checked in one place, wherever they come from, before anything is learned."""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

from geodl.errors import ConfigError, DataError

LONGEST = 255
"""Characters of the longest name, as of a folder."""
UNKNOWN = "unknown"
"""What an image is called that is unlike all classes."""


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
    """Return the name of a class, composed as those of folders are (NFC); a number is named by its digits."""
    if hasattr(given, "item") and getattr(given, "size", None) == 1:  # a number of numpy's
        given = given.item()
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
        raise ConfigError(
            f"new name {name!r}: no folder of images could have it (a dot first, a slash, a space at its ends)"
        )
    if name == UNKNOWN:
        raise ConfigError(f"new name {name!r}: images unlike all classes are called that; give the class another name")
    return name


def class_names(given: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of several classes, no two of them equal."""
    names = tuple(class_name(each) for each in given)
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DataError(f"two classes are called {twice[0]!r}; each needs a name of its own")
    return names


def _short(given: Any) -> str:
    """Show a value in a message, whatever it is."""
    text = repr(given) if isinstance(given, str | int | float | bytes | None) else type(given).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."
