"""`progress/`: the checkpoint of the phase in work. It can always be computed again, so that damage costs time alone."""

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

    file = _file(path, generation)
    with files.writing(file):
        if not files.is_directory(file.parent):
            files.remove(file.parent)  # a file or a link in its place
        if files.is_directory(file):
            files.remove(file)
    files.make_below(path, NAME)
    write_sealed(file, canonical_json(state) + b"\n" + tensor_file(tensors))


def has_checkpoint(path: Path, generation: int) -> bool:
    """Return whether there is a checkpoint that began from a generation, without reading it."""
    file = _file(path, generation)
    return files.is_directory(file.parent) and file.is_file()


def load_checkpoint(
    path: Path, generation: int
) -> "tuple[dict[str, Tensor], dict[str, Any]] | None":
    """Read the checkpoint that began from a generation, verified; None where there is none."""
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
    """Remove all checkpoints but that of one generation, and the folder where it is left empty."""
    folder = path / NAME
    if not files.is_directory(folder):
        files.unlink(folder)
        return
    files.remove_temporaries(folder)
    found = (name for name in files.names_in(folder) if re.fullmatch("checkpoint-[0-9]+", name))
    files.remove_all(folder, [name for name in found if name != f"checkpoint-{but}"])
    with suppress(OSError):  # something else is in it
        folder.rmdir()
