"""``IncrementalClassifier``: a model directory that learns classes from images, again and again, and recognizes them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from geodl.app import state as states
from geodl.app.choices import checked
from geodl.app.evaluation import Evaluation, evaluated
from geodl.app.state import State
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
    """A state that was read, its version, and the stamp of the directory before that."""

    stamp: tuple[int, int, int] | None
    version: Any
    state: State


class IncrementalClassifier(Predicting):
    """A model in a directory that learns new classes without the old images.

    The first `learn` creates the directory. Several processes may read it while one writes.

    Args:
        path: the directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path, "model")
        self._loaded: _Loaded | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order in which they were learned."""
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
            again: learn also where the last step learned exactly these images, or a model in closed form knows all of them.
            relabel: move images that are known under another class to the class that they have here,
                instead of skipping them.
            group_by: what tells which images are of one series, such as the frames of a video, which is left out as a whole
                where accuracy is measured: auto, name, time, folder, none, or a regular expression with one group.
            strict: raise a DataError for the first image that cannot be used, instead of skipping it.
            listener: called with each event (`geodl.core.events`).
            stop: asked after each step of training whether to stop; `Interrupted` is raised then.
            confirm: asked with an estimate in seconds before a training, or early in reading, that takes over two minutes.
            options: options of a run (epochs, lr, image_size, exemplars, network, ...) that replace the choices made.

        Returns:
            A `geodl.app.learned.Learned`. A step that fails changes nothing; one that was stopped or killed
            resumes when it is called again with the same images and options.
        """
        # Here, so that predicting never loads what trains.
        from geodl.app.learned import figures
        from geodl.app.learning import LearnStep
        from geodl.app.series import way_of_grouping

        for name, given in (("listener", listener), ("stop", stop), ("confirm", confirm)):
            if not callable(given):
                raise ConfigError(f"{name}: {type(given).__name__} given, a function is needed")
        wanted, group_by = checked(options), way_of_grouping(group_by)
        if isinstance(images, str | Path):
            self._refuse_inside(Path(images))
        intake = take(images, labels, classes, strict=strict, series=group_by == "folder")
        made = not exists(self.path)
        store = self.directory() if exists(self.path) else model_directory(self.path)
        self._refuse_run(store)
        try:
            with store.lock():
                last = states.load(store)
                if last is not None and last.learned == intake.key and not again:
                    return figures(last, last, repeatable=not last.stored_sums)
                return LearnStep(
                    store,
                    last,
                    intake,
                    wanted,
                    again=again,
                    relabel=relabel,
                    group_by=group_by,
                    strict=strict,
                    listener=listener,
                    stop=stop,
                    confirm=confirm,
                ).take()
        except Interrupted:
            raise
        except GeodlError:
            if made:
                with suppress(StoreError):  # another process writes it by now
                    remove_directory(self.path, unless_learned=True)
            raise

    def recognizer(self, classifier: str | None = None, accelerator: str = "auto") -> Recognizer:
        """Return what predicts from the last complete state, for many calls; later steps do not change it."""
        return self.state().model.recognizer(classifier, accelerator=accelerator)

    def directory(self) -> Directory:
        """Open the model's directory; where there is none, the StoreError says how to make it."""
        if not os.path.lexists(self.path):
            raise StoreError(
                f"{self.path}: no such model; `geodl learn {self.path} FOLDER` makes one"
            )
        return Directory(self.path)

    def state(self) -> State:
        """Return the last complete state; it is read again only where the model has changed."""
        seen, loaded = stamp(self.path), self._loaded
        if loaded is not None and seen is not None and seen == loaded.stamp:
            return loaded.state
        store = self.directory()
        version = store.version
        if version is None:
            hint = (
                f"; `geodl redo {self.path}` brings back what was taken back"
                if store.undone()
                else ""
            )
            raise StoreError(
                f"{self.path} has learned nothing yet; `geodl learn {self.path} FOLDER` teaches it{hint}"
            )
        found = loaded.state if loaded and loaded.version == version else states.load(store)
        assert found is not None
        self._loaded = _Loaded(seen, version, found)
        return found

    @property
    def version(self) -> Any:
        """What tells the last complete state from any other; None where nothing is learned yet."""
        return self.directory().version if exists(self.path) else None

    @property
    def validation(self) -> Images | None:
        """The stored validation images, labels being positions in `classes`; None where none are stored."""
        return self.state().validation

    def kept(self) -> "list[Kept]":
        """Return the images with doubtful classes, as `doubtful` does, and all other pictures that the model keeps."""
        from geodl.app.kept import kept

        return kept(self.state())

    def kept_picture(self, key: str) -> tuple[Images, int]:
        """Return the images among which a kept picture is, by its id, and its place there."""
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
        """Measure accuracy on labelled images, given as for `learn`; unknown classes are skipped."""
        return evaluated(
            self.state(),
            take(images, labels, classes, strict=strict, series=True),
            classifier=classifier,
            strict=strict,
            accelerator=accelerator,
            workers=workers,
            listener=listener,
        )

    def info(self) -> dict[str, Any]:
        """Describe the model: classes, stored images with their origins, sizes, steps, accuracies."""
        from geodl.app.about import describe

        store = self.directory()
        return describe(store, self.state())

    def undo(self) -> dict[str, Any]:
        """Undo the last step (learn, rename, remove, relabel or forget); return its record.

        `redo` restores it until the next change. A damaged state is dropped, and its record is
        ``{"action": "damaged"}``.
        """
        with self._writing() as store:
            record = store.undo()
            store.events("undone", record=states.unnamed(record))
            return record

    def redo(self) -> dict[str, Any]:
        """Restore the step that `undo` undid last; return its record."""
        with self._writing() as store:
            record = store.redo()
            store.events("redone", record=states.unnamed(record))
            return record

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        with self._writing() as store:
            states.save(store, states.renamed(self.state(), old, new))
            store.events("renamed", phase=store.completed() - 1, old=old, new=new)

    def remove(self, name: str, *, for_good: bool = False) -> str:
        """Remove a class with its images and features; return what stays of it, "" for nothing.

        Args:
            name: of the class.
            for_good: remove it from all earlier states, the report and old uploads as well; a class that
                was removed before, too.
        """
        with self._writing() as store:
            stays = states.traces(self.state(), name)
            rest = states.without(self.state(), name, again=for_good)
            if (
                for_good
            ):  # first what is beside the states: where that fails, the model is as before
                drop_uploads(self.path / "teaching")  # where 0.2 kept them
                unlink(self.path / "report.html")  # it may show images
                Cache().clear((CONVERTED,))  # they know the class
            states.save(store, rest, states=1 if for_good else states.UNDO + 1)
            store.events("removed", phase=store.completed() - 1, name=name, for_good=for_good)
        return stays

    def doubtful(self) -> "tuple[Kept, ...]":
        """Return the learned images whose labels the rest of the data contradicts, the surest mistakes first.

        `relabel` moves one, or confirms its class; `forget` removes it.
        """
        from geodl.app.kept import doubtful

        return doubtful(self.state())

    def relabel(self, image: Any, label: str) -> dict[str, Any]:
        """Move learned images to another known class, as if they had been learned so from the start; return the step's record.

        With the class that a doubtful image already has, its label is confirmed, and it is not listed again. Only a
        model in closed form can.

        Args:
            image: as for `predict`, the name of a learned image, `Kept.id`, or a list of these.
            label: the class.
        """
        from geodl.app.mending import relabelled

        with self._writing() as store:
            found = relabelled(self.state(), image, label)
            states.save(store, found)
            store.events("relabelled", phase=store.completed() - 1, name=label)
            return dict(found.history[-1])

    def forget(self, images: Any) -> int:
        """Forget learned images, given as for `relabel`, as if they had never been learned; return how many.

        Earlier states, which `undo` restores, still hold them.
        """
        from geodl.app.mending import forgotten

        with self._writing() as store:
            rest = forgotten(self.state(), images)
            states.save(store, rest)
            number = int(rest.history[-1]["images"])
            store.events("forgotten", phase=store.completed() - 1, images=number)
            return number

    def export(self, path: str | Path, *, force: bool = False) -> dict[str, Any]:
        """Export to an ONNX file with labels and preprocessing inside; `force` replaces a file."""
        from geodl.app.export import export

        file = as_path(path, "file")
        if os.path.lexists(file) and not force:
            raise ConfigError(f"{file} is there already; --force replaces it")
        return export(self.state().model, file, self.state().pictures)

    def export_web(
        self, path: str | Path, *, runtime: str | Path | None = None, force: bool = False
    ) -> dict[str, Any]:
        """Write a folder with one static page that recognizes images and the camera in the browser.

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
        """Whether a learn step was stopped, which the same `learn` would go on with; any other change gives it up."""
        return self.directory().unfinished

    def give_up(self) -> None:
        """Give up a learn step that was stopped: how far it came is forgotten, the model is as before it."""
        with self._writing() as store:
            store.clear_progress()

    @contextmanager
    def _writing(self) -> Iterator[Directory]:
        store = self.directory()
        self._refuse_run(store)
        with store.lock():
            yield store

    def _refuse_run(self, store: Directory) -> None:
        """Refuse to change a run: one can predict with it, but it is the record of an experiment."""
        if store.kind != "model":
            raise StoreError(f"{self.path} is the directory of a {store.kind}, not of a model")

    def _refuse_inside(self, folder: Path) -> None:
        # Not resolve(), which fails where links lead in a circle.
        here, there = (Path(os.path.realpath(path)) for path in (self.path, folder))
        if here == there or there in here.parents or here in there.parents:
            raise ConfigError(
                f"model {self.path} and images {folder}: one is inside the other; keep them apart"
            )


def drop_uploads(folder: Path) -> int:
    """Remove the images that a killed server left in a folder; return how many there were."""
    if not is_directory(folder):  # behind a link nothing is touched
        return 0
    images = sum(each.name.isdigit() for each in folder.glob("*/*"))
    remove(folder)
    if is_directory(folder):
        raise StoreError(f"{folder} cannot be removed; remove it yourself: it holds images")
    return images
