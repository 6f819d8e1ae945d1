"""``IncrementalClassifier``: a model directory that learns classes from images, again and again, and recognizes them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from geodl.app import state as states
from geodl.app.choices import checked
from geodl.app.handed_over import forget_class, refuse_waiting
from geodl.app.state import State, last_record
from geodl.data.dataset import Skipped, insist
from geodl.data.images import Images
from geodl.data.intake import take
from geodl.devices import device_kind
from geodl.errors import ConfigError, DataError, GeodlError, Interrupted, StoreError
from geodl.events import ImagesPredicted, Listener, ignore
from geodl.files import as_path, unlink
from geodl.learner import MODEL
from geodl.metrics import Confusion, finite
from geodl.predicting import Predictions, Recognizer
from geodl.store import RunDirectory, has_record, remove_run

if TYPE_CHECKING:
    from geodl.app.learning import Learned


@dataclass(frozen=True)
class Evaluation:
    """How good the model is on labelled images, in %; `confusion` holds the counts (C, C) with the true class first."""

    images: int
    accuracy: float
    per_class: dict[str, float | None]
    per_step: dict[int, float | None]
    confusion: Confusion
    skipped: Skipped


class IncrementalClassifier:
    """A model in a directory. It learns new classes without the old images, and more images of known classes.

    The directory is made by the first `learn`. Several processes may read it while one writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path, "model")
        self._loaded: tuple[Any, State] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes known, in the order in which they were learned."""
        return tuple(self._state().names)

    def learn(
        self,
        images: Any,
        labels: Any = None,
        *,
        classes: Sequence[str] | None = None,
        again: bool = False,
        strict: bool = False,
        listener: Listener = ignore,
        stop: Callable[[], bool] = lambda: False,
        confirm: Callable[[float], bool] = lambda seconds: True,
        **options: Any,
    ) -> "Learned":
        """Learn the classes of a folder of class folders, of arrays with labels, or of a torch Dataset.

        Args:
            images: the folder; or uint8 or 0..1 float images (N, H, W[, C]) with `labels`; or a Dataset of pairs; or an
                `Intake`.
            labels: (N,) class names or numbers.
            classes: names for numbered labels.
            again: learn also where the last step learned exactly these images.
            strict: raise a DataError for the first image that cannot be used, instead of skipping it.
            listener: called with each event (`geodl.events`).
            stop: asked after each step of training whether to stop; `Interrupted` is raised then.
            confirm: asked with an estimate in seconds before a training that takes over two minutes.
            options: options of a run (epochs, lr, image_size, exemplars, network, ...) that replace the choices made.

        Returns:
            A `geodl.app.learning.Learned`. A step that fails changes nothing; one that was stopped or killed goes on
            when it is called again with the same images and options.
        """
        from geodl.app.learning import learn_step, summarize  # here, so that predicting never loads what trains

        for name, given in (("listener", listener), ("stop", stop), ("confirm", confirm)):
            if not callable(given):
                raise ConfigError(f"{name}: {type(given).__name__} given, a function is needed")
        wanted = checked(options)
        if isinstance(images, str | Path):
            self._refuse_inside(Path(images))
        intake = take(images, labels, classes, strict=strict)
        made = not has_record(self.path)
        store = RunDirectory.create_or_open(self.path, MODEL) if made else self.directory()
        self._refuse_run(store)
        try:
            with store.lock():
                last = states.load(store)
                if last is not None and last.learned == intake.key and not again:
                    return summarize(last, len(last.classes), (), already=True)
                how: dict[str, Any] = {"strict": strict, "listener": listener, "stop": stop, "confirm": confirm}
                return learn_step(store, last, intake, wanted, **how)
        except Interrupted:
            raise
        except GeodlError:
            if made and store.completed() == 0:
                remove_run(self.path)
            raise

    def predict(
        self, images: Any, *, classifier: str | None = None, accelerator: str = "auto", **how: Any
    ) -> Predictions:
        """Recognize images: files, folders, arrays (N, H, W[, C]), PIL images, or a list of such; in their order.

        classifier: nme, ncm or cnn, as for `Learner.recognizer`; how: top, threshold, strict, workers, listener as for
        `geodl.predicting.Recognizer.predict`. An image that cannot be read is skipped and named in `skipped`.
        """
        return self.recognizer(classifier, accelerator).predict(images, **how)

    def recognizer(self, classifier: str | None = None, accelerator: str = "auto") -> Recognizer:
        """Return what predicts from the last complete state, for many calls; later steps do not change it."""
        return self._recognizer(self._state(), classifier, accelerator)

    def directory(self) -> RunDirectory:
        """Open the model's directory; where there is none, the StoreError says how to make it."""
        if not os.path.lexists(self.path):
            raise StoreError(f"{self.path}: no such model; `geodl learn {self.path} FOLDER` makes one")
        return RunDirectory(self.path)

    @property
    def stamp(self) -> Any:
        """What tells the last complete state from any other; None where nothing is learned yet."""
        return self.directory().stamp() if has_record(self.path) else None

    @property
    def validation(self) -> Images | None:
        """The stored validation images, labels being positions in `classes`; None where none are stored."""
        return self._state().validation

    def evaluate(
        self,
        images: Any,
        labels: Any = None,
        *,
        classes: Sequence[str] | None = None,
        classifier: str | None = None,
        strict: bool = False,
        accelerator: str = "auto",
        workers: int | None = None,
        listener: Listener = ignore,
    ) -> Evaluation:
        """Say how good the model is on labelled images, given as for `learn`; classes it does not know are skipped."""
        state = self._state()
        intake = take(images, labels, classes, strict=strict)
        unknown = [name for name in intake.classes if name not in state.names]
        skipped = [*intake.problems, *((name, "the model does not know this class") for name in unknown)]
        rows = {i: state.names.index(name) for i, name in enumerate(intake.classes) if name not in unknown}
        known = [i for i, label in enumerate(intake.images.labels.tolist()) if label in rows]
        if not known:
            raise DataError(f"{intake.title}: no image of a class that the model knows")
        pictures = intake.images.select(known)
        true: list[int] = []
        guessed: list[int] = []
        insist(strict, skipped)
        for positions, scores, bad in self._recognizer(state, classifier, accelerator).stream(pictures, workers):
            skipped += [(intake.names[known[i]], reason) for i, reason in bad]
            insist(strict, skipped)
            listener(ImagesPredicted(len(positions) + len(bad), len(pictures)))
            true += [rows[label] for label in pictures.labels[positions].tolist()]
            guessed += scores.argmax(dim=1).tolist()
        if not true:
            raise DataError(f"{intake.title}: no image could be read, such as {skipped[-1][0]}: {skipped[-1][1]}")
        confusion = Confusion.of(torch.tensor(true), torch.tensor(guessed), state.names)
        return _evaluation(state, confusion, tuple(skipped))

    def info(self) -> dict[str, Any]:
        """Say what the model knows and keeps: classes, stored images with their origins, sizes, steps, accuracies."""
        from geodl.app.about import describe

        store = self.directory()
        return describe(store, self._state())

    def undo(self) -> dict[str, Any]:
        """Take the last step (learn, rename or remove) back; return its record.

        The state is kept aside, and `redo` brings it back, until another change is made. A damaged one is dropped; its record
        says no more than ``{"action": "damaged"}``.
        """
        with self._writing() as store:
            done = store.completed()
            if not done:
                raise StoreError(f"{self.path}: nothing to take back; the model has learned nothing yet")
            if done > 1 and not store.remembers(done - 2):
                raise StoreError(
                    f"{self.path}: the state before the last step is no longer kept, it cannot be taken back"
                )
            sound = not store.is_damaged(done - 1)
            record = last_record(store.load_extra(done - 1)) if sound else {"action": "damaged"}
            store.drop_last_phase(keep=sound)
            store.events("undone", record=record)
            return record

    def redo(self) -> dict[str, Any]:
        """Bring the step back that `undo` took back last; return its record."""
        with self._writing() as store:
            store.redo_phase()
            record = last_record(store.load_extra(store.completed() - 1))
            store.events("redone", record=record)
            return record

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        with self._writing() as store:
            states.save(store, states.renamed(self._state(), old, new))
            store.events("renamed", phase=store.completed() - 1, old=old, new=new)

    def remove(self, name: str, *, for_good: bool = False) -> None:
        """Remove a class with its images and features.

        for_good: also from all other states, the page, and what a server took in and has not learned, so that none is
        left; a class that was removed before, too.
        """
        with self._writing() as store:
            rest = states.without(self._state(), name, again=for_good)
            if for_good:  # first what is beside the states: where that fails, the model is as before
                refuse_waiting(self.path, name)
                forget_class(self.path, name)
                unlink(self.path / "report.html")  # it may show images
            states.save(store, rest)
            if for_good:
                states.forget(store, before=store.completed() - 1)
            store.events("removed", phase=store.completed() - 1, name=name, for_good=for_good)

    def export(self, path: str | Path, *, force: bool = False) -> dict[str, Any]:
        """Write the model to an ONNX file with labels and preprocessing inside; `force` replaces a file that is there."""
        from geodl.app.export import export

        file = as_path(path, "file")
        if os.path.lexists(file) and not force:
            raise ConfigError(f"{file} is there already; --force replaces it")
        return export(self._state().learner, file)

    @property
    def unfinished(self) -> bool:
        """Whether a learn step was stopped, which the same `learn` would go on with; any other change gives it up."""
        return self.directory().load_progress() is not None

    def give_up(self) -> None:
        """Give up a learn step that was stopped: how far it came is forgotten, the model is as before it."""
        with self._writing() as store:
            store.clear_progress()

    @contextmanager
    def _writing(self) -> Iterator[RunDirectory]:
        store = self.directory()
        self._refuse_run(store)
        with store.lock():
            yield store

    def _state(self) -> State:
        """Return the last complete state; read it anew if it is not the one read before."""
        store = self.directory()
        stamp = store.stamp()
        if stamp is None:
            hint = f"; `geodl redo {self.path}` brings back what was taken back" if store.undone() else ""
            raise StoreError(f"{self.path} has learned nothing yet; `geodl learn {self.path} FOLDER` teaches it{hint}")
        if self._loaded is None or self._loaded[0] != stamp:
            found = states.load(store)
            assert found is not None
            self._loaded = (stamp, found)
        return self._loaded[1]

    def _refuse_run(self, store: RunDirectory) -> None:
        """Refuse to change a run: one can predict with it, but it is the record of an experiment."""
        if store.kind != "model":
            raise StoreError(f"{self.path} is the directory of a {store.kind}, not of a model")

    def _refuse_inside(self, folder: Path) -> None:
        # Not resolve(), which fails where links lead in a circle.
        here, there = (Path(os.path.realpath(path)) for path in (self.path, folder))
        if here == there or there in here.parents or here in there.parents:
            raise ConfigError(f"model {self.path} and images {folder}: one is inside the other; keep them apart")

    def _recognizer(self, state: State, classifier: str | None, accelerator: str) -> Recognizer:
        found = state.learner.recognizer(classifier)
        found.network.to(device_kind(accelerator))
        return found


def _evaluation(state: State, confusion: Confusion, skipped: Skipped) -> Evaluation:
    steps = sorted({known.step for known in state.classes})
    learned_in = {step: [i for i, known in enumerate(state.classes) if known.step == step] for step in steps}
    return Evaluation(
        images=confusion.images,
        accuracy=confusion.accuracy,
        per_class={name: finite(value) for name, value in confusion.per_class.items()},
        per_step={step: finite(confusion.rate(rows)) for step, rows in learned_in.items()},
        confusion=confusion,
        skipped=skipped,
    )
