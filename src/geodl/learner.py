"""``Learner``: a network, its memory and its class statistics, and what a method does with them. It needs no directory."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.config import Layer, RunConfig, derive, groups_of_options, preset_layer
from geodl.data.batches import Transform, transform_of
from geodl.data.images import Images, concat
from geodl.data.intake import labelled, with_rows
from geodl.data.names import class_name
from geodl.devices import choose_precision, device_kind
from geodl.errors import ConfigError, DataError, StoreError
from geodl.events import Listener, ignore
from geodl.files import as_path, interpreting
from geodl.herding import first_of_each
from geodl.memory import Memory, insist_on_labels, quota, without_class
from geodl.methods import Phase, build, configure, stored_config
from geodl.metrics import Confusion
from geodl.nets import CosineHead, Network, build_network, folded, frozen_copy
from geodl.predicting import Predictions, Recognizer, Scorer
from geodl.predictors import Features, Judged, class_means, default_classifier, nearest_mean
from geodl.store import Phase as SavedPhase
from geodl.store import RunDirectory
from geodl.training import Base, Progress, Trainer, means_of_exemplars, run_stages, settled

MODEL = {"kind": "model"}
"""The constant configuration of a model directory: what its steps were made with is kept with each step."""


class Learner:
    """Learns classes group by group without forgetting, by a method and its options.

    The options are those of the command line (``geodl config show`` lists them) but for where data come from:
    ``Learner(method="lucir", distill="geodesic", exemplars=20)``; ``preset="cifar100"`` starts from a preset. Or it takes a
    configuration that was checked before.

    Attributes:
        classes: the names of the classes known, in the order in which they were learned.
        network: the network; None before anything is learned.
        memory: exemplars and class means.
        transform: from a picture to the network's input; None before anything is learned.
        phases: how many groups were learned.
        given: joint training alone: all images given so far. They are not saved with it.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        listener: Listener = ignore,
        stop: Callable[[], bool] = lambda: False,
        shared_base: Base | None = None,
        decided_precision: str | None = None,
        **options: Any,
    ) -> None:
        self.config = config if config is not None else _configured(options)
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.method = build(self.config)
        self.listener, self.shared_base = listener, shared_base
        self._stop, self._decided_precision = stop, decided_precision
        self.classes: tuple[str, ...] = ()
        self._saved: SavedPhase | None = None
        self.memory = Memory(store_images=self.config.store_images)
        self.transform: Transform | None = None
        self.phases = 0
        self.trained = False
        self.given: Images | None = None

    @cached_property
    def network(self) -> Network | None:
        """The network, which a saved learner builds on first use; None before anything is learned."""
        if self._saved is None:
            return None
        # Without the first weights: neither the package nor the file that they came from is needed any more.
        with interpreting(self._saved.path):
            network = self._built(len(self.classes), weights=None, pretrained=False)
            network.load(self._saved.model)
        self._saved = None
        return network.eval()

    @cached_property
    def trainer(self) -> Trainer:
        """What trains and evaluates on the devices; made on first use, since loading and predicting need none."""
        return Trainer(self.config, precision=self._decided_precision, listener=self.listener, stop=self._stop)

    # ------------------------------------------------------------------------------------------------------ learning

    def learn(self, images: Any, labels: Any = None, *, progress: Progress | None = None) -> None:
        """Learn one group: new classes, more images of known ones, or both (the paper's Algorithm 1).

        Args:
            images: images of geodl's (``phase.train`` of a scenario), or uint8 or 0..1 float arrays (N, H, W[, C]) with
                labels, or a torch Dataset of (image, label) pairs.
            labels: (N,) class names or numbers.
            progress: where checkpoints go; a group that was stopped is gone on with where they were kept.

        Until a group is learned completely, nothing is changed.
        """
        train, classes = self._admitted(labelled(images, labels))
        transform = self.transform or transform_of(self.config, train)
        if self.method.keeps_all_data and self.phases:
            if self.given is None:
                raise ConfigError("joint training needs all earlier images: set `given` to them, they are not saved")
            train = concat([self.given, train])
        elif not self.trained and self.memory.images is not None:  # the first real training: all is new
            train = concat([train, self.memory.images])
        if len(classes) == 1 and self.method.trains(0) and not self.trained:
            network, memory = self._one_class(train, transform)
        else:
            phase = self.prepare(train, len(classes), transform)
            if len(classes) > 1:  # where the others were removed, there is nothing to train either
                run_stages(self.trainer, self.method, phase, progress, self.listener, self.shared_base)
            network, memory = phase.network, settled(self.trainer, self.method, phase)
        if self.method.keeps_all_data:
            self.given = train
        self.network, self.memory, self.transform = network, memory, transform
        self.classes, self.phases = classes, self.phases + 1
        self.trained = self.trained or len(classes) > 1 or not self.method.trains(0)

    def prepare(self, images: Images, classes: int, transform: Transform) -> Phase:
        """Return the next phase, ready to be trained: teacher, grown head, imprinted rows, frozen rows of absent classes.

        images: labels are rows of the head; classes counts all those known when the phase is over.
        """
        config, method, trainer = self.config, self.method, self.trainer
        fresh = not self.trained or method.keeps_all_data
        memory = Memory(store_images=config.store_images) if fresh else self.memory
        last = None if fresh else self.network
        old = 0 if last is None else last.head.classes
        network = self._built(classes) if last is None else deepcopy(last)
        if classes > network.head.classes:
            network.head.grow(classes - old, derive(config.seed, "rows", self.phases))
        trainer.place(network)
        held = method.held_out(quota(classes, config.exemplars, config.memory_budget))
        images, memory = memory.hold_out(images, range(old, classes), held, config.seed)
        read = partial(trainer.features, transform=transform, levels=method.levels(network))
        teacher = frozen_copy(last).to(trainer.device) if last is not None and method.trains(self.phases) else None
        phase = Phase(
            index=self.phases,
            config=config,
            transform=transform,
            network=network,
            teacher=teacher,
            images=images,
            memory=memory,
            old=old,
            new=classes - old,
            read=partial(read, network),
            read_teacher=partial(read, teacher) if teacher is not None else None,
            device=trainer.device,
            ranks=trainer.ranks,
            autocast=trainer.fabric.autocast,
        )
        if phase.read_teacher is not None:
            phase.before = found = phase.read_teacher(phase.at_hand())
            if isinstance(network.head, CosineHead) and classes > old:
                network.head.imprint(range(old, classes), class_means(found.pooled, found.labels, classes)[old:])
        if old and method.freezes_old_rows:
            absent = torch.arange(classes) < old
            absent[images.labels] = False
            network.head.freeze(absent)
        return phase

    def _one_class(self, train: Images, transform: Transform) -> tuple[Network, Memory]:
        """Keep exemplars of the only class by the features of the untrained network: there is nothing to tell apart."""
        share = quota(1, self.config.exemplars, self.config.memory_budget)
        if not share and not self.method.keeps_all_data:
            given = f"exemplars = {self.config.exemplars}"
            raise ConfigError(f"{given}: the first step needs two classes or more, since nothing can be kept of one")
        network = self._built(1)
        found = self.trainer.features(network, train, transform)
        empty = Memory(store_images=self.config.store_images)
        chosen = empty.update(train, found.pooled, [0], quota=share, selection=self.config.selection)
        taken = means_of_exemplars(self.trainer, network, chosen.images, transform, 1)
        return network, replace(chosen, means=class_means(found.pooled, found.labels, 1), exemplar_means=taken)

    def _admitted(self, images: Images) -> tuple[Images, tuple[str, ...]]:
        """Return the images with rows of the head as labels, and the names of all classes known with them."""
        if not len(images):
            raise DataError("no images given: at least one is needed")
        new = [images.names[label] for label in sorted(set(images.labels.tolist()))]
        classes = tuple(dict.fromkeys([*self.classes, *new]))
        return with_rows(images, classes), classes

    def check(self) -> None:
        """Raise an error where the network cannot be built as it is configured."""
        self._built(1)

    def _built(self, classes: int, **other: Any) -> Network:
        config = self.config
        options = {"weights": config.weights, "pretrained": config.pretrained} | other
        seed = derive(config.seed, "network")
        return build_network(config.network, classes, head=self.method.head, scale=config.scale, seed=seed, **options)

    # ---------------------------------------------------------------------------------------- evaluating, predicting

    def features(self, images: Images, *, mirror: bool = False) -> Features:
        """Return what the network makes of un-augmented images, or of their mirrored copies, in eval mode."""
        network, transform = self.known()
        levels = self.method.levels(network)
        return self.trainer.features(network, images, transform, mirror=mirror, levels=levels)

    def classifiers(self, oracle: Tensor | None = None) -> dict[str, Scorer]:
        """Return all classifiers there are, by name; oracle: the means of AME."""
        network, _ = self.known()
        # Confidence is the softmax of cosines times the head's learned scale, 10 where it has none.
        scale = getattr(network.head, "scale", torch.tensor(10.0)).detach().item()
        found: dict[str, Scorer] = {}
        if self.method.trains(self.phases - 1):  # else the head does not know all classes
            found["cnn"] = Scorer(lambda seen: seen.logits)
        means = {"nme": self.memory.exemplar_means, "ame": oracle, "ncm": self.memory.means}
        for name, mean in means.items():
            if mean is not None:
                found[name] = Scorer(partial(_nearest, mean), scale=scale)
        fitted = self.method.fitted(self.memory.own)
        if fitted is not None:
            one = Scorer(lambda seen: fitted.scores(seen.levels), 1 / fitted.temperature, fitted.threshold)
            mirrors = self.method.mirrors(self.memory.own)
            found["analytic"] = replace(one, mirrors=mirrors)
            if mirrors:
                found["analytic_single"] = one
        return found

    def evaluate(self, images: Any, labels: Any = None, *, old: Images | None = None) -> dict[str, Confusion]:
        """Return what every classifier makes of labelled images of known classes, given as for `learn`.

        old: all training images of all classes known: only with them AME, the oracle, can be evaluated.
        """
        test = self.rows_of(images, labels)
        return self.confusions(test, self.features(test), old)

    def confusions(self, images: Images, found: Features, old: Images | None = None) -> dict[str, Confusion]:
        """Return what every classifier makes of images whose labels are rows and whose features are known."""
        oracle = None if old is None else self._all_means(self.rows_of(old))
        classifiers = self.classifiers(oracle)
        mirrored = self.features(images, mirror=True) if any(each.mirrors for each in classifiers.values()) else None
        scores = {name: each(found, mirrored) for name, each in classifiers.items()}
        return {name: Confusion.of(found.labels, each.argmax(dim=1), self.classes) for name, each in scores.items()}

    def left_out(self) -> Confusion | None:
        """Return what the classifier makes of learned images when each is left out of the fit; None where that is unknown."""
        found = self.validated()
        return None if found is None else Confusion.of(found.labels, found.predictions, self.classes)

    def validated(self) -> Judged | None:
        """Return what the fit without an image says of it, for learned images; None where the method cannot say."""
        return self.method.validated(self.memory.own)

    def judged(self, images: Images) -> Judged:
        """Return what the model makes of images that it keeps, whose labels are rows; a prediction of -1 is none.

        Where images were learned that are judged by the fit without them, so are these, as far as they are found among them.
        """
        found, recognizer = self.validated(), self.recognizer()
        if found is None:
            confidences, predictions = recognizer.recognize(images)[0].max(dim=1)
            return Judged(images.labels, predictions, confidences)
        places = self.method.recalled(self.memory.own, recognizer.features(images).levels)
        # Place -1, nowhere, is the one that is put at the end.
        predictions = F.pad(found.predictions, (0, 1), value=-1)[places]
        sure = None if found.confidences is None else F.pad(found.confidences, (0, 1))[places]
        return Judged(images.labels, predictions, sure)

    def _all_means(self, images: Images) -> Tensor:
        """Return the (C, d) means of AME: over all training images, or the first ``ame_images`` of each class."""
        most = self.config.ame_images
        if most is not None:
            images = images.select(first_of_each(images.labels, most))
        found = self.features(images)
        return class_means(found.pooled, found.labels, len(self.classes))

    def rows_of(self, images: Any, labels: Any = None) -> Images:
        """Return labelled images with rows of the head as labels; a class that is not known is an error."""
        self.known()
        given = labelled(images, labels)
        unknown = [given.names[i] for i in sorted(set(given.labels.tolist())) if given.names[i] not in self.classes]
        if unknown:
            raise DataError(f"class {unknown[0]!r} was not learned; known are {', '.join(self.classes[:20])}")
        return with_rows(given, self.classes)

    def predict(self, images: Any, *, classifier: str | None = None, **how: Any) -> Predictions:
        """Return the likeliest classes of images: files, folders, arrays (N, H, W[, C]), PIL images, or a list of such.

        classifier: as for `recognizer`; how: top, threshold, strict, workers, listener as for `Recognizer.predict`.
        """
        return self.recognizer(classifier).predict(images, **how)

    def recognizer(self, classifier: str | None = None) -> Recognizer:
        """Return what predicts with a classifier: analytic, nme, ncm or cnn; None: the first of these that there is."""
        network, transform = self.known()
        there = self.classifiers()
        name = classifier or default_classifier(there)
        if name not in there:
            given = [each for each in there if each != "analytic_single"]  # which is for comparison alone
            raise ConfigError(f"classifier = {name!r}: this model has {', '.join(given)}")
        levels = self.method.levels(network) if name.startswith("analytic") else ()
        device = device_kind(self.config.accelerator)
        bf16 = choose_precision(self.config.precision, device) == "bf16"
        return Recognizer(folded(network).to(device), transform, self.classes, there[name], levels, bf16)

    def known(self) -> tuple[Network, Transform]:
        """Return network and transform; an error where nothing was learned yet."""
        if self.network is None or self.transform is None:
            raise ConfigError("nothing was learned yet: call learn first")
        return self.network, self.transform

    # ------------------------------------------------------------------------------------------------------- changing

    def rename(self, old: str, new: str) -> None:
        """Give a class another name."""
        place, new = self.position(old), class_name(new)
        if new in self.classes:
            raise ConfigError(f"new name {new!r}: there is a class of that name already")
        self.classes = (*self.classes[:place], new, *self.classes[place + 1 :])

    def remove(self, name: str) -> None:
        """Remove a class: its row of the head, its means, its images."""
        gone = self.position(name)
        if len(self.classes) == 1:
            raise ConfigError(f"{name!r} is the only class: a model without classes is no model")
        network = deepcopy(self.known()[0])
        network.head.keep([i for i in range(len(self.classes)) if i != gone])
        own = self.method.without(self.memory.own, gone)
        self.network, self.memory = network, replace(self.memory.without(gone), own=own)
        self.given = None if self.given is None else without_class(self.given, gone)
        self.classes = (*self.classes[:gone], *self.classes[gone + 1 :])

    def position(self, name: str) -> int:
        """Return the row of a class."""
        if name not in self.classes:
            few = [*self.classes[:20], *(["..."] if len(self.classes) > 20 else [])]
            raise ConfigError(f"no class {name!r}; the model knows {', '.join(few)}")
        return self.classes.index(name)

    def continued(self, config: RunConfig, **how: Any) -> "Learner":
        """Return a learner that goes on from here with other options; how: as for the constructor."""
        learner = Learner(config, **how)
        if self.transform is not None:
            self._refuse_other(learner, self.transform.size)
            learner.transform = transform_of(config, size=self.transform.size)
        for name in ("network", "memory", "classes", "phases", "trained", "given"):
            setattr(learner, name, getattr(self, name))
        return learner

    def _refuse_other(self, learner: "Learner", size: int) -> None:
        """Raise an error where a learner that is to go on from here has options that only a new one can have."""
        for key in learner.config.having("in_model", "fixed"):
            wanted = getattr(learner.config, key)
            there = size if key == "image_size" else getattr(self.config, key, None)
            if wanted is not None and wanted != there:
                raise ConfigError(f"{key} = {wanted}: this model was made with {there}; another needs a new model")
        head, there = learner.method.head, self.method.head
        if head != there:
            raise ConfigError(
                f"distill = {learner.config.distill!r}: this goes with a {head} head, and this model has a {there} one; "
                "another needs a new model"
            )

    # --------------------------------------------------------------------------------------------- saving and loading

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of the network, of the memory, and of statistics that only learning needs."""
        own = self.memory.own
        statistics = {name: own[name] for name in own if self.method.only_to_learn(name)}
        rest = {name: own[name] for name in own if name not in statistics}
        asleep = None if "network" in vars(self) else self._saved  # not built, so still as it was saved
        model = self.known()[0].state_dict() if asleep is None else asleep.model
        return model, replace(self.memory, own=rest).to_tensors(), statistics

    def facts(self) -> dict[str, Any]:
        """Return all else that a saved learner consists of, ready for JSON."""
        transform = self.transform or self.known()[1]  # without building the network
        return {
            "config": self.config.identity() | {"image_size": transform.size},  # found by now, where it was left open
            "transform": transform.to_dict(),
            "classes": list(self.classes),
            "phases": self.phases,
            "trained": self.trained,
        }

    def save(self, path: str | Path) -> None:
        """Write the learner to a directory, which ``geodl predict`` opens too; one that is there gets a further state."""
        model, memory, statistics = self.tensors()
        store = RunDirectory.create_or_open(as_path(path, "model"), MODEL)
        with store.lock():
            store.save_phase(store.completed(), model, memory, {}, self.facts(), statistics)

    @classmethod
    def load(cls, path: str | Path, **how: Any) -> Self:
        """Read the last state in a directory of `save`, of ``geodl learn`` or of ``geodl run``; how: listener, stop."""
        store = RunDirectory(as_path(path, "model"))
        if not (done := store.completed()):
            raise StoreError(f"{path}: nothing was learned yet")
        return cls.restored(store.load_phase(done - 1), **how)

    @classmethod
    def restored(cls, saved: SavedPhase, *, config: RunConfig | None = None, **how: Any) -> Self:
        """Return the learner that was saved as a phase of a directory; how: as for the constructor."""
        with interpreting(saved.path):
            learner = cls(config or stored_config(saved.extra["config"]), **how)
        learner.restore(saved)
        return learner

    def restore(self, saved: SavedPhase) -> None:
        """Take over a state that was saved, keeping our own configuration."""
        facts = saved.extra
        vars(self).pop("network", None)
        self._saved = saved
        with interpreting(saved.path):
            memory = Memory.from_tensors(saved.memory)
            self.memory = replace(memory, own={**memory.own, **saved.statistics})
            self.transform = Transform.from_dict(facts["transform"])
            self.classes = tuple(str(name) for name in facts["classes"])
            self.phases, self.trained = int(facts["phases"]), facts["trained"]
            insist_on_labels(len(self.classes), memory.images, memory.held)


def _configured(options: Mapping[str, Any]) -> RunConfig:
    """Check the options of a Learner, which is handed its images: those about data sources are refused."""
    about_data = groups_of_options(RunConfig)["Data"]
    given = {key: value for key, value in options.items() if key != "preset"}
    for key in given:
        if key in about_data:
            raise ConfigError(f"{key}: an option about where images come from; a Learner is handed its images")
    layers: Sequence[Layer] = []
    if "preset" in options:
        preset = preset_layer(options["preset"])
        layers = [Layer(preset.origin, {key: each for key, each in preset.values.items() if key not in about_data})]
    return configure([*layers, Layer("option", given)]).config


def _nearest(means: Tensor, found: Features) -> Tensor:
    return nearest_mean(found.pooled, means)
