"""Images collected for teaching: kept until they are taught, the server ends, or they expire."""

import hashlib
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geodl.app.serve import schemas
from geodl.app.serve.jobs import Job, Teacher
from geodl.app.serve.limits import Limits, Refused
from geodl.app.serve.uploads import Upload
from geodl.core.decoding import open_image, shown
from geodl.core.errors import DataError
from geodl.core.text import printable, readable

SIDE = 128
"""Side of a thumbnail in pixels."""


@dataclass
class Collected:
    """A collected image: what clients see of it, its file, its size in bytes, and the time of its last upload."""

    facts: schemas.Collected
    file: Path
    size: int
    since: float


class Tray:
    """The collected images, by the hash of their contents, so that each image is in one class at a time.

    version: increases with every change.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.version = limits, 0
        self._items: dict[str, Collected] = {}
        self._lock = threading.Lock()

    def listed(self) -> list[schemas.Collected]:
        """Return the collected images, oldest first."""
        with self._lock:
            return [item.facts.model_copy() for item in self._items.values()]

    def add(self, upload: Upload) -> list[schemas.Collected]:
        """Collect the images of a request; one that is collected already gets the new class."""
        labels, digests = upload.classes(), [_digest(file) for file in upload.files]
        sizes = [file.stat().st_size for file in upload.files]
        with self._lock:
            new = [size for size, key in zip(sizes, digests, strict=True) if key not in self._items]
            self._require_room(len(new), sum(new))
            upload.kept = True
            for image in zip(digests, labels, upload.names, upload.files, sizes, strict=True):
                self._put(*image)
            self.version += 1
            return [self._items[key].facts.model_copy() for key in digests]

    def drop(self, keys: Collection[str] = (), label: str | None = None) -> None:
        """Drop some images, or those of a class, except images that are being taught."""
        with self._lock:
            for key, item in list(self._items.items()):
                chosen = key in keys or item.facts.label == label
                if chosen and item.facts.job is None:
                    self._remove(key)
                    self.version += 1

    def expire(self) -> None:
        """Drop images that were not taught in time."""
        oldest = time.monotonic() - self.limits.tray_seconds
        old = [key for key, item in list(self._items.items()) if item.since < oldest]
        if old:
            self.drop(old)

    def picture(self, key: str) -> schemas.Picture:
        """Return a thumbnail; if the image cannot be read, an empty one, and the reason is kept as its flaw."""
        item = self._items.get(key)
        if item is None:
            raise Refused(404, "no such image")
        try:
            image = open_image(item.file, at_least=SIDE)
        except DataError as error:
            item.facts.flaw = str(error).removeprefix(f"{shown(item.file)}: ")
            self.version += 1
            return schemas.Picture(image="")
        return schemas.Picture.of(image, SIDE)

    def teach(self, teacher: Teacher) -> Job:
        """Queue a job that teaches all images that are not part of another job."""
        with self._lock:
            ready = [item for item in self._items.values() if item.facts.job is None]
            if not ready:
                raise Refused(409, "no images are collected")
            labels = [item.facts.label for item in ready]
            names = [item.facts.name for item in ready]
            files = [item.file for item in ready]
            job = teacher.add(Job.of_files(files, names, labels, self._settle))
            for item in ready:
                item.facts.job = job.facts.id
            self.version += 1
            return job

    def _settle(self, job: Job, state: schemas.State) -> None:
        """Drop learned images; those that could not be used stay, with the reason."""
        reasons = {skipped.name: skipped.reason for skipped in job.facts.skipped}
        with self._lock:
            for key, item in list(self._items.items()):
                if item.facts.job != job.facts.id:
                    continue
                item.facts.job = None
                item.facts.flaw = reasons.get(
                    printable(f"{item.facts.label}/{item.facts.name}"), ""
                )
                if state == "done" and not item.facts.flaw:
                    self._remove(key)
            self.version += 1

    def _require_room(self, images: int, size: int) -> None:
        limits = self.limits
        if len(self._items) + images > limits.learn_images:
            raise Refused(413, f"more than {limits.learn_images} images are collected; teach some")
        if sum(item.size for item in self._items.values()) + size > limits.tray_bytes:
            most = readable(limits.tray_bytes)
            raise Refused(413, f"the collected images are larger than {most} together; teach some")

    def _put(self, key: str, label: str, name: str, file: Path, size: int) -> None:
        now = time.monotonic()
        if key in self._items:
            _unlink(file)
            item = self._items[key]
            if item.facts.job is not None:
                return
            item.since, item.facts.label = now, label
        else:
            facts = schemas.Collected(id=key, label=label, name=name)
            item = self._items[key] = Collected(facts, file, size, now)
        item.facts.name = self._unique(key, label, item.facts.name)

    def _unique(self, key: str, label: str, name: str) -> str:
        """Return a name that is unique in the class, so that a job's reasons can be assigned to images."""
        others = [item.facts for other, item in self._items.items() if other != key]
        taken = {facts.name for facts in others if facts.label == label}
        return name if name not in taken else f"{key[:8]} {name}"

    def _remove(self, key: str) -> None:
        _unlink(self._items.pop(key).file)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _unlink(file: Path) -> None:
    """Delete a file, and its folder once that is empty."""
    with suppress(OSError):
        file.unlink()
        file.parent.rmdir()
