"""What a person sees: lines, tables, and while something long runs a bar on a terminal, plain lines elsewhere."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from geodl.cli import signals
from geodl.core import events
from geodl.core.text import printable

SECONDS = 30.0
"""Between two signs of life in a log."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave as if all were said: whoever read our output has left."""
        with suppress(SystemExit):
            super().on_broken_pipe()
        sys.exit(0)


def _console(*, stderr: bool = False) -> Console:
    """Make a console; in a pipe nothing is folded: whoever reads it there wants a line to be a line."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return _Console(
        stderr=stderr, highlight=False, soft_wrap=piped, width=10_000 if piped else None
    )


console, errors = _console(), _console(stderr=True)


def plain(text: str, style: str = "") -> Text:
    """Return a line as it is: names of files and classes are never markup, nor orders to the terminal."""
    return Text(printable(text), style)


def say(text: Any = "", style: str = "") -> None:
    """Print for a person: a line as it is, or something made of rich."""
    console.print(plain(text, style) if isinstance(text, str) else text)


def table(*columns: str, rows: Sequence[Sequence[object]] = (), **look: Any) -> Table:
    """Make a table without lines; a column whose name begins with > is set to the right."""
    defaults = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), "header_style": "dim"}
    made = Table(show_header=any(columns), **(defaults | look))
    for column in columns:
        side = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=side)  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*(plain(str(cell)) for cell in row))
    return made


class Stopper:
    """Ctrl-C or SIGTERM: the first asks to stop after the current step, the second quits at once.

    Before anybody asks whether to stop there is nothing to save: then the first quits at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self.polled = False

    def __call__(self) -> bool:
        """Whether the user asked to stop."""
        self.polled = True
        return self.asked

    def watching(self) -> AbstractContextManager[None]:
        """Take over both signals while the block runs."""
        return signals.handled(self._hear, signal.SIGINT, signal.SIGTERM)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        signals.heard.append(number)
        if self.asked or not self.polled:
            signals.leave(number)
        self.asked = True
        errors.print("Stopping after this step. Press Ctrl-C again to quit now.")


def progress_bar(where: Console, *, quiet: bool = False) -> Progress:
    """Make a bar that a terminal shows until it is done; each of its tasks has a `state`: a few words behind the per cent."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=where,
        transient=True,
        disable=quiet or not where.is_terminal,
    )


class Display:
    """A listener that shows events; ``shows`` has a function for each kind of event that is shown."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.bar = progress_bar(console, quiet=quiet)
        self.shows: Mapping[type[events.Event], Callable[[Any], None]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._said = time.monotonic()

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        show = self.shows.get(type(event))
        if show is not None and not self.quiet:
            show(event)

    def advance(self, what: str, done: float, total: float, state: str = "") -> None:
        """Move a bar."""
        if what not in self._tasks:
            self._tasks[what] = self.bar.add_task(f"  {what}", total=total, state=state)
        self.bar.update(self._tasks[what], completed=done, state=state, visible=done < total)

    def epoch(self, event: events.EpochEnded) -> None:
        """Write a line into a log now and then: no bar moves there."""
        if not console.is_terminal and time.monotonic() - self._said > SECONDS:
            say(f"    epoch {event.epoch} of {event.epochs}, {event.rate:.0f} images/s")
            self._said = time.monotonic()
