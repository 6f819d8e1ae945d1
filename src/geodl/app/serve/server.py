"""What all requests to one server share: the model, its one teacher, predictions, files, and counts of what goes on."""

import asyncio
import functools
import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from geodl.app.classifier import IncrementalClassifier, drop_uploads
from geodl.app.serve.batching import Predictor
from geodl.app.serve.exports import Exports
from geodl.app.serve.jobs import Teacher
from geodl.app.serve.limits import BUSY, Limits, Refused, Share
from geodl.app.serve.tray import Tray
from geodl.core.devices import available_cores
from geodl.core.errors import StoreError
from geodl.core.locks import is_locked, locked
from geodl.store import refuse_foreign

T = TypeVar("T")

PREFIX = "geodl-serve-"
TICK = 0.25
"""Seconds between two looks at what has changed."""


@dataclass
class Server:
    """What all requests share.

    path:         the model's directory; the first job makes it.
    token:        what a request that changes the model must know.
    host:         the address that is listened on.
    allow_hosts:  further names under which the server may be asked for.
    read_only:    refuse everything that changes the model.
    allow_folder: teach from folders below this one.
    options:      options of every learn step, as for `IncrementalClassifier.learn`.
    folder:       private files of this server, among the system's temporary files; gone when it ends.
    dropped:      how many uploaded images of killed servers were removed at the start.
    """

    path: Path
    token: str
    host: str = "127.0.0.1"
    allow_hosts: Collection[str] = ()
    read_only: bool = False
    allow_folder: Path | None = None
    limits: Limits = field(default_factory=Limits)
    options: Mapping[str, Any] = field(default_factory=dict)
    closing: bool = False

    def __post_init__(self) -> None:
        limits = self.limits
        refuse_foreign(self.path)
        self.model = IncrementalClassifier(self.path)
        if self.read_only:  # nothing served here could ever make the model
            self.model.directory()
        self._held = ExitStack()
        private = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.folder = Path(self._held.enter_context(private))
        self._held.enter_context(locked(self.folder))
        earlier = [] if self.read_only else [self.path / "teaching"]  # where version 0.2 kept them
        self.dropped = sum(map(drop_uploads, [*_left_over(self.folder), *earlier]))
        self.predictor = Predictor(IncrementalClassifier(self.path))
        self.teacher = None if self.read_only else Teacher(self.path, self.options, limits.jobs)
        self.tray = Tray(limits)
        self.exports = Exports(self.path, self.folder, limits.answer_seconds)
        # The owner has pools of its own: what others send never keeps it waiting. What comes before
        # decoding has, too: a request beyond the share is refused at once.
        threads = available_cores() + 1  # one of them predicts
        self.predicting = {key: ThreadPoolExecutor(threads, "predicting") for key in (False, True)}
        self._other = {key: ThreadPoolExecutor(threads, "requests") for key in (False, True)}
        self.decoding = Share(limits.decoding, BUSY)
        self._told: dict[bool, tuple[float, str]] = {}

    @property
    def writer(self) -> Teacher:
        """The one writer."""
        if self.teacher is None:
            raise Refused(403, "this server was started with --read-only")
        return self.teacher

    async def run(self, trusted: bool, work: Callable[..., T], *given: Any) -> T:
        """Await work of a thread; it is not begun once the caller has gone."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._other[trusted], functools.partial(work, *given))

    def jobs(self, trusted: bool) -> list[dict[str, Any]]:
        """Return all jobs as a client sees them."""
        jobs = [] if self.teacher is None else list(self.teacher.jobs.values())
        return [job.told(trusted).model_dump() for job in jobs]

    def facts(self, trusted: bool) -> dict[str, Any]:
        """Return what a page is told at every change: the state of the model and of the tray, whether others write, all jobs."""
        taught = self.teacher is not None and self.teacher.teaching
        state, busy = "unreadable", False
        with suppress(StoreError):
            state, busy = str(self.model.version), not taught and is_locked(self.path)
        facts = {"state": state, "busy": busy, "jobs": self.jobs(trusted)}
        seen = trusted and not self.read_only
        return facts | ({"tray": self.tray.version} if seen else {})

    async def told(self, trusted: bool) -> str:
        """Return the facts as JSON, looked up once for all streams."""
        when, text = self._told.get(trusted, (0.0, ""))
        if not text or time.monotonic() - when >= TICK:
            self._told[trusted] = (time.monotonic(), text)
            text = json.dumps(await asyncio.to_thread(self.facts, trusted))
            self._told[trusted] = (time.monotonic(), text)
        return text

    def close(self) -> None:
        """End what goes on, and remove the private files."""
        self.closing = True
        if self.teacher is not None:
            self.teacher.close()
        for pool in (*self.predicting.values(), *self._other.values()):
            pool.shutdown(cancel_futures=True)
        self._held.close()


def _left_over(own: Path) -> Iterator[Path]:
    """Yield the private folders that killed servers of this user left beside one's own."""
    for folder in own.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another server has just removed it
            mine = folder.lstat().st_uid == own.stat().st_uid
            if mine and (folder / "lock").is_file() and not is_locked(folder):
                yield folder
