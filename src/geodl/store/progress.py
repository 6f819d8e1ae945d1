"""`progress/`: the checkpoint of the phase in work, and what may stand in its way. It can always be computed again."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from geodl import files


def save_checkpoint(path: Path, phase: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Replace the checkpoint: tensors and state in one file, so that one rename replaces both."""
    if is_odd(path):
        set_aside(path)
    files.make_directory(path.parent)
    files.write_tensors(path, tensors, {"phase": str(phase), "state": files.canonical_json(state).decode()})


def load_checkpoint(path: Path, phase: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the checkpoint, verified; None where it is of another phase than the one in work."""
    tensors, metadata = files.read_tensors(path)
    with files.interpreting(path):
        if metadata["phase"] != str(phase):
            return None  # killed after its phase was saved and before it was removed
        return tensors, files.parse_object(metadata["state"].encode(), path)


def is_odd(checkpoint: Path) -> bool:
    """Return whether something stands in the way of a checkpoint: a file or a link for its folder, a folder for itself."""
    folder = checkpoint.parent
    return files.is_directory(checkpoint) or (os.path.lexists(folder) and not files.is_directory(folder))


def set_aside(checkpoint: Path) -> None:
    """Move `progress`, whatever it is, to `damaged-progress`, where it stays until the next phase is complete."""
    aside = _aside(checkpoint)
    with files.writing(aside):
        files.remove(aside)
        files.move(checkpoint.parent, aside)


def drop_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, and one that was set aside."""
    with files.writing(checkpoint):
        files.remove(_aside(checkpoint))
    if is_odd(checkpoint):
        set_aside(checkpoint)
    else:
        files.unlink(checkpoint)


def _aside(checkpoint: Path) -> Path:
    return checkpoint.parent.with_name("damaged-progress")
