"""Ctrl-C and SIGTERM end the program with a sentence and the status that shells expect, 130 and 143."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

heard: list[int] = []
"""The signals that asked a training to stop."""


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is Ctrl-C."""


def leave(number: int, frame: FrameType | None = None) -> None:
    """Leave at once."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def terminating() -> Iterator[None]:
    """Turn SIGTERM into `Terminated` while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def status() -> int:
    """Return the exit status of a training that was stopped."""
    return 128 + (heard[-1] if heard else signal.SIGINT)
