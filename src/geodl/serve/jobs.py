"""Teaching, one job after the other: what was handed over is kept in the model's directory until its job has ended.

So a job whose server was killed is found by the next one, which can go on with it or throw it away.
"""

import logging
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from geodl.app.handed_over import FOLDER, discard, interrupted, read_job
from geodl.classifier import IncrementalClassifier
from geodl.data.dataset import Skipped
from geodl.data.images import FileImages
from geodl.data.intake import Intake
from geodl.data.names import typed_name
from geodl.errors import GeodlError, Interrupted, StoreError
from geodl.events import (
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
from geodl.files import make_directory, write_json
from geodl.learner import MODEL
from geodl.locks import is_locked, locked
from geodl.serve.security import Refused
from geodl.store import RunDirectory, has_record
from geodl.text import printable

_log = logging.getLogger("geodl")

REMEMBERED = 20
"""So many ended jobs are still told about."""

State = Literal["waiting", "running", "done", "cancelled", "failed", "interrupted"]
ENDED = ("done", "cancelled", "failed")


@dataclass
class Job:
    """What is taught at once: what it brings (images of each class), how far it is, what came of it.

    part:   how much of what is `doing` is done, 0 to 1.
    seconds, advice: about how long training will take, and what would serve better, as the step says at its start.
    result: what the step reached, once it is done.
    folder: where its images are; source: a folder on the server to teach from instead.
    """

    id: str
    images: int
    classes: dict[str, int]
    made: str
    folder: Path
    source: Path | None = None
    state: State = "waiting"
    doing: str = "waiting"
    part: float = 0.0
    epoch: int = 0
    epochs: int = 0
    rate: float = 0.0
    seconds: float | None = None
    advice: tuple[str, ...] = ()
    skipped: Skipped = ()
    result: dict[str, Any] | None = None
    error: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    held: ExitStack = field(default_factory=ExitStack)
    _stage: StageStarted | None = None

    def hold(self) -> None:
        """Lock its folder, so that nobody takes it for one of a killed server."""
        self.held.enter_context(locked(self.folder))

    def hear(self, event: Event) -> None:
        """Note how far the step is."""
        match event:
            case ImagesRead():
                self.doing, self.part = "reading", event.done / max(event.total, 1)
            case IntakeDone():
                self.images, self.skipped = self.images or event.images, tuple(event.skipped)
                self.doing, self.part = "learning", 0.0
            case Advised():
                self.advice += (event.sentence,)
            case TimeEstimated():
                self.seconds = event.seconds
            case FeaturesTaken() if self._stage is None and self.doing == "learning":  # in closed form this is all
                self.part = event.done / max(event.total, 1)
            case StageStarted():
                self._stage, self.doing, self.part, self.epochs = event, "learning", 0.0, event.epochs
            case StepTaken() if self._stage is not None:
                self.part, self.epoch, self.rate = part_of(event, self._stage), event.epoch + 1, event.rate

    def facts(self) -> dict[str, Any]:
        """Return what a client is told, ready for JSON."""
        told = ("id", "state", "images", "classes", "made", "doing", "epoch", "epochs", "seconds", "result", "error")
        return {name: getattr(self, name) for name in told} | {
            "part": round(self.part, 4),
            "rate": round(self.rate, 1),
            "advice": [printable(sentence) for sentence in self.advice],
            "skipped": [{"name": printable(name), "reason": printable(reason)} for name, reason in self.skipped],
        }


class Teacher:
    """The one writer of a model: teaches what is handed over, in its order, in a thread of its own."""

    def __init__(self, path: Path, options: Mapping[str, Any], most: int) -> None:
        self.path, self.options, self.most = path, dict(options), most
        self.jobs: dict[str, Job] = {}
        self._closing = False
        self._changing = threading.Lock()  # held while a job goes from one state to another
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        for folder, left in interrupted(path):
            count = len(left.labels)
            job = Job(folder.name, count, left.classes, left.made, folder, left.source, "interrupted", "")
            self.jobs[job.id] = job
        self._thread = threading.Thread(target=self._work, name="teaching", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------ handing over

    @contextmanager
    def preparing(self) -> Iterator[Job]:
        """Yield a job with a new folder in the model's directory for its images; where it is not added, the folder is removed."""
        if sum(job.state == "waiting" for job in list(self.jobs.values())) >= self.most:
            raise Refused(429, f"{self.most} jobs are already waiting; try again when one has ended")
        made = has_record(self.path)
        store = RunDirectory(self.path) if made else RunDirectory.create_or_open(self.path, MODEL)
        if store.kind != "model":
            raise StoreError(f"{self.path} is the directory of a {store.kind}, not of a model")
        folder = self.path / FOLDER / secrets.token_hex(8)
        job = Job(folder.name, 0, {}, datetime.now(UTC).isoformat(timespec="seconds"), folder)
        make_directory(folder)
        try:
            job.hold()
            yield job
        finally:
            if job.id not in self.jobs:
                job.held.close()
                discard(folder)

    def add(
        self, job: Job, labels: Sequence[str] = (), names: Sequence[str] = (), *, source: Path | None = None
    ) -> Job:
        """Queue a job of `preparing`: the images 0, 1, ... in its folder, or the class folders of `source`, on this machine.

        The names are for people alone.
        """
        labels = [typed_name(label) for label in labels]
        job.images, job.classes, job.source = len(labels), dict(Counter(labels)), source
        brings = {"labels": labels, "names": list(names), "source": None if source is None else str(source)}
        write_json(job.folder / "job.json", brings | {"made": job.made})
        return self._queued(job)

    def _queued(self, job: Job) -> Job:
        job.state = job.doing = "waiting"
        self.jobs[job.id] = job
        ended = [other.id for other in list(self.jobs.values()) if other.state in ENDED]
        for old in ended[: max(0, len(ended) - REMEMBERED)]:
            del self.jobs[old]
        self._queue.put(job)
        return job

    # ---------------------------------------------------------------------------------------------------------- commands

    def find(self, key: str) -> Job:
        """Return a job by its id."""
        if key not in self.jobs:
            raise Refused(404, "no such job")
        return self.jobs[key]

    def cancel(self, key: str) -> Job:
        """Stop a job, or throw away one that was interrupted; the model stays as it was before it."""
        job = self.find(key)
        with self._changing:
            if job.state in ENDED:
                raise Refused(409, f"the job has ended already ({job.state})")
            if job.state == "interrupted" and is_locked(job.folder):
                raise Refused(409, "another server has taken up the job; cancel it there")
            job.cancelled.set()
            # There is one checkpoint, of whichever job was the last to train: it goes with the last that may need it.
            others = (other for other in list(self.jobs.values()) if other is not job)
            if job.state == "interrupted" and all(other.state in ENDED for other in others):
                self._give_up()
            if job.state != "running":  # else the thread ends it
                self._end(job, "cancelled")
        return job

    def resume(self, key: str) -> Job:
        """Go on with a job that was interrupted."""
        job = self.find(key)
        with self._changing:
            if job.state != "interrupted":
                raise Refused(409, f"the job is {job.state}; only an interrupted job can be resumed")
            if not job.folder.exists():  # its images were removed with their class
                self._end(job, "cancelled")
                raise Refused(409, "the images of the job are no longer there")
            job.hold()
            return self._queued(job)

    def forget(self, name: str) -> None:
        """Throw away the interrupted jobs that hold images of a class."""
        for job in list(self.jobs.values()):
            if job.state == "interrupted" and name in job.classes:
                self.cancel(job.id)

    @property
    def teaching(self) -> bool:
        """Whether a job runs now."""
        return any(job.state == "running" for job in list(self.jobs.values()))

    def close(self) -> None:
        """Stop; a job that runs can be resumed after the next start."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()
        for job in self.jobs.values():
            job.held.close()

    # -------------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (job := self._queue.get()) is not None and not self._closing:
            if job.state == "waiting":
                self._teach(job)

    def _stop(self, job: Job) -> bool:
        return self._closing or job.cancelled.is_set()

    def _teach(self, job: Job) -> None:
        model = IncrementalClassifier(self.path)
        while not self._stop(job):
            if is_locked(self.path):
                job.doing = "waiting until another program is done with the model"
                job.cancelled.wait(0.2)
                continue
            if not self._begin(job):
                return
            try:
                learned = model.learn(
                    job.source or _intake(job.folder),
                    listener=job.hear,
                    stop=lambda: self._stop(job),
                    **self.options,
                )
                job.result, job.skipped = _told(vars(learned)), learned.skipped or job.skipped
                self._end(job, "done")
                return
            except Interrupted:
                break
            except StoreError as error:
                if not is_locked(self.path):  # else another program was quicker: wait for it
                    self._end(job, "failed", str(error))
                    return
            except GeodlError as error:
                self._end(job, "failed", str(error))
                return
            except Exception as error:
                _log.exception("teaching failed")
                self._end(job, "failed", f"unexpected error, the model is as before: {type(error).__name__}: {error}")
                return
        if job.state == "running" and not self._closing:  # else its folder and checkpoint stay for the next start
            self._give_up()
            self._end(job, "cancelled")

    def _begin(self, job: Job) -> bool:
        """Let a job run, unless it was cancelled just now."""
        with self._changing:
            if job.state not in ENDED:
                job.state, job.doing = "running", "reading"
            return job.state == "running"

    def _give_up(self) -> None:
        try:
            IncrementalClassifier(self.path).give_up()
        except StoreError as error:  # another program writes: its step replaces the checkpoint
            _log.warning("%s", error)

    def _end(self, job: Job, state: State, error: str | None = None) -> None:
        job.held.close()
        with suppress(StoreError):  # the next start finds what could not be removed
            discard(job.folder)
        job.error = printable(error) if error else None
        job.doing, job.part = "", 1.0 if state == "done" else job.part
        job.state = state


def _told(learned: Mapping[str, Any]) -> dict[str, Any]:
    names = [
        "already",
        "step",
        "new",
        "returning",
        "images",
        "accuracy",
        "interval",
        "judged",
        "left_out",
        "before",
        "after",
        "warnings",
    ]
    return {name: learned[name] for name in names}


def _intake(folder: Path) -> Intake:
    """Return the images of a job, read from its folder."""
    found = read_job(folder)
    classes = tuple(found.classes)
    position = {label: i for i, label in enumerate(classes)}
    rows = torch.tensor([position[label] for label in found.labels], dtype=torch.int64)
    files = tuple(folder / str(i) for i in range(len(rows)))
    shown = tuple(f"{label}/{name}" for label, name in zip(found.labels, found.names, strict=True))
    return Intake("what was handed over", FileImages(files, rows), classes, shown)
