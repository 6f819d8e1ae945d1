"""How a learn step, predictions, an evaluation and a model look to a person."""

import csv as csv_format
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.progress import TaskID
from rich.table import Column, Table

from geodl.app.choices import VALIDATION
from geodl.classifier import Evaluation
from geodl.cli.display import console, errors, plain, progress_bar, say
from geodl.data.dataset import Skipped
from geodl.events import (
    Advised,
    EpochEnded,
    Event,
    FeaturesTaken,
    ImagesPredicted,
    ImagesRead,
    IntakeDone,
    Listener,
    OptionsChosen,
    StageStarted,
    StepContinued,
    StepTaken,
    TimeEstimated,
    part_of,
)
from geodl.files import readable
from geodl.predicting import Predictions
from geodl.text import count, duration, listed

SECONDS = 30.0  # between two signs of life in a log
REASONS = 3  # the most frequent ones, where not all that was skipped is named
SHOWN = 20  # lines of what was skipped, of classes, of confusions; --json has all


class LearnWatch:
    """Shows a learn step while it runs."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.training = False
        self._stage = StageStarted(0, "", 1, 1, 0)
        self._tasks: dict[str, TaskID] = {}
        self._said = time.monotonic()
        self.bar = progress_bar(console, quiet=quiet)

    def __call__(self, event: Event) -> None:
        """Hear what happens."""
        self.training = self.training or isinstance(event, StageStarted)
        if self.quiet:
            return
        match event:
            case ImagesRead():
                self._advance("reading", event.done, event.total)
            case IntakeDone():
                say_skipped(event.skipped)
                what = f"{count(event.images, 'image')} of {count(event.classes, 'class')}"
                say(f"{event.title}: {what}, typically {event.side} pixels a side", "bold")
            case OptionsChosen():
                self._chosen(event)
            case Advised():
                say(plain("note: ", "yellow") + plain(event.sentence))
            case TimeEstimated():
                if event.seconds > 10:
                    say(f"this will take about {duration(event.seconds)} (estimated from a few steps)")
            case StepContinued():
                say(f"going on where it was stopped: {count(event.epoch, 'epoch')} done")
            case FeaturesTaken() if not self.training:  # in closed form this is all
                self._advance("learning", event.done, event.total)
            case StageStarted():
                self._stage = event
                self._tasks["learning"] = self.bar.add_task("  learning", total=1.0, state="")
            case StepTaken():
                state = f"epoch {event.epoch + 1}/{self._stage.epochs}, {event.rate:.0f} images/s"
                self.bar.update(self._tasks["learning"], completed=part_of(event, self._stage), state=state)
            case EpochEnded():
                if not console.is_terminal and time.monotonic() - self._said > SECONDS:  # a log wants a sign of life
                    say(f"  epoch {event.epoch} of {event.epochs}, {event.rate:.0f} images/s")
                    self._said = time.monotonic()

    def confirm(self, seconds: float) -> bool:
        """Ask a person at a terminal whether to start a training that takes so long."""
        if self.quiet or not sys.stdin.isatty() or not console.is_terminal:
            return True
        self.bar.stop()
        answer = console.input(f"Train for about {duration(seconds)}? [y/N] ", markup=False)
        self.bar.start()
        return answer.strip().lower() in ("y", "yes")

    def _advance(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self.bar.add_task(f"  {what}", total=total, state="")
        self.bar.update(self._tasks[what], completed=done, visible=done < total)

    def _chosen(self, event: OptionsChosen) -> None:
        say("chosen, unless you set it otherwise:")
        columns = Column(no_wrap=True), Column(no_wrap=True), Column(style="dim")
        table = Table(*columns, box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for option, value, why in event.choices:
            table.add_row(f"  {option}", plain(value), plain(why))
        say(table)


@contextmanager
def predicting() -> Iterator[Listener]:
    """Yield a listener that shows, on a terminal, how many images were predicted; what is printed stays free of it."""
    with progress_bar(errors) as bar:
        task = bar.add_task("  predicting", total=None, state="", visible=False)

        def listener(event: Event) -> None:
            if isinstance(event, ImagesPredicted):
                bar.update(task, total=event.total, advance=event.images, visible=True)

        yield listener


def percent(value: float | None) -> str:
    """Write an accuracy."""
    return "not measured" if value is None else f"{value:.1f} %"


def plain_table(*columns: str) -> Table:
    """Make a plain table; a column whose name begins with > is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def say_more(number: int, what: str) -> None:
    """Say that a list of things goes on."""
    if number > SHOWN:
        say(f"and {count(number - SHOWN, f'more {what}')} (--json lists all)")


def say_skipped(skipped: Sequence[tuple[str, str]], *, to_errors: bool = False) -> None:
    """Name what was skipped, and why."""
    if not skipped:
        return
    out = errors if to_errors else console
    kinds = Counter(reason for _, reason in skipped).most_common(REASONS) if len(skipped) > SHOWN else []
    summary = "".join(f"; {number} times: {reason}" for reason, number in kinds)
    out.print(plain(f"skipped: {len(skipped)}{summary}", "yellow"))
    for name, reason in skipped[:SHOWN]:
        out.print(plain(f"  {name}: {reason}"))
    if len(skipped) > SHOWN:
        out.print(f"  and {len(skipped) - SHOWN} more (--json lists all)", markup=False)


def say_learned(model: Path, done: Any) -> None:
    """Say what a learn step did and how good the model is now."""
    if done.new or done.returning:
        parts = [
            f"{word}: {listed(names, SHOWN)}"
            for word, names in (("new", done.new), ("known before", done.returning))
            if names
        ]
        say(f"step {done.step} learned from {count(done.images, 'image')}; {'; '.join(parts)}")
    if done.accuracy is not None:
        judged = count(done.judged, "image" if done.left_out else "validation image")
        what = f"{judged}, each left out in turn," if done.left_out else judged
        validated = sum(value is not None for value in done.per_class.values())
        parts = [
            f"{value:.1f} % on {what}"
            for value, what in ((done.before, "the classes known before"), (done.after, "the new ones"))
            if value is not None and done.before is not None and done.after is not None
        ]
        old_and_new = f": {', '.join(parts)}" if parts else ""
        rest = len(done.per_class) - validated
        lacking = f"; no validation images of {count(rest, 'class')}" if rest else ""
        low, high = done.interval
        say(
            f"accuracy {done.accuracy:.1f} % (95 % interval {low:.1f} to {high:.1f}) on {what} of {count(validated, 'class')}"
            f"{old_and_new}{lacking}",
            "bold",
        )
    features = f", and the features of {count(done.stored_features, 'image')}" if done.stored_features else ""
    earlier = "; states kept for undo hold images still" if done.earlier_images and not done.stored_images else ""
    say(
        f"stored in {model}: {count(done.stored_images, 'image')}, {readable(done.stored_bytes)}{features}{earlier}; your folder is not needed any more"
    )
    for sentence in done.warnings:
        say(plain("note: ", "yellow") + plain(sentence))


def skipped_json(skipped: Skipped) -> list[dict[str, str]]:
    """Return what was skipped, ready for JSON."""
    return [{"image": name, "reason": reason} for name, reason in skipped]


def csv_predictions(found: Predictions) -> None:
    """Print predictions as CSV."""
    writer = csv_format.writer(sys.stdout, lineterminator="\n")
    most = len(found[0].top) if found else 1  # there may be fewer classes than were asked for
    more = [part for rank in range(2, most + 1) for part in (f"label {rank}", f"confidence {rank}")]
    writer.writerow(["image", "label", "confidence", *more])
    for each in found:
        first, *others = [(label, f"{value:.4f}") for label, value in each.top]
        shown = [(each.label, "") if each.unknown else first, *others]  # how sure it is of "unknown" nobody knows
        writer.writerow([each.name, *(part for pair in shown for part in pair)])


def table_predictions(found: Predictions, top: int) -> None:
    """Print predictions as a table."""
    table = plain_table("image", "class", ">confidence", *(["next likeliest"] if top > 1 else []))
    for each in found:
        others = ", ".join(f"{label} {value:.0%}" for label, value in each.top[1:])
        label = f"{each.label} (nearest: {each.top[0][0]})" if each.unknown else each.label
        sure = "" if each.unknown else f"{each.confidence:.1%}"
        table.add_row(plain(each.name), plain(label), sure, *([plain(others)] if top > 1 else []))
    say(table)


def say_classes(found: Evaluation) -> None:
    """Print the accuracy of each class, the weakest first."""
    counts = dict(zip(found.confusion.classes, found.confusion.counts.sum(dim=1).tolist(), strict=True))
    table = plain_table("class", ">images", ">accuracy")
    order = sorted((name for name in counts if counts[name]), key=lambda name: found.per_class[name] or 0.0)
    for name in order[:SHOWN]:
        table.add_row(plain(name), str(counts[name]), percent(found.per_class[name]))
    say(table)
    say_more(len(order), "better class")


def say_confusion(found: Evaluation) -> None:
    """Name the most frequent confusions."""
    confusion = found.confusion
    mistakes = confusion.mistakes(10)
    if mistakes:
        say("most frequent confusions:")
    for i, j, number in mistakes:
        say(f"  {confusion.classes[i]} taken for {confusion.classes[j]}: {number} of {int(confusion.counts[i].sum())}")


def when(time: str | None) -> str:
    """Write a time of the log in local time."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}" if time else ""


def describe_step(record: Mapping[str, Any]) -> str:
    """Say what a step did, in a few words."""
    match record["action"]:
        case "learn":
            what = listed((*record["new"], *record["returning"]), SHOWN)
            return f"step {record['step']}: learning {what} ({count(record['images'], 'image')})"
        case "rename":
            return f"renaming {record['old']} to {record['new']}"
        case "remove":
            return f"removing {record['class']}"
    return "the last state that was saved"


def say_history(facts: dict[str, Any]) -> None:
    """Print one line for each step, and for each that can be brought back."""
    say("history" + (" (accuracy: each image judged by the model without it):" if facts["left_out"] else ":"))
    for record in facts["steps"]:
        judged = ""
        if record["action"] == "learn":
            validated = f" on the validation images of {count(record['validated'], 'class')}"
            judged = f"; accuracy {percent(record['accuracy'])}{'' if facts['left_out'] else validated}"
        say(f"  {when(record['time'])}  {describe_step(record)}{judged}")
    for record in facts["undone"]:
        say(f"  taken back, `geodl redo` brings it back: {describe_step(record)}")


def say_kept(facts: dict[str, Any], *, listed: bool) -> None:
    """Say which images are stored and how large the model is."""
    budget = facts["memory_budget"]
    per = "a class" if budget["counted"] == "per_class" else "in all"
    checks = f" and up to {VALIDATION} validation images a class" if budget["exemplars"] else ""
    why = "to show, not to learn from" if facts["left_out"] else f"memory budget: {budget['exemplars']} {per}{checks}"
    say(f"stored images: {facts['stored_images']}, {readable(facts['stored_bytes'])} ({why})")
    if listed:
        for each in facts["stored"]:
            say(f"  {each['from']} ({each['class']}, {each['use']})")
    elif facts["stored"]:
        say("  --images lists them")
    if facts["features"]["images"]:
        say(
            f"stored features: of {count(facts['features']['images'], 'image')}, {readable(facts['features']['bytes'])}, no pixels. "
            "They are enough to tell whether a given picture was learned and to rebuild a rough likeness of it: keep the model as "
            "private as the images. `geodl remove --for-good` removes those of a class."
        )
    if facts["threshold"] is not None:
        say(f"unknown: an image whose largest score is below {facts['threshold']:.3g} (`geodl predict --threshold`)")
    say(
        f"network: {facts['network']}, {count(facts['parameters'], 'parameter')}, sees {facts['image_size']} x {facts['image_size']} "
        f"pixels; directory: {readable(facts['directory_bytes'])}; can be taken back: {count(facts['undo'], 'step')}"
    )
