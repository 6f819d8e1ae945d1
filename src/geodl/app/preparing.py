"""The images of a step are prepared: labels become rows, repeats and contradictions are skipped, validation images set aside."""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from geodl.app.choices import VALIDATION, in_closed_form
from geodl.app.lookup import placed
from geodl.app.series import clues_of
from geodl.app.state import KnownClass, State
from geodl.closed_form.kept_features import mirroring_changes_nothing
from geodl.closed_form.series import near_duplicates
from geodl.core.errors import DataError
from geodl.core.keys import derive
from geodl.core.text import UNKNOWN
from geodl.data.batches import resized
from geodl.data.dataset import Skipped
from geodl.data.images import Images, short_hashes
from geodl.data.intake import Intake
from geodl.data.squares import Decoded
from geodl.model.herding import first_of_each

SIDE = 16
ALIKE = 0.99
"""Images whose thumbnails of SIDE pixels a side correlate more than this are near-duplicates (burst shots, copies)."""
THUMBNAILS, MOST_THUMBNAILS = 30, 1500
"""Thumbnails of each class, and about how many in all, by which is decided whether mirroring keeps the class."""


@dataclass(frozen=True)
class Prepared:
    """The images that a step learns; labels are rows of the model.

    originals:   the same images as they were given.
    rows:        their places among the images that could be decoded.
    known:       the number of classes before the step.
    fresh:       (N,) bool, the images that were never trained on.
    nothing_new: whether a model in closed form has learned all of them as these classes.
    """

    images: Images
    originals: Images
    rows: tuple[int, ...]
    digests: tuple[str, ...]
    names: tuple[str, ...]
    classes: tuple[KnownClass, ...]
    known: int
    fresh: Tensor
    nothing_new: bool
    problems: Skipped

    @property
    def names_of_classes(self) -> tuple[str, ...]:
        """The names of all classes after this step, by row."""
        return tuple(known.name for known in self.classes)

    @property
    def present(self) -> list[int]:
        """The rows of the classes in this step."""
        return sorted(set(self.images.labels.tolist()))


def prepare(
    intake: Intake, decoded: Decoded, last: State | None, step: int, group_by: str = "auto"
) -> Prepared:
    """Return the images to learn, without those that contradict or repeat others.

    group_by: as for `geodl.app.series.clues_of`.
    """
    known = last.names if last else ()
    position = {name: i for i, name in enumerate(known)}
    problems = [*intake.problems, *decoded.problems, *_clashes(intake.classes, known)]
    for name in intake.classes:
        position.setdefault(name, len(position))
    images = decoded.images
    if len(decoded.kept):
        images = images.relabel(torch.tensor([position[name] for name in intake.classes]))
    names = tuple(intake.names[i] for i in decoded.kept)
    labels = images.labels.tolist()
    rows, repeats = _without_repeats(labels, decoded.digests, names, last)
    problems += repeats
    nothing_new = _all_learned(decoded.digests, labels, rows, last)
    if not rows and not nothing_new:
        first = f" (first: {problems[0][0]}: {problems[0][1]})" if problems else ""
        raise DataError(f"{intake.title}: no image is left to learn from{first}")
    clues = clues_of(intake, group_by)[list(decoded.kept)]
    digests = tuple(decoded.digests[i] for i in rows)
    seen = last.seen if last else torch.empty(0, dtype=torch.int64)
    fresh = ~torch.isin(short_hashes(digests), seen)
    images = replace(images, clues=clues).select(rows)
    images, classes = _with_classes(images, list(position), fresh, last, step)
    return Prepared(
        images=images,
        originals=intake.images.select([decoded.kept[i] for i in rows]),
        rows=tuple(rows),
        digests=digests,
        names=tuple(names[i] for i in rows),
        classes=classes,
        known=len(known),
        fresh=fresh,
        nothing_new=nothing_new,
        problems=tuple(problems),
    )


def _all_learned(
    digests: Sequence[str], labels: Sequence[int], rows: Sequence[int], last: State | None
) -> bool:
    """Return whether a model in closed form has learned some of the images as these classes, and all of `rows`."""
    if last is None:
        return False
    ledger, keys = last.ledger, short_hashes(digests).tolist()
    known = dict(zip(ledger.keys.tolist(), ledger.labels.tolist(), strict=True))
    some = any(known.get(key) == label for key, label in zip(keys, labels, strict=True))
    return some and all(keys[i] in known for i in rows)


def _with_classes(
    images: Images, names: Sequence[str], fresh: Tensor, last: State | None, step: int
) -> tuple[Images, tuple[KnownClass, ...]]:
    """Return the images with their final labels, and all classes after this step.

    A new class of which every image was skipped is not learned: the rows of later ones move up. names: of the classes by label,
    known ones first; fresh: (N,) bool, the images that were never trained on.
    """
    old = list(last.classes) if last else []
    counts = torch.bincount(images.labels, minlength=len(names))
    known = torch.arange(len(names)) < len(old)
    present = known | (counts > 0)
    final = present.long().cumsum(0) - 1
    more = torch.bincount(images.labels[fresh], minlength=len(names)).tolist()
    classes = [replace(each, images=each.images + more[i]) for i, each in enumerate(old)]
    # All images of a new class count, even those that were trained on before the class was removed.
    new = (present & ~known).nonzero().squeeze(1).tolist()
    classes += [KnownClass(names[i], step, int(counts[i])) for i in new]
    return images.relabel(final.where(present, -1)), tuple(classes)


def _clashes(names: Sequence[str], known: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the new names that are easily mistaken for others."""
    folded = {name.casefold(): name for name in known}
    remedy = "undo this step, rename the folder and learn again"
    for name in names:
        if name in known:
            continue
        if name.casefold() in folded:
            other = folded[name.casefold()]
            yield (
                name,
                f"a new class, although the model knows {other!r}; if they are one, {remedy}",
            )
        elif name == UNKNOWN:
            yield name, f"also the label of images unlike all classes; to tell them apart, {remedy}"


def _without_repeats(
    labels: Sequence[int], digests: Sequence[str], names: Sequence[str], last: State | None
) -> tuple[list[int], list[tuple[str, str]]]:
    """Return the rows to learn, and what is skipped: images given twice, or under two classes."""
    known = known_labels(last) if last else {}
    not_again: Set[int] = _never_again(last) if last else set()
    keys = short_hashes(digests).tolist()
    equal: dict[str, list[int]] = {}
    for i, digest in enumerate(digests):
        equal.setdefault(digest, []).append(i)
    rows, problems = [], []
    for i, (label, key) in enumerate(zip(labels, keys, strict=True)):
        twins = equal[digests[i]]
        elsewhere = [j for j in twins if labels[j] != label]
        if last is not None and known.get(key, label) != label:
            problems.append((names[i], _known_as(last, known[key])))
        elif elsewhere:  # one of the labels is wrong, and nobody knows which
            other = names[elsewhere[0]]
            problems.append((names[i], f"the same picture as {other} in another class"))
        elif twins[0] != i:
            problems.append((names[i], f"the same picture as {names[twins[0]]}"))
        elif key not in not_again:
            rows.append(i)
    return rows, problems


def _never_again(last: State) -> Set[int]:
    """Return the short hashes of images that are not learned again: validation images, and those that sums contain."""
    if last.model.default.stored().sums:  # each would count twice
        return set(last.ledger.keys.tolist())
    if in_closed_form(last.config.method):  # pictures to show are learned like all others
        return set()
    return _labels_of(last.validation).keys()


def _known_as(last: State, label: int) -> str:
    """Return why a picture that is known under another class is skipped, and how to move it."""
    words = f"the same picture is known as class {last.names[label]!r} already"
    if not in_closed_form(last.config.method):
        return words
    return f"{words}; `geodl relabel MODEL IMAGE CLASS` moves it, `geodl learn --relabel` all such"


def known_labels(last: State) -> dict[int, int]:
    """Return the class of each image that a model knows, by its short hash."""
    ledger = dict(zip(last.ledger.keys.tolist(), last.ledger.labels.tolist(), strict=True))
    return ledger | _labels_of(last.model.memory.images) | _labels_of(last.validation)


def _labels_of(images: Images | None) -> dict[int, int]:
    if images is None:
        return {}
    keys = short_hashes(images.item_digests()).tolist()
    return dict(zip(keys, images.labels.tolist(), strict=True))


def moving(intake: Intake, decoded: Decoded, last: State) -> list[int]:
    """Return the positions of the decoded images that a model in closed form has learned as another class.

    A picture that is given under several classes is not among them: nobody knows which is right.
    """
    known, keys = known_labels(last), short_hashes(decoded.digests).tolist()
    first: dict[int, int] = {}
    classes: dict[int, set[str]] = {}
    for i, (key, label) in enumerate(zip(keys, decoded.images.labels.tolist(), strict=True)):
        first.setdefault(key, i)
        classes.setdefault(key, set()).add(intake.classes[label])
    found = []
    for key, i in first.items():
        if key in known and len(classes[key]) == 1 and last.names[known[key]] not in classes[key]:
            found.append(i)
    if not found:
        return found
    hashes = short_hashes([decoded.digests[i] for i in found])
    places = placed(last, hashes, decoded.images.select(found)).tolist()
    return [i for i, place in zip(found, places, strict=True) if place >= 0]


def set_aside(ready: Prepared, last: State | None) -> Tensor:
    """Choose the validation images, (N,) bool, by their content: up to ten a class and a fifth of it.

    Near-duplicates stay on one side. A returning class gives more as long as it has fewer than ten.
    """
    counts = last.checks if last else Counter[int]()
    held = torch.zeros(len(ready.images), dtype=torch.bool)
    for label in ready.present:
        mine = (ready.images.labels == label).nonzero().squeeze(1)
        lacking = min(VALIDATION, ready.classes[label].images // 5) - counts[label]
        fresh = [int(i) for i in mine if ready.fresh[i]]
        limit = min(lacking, len(fresh) // 2)
        if limit <= 0:
            continue
        pixels = resized(ready.images.select(mine), SIDE).pixels.flatten(1).float()
        groups = near_duplicates(pixels - pixels.mean(1, keepdim=True), ALIKE)
        series: dict[int, list[int]] = {}
        for i, group in zip(mine.tolist(), groups.tolist(), strict=True):
            series.setdefault(group, []).append(i)
        for rows in sorted(series.values(), key=lambda rows: _draw(ready, rows)):
            unseen = bool(ready.fresh[rows].all())
            if unseen and int(held[mine].sum()) + len(rows) <= limit:
                held[rows] = True
    return held


def _draw(ready: Prepared, rows: Sequence[int]) -> int:
    """Return the random number of a series, which depends on its content alone."""
    return min(derive(0, "validation image", ready.digests[i]) for i in rows)


def mirrors(images: Images) -> bool:
    """Return whether mirroring keeps the class: False if mirrored thumbnails are predicted as another one."""
    classes = torch.tensor(sorted(set(images.labels.tolist())))
    labels = torch.searchsorted(classes, images.labels)
    rows = first_of_each(labels, THUMBNAILS)
    rows = rows[:: max(1, len(rows) // MOST_THUMBNAILS)]
    pixels, labels = resized(images.select(rows), SIDE).pixels, labels[rows]
    thumbnails, copies = (each.flatten(1).float() for each in (pixels, pixels.flip(-1)))
    return mirroring_changes_nothing(thumbnails, copies, labels)
