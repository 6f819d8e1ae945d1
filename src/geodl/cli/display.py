"""Terminal output: lines, tables, JSON, and progress: a bar on a terminal, plain lines elsewhere."""

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Annotated, Any

from cyclopts import Parameter
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
"""Between two progress lines in a log."""
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]
Quiet = Annotated[bool, Parameter(alias="-q", help="Print only the result.")]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Exit successfully: the reader of the output has closed it."""
        with suppress(SystemExit):
            super().on_broken_pipe()
        sys.exit(0)


def _console(*, stderr: bool = False) -> Console:
    """Return a console; output that is piped is not wrapped, so that each line stays one line."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return _Console(
        stderr=stderr, highlight=False, soft_wrap=piped, width=10_000 if piped else None
    )


console, errors = _console(), _console(stderr=True)


def plain(text: str, style: str = "") -> Text:
    """Return text without markup or control characters: names of files and classes are shown as they are."""
    return Text(printable(text), style)


def echo(text: Any = "", style: str = "") -> None:
    """Print a line as it is, or a rich renderable."""
    console.print(plain(text, style) if isinstance(text, str) else text)


def print_json(facts: Any) -> None:
    """Print one line of JSON, in ASCII: paths may hold bytes that are no text."""
    print(json.dumps(facts))


def number(value: float | None) -> str:
    """Format a percentage; - if there is none."""
    return "-" if value is None else f"{value:.1f}"


def table(*columns: str, rows: Sequence[Sequence[object]] = (), **style: Any) -> Table:
    """Return a table without lines, with a header if columns are named; a name that begins with > aligns to the right."""
    defaults = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), "header_style": "dim"}
    made = Table(show_header=bool(columns), **(defaults | style))
    for column in columns:
        side = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=side)  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*(plain(str(cell)) for cell in row))
    return made


class Stopper:
    """Handles Ctrl-C and SIGTERM: the first asks to stop after the current step, the second quits at once.

    Until training has first polled for a stop there is nothing to save, and the first quits at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self.polled = False

    def __call__(self) -> bool:
        """Return whether the user asked to stop."""
        self.polled = True
        return self.asked

    def watching(self) -> AbstractContextManager[None]:
        """Handle both signals while the block runs."""
        return signals.handled(self._stop, signal.SIGINT, signal.SIGTERM)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        signals.received.append(number)
        if self.asked or not self.polled:
            signals.quit_now(number)
        self.asked = True
        errors.print("Stopping after this step. Press Ctrl-C again to quit now.")


def progress_bar(where: Console, *, quiet: bool = False) -> Progress:
    """Return a progress bar for terminals, removed when it is done; a task's `state` is the text behind the percentage."""
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
    """Shows events as they happen; ``shows`` has a function for each kind of event that is shown."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.bar = progress_bar(console, quiet=quiet)
        self.shows: Mapping[type[events.Event], Callable[[Any], None]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._printed = time.monotonic()

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        show = self.shows.get(type(event))
        if show is not None and not self.quiet:
            show(event)

    def advance(self, task: str, done: float, total: float, state: str = "") -> None:
        """Move the bar of a task."""
        if task not in self._tasks:
            self._tasks[task] = self.bar.add_task(f"  {task}", total=total, state=state)
        self.bar.update(self._tasks[task], completed=done, state=state, visible=done < total)

    def epoch(self, event: events.EpochEnded) -> None:
        """Print a line now and then where there is no terminal to show a bar."""
        if not console.is_terminal and time.monotonic() - self._printed > SECONDS:
            echo(f"    epoch {event.epoch} of {event.epochs}, {event.rate:.0f} images/s")
            self._printed = time.monotonic()
