"""Ctrl-C and SIGTERM end the program with one line and the exit status that shells expect, 130 and 143."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

received: list[int] = []
"""The signals that asked a training to stop."""


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is Ctrl-C."""


def quit_now(number: int, frame: FrameType | None = None) -> None:
    """Raise the exception of a signal."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals while the block runs."""
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
    return 128 + (received[-1] if received else signal.SIGINT)
