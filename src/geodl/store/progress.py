"""`progress/`: the checkpoint of the unfinished phase. It is disposable: the phase can be computed again."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geodl.core import files
from geodl.core.content import canonical_json, parse_object, read_sealed, write_sealed

if TYPE_CHECKING:
    from torch import Tensor

NAME = "progress"


def _file(path: Path, generation: int) -> Path:
    return path / NAME / f"checkpoint-{generation}"


def save_checkpoint(
    path: Path, generation: int, tensors: "Mapping[str, Tensor]", state: Mapping[str, Any]
) -> None:
    """Replace the checkpoint: tensors and state in one file, so that one rename replaces both."""
    from geodl.core.tensors import tensor_file

    if not files.is_directory(path / NAME):
        files.unlink(path / NAME)  # a file or a link in its place
    files.make_below(path, NAME)
    data = canonical_json(state) + b"\n" + tensor_file(tensors)
    write_sealed(_file(path, generation), data)


def has_checkpoint(path: Path, generation: int) -> bool:
    """Return whether a checkpoint of a generation exists, without reading it."""
    file = _file(path, generation)
    return files.is_directory(file.parent) and file.is_file()


def load_checkpoint(
    path: Path, generation: int
) -> "tuple[dict[str, Tensor], dict[str, Any]] | None":
    """Return the verified checkpoint of a generation, or None if it does not exist."""
    from geodl.core.tensors import parse_tensors

    file = _file(path, generation)
    if not files.is_directory(file.parent):
        return None
    try:
        state, _, tensors = read_sealed(file).partition(b"\n")
    except files.MissingFileError:
        return None
    return parse_tensors(tensors, file), parse_object(state, file)


def drop_checkpoints(path: Path, but: int | None = None) -> None:
    """Remove all checkpoints except that of one generation, and the folder if it is then empty."""
    folder = path / NAME
    if not files.is_directory(folder):
        files.unlink(folder)
        return
    files.remove_temporaries(folder)
    names = filter(re.compile("checkpoint-[0-9]+").fullmatch, files.names_in(folder))
    files.remove_all(folder, [name for name in names if name != f"checkpoint-{but}"])
    with suppress(OSError):  # not empty
        folder.rmdir()
