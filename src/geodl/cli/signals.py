"""Ctrl-C and SIGTERM end the program with a sentence and the status that shells expect, 130 and 143."""

import signal
import threading
from collections.abc import Callable, Iterator
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
def handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Give signals to a handler while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def status() -> int:
    """Return the exit status of a training that was stopped."""
    return 128 + (heard[-1] if heard else signal.SIGINT)
