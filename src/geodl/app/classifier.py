"""``IncrementalClassifier``: a model directory that learns classes of images step by step, and predicts."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from geodl.app.choices import checked
from geodl.app.evaluation import Evaluation, evaluated
from geodl.app.state import UNDO, State, load, save, unnamed
from geodl.core.cache import CONVERTED, Cache
from geodl.core.errors import ConfigError, GeodlError, Interrupted, StoreError
from geodl.core.events import Listener, ignore
from geodl.core.files import as_path, is_directory, remove, unlink
from geodl.data.images import Images
from geodl.data.intake import take
from geodl.learning.saving import model_directory
from geodl.model.recognizer import Predicting, Recognizer
from geodl.store import Directory, exists, remove_directory, stamp

if TYPE_CHECKING:
    from geodl.app.kept import Kept
    from geodl.app.learned import Learned


class _Loaded(NamedTuple):
    """A state, its version, and the stamp of the directory before it was read."""

    stamp: tuple[int, int, int] | None
    version: Any
    state: State


class IncrementalClassifier(Predicting):
    """A model in a directory, which learns new classes without the old images.

    The first `learn` creates the directory. Several processes can read it while one writes.

    Args:
        path: the directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path, "model")
        self._loaded: _Loaded | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in learning order."""
        return tuple(self.state().names)

    def learn(
        self,
        images: Any,
        labels: Any = None,
        *,
        classes: Sequence[str] | None = None,
        again: bool = False,
        relabel: bool = False,
        group_by: str = "auto",
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
            labels: (N,) class names or numbers; 0, 0.0 and "0" are one class.
            classes: names for numbered labels.
            again: learn even if the last step learned exactly these images, or a model in closed form knows all of them.
            relabel: move images that are known under another class to the class that they have here,
                instead of skipping them.
            group_by: how images are grouped into series, such as the frames of a video, which are left out together
                when accuracy is measured: auto, name, time, folder, none, or a regular expression with one group.
            strict: raise a DataError for the first image that cannot be used, instead of skipping it.
            listener: called with each event (`geodl.core.events`).
            stop: called after each training step; if it returns True, `Interrupted` is raised.
            confirm: called with an estimate in seconds before a training, or early in reading, that takes over two minutes.
            options: options of a run (epochs, lr, image_size, exemplars, network, ...) that replace the automatic choices.

        Returns:
            A `geodl.app.learned.Learned`. A step that fails changes nothing; one that was stopped or killed
            resumes when it is called again with the same images and options.
        """
        # Imported here, so that predicting does not load what training needs.
        from geodl.app.learned import figures
        from geodl.app.series import check_grouping
        from geodl.app.step import LearnStep

        for name, function in (("listener", listener), ("stop", stop), ("confirm", confirm)):
            if not callable(function):
                raise ConfigError(f"{name}: expected a function, got {type(function).__name__}")
        chosen = checked(options)
        check_grouping(group_by)
        if isinstance(images, str | Path):
            self._refuse_inside(Path(images))
        intake = take(images, labels, classes, strict=strict, series=group_by == "folder")
        made = not exists(self.path)
        store = model_directory(self.path) if made else self.directory()
        self._refuse_run(store)
        try:
            with store.lock():
                last = load(store)
                if last is not None and last.learned == intake.key and not again:
                    return figures(last, last, repeatable=not last.model.default.stored().sums)
                step = LearnStep(
                    store,
                    last,
                    intake,
                    chosen,
                    again=again,
                    relabel=relabel,
                    group_by=group_by,
                    strict=strict,
                    listener=listener,
                    stop=stop,
                    confirm=confirm,
                )
                return step.take()
        except Interrupted:
            raise
        except GeodlError:
            if made:
                with suppress(StoreError):  # another process is writing it
                    remove_directory(self.path, unless_learned=True)
            raise

    def recognizer(self, classifier: str | None = None, accelerator: str = "auto") -> Recognizer:
        """Return a recognizer of the last complete state; later steps do not change it."""
        return self.state().model.recognizer(classifier, accelerator=accelerator)

    def directory(self) -> Directory:
        """Open the model's directory."""
        if not os.path.lexists(self.path):
            remedy = f"`geodl learn {self.path} FOLDER` creates one"
            raise StoreError(f"{self.path}: no such model; {remedy}")
        return Directory(self.path)

    def state(self) -> State:
        """Return the last complete state; it is read again only if the model has changed."""
        seen, loaded = stamp(self.path), self._loaded
        if loaded is not None and seen is not None and seen == loaded.stamp:
            return loaded.state
        store = self.directory()
        version = store.version
        if version is None:
            remedy = f"`geodl learn {self.path} FOLDER` teaches it"
            if store.undone():
                remedy += f"; `geodl redo {self.path}` restores what was undone"
            raise StoreError(f"{self.path} has learned nothing yet; {remedy}")
        found = loaded.state if loaded and loaded.version == version else load(store)
        assert found is not None
        self._loaded = _Loaded(seen, version, found)
        return found

    @property
    def version(self) -> Any:
        """An identifier of the last complete state; None if nothing is learned yet."""
        return self.directory().version if exists(self.path) else None

    @property
    def validation(self) -> Images | None:
        """The stored validation images, whose labels are positions in `classes`; None if there are none."""
        return self.state().validation

    def kept(self) -> "list[Kept]":
        """Return the doubtful images, as `doubtful` does, then all other pictures that the model keeps."""
        from geodl.app.kept import kept

        return kept(self.state())

    def kept_picture(self, key: str) -> tuple[Images, int]:
        """Return the images that contain a kept picture, by its id, and its position there."""
        from geodl.app.kept import find

        return find(self.state(), key)

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
        """Measure the accuracy on labelled images, passed as to `learn`; unknown classes are skipped."""
        state, intake = self.state(), take(images, labels, classes, strict=strict, series=True)
        recognizer = state.model.recognizer(classifier, accelerator=accelerator)
        return evaluated(state, recognizer, intake, strict, workers, listener)

    def info(self) -> dict[str, Any]:
        """Describe the model: classes, stored images with their origins, sizes, steps, accuracies."""
        from geodl.app.info import describe

        store = self.directory()
        return describe(store, self.state())

    def undo(self) -> dict[str, Any]:
        """Undo the last step (learn, rename, remove, relabel or forget); return its record.

        `redo` restores it until the next change. A damaged state is dropped, and its record is
        ``{"action": "damaged"}``.
        """
        with self._writing() as store:
            record = store.undo()
            store.events("undone", record=unnamed(record))
            return record

    def redo(self) -> dict[str, Any]:
        """Restore the step that `undo` undid last; return its record."""
        with self._writing() as store:
            record = store.redo()
            store.events("redone", record=unnamed(record))
            return record

    def rename(self, old: str, new: str) -> None:
        """Rename a class."""
        from geodl.app.edits import renamed

        with self._writing() as store:
            self._commit(store, renamed(self.state(), old, new), "renamed", old=old, new=new)

    def remove(self, name: str, *, for_good: bool = False) -> str:
        """Remove a class with its images and features; return what stays of it, "" for nothing.

        Args:
            name: of the class.
            for_good: remove it from all earlier states, the report and old uploads as well, even if it
                was removed before.
        """
        from geodl.app.edits import removed, traces

        with self._writing() as store:
            stays = traces(self.state(), name)
            rest = removed(self.state(), name, again=for_good)
            if for_good:  # first what is outside the states: if that fails, the model is unchanged
                drop_uploads(self.path / "teaching")  # where version 0.2 kept them
                unlink(self.path / "report.html")  # it may show images
                Cache().clear((CONVERTED,))  # converted models, which know the class
            kept = 1 if for_good else UNDO + 1
            self._commit(store, rest, "removed", states=kept, name=name, for_good=for_good)
        return stays

    def doubtful(self) -> "tuple[Kept, ...]":
        """Return the learned images whose labels the rest of the data contradicts, the most certain mistakes first.

        `relabel` moves one, or confirms its class; `forget` removes it.
        """
        from geodl.app.kept import doubtful

        return doubtful(self.state())

    def relabel(self, image: Any, label: str) -> dict[str, Any]:
        """Move learned images to another known class, as if they had been learned so; return the step's record.

        If a doubtful image is of this class already, its label is confirmed, and it is not listed again. Needs a
        model in closed form.

        Args:
            image: as for `predict`, the name of a learned image, `Kept.id`, or a list of these.
            label: the class.
        """
        from geodl.app.edits import relabelled

        with self._writing() as store:
            found = relabelled(self.state(), image, label)
            self._commit(store, found, "relabelled", name=label)
            return dict(found.history[-1])

    def forget(self, images: Any) -> int:
        """Forget learned images, passed as to `relabel`, as if they had never been learned; return how many.

        Earlier states, which `undo` restores, still contain them.
        """
        from geodl.app.edits import forgotten

        with self._writing() as store:
            rest = forgotten(self.state(), images)
            number = int(rest.history[-1]["images"])
            self._commit(store, rest, "forgotten", images=number)
            return number

    def export(self, path: str | Path, *, force: bool = False) -> dict[str, Any]:
        """Export to an ONNX file that includes labels and preprocessing; `force` replaces a file."""
        from geodl.app.export import export

        file = as_path(path, "file")
        if os.path.lexists(file) and not force:
            raise ConfigError(f"{file} exists already; --force replaces it")
        return export(self.state().model, file, self.state().pictures)

    def export_web(
        self, path: str | Path, *, runtime: str | Path | None = None, force: bool = False
    ) -> dict[str, Any]:
        """Write a folder with a static page that predicts images and camera pictures in the browser.

        runtime: a directory with the files of onnxruntime-web; None: npm fetches them. force: write into a directory
        that is not empty.
        """
        from geodl.app.web.export import export_web

        place = None if runtime is None else as_path(runtime, "runtime")
        name, folder = self.path.resolve().name, as_path(path, "folder")
        state = self.state()
        return export_web(state.model, folder, name, place, force, state.pictures)

    @property
    def unfinished(self) -> bool:
        """Whether a learn step was interrupted, which the same `learn` resumes; any other change discards it."""
        return self.directory().unfinished

    def give_up(self) -> None:
        """Discard the checkpoint of an interrupted learn step."""
        with self._writing() as store:
            store.clear_progress()

    @contextmanager
    def _writing(self) -> Iterator[Directory]:
        store = self.directory()
        self._refuse_run(store)
        with store.lock():
            yield store

    @staticmethod
    def _commit(
        store: Directory, state: State, event: str, states: int = UNDO + 1, **facts: Any
    ) -> None:
        """Save an edited state, and log the event."""
        save(store, state, states=states)
        store.events(event, phase=store.completed() - 1, **facts)

    def _refuse_run(self, store: Directory) -> None:
        """Refuse to change a run, which is the record of an experiment."""
        if store.kind != "model":
            raise StoreError(f"{self.path} is the directory of a {store.kind}, not of a model")

    def _refuse_inside(self, folder: Path) -> None:
        # Not resolve(), which fails on circular links.
        model, images = (Path(os.path.realpath(path)) for path in (self.path, folder))
        if model == images or images in model.parents or model in images.parents:
            raise ConfigError(
                f"model {self.path} and images {folder}: one is inside the other; use separate folders"
            )


def drop_uploads(folder: Path) -> int:
    """Remove the images that a killed server left in a folder; return how many there were."""
    if not is_directory(folder):  # nothing behind a link is touched
        return 0
    images = sum(each.name.isdigit() for each in folder.glob("*/*"))
    remove(folder)
    if is_directory(folder):
        raise StoreError(f"{folder} cannot be removed; remove it yourself: it contains images")
    return images
