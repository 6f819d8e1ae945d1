"""Incomplete writes: killed, or on a disk that fails."""

import errno
import random
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.directories import Killed
from tests.helpers.writes import WRITES, Whole

from geodl.core import files

from .directories import answers, comparable
from .harness import family

NAMES = [name for name in WRITES if name != "conversion and commit"]
"""The version between these two writes is neither the old nor the new one."""


def read(path: Path) -> dict[str, Any]:
    """Return all answers of a directory that can be compared."""
    return comparable(answers(path))


@family("kills")
def kills(draw: random.Random, folder: Path) -> None:
    """Killed at any step of any write, with what was not yet on the disk torn: old or new, and the same write resumes."""
    _stopped(draw, folder, Killed(), tear=draw.random() < 0.5)


@family("failing disk")
def failing_disk(draw: random.Random, folder: Path) -> None:
    """A disk that is full, read-only or broken at any step, also while cleaning up: one line, and old or new."""
    kind = draw.choice([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT])

    def remove(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    cleaning = mock.patch.object(files, "remove", remove) if draw.random() < 0.5 else None
    _stopped(draw, folder, OSError(kind, "a failure"), also=cleaning)


def _stopped(draw: random.Random, folder: Path, failure: BaseException, **how: Any) -> None:
    whole = Whole.of(WRITES[draw.choice(NAMES)], folder / "whole", read)
    whole.stopped(folder / "it", draw.randrange(whole.steps), failure, **how)
