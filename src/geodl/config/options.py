"""The common options of a run, each declared once with its help text as docstring."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator
from pydantic_core import to_json

from geodl.core.errors import ConfigError

MANY = 1_000_000
"""Upper limit of options that count something (epochs, classes, images)."""
SEEDS = 2**63 - 1
"""The largest seed."""


class Options(BaseModel):
    """Base class of the options of a part (a method, a distillation, ...): fields with docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Of a method: its own defaults of common options."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Options that cannot change once a model of `geodl learn` exists; the others can be set again in each step."""
    research: ClassVar[frozenset[str]] = frozenset()
    """Options of this part that `geodl learn` does not offer."""

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default of a common option with this method."""
        return cls.defaults.get(name, COMMON[name].default)

    def check(self, config: "RunConfig") -> None:
        """Raise ValueError if these options contradict others of the run."""


class PartOptions(Options):
    """The parts of a run."""

    method: str = "lucir"
    """The learning method; `geodl methods` lists them."""
    distill: str = "none"
    """Distillation of old knowledge: none, lwf, cosine or geodesic (GeoDL)."""


class DataOptions(Options):
    """The data, the order of classes, and their split into phases."""

    data: str = "digits"
    """Data source: digits, folder, cifar100, hub, imagenet, imagenet-subset, arrays."""
    data_dir: Path | None = None
    """Directory of the data (hub: the dataset's name or path)."""
    test_fraction: float = Field(0.2, gt=0, lt=1)
    """Test share of data without a test set (folder, arrays, hub)."""
    split_seed: int = Field(0, ge=-SEEDS, le=SEEDS)
    """Seed of the test split (test_fraction), of hold_out and of images_per_class."""
    hold_out: float = Field(0.0, ge=0, lt=1)
    """Share of each class's training images to hold out: never trained on, evaluated beside the test images."""
    classes: int | None = Field(None, ge=1, le=MANY)
    """Use only the first N classes of the class order; unset: all."""
    images_per_class: int | None = Field(None, ge=1, le=MANY)
    """At most this many training images per class, drawn with split_seed; unset: all."""
    image_column: str | None = None
    """Hub: the column of images; unset: auto-detected."""
    label_column: str | None = None
    """Hub: the column of labels; unset: auto-detected."""
    base: int | None = Field(None, ge=0, le=MANY)
    """Classes of phase 0; unset: half of them; 0: as many as in other phases."""
    phases: int = Field(5, ge=0, le=MANY)
    """Incremental phases T after phase 0; 0: a single phase with all classes."""
    groups: tuple[int, ...] | tuple[tuple[str, ...], ...] | None = None
    """Groups of classes, in place of base and phases: sizes (5,3,2) or names (cat,dog;fish)."""
    order: str | tuple[str, ...] = "lucir-1993"
    """Class order: lucir-1993, icarl-1993, natural, seed (random, by order_seed), or a list of names."""
    order_seed: int | None = Field(None, ge=0, lt=2**32)
    """Seed of a random class order (order = seed)."""

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
    """Epochs of phase 0; unset: same as epochs."""
    batch_size: int = Field(128, ge=2, le=MANY)
    """Images per step, over all devices."""
    lr: float = Field(0.1, gt=0)
    """Learning rate (onecycle: its peak); about 0.001 for adamw."""
    base_lr: float | None = Field(None, gt=0)
    """Learning rate of phase 0; unset: same as lr."""
    schedule: Literal["step", "onecycle", "cosine"] = "step"
    """Learning rate schedule: step (lr x lr_decay at milestones), onecycle (up, then down) or cosine (down)."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Step schedule: when to decay, as fractions of the epochs."""
    lr_decay: float = Field(0.1, gt=0, le=1)
    """Step schedule: factor at each milestone."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of the main stage; later stages of a method, such as BiC's correction, have their own SGD."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """SGD momentum; adamw: beta 1."""
    nesterov: bool = False
    """Use Nesterov momentum (sgd)."""
    weight_decay: float = Field(5e-4, ge=0)
    """Weight decay."""
    norm_decay: bool = True
    """Apply weight decay to norms, biases and scales too."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing of the cross-entropy."""
    clip_norm: float | None = Field(None, gt=0)
    """Maximum norm of the gradient; unset: no clipping."""
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
    """Preprocessing and augmentation."""

    image_size: int | None = Field(None, ge=1, le=4096)
    """Side of the network's input in pixels; unset: that of the data."""
    crop: Literal["pad", "whole", "resized"] = "pad"
    """pad: center square, in training padded and cropped; whole: the whole picture on gray, likewise; resized: a random part, resized."""
    padding: int = Field(4, ge=0, le=1024)
    """Padding in pixels (crop = pad or whole)."""
    flip: bool = True
    """Mirror images at random (and the exemplars of k-NME)."""
    jitter: float = Field(0.0, ge=0, lt=1)
    """Color jitter: brightness, contrast, saturation."""
    augment: str = "none"
    """Further augmentation of each image, after crop and flip: none or trivial (TrivialAugment)."""
    mean: tuple[float, float, float] = (0.5071, 0.4866, 0.4409)
    """Mean of each color channel (0 to 1)."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.2009, 0.1984, 0.2023)
    """Standard deviation of each color channel."""


class MemoryOptions(Options):
    """The memory of old classes."""

    exemplars: int = Field(20, ge=0, le=MANY)
    """Exemplars per class, or in total (see memory_budget)."""
    memory_budget: Literal["per_class", "total"] = "per_class"
    """Whether exemplars counts images per class or in total."""
    selection: str = "herding"
    """Selection of exemplars: herding, or nearest (to the class mean)."""
    store_images: bool = True
    """Store exemplars of image files as bytes; otherwise as path and content hash."""


class EvaluationOptions(Options):
    """Evaluation."""

    classifiers: tuple[str, ...] | None = None
    """Classifiers to evaluate, such as nme,ncm; unset: all of the model."""
    ame: bool = False
    """Also evaluate AME, an oracle that reads all images of old classes."""
    ame_images: int | None = Field(None, ge=1, le=MANY)
    """AME (oracle): at most this many images per class; unset: all."""
    analysis: bool = True
    """Compare features with phase 0 after each phase (SVCCA, CKA, angles)."""


class MachineOptions(Options):
    """Hardware and logging. Only precision and compile change the results beyond rounding."""

    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads; unset: all cores, at most OMP_NUM_THREADS."""
    devices: int = Field(1, ge=1, le=1024)
    """Devices (GPUs, or CPU processes) per node."""
    nodes: int = Field(1, ge=1, le=65536)
    """Number of nodes."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Type of device; auto: cuda if available."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    """Precision of training: float32 or bf16; auto: bf16 if the device supports it. Features for classifiers are always float32."""
    compile: bool = False
    """Compile the network with torch.compile; worthwhile for long phases."""
    workers: int = Field(2, ge=0, le=1024)
    """Threads for decoding image files."""
    checkpoint_steps: int | None = Field(None, ge=1, le=10**9)
    """Steps between checkpoints; unset: at the end of an epoch, at least 10 seconds apart."""
    tensorboard: bool = False
    """Write TensorBoard logs to the run directory."""


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
"""The common options: name -> pydantic field."""
IDENTITY_FREE = frozenset(MachineOptions.model_fields) - {"precision", "compile"}
"""Options that do not change the results and are not part of a run's hash."""

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

    Frozen: the configuration stored with a run is the one that it used. On the command line, in TOML files, as keyword
    arguments and in stored configurations all options, those of parts included, share one flat namespace.
    """

    fixed: ClassVar[frozenset[str]] = frozenset(
        {"method", "network", "scale", "image_size", "crop", "padding", "mean", "std"}
    )
    parts: Mapping[str, Options] = Field({}, exclude=True)
    """The options of the parts in use by kind and name, such as "method lucir"."""

    def __hash__(self) -> int:
        return hash(self.hash())

    def of(self, kind: type[P]) -> P:
        """Return the options of a part by their class, as in ``config.of(LucirOptions).margin``; defaults if it is not in use."""
        return next((part for part in self.parts.values() if isinstance(part, kind)), kind())

    def headings(self) -> dict[str, list[str]]:
        """Return the names of the options by heading: common options, then those of each part in use."""
        common = {title: list(section.model_fields) for title, section in SECTIONS.items()}
        return common | {
            title.capitalize(): list(type(part).model_fields)
            for title, part in self.parts.items()
            if type(part).model_fields
        }

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option by its flat name."""
        return self.flat()[name]

    def flat(self, mode: Literal["python", "json"] = "python") -> dict[str, Any]:
        """Return all options by their flat names; mode "json": as JSON types."""
        values = self.model_dump(mode=mode)
        for part in self.parts.values():
            values |= part.model_dump(mode=mode)
        return values

    def identity(self) -> dict[str, Any]:
        """Return the options that determine the results, as JSON types: those that a run's hash covers."""
        return {key: value for key, value in self.flat("json").items() if key not in IDENTITY_FREE}

    def older(self, known: Collection[str]) -> dict[str, Any]:
        """Return the identity without options that are at their defaults, except those in `known`.

        It is what an earlier version stored that had only the options in `known`.
        """
        fields = dict(COMMON)
        for part in self.parts.values():
            fields |= type(part).model_fields
        defaults = json.loads(to_json({key: info.default for key, info in fields.items()}))
        return {
            key: value
            for key, value in self.identity().items()
            if key in known or value != defaults[key]
        }

    def hash(self) -> str:
        """Return a short hash of the options that differ from their defaults, so that new options change no hash."""
        text = json.dumps(self.older(()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def fixed_in_model(self) -> list[str]:
        """Return the options that cannot change once a model exists."""
        fixed = self.fixed.union(*(part.fixed for part in self.parts.values()))
        return [key for key in self.flat() if key in fixed]

    def insist_on_fixed(self, wanted: Mapping[str, Any]) -> None:
        """Raise a ConfigError if options that cannot change once a model exists are requested with other values."""
        for key in self.fixed_in_model():
            if wanted.get(key) is not None and wanted[key] != self[key]:
                raise ConfigError(
                    f"{key} = {wanted[key]}: this model was made with {self[key]}; another needs a new model"
                )
