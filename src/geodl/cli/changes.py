"""``geodl undo``, ``redo``, ``rename``, ``remove``, ``relabel``, ``forget`` and ``export``: what is done with a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from geodl.cli import own_display as display
from geodl.cli.display import say
from geodl.cli.own import Json, Model, how, opened, print_json
from geodl.core.text import count, readable

if TYPE_CHECKING:
    from geodl.app.classifier import IncrementalClassifier


@contextmanager
def _giving_up(model: Path) -> "Iterator[IncrementalClassifier]":
    """Give the model to change, and print a line where the change gives up a learn step that was stopped."""
    classifier = opened(model)
    unfinished = classifier.unfinished
    yield classifier
    if unfinished:
        say("an interrupted learn step is given up: it began from another state", "yellow")


def undo(model: Model, /) -> None:
    """Undo the last step."""
    with _giving_up(model) as classifier:
        record = classifier.undo()
    if record["action"] == "damaged":
        say("undone: the last state, which is damaged; there is no redo")
    else:
        say(
            f"undone: {display.describe_step(record)}; `geodl redo` restores it, until the next change"
        )


def redo(model: Model, /) -> None:
    """Restore the step that was undone last."""
    with _giving_up(model) as classifier:
        record = classifier.redo()
    say(f"restored: {display.describe_step(record)}")


def rename(
    model: Model,
    old: Annotated[str, Parameter(help="The present name of the class.")],
    new: Annotated[str, Parameter(help="Its new name.")],
    /,
) -> None:
    """Rename a class."""
    with _giving_up(model) as classifier:
        classifier.rename(old, new)
    say(f"{old} is now called {new}")


def remove(
    model: Model,
    name: Annotated[str, Parameter(name="CLASS", help="The class to remove.")],
    /,
    *,
    for_good: Annotated[
        bool,
        Parameter(
            help="Remove all other states too, so that neither image nor features of the class are left; no undo.",
            negative=(),
        ),
    ] = False,
) -> None:
    """Remove a class and its images."""
    with _giving_up(model) as classifier:
        stays = classifier.remove(name, for_good=for_good)
    rest = "`geodl undo` restores it (--for-good: no undo)"
    if for_good:
        rest = "no image of it is left, and there is no undo"
    rest += f"; {stays} stay" if stays else ""
    say(f"{name} is removed; {rest}")


_LEARNED = "a file, the name that it was learned under, or the identity that --json shows."


def relabel(
    model: Model,
    image: Annotated[str, Parameter(help=f"The learned image: {_LEARNED}")],
    name: Annotated[
        str,
        Parameter(
            name="CLASS", help="The right class; the class that it has: its label is confirmed."
        ),
    ],
    /,
) -> None:
    """Move a learned image to its right class."""
    with _giving_up(model) as classifier:
        record = classifier.relabel(image, name)
    done = f"is now of class {name}" if record["action"] == "relabel" else f"stays in class {name}"
    say(f"{image} {done}; `geodl undo` takes it back")
    _say_subtracted(record)


def forget(
    model: Model,
    images: Annotated[list[str], Parameter(help=f"Learned images: {_LEARNED}", negative=())],
    /,
) -> None:
    """Forget learned images."""
    with _giving_up(model) as classifier:
        number = classifier.forget(images)
        record = classifier.info()["steps"][-1]
    say(f"{count(number, 'image')} forgotten; `geodl undo` takes it back")
    _say_subtracted(record)


def _say_subtracted(record: Mapping[str, Any]) -> None:
    """Print what stays of an image where only sums over all are kept."""
    if record.get("subtracted"):
        say(
            "Only sums over the images are kept: its share is subtracted; standardization, levels and ridge stay as they were"
        )


def export(
    model: Model,
    file: Annotated[Path, Parameter(help="The ONNX file or, with --format web, the folder.")],
    /,
    *,
    to: Annotated[
        Literal["onnx", "web"],
        how(name="--format", help="One ONNX file, or a folder with a page that runs it."),
    ] = "onnx",
    runtime: Annotated[
        Path | None,
        how(help="With --format web: a directory with onnxruntime-web; else npm fetches it."),
    ] = None,
    force: Annotated[bool, how(help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model as one ONNX file, or as a page for the browser."""
    classifier = opened(model)
    if to == "web":
        done = classifier.export_web(file, runtime=runtime, force=force)
    else:
        done = classifier.export(file, force=force)
    if as_json:
        print_json(done)
        return
    what = count(done["checked"], "made-up image" if done["made_up"] else "kept image")
    size = f"{count(done['classes'], 'class')}, {readable(done['bytes'])}"
    say(f"{file}: {size}; differs from the model by {done['difference']:.1g} at most on {what}")
