"""The state that all requests to one server share: the model, the teaching queue, predictions, files and counts."""

import asyncio
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
from geodl.app.serve.limits import BUSY, Limits, Share
from geodl.app.serve.tray import Tray
from geodl.core.devices import available_cores
from geodl.core.errors import StoreError
from geodl.core.locks import is_locked, locked
from geodl.store import refuse_foreign

T = TypeVar("T")

PREFIX = "geodl-serve-"
TICK = 0.25
"""Seconds between two checks for changes."""


@dataclass
class Server:
    """The state that all requests share.

    path:         the model's directory; the first job creates it.
    token:        required by requests that change the model.
    host:         the address to listen on.
    allow_hosts:  further host names under which clients may reach the server.
    read_only:    refuse everything that changes the model.
    allow_folder: teach from folders below this one.
    options:      options of every learn step, as for `IncrementalClassifier.learn`.
    folder:       private files of this server, among the system's temporary files; deleted when it ends.
    dropped:      number of uploaded images of killed servers that were deleted at the start.
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
        if self.read_only:
            self.model.directory()  # must exist: nothing can create it
        self._held = ExitStack()
        private = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.folder = Path(self._held.enter_context(private))
        self._held.enter_context(locked(self.folder))
        earlier = [] if self.read_only else [self.path / "teaching"]  # where version 0.2 kept them
        self.dropped = sum(map(drop_uploads, [*_left_over(self.folder), *earlier]))
        self.predictor = Predictor(IncrementalClassifier(self.path))
        self.teacher = Teacher(self.path, self.options, limits.jobs)
        self.tray = Tray(limits)
        self.exports = Exports(self.path, self.folder, limits.answer_seconds)
        # Requests with the token have their own threads, so that others never delay them. So has the work before
        # decoding: a request beyond the share of decoding is refused at once.
        threads = available_cores() + 1  # one more, to predict
        self.predicting = {key: ThreadPoolExecutor(threads, "predicting") for key in (False, True)}
        self._other = {key: ThreadPoolExecutor(threads, "requests") for key in (False, True)}
        self.decoding = Share(limits.decoding, BUSY)
        self._status: dict[bool, tuple[float, str]] = {}

    async def run(self, trusted: bool, work: Callable[..., T], *arguments: Any) -> T:
        """Await work in a thread; work that has not begun is cancelled with its caller."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._other[trusted], work, *arguments)

    def jobs(self, trusted: bool) -> list[dict[str, Any]]:
        """Return all jobs as a client may see them."""
        return [job.visible(trusted).model_dump() for job in list(self.teacher.jobs.values())]

    async def status(self, trusted: bool) -> str:
        """Return the content of an event as JSON, made once for all streams."""
        when, text = self._status.get(trusted, (0.0, ""))
        if not text or time.monotonic() - when >= TICK:
            self._status[trusted] = (time.monotonic(), text)
            text = json.dumps(await asyncio.to_thread(self._changes, trusted))
            self._status[trusted] = (time.monotonic(), text)
        return text

    def _changes(self, trusted: bool) -> dict[str, Any]:
        """Return the version of the model, whether another program writes it, all jobs, and the version of the tray."""
        state, busy = "unreadable", False
        with suppress(StoreError):
            state = str(self.model.version)
            busy = not self.teacher.teaching and is_locked(self.path)
        facts = {"state": state, "busy": busy, "jobs": self.jobs(trusted)}
        if trusted and not self.read_only:
            facts["tray"] = self.tray.version
        return facts

    def close(self) -> None:
        """Stop all work, and delete the private files."""
        self.closing = True
        self.teacher.close()
        for pool in (*self.predicting.values(), *self._other.values()):
            pool.shutdown(cancel_futures=True)
        self._held.close()


def _left_over(own: Path) -> Iterator[Path]:
    """Yield the private folders of this user's killed servers, beside this server's own."""
    for folder in own.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another server has just deleted it
            mine = folder.lstat().st_uid == own.stat().st_uid
            if mine and (folder / "lock").is_file() and not is_locked(folder):
                yield folder
