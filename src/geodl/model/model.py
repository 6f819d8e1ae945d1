"""A model: everything that was learned so far, as one immutable object."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from geodl.config import RunConfig, imported
from geodl.core.content import interpreting
from geodl.core.devices import device_kind
from geodl.core.errors import ConfigError
from geodl.core.tensors import part
from geodl.core.text import raised
from geodl.data.batches import Transform
from geodl.data.images import Images
from geodl.data.names import class_name
from geodl.model.classifiers import CLASSIFIERS, Classifier, LeftOut, default_classifier
from geodl.model.memory import Memory, insist_on_labels
from geodl.model.metrics import Confusion
from geodl.model.recognizer import Recognizer
from geodl.nets import Network, Own, build_network, reading_copy

STATISTICS = "statistics."
"""The prefix of tensors that only further learning needs."""


class Weights:
    """The weights of a network, which is built on first use.

    So a model can be described and its classes renamed without the package that its network needs.
    """

    def __init__(self, name: str | Own, tensors: Mapping[str, Tensor]) -> None:
        self._name, self._tensors = name, dict(tensors)

    @classmethod
    def of(cls, name: str, network: Network) -> Self:
        """Return the weights of a network; name: as for `build_network`."""
        weights = cls(name, {})
        weights.network = network
        return weights

    @cached_property
    def network(self) -> Network:
        """The network, in eval mode."""
        tensors = self._tensors
        # A cosine head has a scale. Seed and initial weights do not matter: all weights are loaded.
        head: Literal["cosine", "linear"] = "cosine" if "head.scale" in tensors else "linear"
        where = Path(f"network {self._name}")
        with interpreting(where):
            classes = len(tensors["head.alpha"])
        network = build_network(self._name, classes, head=head)
        with interpreting(where):
            network.load(tensors)
            wrong = [key for key, each in network.state_dict().items() if not each.isfinite().all()]
            if wrong:
                raise ValueError(f"{wrong[0]} has values that are not finite")
        self._tensors = {}
        return network.eval()

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights by name, without building the network."""
        return self._tensors or self.network.state_dict()


@dataclass(frozen=True, eq=False)
class Model:
    """Everything that was learned so far; learning returns a new model.

    config:      the options of the last phase.
    classes:     the names of the classes; a class's position is its row in the head and the means.
    transform:   from an image to the network's input.
    memory:      the exemplars.
    classifiers: the classifiers by name.
    phases:      the number of groups learned.
    """

    config: RunConfig
    classes: tuple[str, ...]
    weights: Weights
    transform: Transform
    memory: Memory
    classifiers: Mapping[str, Classifier]
    phases: int

    @property
    def network(self) -> Network:
        """The network, built on first use."""
        return self.weights.network

    def row(self, name: str) -> int:
        """Return the row of a class."""
        if name not in self.classes:
            more = ["..."] if len(self.classes) > 20 else []
            known = ", ".join([*self.classes[:20], *more])
            raise ConfigError(f"class {name!r}: the model knows {known}")
        return self.classes.index(name)

    def renamed(self, old: str, new: str) -> "Model":
        """Return the model with a class renamed."""
        row, new = self.row(old), class_name(new)
        if new in self.classes:
            raise ConfigError(f"class name {new!r}: the model has a class of that name")
        return replace(self, classes=(*self.classes[:row], new, *self.classes[row + 1 :]))

    def without(self, name: str) -> "Model":
        """Return the model without a class: its row of the head, its means, its images."""
        row = self.row(name)
        if len(self.classes) == 1:
            raise ConfigError(f"class {name!r}: the only class of a model cannot be removed")
        network = deepcopy(self.network)
        network.head.keep([i for i in range(len(self.classes)) if i != row])
        return replace(
            self,
            classes=(*self.classes[:row], *self.classes[row + 1 :]),
            weights=Weights.of(self.config.network, network),
            memory=self.memory.without(row),
            classifiers={key: each.without(row) for key, each in self.classifiers.items()},
        )

    def recognizer(
        self, classifier: str | None = None, *, accelerator: str | None = None
    ) -> Recognizer:
        """Return a recognizer, which predicts; classifier: its name; None: the preferred one."""
        name = classifier or default_classifier(self.classifiers)
        if name not in self.classifiers:
            known = ", ".join(self.classifiers)
            raise ConfigError(f"classifier = {name!r}: this model has {known}")
        device = device_kind(accelerator or self.config.accelerator)
        scorer = self.classifiers[name].scorer(self.network)
        network = reading_copy(self.network, device)
        return Recognizer(network, self.transform, self.classes, scorer)

    @property
    def default(self) -> Classifier:
        """The classifier that predicts by default."""
        return self.classifiers[default_classifier(self.classifiers)]

    def left_out(self) -> Confusion | None:
        """Return the leave-one-out confusion matrix of learned images, if it is known."""
        left_out = self.default.left_out()
        if left_out is None:
            return None
        confusion = Confusion.of(left_out.labels, left_out.predictions, self.classes)
        if left_out.series is None or left_out.gains is None:
            return confusion
        return confusion.in_series(left_out.labels, left_out.series, left_out.gains)

    def judged(self, images: Images) -> LeftOut:
        """Return predictions for images that the model keeps; their labels are rows.

        Learned images have their leave-one-out prediction, if the classifier stores these; -1 if an image is not found.
        """
        recognizer, left_out = self.recognizer(), self.default.left_out()
        if left_out is None:
            confidences, predictions = recognizer.answers(images).probabilities.max(dim=1)
            return LeftOut(images.labels, predictions, confidences)
        places = self.default.places(recognizer.features(images))
        assert places is not None
        found = places >= 0
        predictions = torch.full_like(places, -1)
        predictions[found] = left_out.predictions[places[found]]
        if left_out.confidences is None:
            return LeftOut(images.labels, predictions, None)
        confidences = torch.zeros(len(places))
        confidences[found] = left_out.confidences[places[found]]
        return LeftOut(images.labels, predictions, confidences)

    # ------------------------------------------------------------------------- saving and loading

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors by name."""
        tensors = {f"network.{key}": each for key, each in self.weights.tensors().items()}
        tensors |= {f"memory.{key}": each for key, each in self.memory.to_tensors().items()}
        for name, classifier in self.classifiers.items():
            tensors |= {f"{name}.{key}": each for key, each in classifier.tensors().items()}
            more = classifier.statistics()
            tensors |= {f"{STATISTICS}{name}.{key}": each for key, each in more.items()}
        return tensors

    def record(self) -> dict[str, Any]:
        """Return everything else that a model consists of, ready for JSON."""
        imports = {"imports": imported()} if imported() else {}
        return {
            # The image size, even if the options left it open.
            "config": self.config.identity() | {"image_size": self.transform.size, **imports},
            "transform": self.transform.to_dict(),
            "classes": list(self.classes),
            "classifiers": list(self.classifiers),
            "phases": self.phases,
        }

    @classmethod
    def from_tensors(
        cls,
        config: RunConfig,
        record: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        data_dir: Path | None = None,
        network: Own | None = None,
    ) -> Self:
        """Return the model of `to_tensors` and `record`.

        config: the record's, validated; data_dir: as for `Memory`; network: the backbone, if it was passed as an object.
        """
        classes = tuple(str(name) for name in record["classes"])
        memory = Memory.from_tensors(part(tensors, "memory"), data_dir)
        insist_on_labels(len(classes), memory.images, memory.held)
        statistics = part(tensors, STATISTICS.removesuffix("."))
        classifiers = {}
        for name in record["classifiers"]:
            mine = part(tensors, name) | part(statistics, name)
            try:
                classifier = classifiers[name] = CLASSIFIERS[name].from_tensors(mine, config)
            except (AttributeError, RuntimeError) as error:  # an error in the classifier's code
                raise ConfigError(f"classifier {name}: {raised(error)}") from error
            if classifier.classes not in (None, len(classes)):
                raise ValueError(f"{name}: {classifier.classes} classes, not {len(classes)}")
        return cls(
            config,
            classes,
            Weights(network or config.network, part(tensors, "network")),
            Transform.from_dict(record["transform"]),
            memory,
            classifiers,
            int(record["phases"]),
        )
