"""What a person sees while something long runs: bars on a terminal, plain lines elsewhere."""

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from geodl import events
from geodl.cli import signals
from geodl.metrics import Trajectory, confusions_of, finite
from geodl.predictors import CLASSIFIERS
from geodl.text import count, printable


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave as if all were said: whoever read our output has left."""
        with suppress(SystemExit):
            super().on_broken_pipe()
        sys.exit(0)


def _console(*, stderr: bool = False) -> Console:
    """Make a console; in a pipe nothing is folded: whoever reads it there wants a line to be a line."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return _Console(stderr=stderr, highlight=False, soft_wrap=piped, width=10_000 if piped else None)


console, errors = _console(), _console(stderr=True)


class Stopper:
    """Ctrl-C or SIGTERM: the first asks to stop after the current step, the second leaves at once.

    Before anybody asks whether to stop there is nothing to save: then the first leaves at once.
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
        errors.print("stopping after this step; once more leaves at once")


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


class Watch:
    """A listener of a run that shows what is learned, how far it is, and how good the network is after each phase."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.title = title
        self.quiet = quiet
        self.bar = progress_bar(console, quiet=quiet)
        self._task: Any = None
        self._work: Sequence[int] = []
        self._base = 0
        self.stage = events.StageStarted(0, "", 1, 1, 0)

    def __call__(self, event: events.Event) -> None:
        """Hear what happens."""
        if self.quiet:
            return
        match event:
            case events.RunStarted():
                self._started(event)
            case events.PhaseStarted():
                names = event.classes
                shown = ", ".join(names[:8]) + (f", ... ({count(len(names), 'class')})" if len(names) > 8 else "")
                say(f"  phase {event.phase}: {shown} ({count(event.images, 'image')})")
            case events.BaseAwaited():
                say("    another run is training the same base phase: waiting for it")
            case events.BaseCached():
                say("    trained before with the same options: taken from the cache")
            case events.StageStarted():
                self.stage = event
                if 0 < event.epoch < event.epochs:
                    say(f"    going on with epoch {event.epoch + 1} of {event.epochs}")
            case events.StepTaken():
                self._step(event)
            case events.EpochEnded():
                long = self._work[event.phase] > 50_000
                if long and event.stage == "train" and not console.is_terminal:
                    say(f"    epoch {event.epoch}/{event.epochs}: loss {event.loss:.3f}, {event.rate:.0f} images/s")
            case events.PhaseEvaluated():
                self._evaluated(event)

    def _started(self, event: events.RunStarted) -> None:
        self._work, sizes = event.work, event.sizes
        self._base = sizes[0]
        words = f": {count(sum(sizes), 'class')}, learned as {' + '.join(map(str, sizes))}"
        say(plain(self.title, "bold") + plain(words))
        if event.done == len(sizes):
            say(f"  complete already: {event.directory}")
        elif event.done:
            say(f"  going on with phase {event.done} of {len(sizes) - 1}: {event.directory}")
        done = sum(self._work[: event.done])
        self._task = self.bar.add_task("  starting", total=sum(self._work), completed=done, state="")

    def _step(self, event: events.StepTaken) -> None:
        # Further stages are short: the bar waits at the end of the phase while they run.
        part = events.part_of(event, self.stage) if event.stage == "train" else 1.0
        done = sum(self._work[: event.phase]) + self._work[event.phase] * part
        state = f"epoch {event.epoch + 1}/{self.stage.epochs}  loss {event.loss:.3f}  {event.rate:.0f} images/s"
        self.bar.update(self._task, completed=done, description=f"  phase {event.phase} {event.stage}", state=state)

    def _evaluated(self, event: events.PhaseEvaluated) -> None:
        found = confusions_of(event.metrics)
        shown = {CLASSIFIERS[name]: found[name] for name in HONEST if name in found}
        everything = ", ".join(f"{name} {_number(finite(each.accuracy))}" for name, each in shown.items())
        base = ", ".join(f"{name} {_number(finite(each.rate(range(self._base))))}" for name, each in shown.items())
        say(
            f"    accuracy (%) on all {len(event.metrics['classes'])} classes: {everything}; on the base classes: {base}"
        )


HONEST = ("cnn", "nme", "analytic")
"""The classifiers that a line has room for: those that need no old data."""


Results = Mapping[str, Trajectory]
"""What each classifier could do after each phase."""


def comparison_table(title: str, rows: Mapping[str, Results]) -> Table:
    """Return a table of several runs, by the name of the run: a row for each of its classifiers."""
    table = _table(title, "method", "classifier")
    for number, (run, results) in enumerate(rows.items()):
        shown = [name for name in HONEST if name in results]
        for name in shown:
            last = name == shown[-1] and number < len(rows) - 1
            label = plain(run if name == shown[0] else "")
            table.add_row(label, CLASSIFIERS[name], *_cells(results[name]), end_section=last)
    return table


def result_table(title: str, results: Results) -> Table:
    """Return a table of one run: a row a classifier."""
    classes = len(next(iter(results.values())).classes)
    table = _table(f"{title}, {count(classes, 'class')} (%)", "classifier")
    for name, shown in CLASSIFIERS.items():
        if name in results:
            table.add_row(shown, *_cells(results[name]))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=plain(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for column in ("average", "final", "forgetting"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(result: Trajectory) -> list[str]:
    """Return the paper's average, the last accuracy and the paper's forgetting."""
    return [_number(value) for value in (result.average, result.final, result.forgetting)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


LEGEND = (
    "average: mean accuracy after phases 1 to T; final: after the last; forgetting: accuracy lost on the base classes"
)


def say(text: Any = "", style: str = "") -> None:
    """Print for a person: a line as it is, or something made of rich."""
    console.print(plain(text, style) if isinstance(text, str) else text)


def plain(text: str, style: str = "") -> Text:
    """Return a line as it is: names of files and classes are never markup, nor orders to the terminal."""
    return Text(printable(text), style)
