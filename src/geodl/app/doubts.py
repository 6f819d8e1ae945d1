"""Learned images whose labels the rest of the data contradicts, for the person who can tell."""

from dataclasses import dataclass
from typing import Any

from geodl.app.ledger import UNKNOWN_KEY
from geodl.app.state import State
from geodl.data.images import short_hashes


@dataclass(frozen=True)
class Doubt:
    """A learned image that looks mislabelled.

    image:      what `relabel` and `forget` know it by.
    name:       where it came from.
    label:      the class that it was learned as.
    likely:     the class that it looks like.
    confidence: in that, 0..1, by a fit without it and without all other suspects.
    picture:    its place among the stored pictures (`IncrementalClassifier.validation`); None where it is not stored.
    """

    image: str
    name: str
    label: str
    likely: str
    confidence: float
    picture: int | None

    def to_json(self) -> dict[str, Any]:
        """Return it under the names that `--json` uses."""
        return {"image": self.image, "name": self.name, "class": self.label} | {
            "likely": self.likely,
            "confidence": round(self.confidence, 4),
        }


def image_id(key: int) -> str:
    """Return by what a person or a page names a learned image."""
    return f"{key:016x}"


def doubtful(state: State) -> tuple[Doubt, ...]:
    """Return the doubtful images, the surest mistakes first."""
    ledger, names = state.ledger, state.names
    digests = [] if state.validation is None else state.validation.item_digests()
    pictures = {key: i for i, key in enumerate(short_hashes(digests).tolist())}
    rows = ((ledger.likely >= 0) & (ledger.keys != UNKNOWN_KEY)).nonzero().squeeze(1)
    rows = rows[ledger.confidences[rows].argsort(descending=True, stable=True)]
    return tuple(
        Doubt(
            image=image_id(key := int(ledger.keys[i])),
            name=ledger.names[i],
            label=names[int(ledger.labels[i])],
            likely=names[int(ledger.likely[i])],
            confidence=float(ledger.confidences[i]),
            picture=pictures.get(key),
        )
        for i in rows.tolist()
    )
