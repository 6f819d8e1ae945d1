"""The pictures that a model keeps, and the learned images whose class the others contradict."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from geodl.app.doubts import Doubt, doubtful, image_id
from geodl.app.state import State
from geodl.core.errors import DataError
from geodl.data.images import Images, short_hashes

Use = Literal["exemplar", "validation"]


@dataclass(frozen=True)
class Kept:
    """A picture that a model keeps, or an image with a doubtful class of which it keeps the features alone.

    id:         what `relabel` and `forget` know it by.
    label:      its class.
    name:       where it came from.
    use:        what the picture is kept for; None where there is none.
    likely:     the class that it looks like, where its own is doubtful.
    confidence: in that, 0 to 1.
    """

    id: str
    label: str
    name: str
    use: Use | None
    likely: str | None = None
    confidence: float | None = None


def kept(state: State) -> list[Kept]:
    """Return the doubtful images, the surest mistakes first, then all other pictures by class."""
    pictures = {}
    for use, images in _parts(state):
        digests, labels = images.item_digests(), images.labels.tolist()
        for key, digest, row in zip(_ids(images), digests, labels, strict=True):
            name = state.stored.get(digest, "")
            pictures[key] = Kept(key, state.names[row], name, use)
    doubts = [_doubted(each, pictures.pop(each.image, None)) for each in doubtful(state)]
    return doubts + sorted(pictures.values(), key=lambda each: state.model.row(each.label))


def find(state: State, key: str) -> tuple[Images, int]:
    """Return the images among which a kept picture is, and its place there."""
    for _, images in _parts(state):
        ids = _ids(images)
        if key in ids:
            return images, ids.index(key)
    raise DataError("no such picture is kept")


def _parts(state: State) -> Iterator[tuple[Use, Images]]:
    if state.validation is not None:
        yield "validation", state.validation
    if state.model.memory.images is not None:
        yield "exemplar", state.model.memory.images


def _ids(images: Images) -> list[str]:
    return [image_id(key) for key in short_hashes(images.item_digests()).tolist()]


def _doubted(doubt: Doubt, picture: Kept | None) -> Kept:
    use = picture.use if picture else None
    return Kept(doubt.image, doubt.label, doubt.name, use, doubt.likely, doubt.confidence)
