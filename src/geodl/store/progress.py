"""`progress/`: the checkpoint of the phase in work, and what may stand in its way. It can always be computed again."""

import os
from pathlib import Path

from geodl.files import is_directory, move, remove, unlink, writing


def is_odd(checkpoint: Path) -> bool:
    """Return whether something stands in the way of a checkpoint: a file or a link for its folder, a folder for itself."""
    folder = checkpoint.parent
    return is_directory(checkpoint) or (os.path.lexists(folder) and not is_directory(folder))


def set_aside(checkpoint: Path) -> None:
    """Move `progress`, whatever it is, to `damaged-progress`, where it stays until the next phase is complete."""
    aside = _aside(checkpoint)
    with writing(aside):
        remove(aside)
        move(checkpoint.parent, aside)


def drop_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, and one that was set aside."""
    with writing(checkpoint):
        remove(_aside(checkpoint))
    if is_odd(checkpoint):
        set_aside(checkpoint)
    else:
        unlink(checkpoint)


def _aside(checkpoint: Path) -> Path:
    return checkpoint.parent.with_name("damaged-progress")
