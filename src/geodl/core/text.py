"""Text for users: foreign names (classes, files, folders) made safe to print, quantities with units."""

import re
import traceback
from collections.abc import Sequence

UNKNOWN = "unknown"
"""The label of an image that is unlike all classes."""

# Control characters, line and paragraph separators, bidirectional controls, lone surrogates, and the two code points
# that XML forbids.
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    r"""Return the text with control characters escaped: ``\x1b``, ``\u202e``."""
    return _HIDDEN.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)


def raised(error: BaseException) -> str:
    """Return type, message and location of an error in a user's code, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})", 500)


def one_line(error: object, most: int = 300) -> str:
    """Return the message of a library's error as one printable line."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def count(number: int, what: str) -> str:
    """Return a number with its noun: 1 class, 2 classes."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names as a list, shortened after `most` of them."""
    shown = ", ".join(names[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown


def duration(seconds: float) -> str:
    """Return a time with its unit: 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def readable(count: int) -> str:
    """Return a number of bytes with its unit: 999 bytes, 1.5 kB, 2.5 MB."""
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
