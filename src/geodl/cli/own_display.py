"""How a learn step, predictions, an evaluation and a model look to a person."""

import csv as csv_format
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from geodl.classifier import Evaluation, Listener, Predictions
from geodl.cli.display import console, errors, plain, progress_bar
from geodl.files import readable
from geodl.own.choices import VALIDATION
from geodl.own.intake import Problems

SECONDS = 30.0  # between two signs of life in a log
SHOWN = 20  # lines of what was left out, of classes, of confusions; --json has all


class LearnWatch:
    """Shows a learn step while it runs."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._epochs, self._steps = 1, 1
        self._reading: Any = None
        self._task: Any = None
        self._said = time.monotonic()
        self.progress = progress_bar(console)
        self.bar: Any = self.progress if console.is_terminal and not quiet else nullcontext()

    def __call__(self, kind: str, **fields: Any) -> None:
        """Hear what happens."""
        if not self.quiet:
            getattr(self, f"_on_{kind}", lambda **_: None)(**fields)

    def _on_reading(self, done: int, total: int) -> None:
        if self._reading is None:
            self._reading = self.progress.add_task("  reading", total=total, state="")
        self.progress.update(self._reading, completed=done, visible=done < total)

    def _on_read(self, intake: Any, skipped: Problems, images: int, side: int) -> None:
        say_skipped(skipped)
        line(
            f"{intake.title}: {count(images, 'image')} of {count(len(intake.classes), 'class')}, typically {side} pixels a side",
            "bold",
        )

    def _on_chosen(self, choices: list[Any]) -> None:
        line("chosen, unless you set it otherwise:")
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(style="dim")
        for choice in choices:
            table.add_row(f"  {choice.option}", plain(choice.value), plain(choice.why))
        console.print(table)

    def _on_continued(self, epoch: int) -> None:
        line(f"going on where it was stopped: {epoch} times through the images are done")

    def _on_stage(self, epochs: int, steps: int, **_: Any) -> None:
        self._epochs, self._steps = epochs, steps
        self._task = self.progress.add_task("  learning", total=epochs * steps, state="")

    def _on_step(self, epoch: int, step: int, rate: float, **_: Any) -> None:
        if self._task is not None:
            self.progress.update(
                self._task,
                completed=epoch * self._steps + step,
                state=f"{epoch + 1}/{self._epochs}, {rate:.0f} images/s",
            )

    def _on_epoch(self, epoch: int, epochs: int, rate: float, **_: Any) -> None:
        if not console.is_terminal and time.monotonic() - self._said > SECONDS:  # a log wants a sign of life, no more
            line(f"  {epoch} of {epochs} times through the images, {rate:.0f} images/s")
            self._said = time.monotonic()


@contextmanager
def looking() -> Iterator[Listener]:
    """Give a listener that shows, on a terminal, how many images were looked at; what is printed stays free of it."""
    with progress_bar(errors) if errors.is_terminal else nullcontext() as bar:
        task: Any = None

        def listener(kind: str, *, done: int, total: int) -> None:
            nonlocal task
            if bar is not None:
                task = bar.add_task("  looking", total=total, state="") if task is None else task
                bar.advance(task, done)

        yield listener


def line(text: str, style: str = "") -> None:
    """Print one line as it is: class and file names are never markup."""
    console.print(plain(text, style))


def percent(value: float | None) -> str:
    """Write an accuracy."""
    return "not checked" if value is None else f"{value:.1f} %"


def plain_table(*columns: str) -> Table:
    """Make a plain table; a column whose name begins with > is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def say_more(count: int, what: str) -> None:
    """Say that a list goes on."""
    if count > SHOWN:
        line(f"and {count - SHOWN} more {what} (--json lists all)")


def say_skipped(skipped: Problems, *, to_errors: bool = False) -> None:
    """Name what was left out, and why."""
    if not skipped:
        return
    out = errors if to_errors else console
    out.print(plain(f"left out or odd: {len(skipped)}", "yellow"))
    for name, reason in skipped:
        out.print(plain(f"  {name}: {reason}"))


def say_learned(model: Path, done: Any) -> None:
    """Say what a learn step did and how good the model is now."""
    if done.new or done.returning:
        parts = [
            f"{word}: {some(names)}" for word, names in (("new", done.new), ("known before", done.returning)) if names
        ]
        line(f"step {done.step} learned from {count(done.images, 'image')}; {'; '.join(parts)}")
    if done.accuracy is not None:
        checked = sum(value is not None for value in done.per_class.values())
        parts = [
            f"{value:.1f} % of {what}"
            for value, what in ((done.before, "the classes known before"), (done.after, "the new ones"))
            if value is not None and done.before is not None and done.after is not None
        ]
        line(
            f"recognises {done.accuracy:.1f} % of the check images of {count(checked, 'class')}"
            + (f": {', '.join(parts)}" if parts else "")
            + (f"; {count(rest, 'class')} cannot be checked" if (rest := len(done.per_class) - checked) else ""),
            "bold",
        )
    earlier = "; states kept for undo hold images still" if done.earlier_images and not done.stored_images else ""
    line(
        f"stored in {model}: {done.stored_images} images, {readable(done.stored_bytes)}{earlier}; your folder is not needed any more"
    )
    for sentence in done.warnings:
        console.print(plain("note: ", "yellow") + plain(sentence))


def skipped_json(skipped: Problems) -> list[dict[str, str]]:
    """Give what was left out, ready for JSON."""
    return [{"image": name, "reason": reason} for name, reason in skipped]


def some(names: tuple[str, ...]) -> str:
    """List names, the first ones of many."""
    return ", ".join(names[:SHOWN]) + (f", and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def csv_predictions(found: Predictions) -> None:
    """Print predictions as CSV."""
    writer = csv_format.writer(sys.stdout, lineterminator="\n")
    most = len(found[0].top) if found else 1  # there may be fewer classes than were asked for
    more = [part for rank in range(2, most + 1) for part in (f"label {rank}", f"confidence {rank}")]
    writer.writerow(["image", "label", "confidence", *more])
    for each in found:
        writer.writerow([each.name, *(part for label, value in each.top for part in (label, f"{value:.4f}"))])


def table_predictions(found: Predictions, top: int) -> None:
    """Print predictions as a table."""
    table = plain_table("image", "class", ">confidence", *(["next likeliest"] if top > 1 else []))
    for each in found:
        others = ", ".join(f"{label} {value:.0%}" for label, value in each.top[1:])
        table.add_row(
            plain(each.name), plain(each.label), f"{each.confidence:.1%}", *([plain(others)] if top > 1 else [])
        )
    console.print(table)


def say_classes(found: Evaluation) -> None:
    """Print the accuracy of each class, the weakest first."""
    counts = found.confusion.sum(dim=1).tolist()
    table = plain_table("class", ">images", ">right")
    order = sorted(
        (i for i, count in enumerate(counts) if count), key=lambda i: found.per_class[found.classes[i]] or 0.0
    )
    for i in order[:SHOWN]:
        table.add_row(plain(found.classes[i]), str(counts[i]), percent(found.per_class[found.classes[i]]))
    console.print(table)
    say_more(len(order), "classes, all better than these")


def say_confusion(found: Evaluation) -> None:
    """Name the commonest mistakes."""
    wrong = found.confusion.clone().fill_diagonal_(0)
    pairs = [(int(wrong[i, j]), int(i), int(j)) for i, j in wrong.nonzero()]
    if not pairs:
        return
    line("commonest mistakes:")
    for count, i, j in sorted(pairs, key=lambda pair: -pair[0])[:10]:
        line(f"  {found.classes[i]} taken for {found.classes[j]}: {count} of {int(found.confusion[i].sum())}")


def count(number: int, what: str) -> str:
    """Count things in words: 1 class, 2 classes."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def count_steps(facts: dict[str, Any]) -> str:
    """Count the learn steps in words."""
    return count(sum(record["action"] == "learn" for record in facts["steps"]), "step")


def when(time: str | None) -> str:
    """Write a time of the log in local time."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}" if time else ""


def say_history(facts: dict[str, Any]) -> None:
    """Print one line for each step."""
    line("history:")
    for record in facts["steps"]:
        if record["action"] == "learn":
            fresh = some((*record["new"], *record["returning"]))
            line(
                f"  {when(record['time'])}  step {record['step']}: {fresh} ({record['images']} images); "
                f"recognised {percent(record['accuracy'])} of the check images of {record['checked']} classes"
            )
        elif record["action"] == "rename":
            line(f"  {record['old']} renamed to {record['new']}")
        else:
            line(f"  {record['class']} removed")


def say_kept(facts: dict[str, Any], *, listed: bool) -> None:
    """Say which images are stored and how large the model is."""
    budget = facts["budget"]
    per = "a class" if budget["counted"] == "per_class" else "in all"
    checks = f" and up to {VALIDATION} a class to check with" if budget["exemplars"] else ""
    line(
        f"stored images: {facts['stored_images']}, {readable(facts['stored_bytes'])} "
        f"(budget: {budget['exemplars']} {per}{checks})"
    )
    if listed:
        for each in facts["stored"]:
            line(f"  {each['from']} ({each['class']}, {'to check with' if each['use'] == 'check' else 'kept'})")
    elif facts["stored"]:
        line("  --images lists them")
    line(
        f"network: {facts['network']}, {facts['parameters']} parameters, sees {facts['image_size']} x {facts['image_size']} "
        f"pixels; directory: {readable(facts['directory_bytes'])}; steps that can be taken back: {facts['undo']}"
    )
