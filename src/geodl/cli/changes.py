"""Commands that change or export a model: ``geodl undo``, ``redo``, ``rename``, ``remove``, ``relabel``, ``forget``, ``export``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from geodl.cli import own_display as display
from geodl.cli.display import Json, echo, print_json
from geodl.cli.own import Model, opened
from geodl.core.text import count, readable

if TYPE_CHECKING:
    from geodl.app.classifier import IncrementalClassifier


@contextmanager
def _changing(model: Path) -> "Iterator[IncrementalClassifier]":
    """Yield the model to change, and print a line if the change discards an interrupted learn step."""
    classifier = opened(model)
    unfinished = classifier.unfinished
    yield classifier
    if unfinished:
        echo("the interrupted learn step is discarded: it began from another state", "yellow")


def undo(model: Model, /) -> None:
    """Undo the last step."""
    with _changing(model) as classifier:
        record = classifier.undo()
    if record["action"] == "damaged":
        echo("undone: the last state, which is damaged; there is no redo")
    else:
        echo(
            f"undone: {display.describe_step(record)}; `geodl redo` restores it, until the next change"
        )


def redo(model: Model, /) -> None:
    """Restore the step that was undone last."""
    with _changing(model) as classifier:
        record = classifier.redo()
    echo(f"restored: {display.describe_step(record)}")


def rename(model: Model, old: str, new: str, /) -> None:
    """Rename a class.

    Args:
        old: The present name of the class.
        new: Its new name.
    """
    with _changing(model) as classifier:
        classifier.rename(old, new)
    echo(f"{old} is now called {new}")


def remove(
    model: Model,
    name: Annotated[str, Parameter(name="CLASS")],
    /,
    *,
    for_good: bool = False,
) -> None:
    """Remove a class and its images.

    Args:
        name: The class to remove.
        for_good: Remove all other states too, so that neither image nor features of the class are left; no undo.
    """
    with _changing(model) as classifier:
        stays = classifier.remove(name, for_good=for_good)
    rest = "`geodl undo` restores it (--for-good: no undo)"
    if for_good:
        rest = "no image of it is left, and there is no undo"
    rest += f"; {stays} stay" if stays else ""
    echo(f"{name} is removed; {rest}")


def relabel(model: Model, image: str, name: Annotated[str, Parameter(name="CLASS")], /) -> None:
    """Move a learned image to its right class.

    Args:
        image: The learned image: a file, the name that it was learned under, or the identity that --json shows.
        name: The right class; if that is its present class, its label is confirmed.
    """
    with _changing(model) as classifier:
        record = classifier.relabel(image, name)
    done = f"is now of class {name}" if record["action"] == "relabel" else f"stays in class {name}"
    echo(f"{image} {done}; `geodl undo` takes it back")
    _print_subtracted(record)


def forget(model: Model, images: list[str], /) -> None:
    """Forget learned images.

    Args:
        images: Learned images: files, the names that they were learned under, or the identities that --json shows.
    """
    with _changing(model) as classifier:
        number = classifier.forget(images)
        record = classifier.info()["steps"][-1]
    echo(f"{count(number, 'image')} forgotten; `geodl undo` takes it back")
    _print_subtracted(record)


def _print_subtracted(record: Mapping[str, Any]) -> None:
    """Print what remains of an image in a model that keeps only sums."""
    if record.get("subtracted"):
        echo(
            "Only sums over the images are kept: its share is subtracted; standardization, levels and ridge stay as they were"
        )


def export(
    model: Model,
    file: Path,
    /,
    *,
    to: Annotated[Literal["onnx", "web"], Parameter(name="--format")] = "onnx",
    runtime: Path | None = None,
    force: bool = False,
    as_json: Json = False,
) -> None:
    """Write a model as one ONNX file, or as a page for the browser.

    Args:
        file: The ONNX file or, with --format web, the folder.
        to: One ONNX file, or a folder with a page that runs it.
        runtime: With --format web: a directory with onnxruntime-web; else npm fetches it.
        force: Replace an existing file.
    """
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
    echo(f"{file}: {size}; differs from the model by {done['difference']:.1g} at most on {what}")
