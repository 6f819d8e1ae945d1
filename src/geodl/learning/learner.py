"""``Learner``: a model with methods to learn, evaluate, predict, save and load, for notebooks and scripts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch

from geodl.config import SECTIONS, Layer, RunConfig, preset_layer
from geodl.config.registry import REGISTRIES
from geodl.core.devices import device_kind
from geodl.core.errors import ConfigError, DataError, StoreError
from geodl.core.events import Listener, ignore
from geodl.core.files import as_path
from geodl.core.text import one_line
from geodl.data.batches import Transform, transform_of
from geodl.data.images import Images, insist_on_images, with_rows
from geodl.data.intake import labelled
from geodl.data.names import class_name
from geodl.learning.algorithm import learn, merged
from geodl.learning.checkpoint import Checkpoints
from geodl.learning.evaluation import evaluate
from geodl.learning.hub import fetched
from geodl.learning.loop import Trainer
from geodl.learning.saving import load_model, model_directory, save_model
from geodl.learning.shared_base import SharedBase
from geodl.methods import METHODS, Method, build, configure
from geodl.model.features import Features
from geodl.model.memory import Memory
from geodl.model.metrics import Confusion
from geodl.model.model import Model
from geodl.model.recognizer import Predicting, Recognizer
from geodl.nets import OWN, Backbone, Network, Own, check_network
from geodl.store import Directory


class Learner(Predicting):
    """Learns classes group by group without forgetting.

    The options are those of the command line (``geodl config show`` lists them) except data sources:
    ``Learner(method="lucir", distill="geodesic", exemplars=20)``; ``preset="cifar100"`` starts from a preset.
    Pass a part of your own by its name or as an object: ``Learner(method=MyMethod, selection=my_function)``.

    Args:
        method: the method: its name, its class, or an instance.
        network: the backbone: its name, its class, or a module (`geodl.nets.backbone` has the
            protocol), which is copied. A module is not saved: pass it to `load` again.
        config: a validated configuration, instead of options.
        model: a model to continue from.
        listener: called with each event (`geodl.core.events`).
        stop: called after each training step; if it returns True, training stops with `Interrupted`.
        shared_base: base phases that runs share.
        decided_precision: 32 or bf16, if the configuration leaves it open.

    Attributes:
        model: everything learned so far; None before the first group.
        seen: with joint training, all images so far, with class names. They are not saved.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        method: str | type[Method] | Method | None = None,
        network: str | Own | None = None,
        model: Model | None = None,
        listener: Listener = ignore,
        stop: Callable[[], bool] = lambda: False,
        shared_base: SharedBase | None = None,
        decided_precision: str | None = None,
        **options: Any,
    ) -> None:
        self._own = None if isinstance(network, str) else network
        self._backbone: Backbone | None = None
        self.config = config if config is not None else _configured(options, method, network)
        if config is None:  # a stored one may come from another machine
            device_kind(self.config.accelerator)
            named = self.config.network if network is None else network
            check_network(named, pretrained=self.config.pretrained and not self.config.weights)
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.method = method if isinstance(method, Method) else build(self.config)
        self.method.configure(self.config)
        self.model = model and _continued(model, self.config)
        self.seen: Images | None = None
        self._listener, self._stop, self._precision = listener, stop, decided_precision
        self._shared_base = shared_base

    @cached_property
    def trainer(self) -> Trainer:
        """The training loop, created on first use: loading and predicting need none."""
        return Trainer(
            self.config, precision=self._precision, listener=self._listener, stop=self._stop
        )

    def listen(self, listener: Listener) -> None:
        """Report events to this listener from now on."""
        self._listener = listener
        if "trainer" in vars(self):
            self.trainer.listener = listener

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order in which they were learned."""
        return self.model.classes if self.model else ()

    @property
    def network(self) -> Network | None:
        """The network; None before the first group."""
        return self.model.network if self.model else None

    @property
    def memory(self) -> Memory:
        """The exemplars."""
        return self.model.memory if self.model else Memory(store_images=self.config.store_images)

    @property
    def transform(self) -> Transform | None:
        """The transform from an image to the network's input; None before the first group."""
        return self.model.transform if self.model else None

    @property
    def phases(self) -> int:
        """The number of groups learned."""
        return self.model.phases if self.model else 0

    @property
    def known(self) -> Model:
        """The model; an error before the first group."""
        if self.model is None:
            raise ConfigError("nothing was learned yet: call learn first")
        return self.model

    # ------------------------------------------------------------------------------------- verbs

    def learn(
        self,
        images: Any,
        labels: Any = None,
        *,
        progress: Checkpoints | None = None,
        now: Features | None = None,
    ) -> None:
        """Learn a group: new classes, more images of known ones, or both (Algorithm 1).

        The model changes only when the whole group is learned.

        Args:
            images: ``phase.train`` of a scenario; or uint8 or 0..1 float arrays (N, H, W[, C]) with
                labels; or a torch Dataset of (image, label) pairs.
            labels: (N,) class names or numbers; 0, 0.0 and "0" are one class.
            progress: where checkpoints are kept; an interrupted group resumes from the last one.
            now: features of these images, if the network is not trained and they are known already
                (`geodl.learning.reading`).
        """
        train = labelled(images, labels)
        if self.model is None or self.method.joint:
            self.check()
        backbone, self._backbone = self._backbone, None
        self.model = learn(
            self.model,
            train,
            self.method,
            self.trainer,
            seen=self.seen,
            checkpoints=progress,
            base=self._shared_base,
            backbone=backbone,
            now=now,
        )
        if self.method.joint:
            self.remember(train)

    def remember(self, images: Images) -> None:
        """Add images with class names to those that joint training trains on."""
        self.seen = images if self.seen is None else merged([self.seen, images])

    def evaluate(
        self, images: Any, labels: Any = None, *, seen: Any = None, mirror: bool = True
    ) -> dict[str, Confusion]:
        """Return the confusion matrix of every classifier on labelled images of known classes.

        Args:
            images: as for `learn`.
            labels: (N,) class names or numbers; 0, 0.0 and "0" are one class.
            seen: all training images so far, which the oracle AME needs.
            mirror: whether classifiers may average over mirrored copies.
        """
        old = None if seen is None else self.rows_of(seen)
        test = self.rows_of(images, labels)
        return evaluate(self.known, test, self.features, seen=old, mirror=mirror)[0]

    def recognizer(self, classifier: str | None = None, accelerator: str = "auto") -> Recognizer:
        """Return a recognizer for the current model; accelerator: cpu or cuda, auto: as configured."""
        return self.known.recognizer(
            classifier, accelerator=None if accelerator == "auto" else accelerator
        )

    def save(self, path: str | Path) -> None:
        """Save the model as the latest state of a directory, which ``geodl predict`` can read."""
        model = self.known
        store = model_directory(as_path(path, "model"))
        with store.lock():
            save_model(store, model, action={"action": "save"})

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        phase: int = -1,
        method: Method | None = None,
        network: Own | None = None,
        data_dir: Path | None = None,
        listener: Listener = ignore,
        stop: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Load a learner from a directory of `save`, ``geodl learn`` or ``geodl run``.

        Args:
            path: the directory, or ``hf://USER/NAME`` for a model uploaded by `geodl.push`.
            phase: the state, counted from 0: a phase of ``geodl run``, a step of ``geodl learn`` (the last four are
                kept), or a call of `save`; -1: the last one. Earlier states evaluate and predict; the closed form of
                a run can continue learning only from its last phase.
            method: the method, if it was passed as an object.
            network: the backbone, if it was passed as a module.
            data_dir: where the exemplars of a model with ``store_images=False`` are; files elsewhere are
                not read.
            listener: as for the constructor.
            stop: as for the constructor.
        """
        if method is not None:
            METHODS.name_of(type(method))
        store = Directory(as_path(fetched(path), "model"))
        if not store.completed():
            raise StoreError(f"{path}: nothing was learned yet")
        model = load_model(store.phase(phase), data_dir=data_dir, network=network)
        if network is not None:
            _check_backbone(model, network)
        parts: dict[str, Any] = {"method": method, "network": network}
        return cls(model.config, model=model, **parts, listener=listener, stop=stop)

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        self.model = self.known.renamed(old, new)
        if self.seen is not None:
            names = {old: class_name(new)}
            named = tuple(names.get(name, name) for name in self.seen.names)
            self.seen = replace(self.seen, names=named)

    def remove(self, name: str) -> None:
        """Remove a class: its row of the head, its means, its images."""
        self.model = self.known.without(name)
        if self.seen is not None:
            # By name: a removed class may have been learned again.
            stay = torch.tensor([each != name for each in self.seen.names])
            self.seen = self.seen.select(stay[self.seen.labels])

    # ------------------------------------------------------------------------------------- parts

    def features(self, images: Images, *, mirror: bool = False) -> Features:
        """Return the network's features of un-augmented images, or of their mirrored copies."""
        model = self.known
        insist_on_images(images)
        scorers = [each.scorer(model.network) for each in model.classifiers.values()]
        levels = tuple(dict.fromkeys(name for scorer in scorers for name in scorer.levels))
        read = partial(self.trainer.features, model.network, images, model.transform)
        return read(mirror=mirror, levels=levels)

    def rows_of(self, images: Any, labels: Any = None) -> Images:
        """Return labelled images with rows of the head as labels; an unknown class is an error."""
        classes, named = self.known.classes, labelled(images, labels)
        for label in sorted(set(named.labels.tolist())):
            if named.names[label] not in classes:
                known = ", ".join(classes[:20])
                raise DataError(f"class {named.names[label]!r} was not learned; known are {known}")
        return with_rows(named, classes)

    def check(self) -> None:
        """Build the backbone of a new model for `learn`; an error if that is not possible."""
        self._backbone = self._backbone or self.method.initial_backbone(self._own)


def _continued(model: Model, config: RunConfig) -> Model:
    """Return a model with other options; options that only a new model can have are an error."""
    if config == model.config:
        return model
    size = model.transform.size
    model.config.model_copy(update={"image_size": size}).insist_on_fixed(config.flat())
    head, old = (build(each).head for each in (config, model.config))
    if head != old:
        raise ConfigError(
            f"distill = {config.distill!r} needs a {head} head, and this model has a {old} one: start a new model"
        )
    return replace(model, config=config, transform=transform_of(config, size=size))


def _configured(
    options: Mapping[str, Any],
    method: str | type[Method] | Method | None,
    network: str | Own | None,
) -> RunConfig:
    """Return the validated options of a Learner; options about data sources are an error."""
    about_data = SECTIONS["Data"].model_fields
    chosen = {key: value for key, value in options.items() if key != "preset"}
    for key in chosen:
        if key in about_data:
            raise ConfigError(f"{key}: an option about data sources; pass images to learn instead")
    if method is not None:
        chosen["method"] = type(method) if isinstance(method, Method) else method
    if network is not None:
        chosen["network"] = network if isinstance(network, str) else _called(network)
    for registry in REGISTRIES.values():
        if callable(chosen.get(registry.option)):
            chosen[registry.option] = registry.name_of(chosen[registry.option])
    layers: Sequence[Layer] = []
    if "preset" in options:
        preset = preset_layer(options["preset"])
        values = {key: each for key, each in preset.values.items() if key not in about_data}
        layers = [Layer(preset.origin, values)]
    return configure([*layers, Layer("option", chosen)]).config


def _called(network: Own) -> str:
    """Return the configuration's name of a backbone that is passed as an object."""
    return OWN + str(getattr(network, "__name__", type(network).__name__))


def _check_backbone(model: Model, network: Own) -> None:
    """Raise a ConfigError if a model was not made with this backbone."""
    made = f"network = {_called(network)}: this model was made with {model.config.network}"
    if not model.config.network.startswith(OWN):
        raise ConfigError(f"{made}; leave network out")
    try:
        model.network  # noqa: B018  # build it now, not later
    except StoreError as error:
        raise ConfigError(
            f"{made}, whose weights do not fit: {one_line(error.__cause__)}"
        ) from error
