"""From what was handed over to what is learned: internal labels, no contradictions, validation images set aside."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from geodl.app.choices import VALIDATION, in_closed_form
from geodl.app.finding import placed
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
"""Pictures whose thumbnails of SIDE pixels correlate more than this are of one series (burst shots, copies)."""
THUMBNAILS, MOST_THUMBNAILS = 30, 1500
"""Of each class, and about so many in all, that tell whether mirroring keeps the class."""


@dataclass(frozen=True)
class Prepared:
    """The images of a step, cleaned: labels are internal; `known` counts the classes known before.

    originals: the same images as they were given.
    rows: their places among the images that could be decoded.
    fresh: (N,) bool, the images that were never trained on.
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
        """The names of all classes known with this step, in the order of their labels."""
        return tuple(known.name for known in self.classes)

    @property
    def present(self) -> list[int]:
        """The classes that the step brings images of."""
        return sorted(set(self.images.labels.tolist()))


def prepare(
    intake: Intake, decoded: Decoded, last: State | None, step: int, group_by: str = "auto"
) -> Prepared:
    """Return the images with internal labels, without what would contradict or repeat what is stored.

    group_by: what tells which images are of one series (`geodl.app.series`).
    """
    known = last.names if last else ()
    position = {name: i for i, name in enumerate(known)}
    problems = [*intake.problems, *decoded.problems, *_clashes(intake.classes, list(position))]
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
        known=len(last.classes) if last else 0,
        fresh=fresh,
        nothing_new=nothing_new,
        problems=tuple(problems),
    )


def _all_learned(
    digests: Sequence[str], labels: Sequence[int], rows: Sequence[int], last: State | None
) -> bool:
    """Return whether a model in closed form has learned some of the images as these classes, and all at `rows`."""
    if last is None:
        return False
    ledger, keys = last.ledger, short_hashes(digests).tolist()
    known = dict(zip(ledger.keys.tolist(), ledger.labels.tolist(), strict=True))
    some = any(known.get(key) == label for key, label in zip(keys, labels, strict=True))
    return some and all(keys[i] in known for i in rows)


def _with_classes(
    images: Images, names: Sequence[str], fresh: Tensor, last: State | None, step: int
) -> tuple[Images, tuple[KnownClass, ...]]:
    """Return the images with their final labels, and all classes known with this step.

    A class of which every image was skipped is not learned: the others move up. names: of the classes, by label, those that the
    model knows first; fresh: (N,) bool, the images that were never trained on.
    """
    old = list(last.classes) if last else []
    counts = torch.bincount(images.labels, minlength=len(names))
    known = torch.arange(len(names)) < len(old)
    present = known | (counts > 0)
    final = present.long().cumsum(0) - 1
    more = torch.bincount(images.labels[fresh], minlength=len(names)).tolist()
    classes = [replace(each, images=each.images + more[i]) for i, each in enumerate(old)]
    # Of a new class every image counts, also one that was learned from before the class was removed.
    new = (present & ~known).nonzero().squeeze(1).tolist()
    classes += [KnownClass(names[i], step, int(counts[i])) for i in new]
    return images.relabel(final.where(present, -1)), tuple(classes)


def _clashes(names: Sequence[str], known: Sequence[str]) -> list[tuple[str, str]]:
    """Say which new names are easily mistaken for others."""
    folded = {name.casefold(): name for name in known}
    remedy = "undo this step, rename the folder and learn again"
    found = []
    for name in names:
        if name in known:
            continue
        if name.casefold() in folded:
            words = f"a new class, although the model knows {folded[name.casefold()]!r}; if they are one, {remedy}"
            found.append((name, words))
        elif name == UNKNOWN:
            words = f"a class whose name is also said of images unlike all classes; to tell them apart, {remedy}"
            found.append((name, words))
    return found


def _without_repeats(
    labels: Sequence[int], digests: Sequence[str], names: Sequence[str], last: State | None
) -> tuple[list[int], list[tuple[str, str]]]:
    """Choose the rows to learn: no picture twice, none under two classes, none that is set aside or in sums."""
    # In closed form the pictures that are kept to show are learned like all others.
    aside = last is not None and not in_closed_form(last.config.method)
    checks = _labels_of(last.validation) if last and aside else {}
    summed = _summed(last)
    known = known_labels(last) if last else {}
    keys = short_hashes(digests).tolist()
    equal: dict[str, list[int]] = {}
    for i, digest in enumerate(digests):
        equal.setdefault(digest, []).append(i)
    rows, problems = [], []
    for i, (label, digest) in enumerate(zip(labels, digests, strict=True)):
        twins = equal[digest]
        elsewhere = [j for j in twins if labels[j] != label]
        if known.get(keys[i], label) != label:
            assert last is not None
            problems.append((names[i], _known_as(last, known[keys[i]])))
        elif elsewhere:  # one of the labels is wrong, and nobody knows which
            problems.append(
                (names[i], f"the same picture as {names[elsewhere[0]]} in another class")
            )
        elif twins[0] != i:
            problems.append((names[i], f"the same picture as {names[twins[0]]}"))
        elif keys[i] not in checks and keys[i] not in summed:
            rows.append(i)
    return rows, problems


def _summed(last: State | None) -> set[int]:
    """Return the short hashes of the images that sums hold already: in these each would count twice."""
    if last is None or not last.stored_sums:
        return set()
    return set(last.ledger.keys.tolist())


def _known_as(last: State, label: int) -> str:
    """Say that a picture is known under another class, and what moves it."""
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
    """Return the positions among the decoded images of those that a model in closed form has learned as another class.

    Not of a picture that is given under several classes: nobody knows which is right.
    """
    known, keys = known_labels(last), short_hashes(decoded.digests).tolist()
    names = [intake.classes[label] for label in decoded.images.labels.tolist()]
    given: dict[int, set[str]] = {}
    for key, name in zip(keys, names, strict=True):
        given.setdefault(key, set()).add(name)
    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    found = []
    for key, i in first.items():
        if key in known and len(given[key]) == 1 and last.names[known[key]] != names[i]:
            found.append(i)
    found.sort()
    if not found:
        return found
    hashes = short_hashes([decoded.digests[i] for i in found])
    places = placed(last, hashes, decoded.images.select(found)).tolist()
    return [i for i, place in zip(found, places, strict=True) if place >= 0]


def set_aside(ready: Prepared, last: State | None) -> Tensor:
    """Choose the validation images, (N,) bool, by their content: up to ten a class and a fifth of it.

    A series of near-duplicates stays on one side. A class that comes back gives more as long as it has fewer than ten.
    """
    have = last.checks if last else Counter[int]()
    held = torch.zeros(len(ready.images), dtype=torch.bool)
    for label in ready.present:
        mine = (ready.images.labels == label).nonzero().squeeze(1)
        wanted = min(VALIDATION, ready.classes[label].images // 5) - have[label]
        fresh = [int(i) for i in mine if ready.fresh[i]]
        limit = min(wanted, len(fresh) // 2)
        if limit <= 0:
            continue
        # Near-duplicates are alike even when they are tiny.
        pixels = resized(ready.images.select(mine), SIDE).pixels.flatten(1).float()
        groups = near_duplicates(pixels - pixels.mean(1, keepdim=True), ALIKE)
        series: dict[int, list[int]] = {}
        for i, group in zip(mine.tolist(), groups.tolist(), strict=True):
            series.setdefault(group, []).append(i)
        old = {i for i, fresh in enumerate(ready.fresh) if not fresh}
        whole = [rows for rows in series.values() if old.isdisjoint(rows)]
        for rows in sorted(
            whole,
            key=lambda rows: min(derive(0, "validation image", ready.digests[i]) for i in rows),
        ):
            if int(held[mine].sum()) + len(rows) <= limit:
                held[rows] = True
    return held


def mirrors(images: Images) -> bool:
    """Return whether mirroring keeps the class, as far as thumbnails tell it: False where copies are predicted as another class."""
    classes = torch.tensor(sorted(set(images.labels.tolist())))
    labels = torch.searchsorted(classes, images.labels)
    rows = first_of_each(labels, THUMBNAILS)
    rows = rows[:: max(1, len(rows) // MOST_THUMBNAILS)]
    pixels, labels = resized(images.select(rows), SIDE).pixels, labels[rows]
    thumbnails, copies = (each.flatten(1).float() for each in (pixels, pixels.flip(-1)))
    return mirroring_changes_nothing(thumbnails, copies, labels)
