"""What tells which of a person's images are of one series: file names, folders, the times at which they were taken."""

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


def way_of_grouping(group_by: str) -> str:
    """Return how to group; what is neither a way nor a pattern is an error."""
    if group_by in WAYS:
        return group_by
    try:
        groups = re.compile(group_by).groups
    except re.error:
        groups = 0
    if groups != 1:
        words = f"{', '.join(WAYS)}, or a regular expression of the path inside the class folder with one group, the series"
        raise ConfigError(f"group_by = {group_by!r}: allowed values are {words}")
    return group_by


def clues_of(intake: Intake, group_by: str) -> Tensor:
    """Return the clues (N, 5) to the series of images: all that can be known of them, or the series that the user asks for."""
    clues, places = no_clues(len(intake.images)), _places(intake)
    if group_by == "auto":
        stems = [stem_and_frame(place) for place in places]
        clues[:, FOLDER] = _hashes([str(place.parent) for place in places])
        clues[:, NAME] = _hashes([stem for stem, _ in stems])
        clues[:, FRAME] = torch.tensor([frame for _, frame in stems], dtype=torch.int64)
        clues[:, TIME] = times_of(intake.images)
        return clues
    names = _series_names(intake, places, group_by)
    # What has no name of a series is alone.
    pairs = zip(names, intake.names, strict=True)
    clues[:, GIVEN] = _hashes([name or f"image {own}" for name, own in pairs])
    return clues


def _series_names(intake: Intake, places: Sequence[PurePath], group_by: str) -> list[str | None]:
    """Return the name of each image's series; None: of none."""
    match group_by:
        case "none":
            return [None] * len(places)
        case "name":
            return [stem_and_frame(place)[0] for place in places]
        case "folder":
            return [str(place.parent) for place in places]
        case "time":
            return _runs_of_classes(times_of(intake.images), intake.images.labels)
    found = [re.search(group_by, place.as_posix()) for place in places]
    return [match and match[1] for match in found]


def _runs_of_classes(times: Tensor, labels: Tensor) -> list[str | None]:
    """Name the runs of pictures of a class that were taken one after the other by their first second."""
    names: list[str | None] = [None] * len(times)
    for label in torch.unique(labels):
        rows = ((labels == label) & (times >= 0)).nonzero().squeeze(1)
        runs = runs_of(times[rows])
        for row, run in zip(rows.tolist(), runs.tolist(), strict=True):
            names[row] = str(int(times[rows][runs == run].min()))
    return names


def _places(intake: Intake) -> list[PurePath]:
    """Return the way to each image inside the folder of its class."""
    found = []
    for name, label in zip(intake.names, intake.images.labels.tolist(), strict=True):
        path, folder = PurePath(name), intake.classes[label]
        inside = path.parts[:1] == (folder,) and len(path.parts) > 1
        found.append(path.relative_to(folder) if inside else path)
    return found


def stem_and_frame(path: PurePath) -> tuple[str | None, int]:
    """Return a path less the number that its name ends in, and this number; None, -1: there is no number."""
    match = _FRAME.match(path.stem)
    if match is None:
        return None, -1
    return str(path.with_name(f"{match[1]}#")), int(match[2])


def times_of(images: Images) -> Tensor:
    """Return when photographs were taken, (N,), in seconds; -1: unknown."""
    if not isinstance(images, FileImages):
        return torch.full((len(images),), -1)
    return torch.tensor([taken(item) for item in images.items], dtype=torch.int64)


def _hashes(names: Sequence[str | None]) -> Tensor:
    """Return 63 bits of the hash of each name, (N,); -1 for None."""
    return torch.tensor([_hash(name) for name in names], dtype=torch.int64)


def _hash(name: str | None) -> int:
    if name is None:
        return -1
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8]) >> 1
