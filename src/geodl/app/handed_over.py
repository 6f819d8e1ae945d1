"""`teaching/`: images that were handed over to a server and are not learned yet, a folder for each job."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geodl.errors import StoreError
from geodl.files import MissingFileError, interpreting, is_directory, names_in, read_json, remove
from geodl.locks import is_locked

FOLDER = "teaching"


@dataclass(frozen=True)
class HandedOver:
    """What a job brings: images of each class, or a folder of the machine; `made`: when."""

    labels: tuple[str, ...]
    names: tuple[str, ...]
    made: str
    source: Path | None

    @property
    def classes(self) -> dict[str, int]:
        """How many images there are of each class."""
        return dict(Counter(self.labels))


def read_job(folder: Path) -> HandedOver:
    """Read what a job brings."""
    path = folder / "job.json"
    record = read_json(path)
    with interpreting(path):
        source = record["source"]
        labels, names = tuple(map(str, record["labels"])), tuple(map(str, record["names"]))
        return HandedOver(labels, names, str(record["made"]), None if source is None else Path(source))


def interrupted(path: Path) -> Iterator[tuple[Path, HandedOver]]:
    """Yield the folders of jobs whose server was killed or stopped; what is left of one that never began is removed."""
    for folder in _folders(path):
        if is_locked(folder):
            continue  # of a server that runs
        try:
            found = read_job(folder)
        except StoreError:
            discard(folder)
        else:
            yield folder, found


def discard(folder: Path) -> None:
    """Remove the folder of a job."""
    remove(folder)
    if os.path.lexists(folder):
        raise StoreError(f"{folder} cannot be removed; remove it yourself: it holds images")
    with suppress(OSError):  # other jobs may be in it
        folder.parent.rmdir()


def refuse_waiting(path: Path, name: str) -> None:
    """Raise a StoreError where a server that runs has images of a class that wait to be learned, or may be getting some."""
    for folder in filter(is_locked, _folders(path)):
        try:
            waiting = read_job(folder).classes
        except MissingFileError as error:
            raise StoreError(f"{path}: a server is taking in images just now; try again in a moment") from error
        if name in waiting:
            raise StoreError(f"{path}: images of {name!r} wait to be learned by a server; let it learn or cancel them")


def forget_class(path: Path, name: str) -> None:
    """Remove the jobs that no server has and that hold images of a class."""
    for folder, found in interrupted(path):
        if name in found.classes:
            discard(folder)


def _folders(path: Path) -> list[Path]:
    here = path / FOLDER
    return [here / name for name in names_in(here)] if is_directory(here) else []  # behind a link nothing is touched
