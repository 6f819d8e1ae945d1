"""The pictures that a model keeps, and the learned images whose class the others contradict."""

import re
from dataclasses import dataclass
from typing import Any

from geodl.app.ledger import UNKNOWN_KEY
from geodl.app.state import State, Use
from geodl.core.errors import DataError
from geodl.data.images import Images, short_hashes

IDENTITY = re.compile("[0-9a-f]{16}")
"""How `Kept.id` names an image."""


@dataclass(frozen=True)
class Kept:
    """A picture that the model keeps, or a doubtful image of which it keeps the features alone: `use` is None then.

    id:         what `relabel` and `forget` know it by.
    label:      its class.
    name:       where it came from.
    use:        what the picture is kept for.
    likely:     the class that it looks like, where its own is doubtful.
    confidence: in that, 0 to 1, by a fit without it and without all other suspects.
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
    """Return the doubtful images, the surest mistakes first."""
    ledger, names = state.ledger, state.names
    rows = ((ledger.likely >= 0) & (ledger.keys != UNKNOWN_KEY)).nonzero().squeeze(1)
    rows = rows[ledger.confidences[rows].argsort(descending=True, stable=True)]
    uses = {each.id: each.use for each in _pictures(state)} if len(rows) else {}
    return tuple(
        Kept(
            id=(key := _id(int(ledger.keys[i]))),
            label=names[int(ledger.labels[i])],
            name=ledger.names[i],
            use=uses.get(key),
            likely=names[int(ledger.likely[i])],
            confidence=float(ledger.confidences[i]),
        )
        for i in rows.tolist()
    )


def kept(state: State) -> list[Kept]:
    """Return the doubtful images, the surest mistakes first, then all other pictures by class."""
    doubts = doubtful(state)
    known = {each.id for each in doubts}
    rest = [each for each in _pictures(state) if each.id not in known]
    return [*doubts, *sorted(rest, key=lambda each: state.model.row(each.label))]


def find(state: State, key: str) -> tuple[Images, int]:
    """Return the images among which a kept picture is, by its id, and its place there."""
    found = state.picture(int(key, 16)) if IDENTITY.fullmatch(key) else None
    if found is None:
        raise DataError("no such picture is kept")
    return found


def _pictures(state: State) -> list[Kept]:
    found = []
    for use, images in state.parts():
        digests = images.item_digests()
        rows = zip(digests, short_hashes(digests).tolist(), images.labels.tolist(), strict=True)
        for digest, key, row in rows:
            name = state.stored.get(digest, "")
            found.append(Kept(_id(key), state.names[row], name, use))
    return found


def _id(key: int) -> str:
    return f"{key:016x}"
