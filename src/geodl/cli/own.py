"""``geodl learn``, ``predict``, ``evaluate``, ``info``, ``undo``, ``rename``, ``remove`` and ``export``: your own images."""

import csv as csv_format
import json
import sys
from contextlib import nullcontext
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from geodl.classifier import Evaluation, IncrementalClassifier, Predictions
from geodl.cli.display import Stopper, console, errors
from geodl.config import RunConfig
from geodl.errors import DataError
from geodl.own.choices import readable
from geodl.own.intake import Problems

_SHOWN = 20  # lines of what was left out, of classes, of confusions; --json has all

_HOW = Group("How it is done", sort_key=6)
_CHOICES = Group("Choices (made from your images and your machine unless you set them)", sort_key=7)
_MACHINE = Group("Machine", sort_key=8)

Model = Annotated[Path, Parameter(help="The model's directory.")]
Folder = Annotated[Path, Parameter(help="A folder with one folder of images for each class.")]
Strict = Annotated[
    bool,
    Parameter(help="Stop at the first file that cannot be used, instead of leaving it out.", negative=(), group=_HOW),
]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.", negative=(), group=_HOW)]
Csv = Annotated[bool, Parameter(name="--csv", help="Print CSV.", negative=(), group=_HOW)]
Quiet = Annotated[bool, Parameter(name=("--quiet", "-q"), help="Print the result alone.", negative=(), group=_HOW)]
Classifier = Annotated[
    Literal["nme", "cnn"],
    Parameter(help="nme: the class whose mean is nearest; cnn: the network's own output.", group=_HOW),
]
Accelerator = Annotated[
    Literal["auto", "cpu", "cuda", "mps"], Parameter(help="Where the network runs.", group=_MACHINE)
]
Workers = Annotated[int | None, Parameter(help="Threads that decode images; unset: chosen.", group=_MACHINE)]


def _flag(name: str, kind: Any, group: Group) -> tuple[str, Any, Any]:
    names = ("--backbone", "--network") if name == "network" else None
    text = RunConfig.model_fields[name].description
    return name, Annotated[kind | None, Parameter(name=names, help=text, group=group)], None


def _declare() -> type[Any]:
    """Make the flags of a learn step from the options of a run: their meaning is declared there, once."""
    budget, machine = Literal["per_class", "total"], Literal["auto", "cpu", "cuda", "mps"]
    chosen: dict[str, Any] = {
        "network": str,
        "weights": Path,
        "pretrained": bool,
        "image_size": int,
        "flip": bool,
        "epochs": int,
    }
    chosen |= {"batch_size": int, "lr": float, "exemplars": int, "budget": budget, "seed": int}
    flags = [_flag(name, kind, _CHOICES) for name, kind in chosen.items()]
    flags += [
        _flag(name, kind, _MACHINE) for name, kind in (("threads", int), ("workers", int), ("accelerator", machine))
    ]
    made = make_dataclass("LearnFlags", flags, frozen=True)
    made.__module__ = __name__
    return made


LearnFlags = _declare()


def learn(
    model: Model,
    images: Folder,
    /,
    *,
    flags: Annotated[LearnFlags, Parameter(name="*")] = LearnFlags(),  # type: ignore[valid-type]  # noqa: B008
    again: Annotated[
        bool, Parameter(help="Learn images that were just learned once more.", negative=(), group=_HOW)
    ] = False,
    strict: Strict = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Learn the classes in a folder of class folders: new ones, and more images of known ones.

    The model's directory is made by the first learn. Afterwards the images are not needed any more: a few of each class
    are kept in the model. Stopped or killed, the same command goes on.
    """
    from geodl.training import Interrupted

    options = {f.name: getattr(flags, f.name) for f in fields(flags) if getattr(flags, f.name) is not None}
    watch, stopper = _Watch(quiet=quiet or as_json), Stopper()
    with stopper.watching(), watch.bar:
        try:
            done = IncrementalClassifier(model).learn(
                images, again=again, strict=strict, listener=watch, stop=stopper, **options
            )
        except Interrupted:
            raise Interrupted("stopped; how far it came is saved, and the same command goes on from there") from None
    if as_json:
        print(json.dumps(vars(done) | {"skipped": [list(pair) for pair in done.skipped]}, ensure_ascii=False))
        return
    if done.already:
        _line(f"already learned: {model} has just learned exactly these images (--again learns them once more)")
    _say_learned(model, done)


def predict(
    model: Model,
    images: Annotated[list[Path], Parameter(help="Images, or folders with images.", negative=())],
    /,
    *,
    top: Annotated[int, Parameter(help="Show so many of the likeliest classes.", group=_HOW)] = 1,
    classifier: Classifier = "nme",
    strict: Strict = False,
    as_json: Json = False,
    as_csv: Csv = False,
    accelerator: Accelerator = "auto",
    workers: Workers = None,
) -> None:
    """Say what is in images: the class and how sure the model is.

    Confidence is the softmax of the network's learned scale times the cosines with the class means (or, with
    --classifier cnn, with the rows of the network's last layer).
    """
    found = IncrementalClassifier(model).predict(
        images, classifier=classifier, top=top, strict=strict, accelerator=accelerator, workers=workers
    )
    if as_json:
        entries = [
            {"image": each.name, "label": each.label, "confidence": each.confidence, "top": [list(t) for t in each.top]}
            for each in found
        ]
        skipped = [{"image": name, "reason": reason} for name, reason in found.skipped]
        print(
            json.dumps(
                {"predictions": entries, "skipped": skipped, "images_per_second": found.rate}, ensure_ascii=False
            )
        )
    elif as_csv:
        _csv_predictions(found, top)
    else:
        _table_predictions(found, top)
    if not as_json:
        _say_skipped(found.skipped, to_errors=True)
        if len(found):
            errors.print(f"{len(found)} images, {found.rate:.0f} images/s", markup=False)
    if not len(found):
        raise DataError("no image could be read" if found.skipped else "no images found")


def evaluate(
    model: Model,
    images: Folder,
    /,
    *,
    classifier: Classifier = "nme",
    strict: Strict = False,
    as_json: Json = False,
    accelerator: Accelerator = "auto",
    workers: Workers = None,
) -> None:
    """Say how good the model is on images whose classes you know, none of which it has learned."""
    found = IncrementalClassifier(model).evaluate(
        images, classifier=classifier, strict=strict, accelerator=accelerator, workers=workers
    )
    if as_json:
        print(json.dumps(vars(found) | {"confusion": found.confusion.tolist()}, ensure_ascii=False))
        return
    _say_skipped(found.skipped)
    _line(f"accuracy: {found.accuracy:.1f} % of {found.images} images", "bold")
    for step, value in found.per_step.items():
        _line(f"  classes learned in step {step}: {_percent(value)}")
    _say_classes(found)
    _say_confusion(found)


def info(
    model: Model,
    /,
    *,
    images: Annotated[bool, Parameter(help="List the stored images.", negative=(), group=_HOW)] = False,
    as_json: Json = False,
) -> None:
    """Say what a model knows and keeps: classes, when they were learned, stored images, sizes, accuracy so far."""
    facts = IncrementalClassifier(model).info()
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    _line(f"{model}: {len(facts['classes'])} classes, learned in {_steps(facts)}", "bold")
    table = _table("class", "step", "learned", ">images seen", ">kept", ">to check with", ">recognised")
    for each in facts["classes"][:_SHOWN]:
        table.add_row(
            Text(each["name"]),
            str(each["step"]),
            _when(each["learned"]),
            *(str(each[key]) for key in ("images", "exemplars", "checks")),
            _percent(each["accuracy"]),
        )
    console.print(table)
    _say_more(len(facts["classes"]), "classes")
    _say_history(facts)
    _say_kept(facts, listed=images)


def undo(model: Model, /) -> None:
    """Take the last step back: the model is as it was before the last learn (or rename, or remove)."""
    record = IncrementalClassifier(model).undo()
    what = {
        "learn": lambda: f"learning {', '.join([*record['new'], *record['returning']][:_SHOWN])}",
        "rename": lambda: f"renaming {record['old']} to {record['new']}",
        "remove": lambda: f"removing {record['class']}",
    }[record["action"]]()
    _line(f"taken back: {what}")


def rename(model: Model, old: str, new: str, /) -> None:
    """Give a class another name."""
    IncrementalClassifier(model).rename(old, new)
    _line(f"{old} is now called {new}")


def remove(
    model: Model,
    name: Annotated[str, Parameter(name="class", help="The class to remove.")],
    /,
    *,
    for_good: Annotated[
        bool, Parameter(help="Remove earlier states too, so that no image of the class is left; no undo.", negative=())
    ] = False,
) -> None:
    """Remove a class: the model no longer knows it, and its images are dropped."""
    IncrementalClassifier(model).remove(name, for_good=for_good)
    rest = (
        "no image of it is left, and there is no undo"
        if for_good
        else "`geodl undo` brings it back (--for-good: no way back)"
    )
    _line(f"{name} is removed; {rest}")


def export(
    model: Model,
    file: Annotated[Path, Parameter(help="The ONNX file to write.")],
    /,
    *,
    as_json: Json = False,
) -> None:
    """Write the model as one ONNX file: labels and preprocessing inside, no images, checked against the model."""
    done = IncrementalClassifier(model).export(file)
    if as_json:
        print(json.dumps(done, ensure_ascii=False))
        return
    _line(
        f"{file}: {done['classes']} classes, {readable(done['bytes'])}; differs from the model by {done['difference']:.1g} at most"
    )


# ----------------------------------------------------------------------------------------------- what a person sees


class _Watch:
    """Shows a learn step while it runs."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._epochs, self._steps, self._task = 1, 1, None
        self.progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self.bar: Any = self.progress if console.is_terminal and not quiet else nullcontext()

    def __call__(self, kind: str, **fields: Any) -> None:
        if not self.quiet:
            getattr(self, f"_on_{kind}", lambda **_: None)(**fields)

    def _on_read(self, intake: Any, skipped: Problems, images: int, side: int) -> None:
        _say_skipped(skipped)
        _line(
            f"{intake.title}: {images} images of {len(intake.classes)} classes, typically {side} pixels a side", "bold"
        )

    def _on_chosen(self, choices: list[Any]) -> None:
        _line("chosen, unless you set it otherwise:")
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(style="dim")
        for choice in choices:
            table.add_row(f"  {choice.option}", Text(choice.value), Text(choice.why))
        console.print(table)

    def _on_continued(self, epoch: int) -> None:
        _line(f"going on where it was stopped: {epoch} times through the images are done")

    def _on_stage(self, epochs: int, steps: int, **_: Any) -> None:
        self._epochs, self._steps = epochs, steps
        self._task = self.progress.add_task("learning", total=epochs * steps, state="")  # type: ignore[assignment]

    def _on_step(self, epoch: int, step: int, rate: float, **_: Any) -> None:
        if self._task is not None:
            self.progress.update(
                self._task,
                completed=epoch * self._steps + step,
                state=f"{epoch + 1}/{self._epochs}, {rate:.0f} images/s",
            )


def _line(text: str, style: str = "") -> None:
    console.print(Text(text, style))


def _percent(value: float | None) -> str:
    return "not checked" if value is None else f"{value:.1f} %"


def _table(*columns: str) -> Table:
    """Make a plain table; a column whose name begins with > is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _say_more(count: int, what: str) -> None:
    if count > _SHOWN:
        _line(f"and {count - _SHOWN} more {what} (--json lists all)")


def _say_skipped(skipped: Problems, *, to_errors: bool = False) -> None:
    if not skipped:
        return
    out = errors if to_errors else console
    out.print(Text(f"left out or odd: {len(skipped)}", "yellow"))
    for name, reason in skipped[:_SHOWN]:
        out.print(Text(f"  {name}: {reason}"))
    if len(skipped) > _SHOWN:
        out.print(Text(f"  and {len(skipped) - _SHOWN} more"))


def _say_learned(model: Path, done: Any) -> None:
    if done.new or done.returning:
        parts = [
            f"{word}: {_some(names)}" for word, names in (("new", done.new), ("known before", done.returning)) if names
        ]
        _line(f"step {done.step} learned from {done.images} images; {'; '.join(parts)}")
    if done.accuracy is not None:
        _line(f"recognises {done.accuracy:.1f} % of the check images of all {len(done.classes)} classes", "bold")
    _line(
        f"stored in {model}: {done.stored_images} images, {readable(done.stored_bytes)}; your folder is not needed any more"
    )
    for sentence in done.warnings:
        console.print(Text("note: ", "yellow") + Text(sentence))


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _csv_predictions(found: Predictions, top: int) -> None:
    writer = csv_format.writer(sys.stdout, lineterminator="\n")
    more = [part for rank in range(2, top + 1) for part in (f"label {rank}", f"confidence {rank}")]
    writer.writerow(["image", "label", "confidence", *more])
    for each in found:
        writer.writerow([each.name, *(part for label, value in each.top for part in (label, f"{value:.4f}"))])


def _table_predictions(found: Predictions, top: int) -> None:
    table = _table("image", "class", ">confidence", *(["next likeliest"] if top > 1 else []))
    for each in found:
        others = ", ".join(f"{label} {value:.0%}" for label, value in each.top[1:])
        table.add_row(Text(each.name), Text(each.label), f"{each.confidence:.1%}", *([Text(others)] if top > 1 else []))
    console.print(table)


def _say_classes(found: Evaluation) -> None:
    counts = found.confusion.sum(dim=1).tolist()
    table = _table("class", ">images", ">right")
    order = sorted(
        (i for i, count in enumerate(counts) if count), key=lambda i: found.per_class[found.classes[i]] or 0.0
    )
    for i in order[:_SHOWN]:
        table.add_row(Text(found.classes[i]), str(counts[i]), _percent(found.per_class[found.classes[i]]))
    console.print(table)
    _say_more(len(order), "classes, all better than these")


def _say_confusion(found: Evaluation) -> None:
    """Name the commonest mistakes."""
    wrong = found.confusion.clone().fill_diagonal_(0)
    pairs = [(int(wrong[i, j]), int(i), int(j)) for i, j in wrong.nonzero()]
    if not pairs:
        return
    _line("commonest mistakes:")
    for count, i, j in sorted(pairs, key=lambda pair: -pair[0])[:10]:
        _line(f"  {found.classes[i]} taken for {found.classes[j]}: {count} of {int(found.confusion[i].sum())}")


def _steps(facts: dict[str, Any]) -> str:
    count = sum(record["action"] == "learn" for record in facts["steps"])
    return f"{count} step" + ("s" if count != 1 else "")


def _when(time: str | None) -> str:
    return time[:16].replace("T", " ") if time else ""


def _say_history(facts: dict[str, Any]) -> None:
    _line("history:")
    for record in facts["steps"]:
        if record["action"] == "learn":
            fresh = _some((*record["new"], *record["returning"]))
            _line(
                f"  {_when(record['time'])}  step {record['step']}: {fresh} ({record['images']} images); "
                f"recognised {_percent(record['accuracy'])} of the check images of {record['classes']} classes"
            )
        elif record["action"] == "rename":
            _line(f"  {record['old']} renamed to {record['new']}")
        else:
            _line(f"  {record['class']} removed")


def _say_kept(facts: dict[str, Any], *, listed: bool) -> None:
    budget = facts["budget"]
    per = "a class" if budget["counted"] == "per_class" else "in all"
    _line(
        f"stored images: {facts['stored_images']}, {readable(facts['stored_bytes'])} "
        f"(budget: {budget['exemplars']} {per} and up to 10 a class to check with)"
    )
    if listed:
        for each in facts["stored"]:
            _line(f"  {each['from']} ({each['class']}, {'to check with' if each['use'] == 'check' else 'kept'})")
    elif facts["stored"]:
        _line("  --images lists them")
    _line(
        f"network: {facts['network']}, {facts['parameters']} parameters, sees {facts['image_size']} x {facts['image_size']} "
        f"pixels; directory: {readable(facts['directory_bytes'])}; {facts['undo']} earlier states for undo"
    )
