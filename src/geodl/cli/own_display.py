"""Terminal output for your own images: learn steps, predictions, evaluations and models."""

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geodl.cli.display import Display, console, echo, errors, plain, progress_bar, table
from geodl.core import events
from geodl.core.text import count, duration, listed, readable
from geodl.model.predictions import Predictions

if TYPE_CHECKING:
    from geodl.app.evaluation import Evaluation
    from geodl.data.dataset import Skipped

REASONS = 3
"""Number of reasons, the most frequent ones, in the summary of very many skipped files."""
USES = {"exemplar": "to learn from again", "validation": "to measure the accuracy"}
"""What stored images are kept for."""
SEVERAL = 3
"""When more than this many files of a folder are skipped for the same reason, they share a line."""
SHOWN = 20
"""Lines of a list that are printed; --json prints all."""


class LearnWatch(Display):
    """Shows the progress of a learn step; ``training``: whether training has begun."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.training = False
        self._stage = events.StageStarted(0, "", 1, 1, 0)
        self.shows = {
            events.ImagesRead: lambda event: self.advance("reading", event.done, event.total),
            events.IntakeDone: self._read,
            events.OptionsChosen: self._chosen,
            events.Advised: lambda event: _note(event.sentence),
            events.TimeEstimated: self._estimated,
            events.StepContinued: self._continued,
            events.FeaturesTaken: self._features,
            events.StepTaken: self._step,
            events.EpochEnded: self.epoch,
        }

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        if isinstance(event, events.StageStarted):
            self.training, self._stage = True, event
        super().__call__(event)

    def _read(self, event: events.IntakeDone) -> None:
        print_skipped(event.skipped)
        size = f"{count(event.images, 'image')} of {count(event.classes, 'class')}"
        echo(f"{event.title}: {size}, typically {event.side} pixels a side", "bold")

    def _chosen(self, event: events.OptionsChosen) -> None:
        echo("chosen, unless you set it otherwise:")
        rows = [(f"  {option}", value, why) for option, value, why in event.choices]
        echo(table(rows=rows))

    def _continued(self, event: events.StepContinued) -> None:
        echo(f"resuming after {count(event.epoch, 'epoch')}")

    def _estimated(self, event: events.TimeEstimated) -> None:
        if event.seconds > 10:
            echo(f"this will take about {duration(event.seconds)} (estimated)")

    def _features(self, event: events.FeaturesTaken) -> None:
        if not self.training:  # the closed form does nothing else
            self.advance("learning", event.done, event.total)

    def _step(self, event: events.StepTaken) -> None:
        state = f"epoch {event.epoch + 1}/{self._stage.epochs}, {event.rate:.0f} images/s"
        self.advance("learning", events.part_of(event, self._stage), 1.0, state)

    def confirm(self, seconds: float) -> bool:
        """Ask whether to continue with a step that takes this long; without a terminal the answer is yes."""
        if self.quiet or not sys.stdin.isatty() or not console.is_terminal:
            return True
        self.bar.stop()
        answer = console.input(
            f"This takes about {duration(seconds)}. Continue? [y/N] ", markup=False
        )
        self.bar.start()
        return answer.strip().lower() in ("y", "yes")


def _note(sentence: str) -> None:
    echo(plain("note: ", "yellow") + plain(sentence))


@contextmanager
def predicting() -> Iterator[events.Listener]:
    """Yield a listener that shows progress on a terminal, on standard error."""
    with progress_bar(errors) as bar:
        task = bar.add_task("  predicting", total=None, state="", visible=False)

        def listener(event: events.Event) -> None:
            if isinstance(event, events.ImagesPredicted):
                bar.update(task, total=event.total, advance=event.images, visible=True)

        yield listener


def percent(value: float | None) -> str:
    """Format an accuracy."""
    return "not measured" if value is None else f"{value:.1f} %"


def _print_more(number: int, what: str) -> None:
    """Print how many entries of a list are not shown."""
    if number > SHOWN:
        echo(f"and {count(number - SHOWN, f'more {what}')} (--json lists all)")


# ---------------------------------------------------------------------------------------------------- learn, predict


def print_skipped(skipped: Sequence[tuple[str, str]], *, to_errors: bool = False) -> None:
    """Print skipped files with the reasons; many files of a folder with the same reason share a line."""
    if not skipped:
        return
    out, summary, lines = errors if to_errors else console, "", _by_folder(skipped)
    if len(lines) > SHOWN:
        reasons = Counter(reason for _, reason in skipped).most_common(REASONS)
        summary = "".join(f"; {number} times: {reason}" for reason, number in reasons)
    out.print(plain(f"skipped: {len(skipped)}{summary}", "yellow"))
    for name, reason in lines[:SHOWN]:
        out.print(plain(f"  {name}: {reason}"))
    if len(lines) > SHOWN:
        out.print(f"  and {len(lines) - SHOWN} more lines (--json lists all)", markup=False)
    elif len(lines) < len(skipped):
        out.print("  (--json lists all)", markup=False)


def _by_folder(skipped: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return names and reasons; many files of a folder with the same reason become one entry."""
    folders: dict[tuple[str, str], list[str]] = {}
    for name, reason in skipped:
        folders.setdefault((name.rpartition("/")[0], reason), []).append(name)
    lines = []
    for (folder, reason), names in folders.items():
        if folder and len(names) > SEVERAL:
            lines.append((f"{folder} ({count(len(names), 'file')})", reason))
        else:
            lines += [(name, reason) for name in names]
    return lines


def print_learned(model: Path, done: Any) -> None:
    """Print the result of a learn step."""
    named = [("new", done.new), ("known before", done.returning)]
    parts = [f"{word}: {listed(names, SHOWN)}" for word, names in named if names]
    if parts:
        echo(f"step {done.step} learned from {count(done.images, 'image')}; {'; '.join(parts)}")
    if done.accuracy is not None:
        _print_accuracy(done)
    print_doubtful([each.to_json() for each in done.doubtful])
    features = earlier = ""
    if done.stored_features:
        features = f", and the features of {count(done.stored_features, 'image')}"
    if done.earlier_images and not done.stored_images:
        earlier = "; states kept for undo still hold images"
    echo(
        f"stored in {model}: {count(done.stored_images, 'image')}, {readable(done.stored_bytes)}{features}{earlier}; your folder is no longer needed"
    )
    for sentence in done.warnings:
        _note(sentence)


def print_doubtful(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the images that look mislabelled."""
    if not found:
        return
    looks = "looks" if len(found) == 1 else "look"
    echo(f"{count(len(found), 'image')} {looks} mislabelled:", "yellow")
    for each in found[:SHOWN]:
        name, own = each["name"], each["class"]
        named = name if name.startswith(f"{own}/") else f"{name} ({own})"
        echo(f"  {named} looks like {each['likely']} ({100 * each['confidence']:.0f} %)")
    _print_more(len(found), "image")
    echo(
        "`geodl relabel MODEL IMAGE CLASS` moves one, or confirms its class; `geodl forget` removes it"
    )


def _print_accuracy(done: Any) -> None:
    what = count(done.judged, "image" if done.left_out else "validation image")
    if done.series:
        some = "" if done.in_series == done.judged else f", {done.in_series} of them"
        what += f"{some} in {done.series} series, each judged without its series,"
    elif done.left_out:
        what += ", each left out in turn,"
    measured = sum(accuracy is not None for accuracy in done.per_class.values())
    old_and_new = lacking = ""
    if done.before is not None and done.after is not None:
        old_and_new = (
            f": {done.before:.1f} % on the classes known before, {done.after:.1f} % on the new ones"
        )
    if rest := len(done.per_class) - measured:
        lacking = f"; no validation images of {count(rest, 'class')}"
        if done.left_out:
            lacking = f"; {count(rest, 'class')} cannot be judged"
    low, high = done.interval
    balanced = "" if done.balanced is None else f", {done.balanced:.1f} % balanced"
    echo(
        f"accuracy {done.accuracy:.1f} %{balanced} (95 % interval {low:.1f} to {high:.1f}) on {what} of {count(measured, 'class')}"
        f"{old_and_new}{lacking}",
        "bold",
    )


def skipped_json(skipped: "Skipped") -> list[dict[str, str]]:
    """Return skipped files, ready for JSON."""
    return [{"name": name, "reason": reason} for name, reason in skipped]


def predictions_json(found: Predictions) -> dict[str, Any]:
    """Return predictions, ready for JSON."""
    entries = [each.to_json() for each in found]
    skipped = skipped_json(found.skipped)
    return {"predictions": entries, "skipped": skipped, "images_per_second": found.rate}


def print_predictions(found: Predictions, top: int, *, as_csv: bool) -> None:
    """Print predictions as a table or as CSV; skipped files and the speed go to standard error."""
    if as_csv:
        _print_csv(found)
    elif found:
        _table(found, top)
    print_skipped(found.skipped, to_errors=True)
    if len(found) > 1:
        errors.print(f"{count(len(found), 'image')}, {found.rate:.0f} images/s", markup=False)


def _print_csv(found: Predictions) -> None:
    """Print predictions as CSV; `nearest` is the likeliest class even of an unknown image, with its confidence."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    most = len(found[0].top) if found else 1  # the model may know fewer classes than --top
    more = [part for rank in range(2, most + 1) for part in (f"label {rank}", f"confidence {rank}")]
    writer.writerow(["image", "label", "confidence", "nearest", *more])
    for each in found:
        others = [part for label, value in each.top[1:] for part in (label, f"{value:.4f}")]
        nearest, confidence = each.top[0]
        writer.writerow([each.name, each.label, f"{confidence:.4f}", nearest, *others])


def _table(found: Predictions, top: int) -> None:
    """Print predictions as a table."""
    columns = ("image", "class", ">confidence", "next likeliest")[: 4 if top > 1 else 3]
    rows = []
    for each in found:
        others = ", ".join(f"{label} {value:.0%}" for label, value in each.top[1:])
        name = f"{each.label} (nearest: {each.top[0][0]})" if each.unknown else each.label
        rows.append((each.name, name, f"{each.confidence:.1%}", others)[: len(columns)])
    echo(table(*columns, rows=rows))


# ------------------------------------------------------------------------------------------------------- evaluate


def print_evaluation(found: "Evaluation") -> None:
    """Print the accuracy overall, by learning step and by class, the weakest first, and the most frequent confusions."""
    confusion, more = found.confusion, ""
    if found.balanced is not None:
        more = f"; {found.balanced:.1f} % balanced: each class counts the same"
    echo(f"accuracy: {found.accuracy:.1f} % of {count(found.images, 'image')}{more}", "bold")
    for step, value in found.per_step.items():
        echo(f"  classes learned in step {step}: {percent(value)}")
    known = [row for row in confusion.weakest if row.judged]
    shown = [(row.name, row.judged, percent(row.accuracy)) for row in known[:SHOWN]]
    echo(table("class", ">images", ">accuracy", rows=shown))
    _print_more(len(known), "class")
    rows, mistakes = confusion.rows, confusion.mistakes(10)
    if mistakes:
        echo("most frequent confusions:")
    for i, j, number in mistakes:
        echo(f"  {rows[i].name} predicted as {rows[j].name}: {number} of {rows[i].judged}")


# ------------------------------------------------------------------------------------------------------------ info


def _when(time: str | None) -> str:
    """Format a time of the log in local time."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}" if time else ""


def describe_step(record: Mapping[str, Any]) -> str:
    """Return a short description of a step."""
    match record["action"]:
        case "learn":
            what = listed((*record["new"], *record["returning"]), SHOWN)
            return f"step {record['step']}: learning {what} ({count(record['images'], 'image')})"
        case "rename":
            return f"renaming {record['old']} to {record['new']}"
        case "remove":
            return f"removing {record['class']}"
        case "relabel":
            return f"moving {_images(record)} from {record['old']} to {record['new']}"
        case "confirm":
            return f"confirming {_images(record)} of {record['class']}"
        case "forget":
            return f"forgetting {_images(record)}"
    return "the last state that was saved"


def _images(record: Mapping[str, Any]) -> str:
    """Return the name of a step's image, or the number of its images."""
    return str(record.get("image") or count(record.get("images", 1), "image"))


def print_known(model: Path, facts: Mapping[str, Any]) -> None:
    """Print the classes: when each was learned, from how many images, and its accuracy."""
    learned = [record["step"] for record in facts["steps"] if record["action"] == "learn"]
    steps = count(max(learned, default=1), "step")
    echo(f"{model}: {count(len(facts['classes']), 'class')}, learned in {steps}", "bold")
    if facts["unfinished"]:
        echo("a learn step was interrupted; the same learn command resumes it", "yellow")
    kept = {"exemplars": ">kept", "validation": ">for validation"}
    if facts["left_out"]:  # pictures are kept only to show them
        kept = {"validation": ">kept to show"}
    rows = []
    for each in facts["classes"][:SHOWN]:
        numbers = [each[key] for key in ("images", *kept)]
        known = (each["name"], each["step"], _when(each["learned"]))
        rows.append((*known, *numbers, percent(each["accuracy"])))
    columns = ("class", "step", "learned", ">images seen", *kept.values(), ">accuracy")
    echo(table(*columns, rows=rows))
    _print_more(len(facts["classes"]), "class")


def print_history(facts: Mapping[str, Any]) -> None:
    """Print a line for each step, and for each undone step that can be restored."""
    left_out = facts["left_out"]
    echo(f"history{' (accuracy: each image judged by the model without it)' if left_out else ''}:")
    for record in facts["steps"]:
        judged = ""
        if record["action"] == "learn":
            judged = f"; accuracy {percent(record['accuracy'])}"
            if not left_out:
                judged += f" on the validation images of {count(record['validated'], 'class')}"
        echo(f"  {_when(record['time'])}  {describe_step(record)}{judged}")
    for record in facts["undone"]:
        echo(f"  undone, `geodl redo` restores it: {describe_step(record)}")


def print_stored(facts: Mapping[str, Any], *, list_images: bool) -> None:
    """Print which images are stored and the size of the model."""
    budget, why = facts["memory_budget"], "to show, not to learn from"
    if not facts["left_out"]:
        per = "a class" if budget["counted"] == "per_class" else "in all"
        most = f" and up to {budget['validation']} validation images a class"
        checks = most if budget["exemplars"] else ""
        why = f"memory budget: {budget['exemplars']} {per}{checks}"
    echo(f"stored images: {facts['stored_images']}, {readable(facts['stored_bytes'])} ({why})")
    if list_images:
        for image in facts["stored"]:
            use = "to show" if facts["left_out"] else USES[image["use"]]
            echo(f"  {image['from']} ({image['class']}): kept {use}")
    elif facts["stored"]:
        echo("  --images lists them")
    features = facts["features"]
    if features["images"]:
        echo(
            f"stored features: of {count(features['images'], 'image')}, {readable(features['bytes'])}, no pixels. They are enough to "
            "tell whether a picture was learned and to reconstruct a rough likeness of it: keep the model as private as the images. "
            "`geodl remove --for-good` removes those of a class."
        )
    if facts["threshold"] is not None:
        echo(
            f"unknown: an image whose score is below {facts['threshold']:.3g} (`geodl predict --threshold`)"
        )
    size = facts["image_size"]
    echo(
        f"network: {facts['network']}, {count(facts['parameters'], 'parameter')}, sees {size} x {size} pixels; directory: "
        f"{readable(facts['directory_bytes'])}; undo: {count(facts['undo'], 'step')}"
    )
