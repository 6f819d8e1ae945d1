"""Clues to which images are of one series: file names, folders, and the times at which they were taken."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePath

import torch
from torch import Tensor

from geodl.closed_form.series import no_clues, runs_of
from geodl.core.decoding import taken
from geodl.core.errors import ConfigError
from geodl.data.images import FileImages, Images
from geodl.data.intake import Intake

WAYS = ("auto", "name", "time", "folder", "none")
"""Values of --group-by; any other is a pattern."""
GIVEN, FOLDER, NAME, FRAME, TIME = range(5)
_FRAME = re.compile(r"(.*?)[ _.()-]*(\d{1,18})\)?$")


def check_grouping(group_by: str) -> None:
    """Raise a ConfigError for a value of --group-by that is neither a way of grouping nor a pattern."""
    try:
        groups = 1 if group_by in WAYS else re.compile(group_by).groups
    except re.error:
        groups = 0
    if groups != 1:
        words = f"{', '.join(WAYS)}, or a regular expression of the path inside the class folder with one group, the series"
        raise ConfigError(f"group_by = {group_by!r}: allowed values are {words}")


def clues_of(intake: Intake, group_by: str) -> Tensor:
    """Return the clues (N, 5) to the series of images: all that are known, or the series that the user asks for."""
    clues, paths = no_clues(len(intake.images)), _paths(intake)
    if group_by == "auto":
        stems = [stem_and_frame(path) for path in paths]
        clues[:, FOLDER] = _hashes([str(path.parent) for path in paths])
        clues[:, NAME] = _hashes([stem for stem, _ in stems])
        clues[:, FRAME] = torch.tensor([frame for _, frame in stems], dtype=torch.int64)
        clues[:, TIME] = times_of(intake.images)
        return clues
    # An image without a series is alone.
    pairs = zip(_series_names(intake, paths, group_by), intake.names, strict=True)
    clues[:, GIVEN] = _hashes([name or f"image {own}" for name, own in pairs])
    return clues


def _series_names(intake: Intake, paths: Sequence[PurePath], group_by: str) -> list[str | None]:
    """Return the name of each image's series; None: of none."""
    match group_by:
        case "none":
            return [None] * len(paths)
        case "name":
            return [stem_and_frame(path)[0] for path in paths]
        case "folder":
            return [str(path.parent) for path in paths]
        case "time":
            return _runs_of_classes(times_of(intake.images), intake.images.labels)
    found = [re.search(group_by, path.as_posix()) for path in paths]
    return [match and match[1] for match in found]


def _runs_of_classes(times: Tensor, labels: Tensor) -> list[str | None]:
    """Name the runs of consecutive pictures of a class by the second of their first picture."""
    names: list[str | None] = [None] * len(times)
    for label in torch.unique(labels):
        rows = ((labels == label) & (times >= 0)).nonzero().squeeze(1)
        runs = runs_of(times[rows])
        for row, run in zip(rows.tolist(), runs.tolist(), strict=True):
            names[row] = str(int(times[rows][runs == run].min()))
    return names


def _paths(intake: Intake) -> list[PurePath]:
    """Return the path of each image inside the folder of its class."""
    paths = []
    for name, label in zip(intake.names, intake.images.labels.tolist(), strict=True):
        path, folder = PurePath(name), intake.classes[label]
        inside = path.parts[:1] == (folder,) and len(path.parts) > 1
        paths.append(path.relative_to(folder) if inside else path)
    return paths


def stem_and_frame(path: PurePath) -> tuple[str | None, int]:
    """Return a path without the number at the end of its name, and this number; None and -1 without a number."""
    match = _FRAME.match(path.stem)
    if match is None:
        return None, -1
    return str(path.with_name(f"{match[1]}#")), int(match[2])


def times_of(images: Images) -> Tensor:
    """Return the seconds at which photographs were taken, (N,); -1: unknown."""
    if not isinstance(images, FileImages):
        return torch.full((len(images),), -1)
    return torch.tensor([taken(item) for item in images.items], dtype=torch.int64)


def _hashes(names: Sequence[str | None]) -> Tensor:
    """Return 63 bits of the hash of each name, (N,); -1 for None."""
    contents = [(name or "").encode("utf-8", "surrogatepass") for name in names]
    hashes = [int.from_bytes(hashlib.sha256(each).digest()[:8]) >> 1 for each in contents]
    known = torch.tensor([name is not None for name in names], dtype=torch.bool)
    return torch.tensor(hashes, dtype=torch.int64).where(known, -1)
