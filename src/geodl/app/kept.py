"""The pictures that a model keeps, and the learned images whose labels are doubtful."""

import re
from dataclasses import dataclass
from typing import Any

from geodl.app.ledger import UNKNOWN_KEY
from geodl.app.state import State, Use
from geodl.core.errors import DataError
from geodl.data.images import Images, short_hashes

IDENTITY = re.compile("[0-9a-f]{16}")
"""The form of `Kept.id`."""


@dataclass(frozen=True)
class Kept:
    """A picture that the model keeps, or a doubtful image of which only the features are kept (`use` is None).

    id:         by which `relabel` and `forget` find it.
    label:      its class.
    name:       where it came from.
    use:        what the picture is kept for.
    likely:     the class that a doubtful image looks like.
    confidence: in that class, 0 to 1, by a fit without this image and all other doubtful ones.
    """

    id: str
    label: str
    name: str
    use: Use | None
    likely: str | None = None
    confidence: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a doubtful image under the names that `--json` uses."""
        assert self.confidence is not None
        return {"image": self.id, "name": self.name, "class": self.label} | {
            "likely": self.likely,
            "confidence": round(self.confidence, 4),
        }


def doubtful(state: State) -> tuple[Kept, ...]:
    """Return the doubtful images, the most certain mistakes first."""
    ledger, names = state.ledger, state.names
    rows = ((ledger.likely >= 0) & (ledger.keys != UNKNOWN_KEY)).nonzero().squeeze(1)
    rows = rows[ledger.confidences[rows].argsort(descending=True, stable=True)]
    uses = {each.id: each.use for each in kept_pictures(state)} if len(rows) else {}
    return tuple(
        Kept(
            id=(identity := f"{int(ledger.keys[i]):016x}"),
            label=names[int(ledger.labels[i])],
            name=ledger.names[i],
            use=uses.get(identity),
            likely=names[int(ledger.likely[i])],
            confidence=float(ledger.confidences[i]),
        )
        for i in rows.tolist()
    )


def kept(state: State) -> list[Kept]:
    """Return the doubtful images, the most certain mistakes first, then all other pictures by class."""
    doubts = doubtful(state)
    known = {each.id for each in doubts}
    rest = [each for each in kept_pictures(state) if each.id not in known]
    return [*doubts, *sorted(rest, key=lambda each: state.model.row(each.label))]


def kept_pictures(state: State) -> list[Kept]:
    """Return the pictures in the order in which they are stored."""
    pictures = []
    for use, images in state.parts():
        digests = images.item_digests()
        rows = zip(digests, short_hashes(digests).tolist(), images.labels.tolist(), strict=True)
        for digest, key, row in rows:
            name = state.stored.get(digest, "")
            pictures.append(Kept(f"{key:016x}", state.names[row], name, use))
    return pictures


def find(state: State, identity: str) -> tuple[Images, int]:
    """Return the images that contain a kept picture, by its id, and its position there."""
    key = int(identity, 16) if IDENTITY.fullmatch(identity) else None
    for _, images in state.parts():
        keys = short_hashes(images.item_digests()).tolist()
        if key in keys:
            return images, keys.index(key)
    raise DataError("the picture is not stored")
