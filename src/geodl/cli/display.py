"""What a person sees while something long runs: bars on a terminal, plain lines elsewhere."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from geodl.predictors import CLASSIFIERS
from geodl.text import printable


def _console(*, stderr: bool = False) -> Console:
    """Make a console; in a pipe nothing is folded: whoever reads it there wants a line to be a line."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, soft_wrap=piped, width=10_000 if piped else None)


console, errors = _console(), _console(stderr=True)


class Stopper:
    """Ctrl-C: the first asks to stop after the current step, the second leaves at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Whether the user asked to stop."""
        return self.asked

    @contextmanager
    def watching(self) -> Iterator["Stopper"]:
        """Take over Ctrl-C while the block runs."""
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        errors.print("stopping after this step; Ctrl-C again leaves at once")


def progress_bar(where: Console, *, hidden: bool = False) -> Progress:
    """Make a bar that is gone when it is done; each of its tasks has a `state`: a few words behind the per cent."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=where,
        transient=True,
        disable=hidden,
    )


class Watch:
    """A listener of a run that shows what is learned, how far it is, and how good the network is after each phase."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.title = title
        self.quiet = quiet
        self.bar = progress_bar(console, hidden=quiet or not console.is_terminal)
        self._task: Any = None
        self._work: list[int] = []
        self._stage: dict[str, Any] = {}

    @contextmanager
    def shown(self) -> Iterator["Watch"]:
        """Show the bar while the block runs."""
        with self.bar:
            yield self

    def __call__(self, kind: str, **fields: Any) -> None:
        """Hear what happens."""
        if not self.quiet:
            getattr(self, f"_on_{kind}", lambda **_: None)(**fields)

    def _on_run(self, directory: str, scenario: Any, done: int, total: int, work: list[int], **_: Any) -> None:
        self._work = work
        sizes = [len(group) for group in scenario.groups]
        say(plain(self.title, "bold") + Text(f": {sum(sizes)} classes, learned as {' + '.join(map(str, sizes))}"))
        if done == total:
            say(f"  complete already: {directory}")
        elif done:
            say(f"  going on with phase {done} of {total - 1}: {directory}")
        self._task = self.bar.add_task("  starting", total=sum(work), completed=sum(work[:done]), state="")

    def _on_phase(self, phase: int, classes: list[str], images: int, **_: Any) -> None:
        shown = ", ".join(classes[:8]) + (f", ... ({len(classes)} classes)" if len(classes) > 8 else "")
        say(f"  phase {phase}: {shown} ({images} images)")

    def _on_stage(self, **fields: Any) -> None:
        self._stage = fields
        if fields["epoch"] and fields["epoch"] < fields["epochs"]:
            say(f"    going on with epoch {fields['epoch'] + 1} of {fields['epochs']}")

    def _on_cached(self, phase: int, **_: Any) -> None:
        say("    trained before with the same options: taken from the cache")

    def _on_step(self, phase: int, stage: str, epoch: int, step: int, loss: float, rate: float, **_: Any) -> None:
        steps = self._stage["steps"]
        part = (epoch * steps + step) / (self._stage["epochs"] * steps)
        # Further stages are short: the bar waits at the end of the phase while they run.
        done = sum(self._work[:phase]) + self._work[phase] * (part if stage == "train" else 1.0)
        state = f"epoch {epoch + 1}/{self._stage['epochs']}  loss {loss:.3f}  {rate:.0f} images/s"
        self.bar.update(self._task, completed=done, description=f"  phase {phase} {stage}", state=state)

    def _on_epoch(self, phase: int, stage: str, epoch: int, epochs: int, loss: float, rate: float, **_: Any) -> None:
        long = self._work[phase] > 50_000
        if long and stage == "train" and not console.is_terminal:
            say(f"    epoch {epoch}/{epochs}: loss {loss:.3f}, {rate:.0f} images/s")

    def _on_evaluated(self, phase: int, metrics: dict[str, Any], **_: Any) -> None:
        shown = {CLASSIFIERS[name]: metrics["results"][name] for name in HONEST if name in metrics["results"]}
        everything = ", ".join(f"{name} {_number(result['accuracy'][-1])}" for name, result in shown.items())
        base = ", ".join(f"{name} {_number(result['matrix'][0][-1])}" for name, result in shown.items())
        say(f"    % right on all {len(metrics['classes'])} classes: {everything}; on the base classes: {base}")


HONEST = ("cnn", "nme")
"""The classifiers that a line has room for: those that need neither old data nor stored means."""


def comparison_table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    """Give a table of several runs: row name -> metrics of the last phase."""
    table = Table(title=plain(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in HONEST:
        for column in ("average", "final", "forgetting"):
            table.add_column(f"{CLASSIFIERS[name]}\n{column}", justify="right", no_wrap=True)
    for row, metrics in rows.items():
        table.add_row(plain(row), *(cell for name in HONEST for cell in _cells(metrics["results"].get(name))))
    return table


def result_table(title: str, metrics: dict[str, Any]) -> Table:
    """Give a table of one run: its classifiers, with the metrics of the last phase."""
    table = Table(title=plain(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("classifier", no_wrap=True)
    for column in ("average", "final", "forgetting"):
        table.add_column(column, justify="right")
    for name, title in CLASSIFIERS.items():
        if name in metrics["results"]:
            table.add_row(title, *_cells(metrics["results"][name]))
    return table


def _cells(result: dict[str, Any] | None) -> list[str]:
    """Give the paper's average, the last accuracy and the paper's forgetting."""
    values = (result["average"], result["accuracy"][-1], result["forgetting"]) if result else (None, None, None)
    return [_number(value) for value in values]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


LEGEND = (
    "average: mean accuracy after phases 1 to T; final: after the last; forgetting: accuracy lost on the base classes"
)


def say(text: Any = "") -> None:
    """Print for a person: a line, or something made of rich."""
    console.print(plain(text) if isinstance(text, str) else text)


def plain(text: str, style: str = "") -> Text:
    """Return a line as it is: names of files and classes are never markup, nor orders to the terminal."""
    return Text(printable(text), style)
