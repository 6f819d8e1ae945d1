"""The queue of learn steps. Jobs are kept in memory: they are lost when the server ends, which leaves the model as it was."""

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve import schemas
from geodl.app.serve.limits import Refused
from geodl.core.errors import GeodlError, Interrupted, StoreError
from geodl.core.events import (
    Advised,
    Event,
    FeaturesTaken,
    ImagesRead,
    IntakeDone,
    StageStarted,
    StepTaken,
    TimeEstimated,
    part_of,
)
from geodl.core.locks import is_locked
from geodl.core.text import printable
from geodl.data.images import FileImages
from geodl.data.intake import Intake

_log = logging.getLogger("geodl.serve")

Ended = Callable[["Job", schemas.State], None]
REMEMBERED = 20
"""Number of ended jobs that stay listed."""
ENDED = ("done", "cancelled", "failed")
RESULT = "already step new returning images accuracy interval judged left_out before after warnings"
"""The fields of `Learned` that a job's result has."""


class Job:
    """One learn step: the images it learns (`source`), and its `facts` for clients.

    ended: called with the job and its last state, before clients see that state; stopped: set it to cancel the job;
    stage: the stage of training, None before it begins.
    """

    def __init__(
        self, source: Path | Intake, classes: dict[str, int], ended: Ended = lambda job, state: None
    ) -> None:
        made = datetime.now(UTC).isoformat(timespec="seconds")
        self.source, self.ended = source, ended
        self.facts = schemas.Job(id=secrets.token_hex(8), classes=classes, made=made)
        self.facts.images = sum(classes.values())
        self.stopped = threading.Event()
        self.future: Future[None] | None = None
        self.stage: StageStarted | None = None

    @classmethod
    def of_files(
        cls, files: Sequence[Path], names: Sequence[str], labels: Sequence[str], ended: Ended
    ) -> "Job":
        """Return a job that learns files; names: shown to people."""
        counts = dict(Counter(labels))
        position = {label: i for i, label in enumerate(counts)}
        rows = torch.tensor([position[label] for label in labels])
        paths = tuple(f"{label}/{name}" for label, name in zip(labels, names, strict=True))
        images = FileImages(tuple(files), rows, tuple(counts))
        return cls(Intake("the upload", images, paths), counts, ended)

    def visible(self, trusted: bool) -> schemas.Job:
        """Return what a client may see; files are named only to clients with the token."""
        if trusted:
            return self.facts
        error = self.facts.error and "the reason is shown with the token"
        return self.facts.model_copy(update={"error": error, "skipped": []})

    def update(self, event: Event) -> None:
        """Record the progress of the step."""
        facts = self.facts
        match event:
            case ImagesRead():
                facts.doing, facts.part = "reading", event.done / max(event.total, 1)
            case IntakeDone():
                facts.images = facts.images or event.images
                self.skip(event.skipped)
                facts.doing, facts.part = "learning", 0.0
            case Advised():
                facts.advice = [*facts.advice, printable(event.sentence)]
            case TimeEstimated():
                facts.seconds = event.seconds
            case FeaturesTaken() if self.stage is None and facts.doing == "learning":
                facts.part = event.done / max(event.total, 1)  # the closed form does nothing else
            case StageStarted():
                self.stage = event
                facts.doing, facts.part, facts.epochs = "learning", 0.0, event.epochs
            case StepTaken() if self.stage is not None:
                facts.part = round(part_of(event, self.stage), 4)
                facts.epoch, facts.rate = event.epoch + 1, round(event.rate, 1)

    def skip(self, skipped: Iterable[tuple[str, str]]) -> None:
        """Record the skipped images."""
        pairs = [(printable(name), printable(reason)) for name, reason in skipped]
        self.facts.skipped = [schemas.Skipped(name=name, reason=why) for name, why in pairs]


class Teacher:
    """The only writer of a model: runs the jobs one after the other, in its own thread."""

    def __init__(self, path: Path, options: Mapping[str, Any], most: int) -> None:
        self.path, self.options, self.most = path, dict(options), most
        self.jobs: dict[str, Job] = {}
        self._closing = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="teaching")

    def add(self, job: Job) -> Job:
        """Queue a job."""
        if len(self._with("waiting")) >= self.most:
            raise Refused(429, f"{self.most} jobs wait already; try again when one has ended")
        for old in self._with(*ENDED)[:-REMEMBERED]:
            del self.jobs[old.facts.id]
        self.jobs[job.facts.id] = job
        job.future = self._pool.submit(self._teach, job)
        return job

    def find(self, key: str) -> Job:
        """Return a job by its id."""
        if key not in self.jobs:
            raise Refused(404, "no such job")
        return self.jobs[key]

    def cancel(self, key: str) -> Job:
        """Cancel a job; the model stays as it was."""
        job = self.find(key)
        if job.facts.state in ENDED:
            raise Refused(409, f"the job has ended already ({job.facts.state})")
        job.stopped.set()
        if job.future is not None and job.future.cancel():  # else its thread ends it
            self._end(job, "cancelled")
        return job

    def require_idle(self) -> None:
        """Refuse a change of the model while a job runs."""
        if self.teaching:
            raise Refused(409, "the model is being taught; wait until it is done, or cancel it")

    def require_none_of(self, name: str) -> None:
        """Refuse to remove a class for good while images of it wait to be learned."""
        for job in self._with("waiting"):
            if name in job.facts.classes:
                raise Refused(409, f"images of {name!r} wait to be learned; cancel that job first")
            if isinstance(job.source, Path):
                words = f"a folder waits to be learned, which may hold images of {name!r}"
                raise Refused(409, f"{words}; cancel that job first")

    @property
    def teaching(self) -> bool:
        """Whether a job is running."""
        return bool(self._with("running"))

    def close(self) -> None:
        """Stop all jobs. The checkpoint of a running one stays: teaching the same images again resumes it."""
        self._closing = True
        for job in self._with("waiting", "running"):
            job.stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def _with(self, *states: str) -> list[Job]:
        return [job for job in list(self.jobs.values()) if job.facts.state in states]

    def _teach(self, job: Job) -> None:
        try:
            learned = self._learned(job)
            job.facts.result = {name: getattr(learned, name) for name in RESULT.split()}
            if learned.skipped:
                job.skip(learned.skipped)
            self._end(job, "done")
        except Interrupted:
            if job.stage and not self._closing:  # otherwise the checkpoint is not this job's
                with suppress(StoreError):  # another program writes, or there is no model yet
                    IncrementalClassifier(self.path).give_up()
            self._end(job, "cancelled")
        except GeodlError as error:
            self._end(job, "failed", str(error))
        except Exception as error:
            _log.exception("teaching failed")
            reason = f"{type(error).__name__}: {error}"
            self._end(job, "failed", f"unexpected error, the model is as before: {reason}")

    def _end(self, job: Job, state: schemas.State, error: str | None = None) -> None:
        facts = job.facts
        with suppress(StoreError):
            facts.version = str(IncrementalClassifier(self.path).version)
        job.ended(job, state)
        facts.error = printable(error) if error else None
        facts.doing, facts.part = "", 1.0 if state == "done" else facts.part
        facts.state = state

    def _learned(self, job: Job) -> Any:
        """Run the learn step, after waiting until no other program writes the model."""
        while True:
            while is_locked(self.path) or job.stopped.is_set():
                job.facts.doing = "waiting until another program is done with the model"
                if job.stopped.wait(0.2):
                    raise Interrupted
            job.facts.state, job.facts.doing = "running", "reading"
            model, stop = IncrementalClassifier(self.path), job.stopped.is_set
            try:
                return model.learn(job.source, listener=job.update, stop=stop, **self.options)
            except StoreError:
                if not is_locked(self.path):  # otherwise another program took the lock first
                    raise
