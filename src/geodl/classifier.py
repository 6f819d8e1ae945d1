"""``IncrementalClassifier``: a model directory that learns classes from images, again and again, and recognises them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from geodl.data.batches import evaluation
from geodl.data.images import ArrayImages, Images
from geodl.devices import device_kind
from geodl.errors import ConfigError, DataError, GeodlError, StoreError
from geodl.metrics import confusion
from geodl.own import state as states
from geodl.own.choices import checked
from geodl.own.intake import Problems, as_images, insist, squares, take
from geodl.own.state import State
from geodl.predictors import features_of, nearest_mean
from geodl.store import RunDirectory, remove_run

if TYPE_CHECKING:
    from geodl.own.learning import Learned

Classifier = Literal["nme", "cnn"]
Listener = Callable[..., None]


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one image: `top` holds the likeliest classes with their confidences, best first."""

    name: str
    top: tuple[tuple[str, float], ...]

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.top[0][0]

    @property
    def confidence(self) -> float:
        """Its confidence, 0 to 1: the softmax of the learned scale times the cosines."""
        return self.top[0][1]


@dataclass(frozen=True)
class Predictions(Sequence[Prediction]):
    """The predictions of some images, in their order, without those that could not be read; `rate` in images/s."""

    items: tuple[Prediction, ...]
    skipped: Problems
    rate: float

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Evaluation:
    """How good the model is on labelled images, in %; `confusion` is (C, C) with the true class first."""

    images: int
    accuracy: float
    per_class: dict[str, float | None]
    per_step: dict[int, float | None]
    classes: tuple[str, ...]
    confusion: Tensor
    skipped: Problems


class IncrementalClassifier:
    """A model in a directory. It learns new classes without the old images, and more images of known classes.

    The directory is made by the first `learn`. Several processes may read it while one writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
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
        listener: Listener = lambda kind, **fields: None,
        stop: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> "Learned":
        """Learn the classes of a folder of class folders, of arrays with labels, or of a torch Dataset.

        Args:
            images: the folder; or uint8 or 0..1 float images (N, H, W[, C]) with `labels`; or a Dataset of pairs.
            labels: (N,) class names or numbers.
            classes: names for numbered labels.
            again: learn also where the last step learned exactly these images.
            strict: raise a DataError for the first image that cannot be used, instead of leaving it out.
            listener: called as ``listener(kind, **fields)`` with what happens.
            stop: asked after each step of training whether to stop; `Interrupted` is raised then.
            options: options of a run (epochs, lr, image_size, exemplars, network, ...) that replace the choices made.

        Returns:
            A `geodl.own.learning.Learned`. A step that fails changes nothing; one that was stopped or killed goes on
            when it is called again with the same images and options.
        """
        from geodl.own.learning import learn_step, summarise  # here, so that predicting never loads what trains
        from geodl.training import Interrupted

        wanted = checked(options)
        if isinstance(images, str | Path):
            self._refuse_inside(Path(images))
        intake = take(images, labels, classes, strict=strict)
        made = not (self.path / "config.json").exists()
        store = self._create()
        try:
            with store.lock():
                last = states.load(store)
                if last is not None and last.learned == intake.key and not again:
                    return summarise(last, len(last.classes), (), already=True)
                return learn_step(store, last, intake, wanted, strict=strict, listener=listener, stop=stop)
        except Interrupted:
            raise
        except GeodlError:
            if made and store.completed() == 0:
                remove_run(self.path)
            raise

    def predict(
        self,
        images: Any,
        *,
        classifier: Classifier = "nme",
        top: int = 1,
        strict: bool = False,
        accelerator: str = "auto",
        workers: int | None = None,
        listener: Listener = lambda kind, **fields: None,
    ) -> Predictions:
        """Recognise images: files, folders, arrays (N, H, W[, C]), PIL images, or a list of such; in their order.

        An image that cannot be read is left out and named in `skipped`, or is a DataError if `strict`. `listener` hears of
        each batch: ``listener("looked", done=images, total=images in all)``.
        """
        state = self._state()
        if top < 1:
            raise ConfigError(f"top = {top}: at least 1 is needed")
        pictures, names, problems = as_images(images)
        began = time.perf_counter()
        found = []
        skipped = list(problems)
        insist(strict, skipped)
        for positions, scores, bad in self._confidences(state, pictures, classifier, accelerator, workers):
            skipped += [(names[i], reason) for i, reason in bad]
            insist(strict, skipped)
            listener("looked", done=len(positions) + len(bad), total=len(pictures))
            values, rows = scores.topk(min(top, scores.shape[1]))
            for i, value, row in zip(positions, values.tolist(), rows.tolist(), strict=True):
                best = tuple((state.names[c], confidence) for c, confidence in zip(row, value, strict=True))
                found.append(Prediction(names[i], best))
        seconds = max(time.perf_counter() - began, 1e-9)
        return Predictions(tuple(found), tuple(skipped), len(found) / seconds)

    def evaluate(
        self,
        images: Any,
        labels: Any = None,
        *,
        classes: Sequence[str] | None = None,
        classifier: Classifier = "nme",
        strict: bool = False,
        accelerator: str = "auto",
        workers: int | None = None,
        listener: Listener = lambda kind, **fields: None,
    ) -> Evaluation:
        """Say how good the model is on labelled images, given as for `learn`; classes it does not know are left out."""
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
        for positions, scores, bad in self._confidences(state, pictures, classifier, accelerator, workers):
            skipped += [(intake.names[known[i]], reason) for i, reason in bad]
            insist(strict, skipped)
            listener("looked", done=len(positions) + len(bad), total=len(pictures))
            true += [rows[label] for label in pictures.labels[positions].tolist()]
            guessed += scores.argmax(dim=1).tolist()
        if not true:
            raise DataError(f"{intake.title}: no image could be read, such as {skipped[-1][0]}: {skipped[-1][1]}")
        matrix = confusion(torch.tensor(true), torch.tensor(guessed), len(state.classes))
        return _evaluation(state, matrix, tuple(skipped))

    def info(self) -> dict[str, Any]:
        """Say what the model knows and keeps: classes, stored images with their origins, sizes, steps, accuracies."""
        from geodl.own.about import describe

        store = self._open()
        return describe(store, self._state())

    def undo(self) -> dict[str, Any]:
        """Take the last step (learn, rename or remove) back; give its record."""
        with self._writing() as store:
            done = store.completed()
            if not done:
                raise StoreError(f"{self.path}: nothing to take back; the model has learned nothing yet")
            if done > 1 and not store.remembers(done - 2):
                raise StoreError(
                    f"{self.path}: the state before the last step is no longer kept, it cannot be taken back"
                )
            record = dict(self._state().history[-1])
            store.drop_last_phase()
            store.events("undone", record=record)
            return record

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        with self._writing() as store:
            states.save(store, states.renamed(self._state(), old, new))
            store.events("renamed", old=old, new=new)

    def remove(self, name: str, *, for_good: bool = False) -> None:
        """Remove a class with its images; `for_good` removes earlier states and the page too, so that no image of it is left."""
        with self._writing() as store:
            states.save(store, states.without(self._state(), name))
            if for_good:
                states.forget(store, before=store.completed() - 1)
                (self.path / "report.html").unlink(missing_ok=True)  # it may show images
            store.events("removed", name=name, for_good=for_good)

    def export(self, path: str | Path) -> dict[str, Any]:
        """Write the model to an ONNX file with labels and preprocessing inside, checked against the model."""
        from geodl.own.export import export

        return export(self._state(), Path(path))

    def _create(self) -> RunDirectory:
        if (self.path / "config.json").exists():
            return self._open()
        return RunDirectory.create_or_open(self.path, states.RECORD)

    def _open(self) -> RunDirectory:
        if not self.path.exists():
            raise StoreError(f"{self.path}: no such model; `geodl learn {self.path} FOLDER` makes one")
        store = RunDirectory(self.path)
        if store.kind != "model":
            raise StoreError(f"{self.path} is the directory of a {store.kind}, not of a model")
        return store

    @property
    def unfinished(self) -> bool:
        """Whether a learn step was stopped, which the same `learn` would go on with; any other change gives it up."""
        return self._open().load_progress() is not None

    @contextmanager
    def _writing(self) -> Iterator[RunDirectory]:
        store = self._open()
        with store.lock():
            yield store

    def _state(self) -> State:
        """Give the last complete state; read it anew if it is not the one read before."""
        store = self._open()
        stamp = store.stamp()
        if stamp is None:
            raise StoreError(f"{self.path} has learned nothing yet; `geodl learn {self.path} FOLDER` teaches it")
        if self._loaded is None or self._loaded[0] != stamp:
            found = states.load(store)
            assert found is not None
            self._loaded = (stamp, found)
        return self._loaded[1]

    def _refuse_inside(self, folder: Path) -> None:
        here, there = self.path.resolve(), folder.resolve()
        if here == there or there in here.parents or here in there.parents:
            raise ConfigError(f"model {self.path} and images {folder}: one is inside the other; keep them apart")

    def _confidences(
        self, state: State, images: Images, classifier: str, accelerator: str, workers: int | None
    ) -> Iterator[tuple[list[int], Tensor, list[tuple[int, str]]]]:
        """Give (positions, confidences (b, C), bad ones) batch by batch; decoding goes on while the network works."""
        if classifier not in ("nme", "cnn"):
            raise ConfigError(f"classifier = {classifier!r}: allowed are nme (nearest class mean) and cnn (the head)")
        device = torch.device(device_kind(accelerator))
        network = state.network.to(device)
        threads = workers if workers is not None else torch.get_num_threads() + 1
        for positions, pixels, bad in squares(images, state.transform.size, threads):
            batch = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
            found = features_of(network, evaluation(batch, state.transform), device)
            scores = found.logits
            if classifier == "nme":
                scale = network.head.scale.detach().cpu()  # type: ignore[operator]
                scores = scale * nearest_mean(found.pooled, state.means)
            yield positions, scores.softmax(dim=1), bad


def _evaluation(state: State, matrix: Tensor, skipped: Problems) -> Evaluation:
    counts, right = matrix.sum(dim=1).tolist(), matrix.diagonal().tolist()

    def percent(rows: Sequence[int]) -> float | None:
        total = sum(counts[i] for i in rows)
        return 100 * sum(right[i] for i in rows) / total if total else None

    every = range(len(counts))
    steps = sorted({known.step for known in state.classes})
    per_step = {step: percent([i for i in every if state.classes[i].step == step]) for step in steps}
    return Evaluation(
        images=sum(counts),
        accuracy=100 * sum(right) / sum(counts),
        per_class={name: percent([i]) for i, name in enumerate(state.names)},
        per_step=per_step,
        classes=tuple(state.names),
        confusion=matrix,
        skipped=skipped,
    )
