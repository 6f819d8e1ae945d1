"""What all requests to one server share: the model, its one teacher, predictions, files to take away, and counts of what goes on."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geodl.classifier import IncrementalClassifier
from geodl.devices import available_cores
from geodl.errors import StoreError
from geodl.locks import is_locked
from geodl.serve.batching import Predictor
from geodl.serve.exports import Exports
from geodl.serve.jobs import Teacher
from geodl.serve.security import Counter, Limits, Refused
from geodl.store.record import refuse_foreign


@dataclass
class Server:
    """What all requests share."""

    path: Path
    token: str
    read_only: bool
    limits: Limits
    allow_folder: Path | None
    options: dict[str, Any]
    model: IncrementalClassifier = field(init=False)
    predictor: Predictor = field(init=False)
    teacher: Teacher | None = field(init=False)
    exports: Exports = field(init=False)
    closing: bool = False

    def __post_init__(self) -> None:
        limits = self.limits
        refuse_foreign(self.path)
        self.model = IncrementalClassifier(self.path)
        if self.read_only:  # nothing served here could ever make the model
            self.model.directory()
        self.predictor = Predictor(IncrementalClassifier(self.path))
        self.teacher = None if self.read_only else Teacher(self.path, self.options, limits.jobs)
        self.exports = Exports(self.path, limits.answer_seconds)
        self.decoding = ThreadPoolExecutor(available_cores(), thread_name_prefix="decoding")
        busy = "the server is busy; try again in a moment"
        self.predictions, self.uploads = Counter(limits.predictions, busy), Counter(limits.uploads, busy)
        self.streams = Counter(limits.streams, "too many pages are open at once; close one of them")

    @property
    def writer(self) -> Teacher:
        """The one writer."""
        if self.teacher is None:
            raise Refused(403, "this server was started with --read-only")
        return self.teacher

    def insist_idle(self) -> None:
        """Insist that the model is not being taught here."""
        if self.writer.teaching:
            raise Refused(409, "the model is being taught; wait until it is done, or cancel it")

    def facts(self) -> dict[str, Any]:
        """Return what a page is told at every change: which state the model is in, who writes it, and all jobs."""
        jobs = [] if self.teacher is None else [job.facts() for job in list(self.teacher.jobs.values())]
        taught = self.teacher is not None and self.teacher.teaching
        with suppress(StoreError):
            return {"state": str(self.model.stamp), "busy": not taught and is_locked(self.path), "jobs": jobs}
        return {"state": "unreadable", "busy": False, "jobs": jobs}

    def close(self) -> None:
        """End what goes on."""
        self.closing = True
        if self.teacher is not None:
            self.teacher.close()
        self.predictor.close()
        self.decoding.shutdown(cancel_futures=True)
        self.exports.close()
