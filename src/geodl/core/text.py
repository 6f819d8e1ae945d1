"""Text for people: names from elsewhere (classes, files, folders) made safe to show, numbers in words."""

import re
import traceback
from collections.abc import Sequence

UNKNOWN = "unknown"
"""What an image is called that is unlike all classes."""

# Control characters, line and paragraph separators, what turns the direction of writing round, halves of surrogate
# pairs, and the two code points that no XML may hold.
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    r"""Return the text with every character that would act instead of being shown as its escape: ``\x1b``, ``\u202e``."""
    return _HIDDEN.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)


def raised(error: BaseException) -> str:
    """Return kind, words and place of an error in code that is not geodl's, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})", 500)


def one_line(error: object, most: int = 300) -> str:
    """Return what an error of a library says as one line that is fit to be shown."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def count(number: int, what: str) -> str:
    """Count things in words: 1 class, 2 classes."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """List names, the first ones of many."""
    return ", ".join(names[:most]) + (
        f", and {len(names) - most} more" if len(names) > most else ""
    )


def duration(seconds: float) -> str:
    """Say a time: 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def readable(count: int) -> str:
    """Write a number of bytes for people."""
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
