"""The common options of a run, each declared once; its docstring is its help text."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator
from pydantic_core import to_json

from geodl.core.errors import ConfigError

MANY = 1_000_000
"""More epochs, classes or images than anybody means; the limit of options that count."""
SEEDS = 2**63 - 1


class Options(BaseModel):
    """Options of a part: a method, a distillation, ...; a subclass declares them as fields with docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Other defaults of common options where this part, a method, is in use."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Options that a model of `geodl learn` keeps for good; it takes over the others unless a step sets them."""
    research: ClassVar[frozenset[str]] = frozenset()
    """Own options that `geodl learn` does not have."""

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default of a common option where this part, a method, is in use."""
        return cls.defaults.get(name, COMMON[name].default)

    def check(self, config: "RunConfig") -> None:
        """Raise ValueError for a combination with other options that is impossible."""


class PartOptions(Options):
    """Which parts are used."""

    method: str = "lucir"
    """The learning method; `geodl methods` lists them."""
    distill: str = "none"
    """How old knowledge is distilled: none, lwf, cosine or geodesic (GeoDL)."""


class DataOptions(Options):
    """Where the images come from, and their classes in which order."""

    data: str = "digits"
    """Data source: digits, folder, cifar100, hub, imagenet, imagenet-subset, arrays."""
    data_dir: Path | None = None
    """Where the source finds its files (hub: the dataset's name or path)."""
    test_fraction: float = Field(0.2, gt=0, lt=1)
    """Data without a test part (folder, arrays, hub): share kept for testing."""
    split_seed: int = Field(0, ge=-SEEDS, le=SEEDS)
    """Seed of the split of data without a test part, of hold_out and of images_per_class."""
    hold_out: float = Field(0.0, ge=0, lt=1)
    """Share of each class's training images that no phase trains on; they are evaluated beside the test images."""
    classes: int | None = Field(None, ge=1, le=MANY)
    """Only the first so many classes of the class order; unset: all."""
    images_per_class: int | None = Field(None, ge=1, le=MANY)
    """At most so many training images of each class, drawn with split_seed; unset: all."""
    image_column: str | None = None
    """Hub: the column of images; unset: auto-detected."""
    label_column: str | None = None
    """Hub: the column of labels; unset: auto-detected."""
    base: int | None = Field(None, ge=0, le=MANY)
    """Classes of phase 0; unset: half; 0: as in the other phases."""
    phases: int = Field(5, ge=0, le=MANY)
    """Incremental phases T; 0: one phase with all the classes."""
    groups: tuple[int, ...] | tuple[tuple[str, ...], ...] | None = None
    """The groups, instead of base and phases: their sizes (5,3,2) or class names (cat,dog;fish)."""
    order: str | tuple[str, ...] = "lucir-1993"
    """Class order: lucir-1993, icarl-1993, natural, seed (with order_seed), or names."""
    order_seed: int | None = Field(None, ge=0, lt=2**32)
    """Seed of the class order, with order = seed."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.order == "seed" and self.order_seed is None:
            raise ValueError("order = 'seed' needs order_seed")
        if self.order != "seed" and self.order_seed is not None:
            raise ValueError(
                f"order_seed = {self.order_seed} is used only with order = 'seed', not {self.order!r}"
            )
        return self


class NetworkOptions(Options):
    """The network."""

    network: str = "resnet32"
    """Backbone: resnet8, resnet20, resnet32, resnet18, convnet, efficientnet-lite0, efficientnet-lite2, or timm:NAME."""
    pretrained: bool = False
    """Start from published weights (efficientnet-lite0, efficientnet-lite2, timm:NAME)."""
    weights: Path | None = None
    """A file with weights for the backbone: safetensors, .pth or .pt."""
    scale: float = Field(1.0, gt=0)
    """Initial scale of the cosine head; short schedules: 10."""


class TrainingOptions(Options):
    """How the network is trained."""

    epochs: int = Field(160, ge=1, le=MANY)
    """Epochs of each phase."""
    base_epochs: int | None = Field(None, ge=1, le=MANY)
    """Epochs of phase 0; unset: as epochs."""
    batch_size: int = Field(128, ge=2, le=MANY)
    """Images a step, over all devices."""
    lr: float = Field(0.1, gt=0)
    """Learning rate (onecycle: its peak); about 0.001 for adamw."""
    base_lr: float | None = Field(None, gt=0)
    """Learning rate of phase 0; unset: as lr."""
    schedule: Literal["step", "onecycle", "cosine"] = "step"
    """step: lr x lr_decay at milestones; onecycle: up, then down; cosine: down."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Where the step schedule decays, as fractions of the epochs."""
    lr_decay: float = Field(0.1, gt=0, le=1)
    """Factor of the step schedule at each milestone."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of the network; later stages of a method, such as BiC's correction, have their own SGD."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD; adamw: beta 1."""
    nesterov: bool = False
    """Nesterov's momentum (sgd)."""
    weight_decay: float = Field(5e-4, ge=0)
    """Weight decay."""
    norm_decay: bool = True
    """Weight decay also on norms, biases and scales."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing of the cross-entropy."""
    clip_norm: float | None = Field(None, gt=0)
    """Clip the gradient's norm; unset: no clipping."""
    seed: int = Field(1, ge=0, le=SEEDS)
    """Seed of initialization, shuffling and augmentation."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.nesterov and self.optimizer != "sgd":
            raise ValueError(
                f"nesterov = True: allowed with optimizer = 'sgd', not {self.optimizer!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_milestones(self) -> Self:
        within = all(0 < milestone < 1 for milestone in self.milestones)
        if not within or sorted(self.milestones) != list(self.milestones):
            raise ValueError(
                f"milestones = {self.milestones}: rising fractions between 0 and 1 are allowed"
            )
        return self


class ImageOptions(Options):
    """What the network sees of an image."""

    image_size: int | None = Field(None, ge=1, le=4096)
    """Side of the network's images; unset: that of the data."""
    crop: Literal["pad", "whole", "resized"] = "pad"
    """Crop: the center square, in training padded and cropped; the whole picture on gray, likewise; or a random part, resized."""
    padding: int = Field(4, ge=0, le=1024)
    """Padding of the pad crop."""
    flip: bool = True
    """Mirror images at random (and the exemplars of k-NME)."""
    jitter: float = Field(0.0, ge=0, lt=1)
    """Color jitter: brightness, contrast, saturation."""
    augment: str = "none"
    """Augmentation of each image, after crop and flip: none or trivial (TrivialAugment)."""
    mean: tuple[float, float, float] = (0.5071, 0.4866, 0.4409)
    """Mean of the colors."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.2009, 0.1984, 0.2023)
    """Standard deviation of the colors."""


class MemoryOptions(Options):
    """What is kept of old classes."""

    exemplars: int = Field(20, ge=0, le=MANY)
    """Exemplars a class, or in total (memory_budget)."""
    memory_budget: Literal["per_class", "total"] = "per_class"
    """What exemplars counts."""
    selection: str = "herding"
    """How exemplars are chosen: herding, or nearest to the class mean."""
    store_images: bool = True
    """Keep exemplars of image files as bytes; otherwise as path and content hash."""


class EvaluationOptions(Options):
    """What is measured."""

    classifiers: tuple[str, ...] | None = None
    """Classifiers to evaluate, such as nme,ncm; unset: all that the model has."""
    ame: bool = False
    """Evaluate AME too, an oracle that needs all the old classes' images."""
    ame_images: int | None = Field(None, ge=1, le=MANY)
    """AME (oracle): at most this many images a class; unset: all."""
    analysis: bool = True
    """Compare features with phase 0 after each phase (SVCCA, CKA, angles)."""


class MachineOptions(Options):
    """Where and how it runs. Only precision and compile change the results beyond rounding."""

    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads; unset: the cores there are, at most OMP_NUM_THREADS."""
    devices: int = Field(1, ge=1, le=1024)
    """Devices (GPUs, or CPU processes) on each node."""
    nodes: int = Field(1, ge=1, le=65536)
    """Nodes."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device; auto: cuda where there is one."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    """Arithmetic of training: 32 bits, or bf16; auto: bf16 where the device has it. Features for classifiers are always float32."""
    compile: bool = False
    """torch.compile the network: pays for long phases."""
    workers: int = Field(2, ge=0, le=1024)
    """Threads that decode image files."""
    checkpoint_steps: int | None = Field(None, ge=1, le=10**9)
    """Save progress every so many steps; unset: at the end of an epoch, 10 seconds apart or more."""
    tensorboard: bool = False
    """Write TensorBoard curves into the run directory."""


SECTIONS: dict[str, type[Options]] = {
    "Method": PartOptions,
    "Data": DataOptions,
    "Network": NetworkOptions,
    "Training": TrainingOptions,
    "Images": ImageOptions,
    "Memory": MemoryOptions,
    "Evaluation": EvaluationOptions,
    "Machine": MachineOptions,
}
"""The common options by heading."""
COMMON = {
    name: info for section in SECTIONS.values() for name, info in section.model_fields.items()
}
"""The common options: name -> pydantic's field."""
IDENTITY_FREE = frozenset(MachineOptions.model_fields) - {"precision", "compile"}
"""Options that do not change what is computed, so that the hash of a run does not cover them."""

P = TypeVar("P", bound=Options)


# Pydantic lists the fields of the last base first.
class RunConfig(
    MachineOptions,
    EvaluationOptions,
    MemoryOptions,
    ImageOptions,
    TrainingOptions,
    NetworkOptions,
    DataOptions,
    PartOptions,
):
    """The options of a run: the common ones, and in `parts` those of the method, the distillation, ... in use.

    Frozen: what is stored with a run is what the run did. Outside Python code options have flat names, those of the parts
    too: on the command line, in TOML files, as keyword arguments and in stored configurations.
    """

    fixed: ClassVar[frozenset[str]] = frozenset(
        {"method", "network", "scale", "image_size", "crop", "padding", "mean", "std"}
    )
    parts: Mapping[str, Options] = Field({}, exclude=True)
    """The options of each part in use, by kind and name, such as "method lucir"."""

    def __hash__(self) -> int:
        return hash(self.hash())

    def of(self, kind: type[P]) -> P:
        """Return the options of a part, given their class: ``config.of(LucirOptions).margin``; the defaults if not in use."""
        return next((part for part in self.parts.values() if isinstance(part, kind)), kind())

    def headings(self) -> dict[str, list[str]]:
        """Return the names of the options by heading: the common ones, then those of each part in use."""
        shown = {title: list(section.model_fields) for title, section in SECTIONS.items()}
        own = {
            title.capitalize(): list(type(part).model_fields) for title, part in self.parts.items()
        }
        return shown | {title: names for title, names in own.items() if names}

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option by its flat name."""
        return self.flat()[name]

    def flat(self, mode: Literal["python", "json"] = "python") -> dict[str, Any]:
        """Return all options by their flat names, those of the parts too; json: ready for JSON."""
        found = self.model_dump(mode=mode)
        for part in self.parts.values():
            found |= part.model_dump(mode=mode)
        return found

    def identity(self) -> dict[str, Any]:
        """Return the options that decide what is computed, ready for JSON: those that the hash of a run covers."""
        return {key: value for key, value in self.flat("json").items() if key not in IDENTITY_FREE}

    def older(self, known: Collection[str]) -> dict[str, Any]:
        """Return the identity as a version that knew these options had it: it lacks newer ones at their defaults."""
        defaults = self._defaults()
        return {
            key: value
            for key, value in self.identity().items()
            if key in known or value != defaults[key]
        }

    def _defaults(self) -> dict[str, Any]:
        """Return the declared default of each option, ready for JSON."""
        found = {key: info.default for key, info in COMMON.items()}
        for part in self.parts.values():
            found |= {key: info.default for key, info in type(part).model_fields.items()}
        return json.loads(to_json(found))  # type: ignore[no-any-return]

    def hash(self) -> str:
        """Return a short hash of the options that differ from their defaults, so that a new option changes none."""
        text = json.dumps(self.older(()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def fixed_in_model(self) -> list[str]:
        """Return the options that a model keeps for good."""
        fixed = self.fixed.union(*(part.fixed for part in self.parts.values()))
        return [key for key in self.flat() if key in fixed]

    def insist_on_fixed(self, wanted: Mapping[str, Any]) -> None:
        """Raise a ConfigError where other values are wanted of options that a model with these options keeps for good."""
        for key in self.fixed_in_model():
            if wanted.get(key) is not None and wanted[key] != self[key]:
                raise ConfigError(
                    f"{key} = {wanted[key]}: this model was made with {self[key]}; another needs a new model"
                )
