"""Images collected for teaching: they outlive the page, but not the server, and expire where nobody teaches them."""

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
from geodl.core.text import readable
from geodl.model.page import thumbnail, webp

SIDE = 128
"""Pixels a side of a thumbnail."""


@dataclass
class Collected:
    """An image: what clients see of it, its file, its bytes, and when it came."""

    facts: schemas.Collected
    file: Path
    size: int
    since: float


class Tray:
    """The collected images by the hash of their contents, so that an image is in one class at a time.

    version: another number at every change.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.version = limits, 0
        self._items: dict[str, Collected] = {}
        self._lock = threading.Lock()

    def listed(self) -> list[schemas.Collected]:
        """Return what is collected, in the order in which it came."""
        with self._lock:
            return [item.facts.model_copy() for item in self._items.values()]

    def add(self, upload: Upload) -> list[schemas.Collected]:
        """Collect the images of a request. One that is here already gets its new class."""
        labels, digests = upload.classes(), [_digest(file) for file in upload.files]
        sizes = [file.stat().st_size for file in upload.files]
        with self._lock:
            fresh = [
                size for size, key in zip(sizes, digests, strict=True) if key not in self._items
            ]
            self._insist_on_room(len(fresh), sum(fresh))
            upload.kept = True
            for given in zip(digests, labels, upload.names, upload.files, sizes, strict=True):
                self._put(*given)
            self.version += 1
            return [self._items[key].facts.model_copy() for key in digests]

    def drop(self, keys: Collection[str] = (), label: str | None = None) -> None:
        """Drop some images, or those of a class; what is being taught stays."""
        with self._lock:
            for key, item in list(self._items.items()):
                wanted = key in keys or item.facts.label == label
                if wanted and item.facts.job is None:
                    self._remove(key)
                    self.version += 1

    def expire(self) -> None:
        """Drop what nobody has taught for too long."""
        oldest = time.monotonic() - self.limits.tray_seconds
        old = [key for key, item in list(self._items.items()) if item.since < oldest]
        if old:
            self.drop(old)

    def picture(self, key: str) -> str:
        """Return a thumbnail as a data address; where there is none, it is empty and the flaw is noted."""
        item = self._items.get(key)
        if item is None:
            raise Refused(404, "no such image")
        try:
            image = open_image(item.file, at_least=SIDE)
        except DataError as error:
            item.facts.flaw = str(error).removeprefix(f"{shown(item.file)}: ")
            self.version += 1
            return ""
        return f"data:image/webp;base64,{webp(thumbnail(image, SIDE))}"

    def teach(self, teacher: Teacher) -> Job:
        """Queue a job that teaches all images that no job has."""
        with self._lock:
            ready = [item for item in self._items.values() if item.facts.job is None]
            if not ready:
                raise Refused(409, "no images are collected")
            labels, names = (
                [item.facts.label for item in ready],
                [item.facts.name for item in ready],
            )
            files = [item.file for item in ready]
            job = teacher.add(Job.of_files(files, names, labels, self._settle))
            for item in ready:
                item.facts.job = job.facts.id
            self.version += 1
            return job

    def _settle(self, job: Job, state: schemas.State) -> None:
        """Drop what was learned; what could not be used stays with its reason."""
        reasons = {each.name: each.reason for each in job.facts.skipped}
        with self._lock:
            for key, item in list(self._items.items()):
                if item.facts.job != job.facts.id:
                    continue
                item.facts.job = None
                item.facts.flaw = reasons.get(job.name_of(item.facts.label, item.facts.name), "")
                if state == "done" and not item.facts.flaw:
                    self._remove(key)
            self.version += 1

    def _insist_on_room(self, images: int, size: int) -> None:
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
        """Return a name that no other image of the class has: by it the reasons of a job find their image."""
        others = [item.facts for other, item in self._items.items() if other != key]
        taken = {facts.name for facts in others if facts.label == label}
        return name if name not in taken else f"{key[:8]} {name}"

    def _remove(self, key: str) -> None:
        _unlink(self._items.pop(key).file)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _unlink(file: Path) -> None:
    """Remove a file, and its folder once that is empty."""
    with suppress(OSError):
        file.unlink()
        file.parent.rmdir()
