"""Options, each declared once with its roles."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MANY = 1_000_000
"""More epochs, classes or images than anybody means; the limit of options that count."""
SEEDS = 2**63 - 1


def option(
    default: Any,
    group: str,
    description: str,
    *,
    identity: bool = True,
    base: bool = False,
    in_model: Literal["fixed", "kept", "set"] | None = None,
    in_grid: bool = False,
    repetition: bool = False,
    training: bool | None = None,
    **constraints: Any,
) -> Any:
    """Declare one option, and its roles.

    Args:
        default: its value where nobody sets it.
        group: the heading under which it is shown.
        description: one sentence for people.
        identity: whether it changes what is computed; otherwise it says only how and where.
        base: whether the trained base phase depends on it (beside its data, schedule and transform).
        in_model: whether `geodl learn` takes it; ``fixed``: a model keeps it for good, ``kept``: later steps take it over
            unless they set it, ``set``: each step has its own.
        in_grid: whether the rows of one table may differ in it and still be rows of that table.
        repetition: whether it says which files and which repetition, not what is done.
        training: whether only training the network uses it, so that who sets it for `geodl learn` asks for training;
            unset: if its group is Training or Distillation.
        constraints: pydantic's ``ge``, ``lt``, ...
    """
    roles: dict[str, Any] = {"group": group, "identity": identity, "base": base, "in_model": in_model}
    roles |= {"in_grid": in_grid, "repetition": repetition}
    roles["training"] = group in ("Training", "Distillation") if training is None else training
    return Field(default, description=description, json_schema_extra=roles, **constraints)


class RunConfig(BaseModel):
    """The options that every method has. Frozen: what is stored with a run is what the run did."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    method: str = option("lucir", "Method", "The learning method; `geodl methods` lists them.", in_model="fixed")
    distill: str = option(
        "none",
        "Method",
        "How old knowledge is distilled: none, lwf, cosine or geodesic (GeoDL).",
        in_model="kept",
        in_grid=True,
        training=True,
    )

    data: str = option(
        "digits", "Data", "Data source: digits, folder, cifar100, hub, imagenet, imagenet-subset, arrays."
    )
    data_dir: Path | None = option(
        None, "Data", "Where the source finds its files (hub: the dataset's name or path).", repetition=True
    )
    test_fraction: float = option(
        0.2, "Data", "Data without a test part (folder, arrays, hub): share kept for testing.", gt=0, lt=1
    )
    split_seed: int = option(0, "Data", "Data without a test part: seed of the split.", ge=-SEEDS, le=SEEDS)
    image_column: str | None = option(None, "Data", "Hub: the column of images; unset: auto-detected.")
    label_column: str | None = option(None, "Data", "Hub: the column of labels; unset: auto-detected.")
    base: int | None = option(
        None, "Data", "Classes of phase 0; unset: half; 0: as in the other phases.", ge=0, le=MANY, in_grid=True
    )
    phases: int = option(
        5, "Data", "Incremental phases T; 0: one phase with all the classes.", ge=0, le=MANY, in_grid=True
    )
    groups: tuple[int, ...] | tuple[tuple[str, ...], ...] | None = option(
        None, "Data", "Sizes of the groups, or lists of class names, instead of base and phases."
    )
    order: str | tuple[str, ...] = option(
        "lucir-1993", "Data", "Class order: lucir-1993, icarl-1993, natural, seed (with order_seed), or names."
    )
    order_seed: int | None = option(None, "Data", "Seed of the class order, with order = seed.", ge=0, lt=2**32)

    network: str = option(
        "resnet32",
        "Network",
        "Backbone: resnet8, resnet20, resnet32, resnet18, convnet, efficientnet-lite0, or timm:NAME.",
        in_model="fixed",
        base=True,
    )
    pretrained: bool = option(
        False, "Network", "Start from published weights (efficientnet-lite0, timm:NAME).", in_model="kept", base=True
    )
    weights: Path | None = option(
        None, "Network", "A file with weights for the backbone: safetensors, .pth or .pt.", in_model="kept"
    )
    scale: float = option(
        1.0, "Network", "Initial scale of the cosine head; short schedules: 10.", gt=0, in_model="fixed", base=True
    )

    epochs: int = option(160, "Training", "Epochs of each phase.", ge=1, le=MANY, in_model="set")
    base_epochs: int | None = option(None, "Training", "Epochs of phase 0; unset: as epochs.", ge=1, le=MANY)
    batch_size: int = option(
        128, "Training", "Images a step, over all devices.", ge=2, le=MANY, in_model="set", base=True
    )
    lr: float = option(0.1, "Training", "Learning rate (onecycle: its peak).", gt=0, in_model="set")
    base_lr: float | None = option(None, "Training", "Learning rate of phase 0; unset: as lr.", gt=0)
    schedule: Literal["step", "onecycle"] = option(
        "step", "Training", "step: lr x lr_decay at milestones; onecycle: up, then down.", in_model="set"
    )
    milestones: tuple[float, ...] = option(
        (0.5, 0.75), "Training", "Where the step schedule decays, as fractions of the epochs.", in_model="set"
    )
    lr_decay: float = option(
        0.1, "Training", "Factor of the step schedule at each milestone.", gt=0, le=1, in_model="set"
    )
    momentum: float = option(0.9, "Training", "Momentum of SGD.", ge=0, lt=1, in_model="set")
    nesterov: bool = option(False, "Training", "Nesterov's momentum.", in_model="set")
    weight_decay: float = option(5e-4, "Training", "Weight decay of SGD.", ge=0, in_model="set")
    norm_decay: bool = option(True, "Training", "Weight decay also on norms, biases and scales.", in_model="set")
    label_smoothing: float = option(
        0.0, "Training", "Label smoothing of the cross-entropy.", ge=0, lt=1, in_model="set", base=True
    )
    clip_norm: float | None = option(
        None, "Training", "Clip the gradient's norm; unset: no clipping.", gt=0, in_model="set", base=True
    )
    seed: int = option(
        1,
        "Training",
        "Seed of initialization, shuffling and augmentation.",
        ge=0,
        le=SEEDS,
        in_model="kept",
        base=True,
        repetition=True,
        training=False,
    )

    image_size: int | None = option(
        None, "Images", "Side of the network's images; unset: that of the data.", ge=1, le=4096, in_model="fixed"
    )
    crop: Literal["pad", "resized"] = option(
        "pad", "Images", "Training crop: pad and crop, or crop and resize.", in_model="fixed"
    )
    padding: int = option(4, "Images", "Padding of the pad crop.", ge=0, le=1024, in_model="fixed")
    flip: bool = option(True, "Images", "Mirror images at random (and the exemplars of k-NME).", in_model="kept")
    jitter: float = option(
        0.0, "Images", "Color jitter: brightness, contrast, saturation.", ge=0, lt=1, in_model="set", training=True
    )
    augment: Literal["none", "trivial"] = option(
        "none", "Images", "trivial: TrivialAugment on each image, after crop and flip.", in_model="set", training=True
    )
    mean: tuple[float, float, float] = option(
        (0.5071, 0.4866, 0.4409), "Images", "Mean of the colors.", in_model="fixed"
    )
    std: tuple[float, float, float] = option(
        (0.2009, 0.1984, 0.2023), "Images", "Standard deviation of the colors.", in_model="fixed"
    )

    exemplars: int = option(
        20, "Memory", "Exemplars a class, or in total (memory_budget).", ge=0, le=MANY, in_model="kept", in_grid=True
    )
    memory_budget: Literal["per_class", "total"] = option(
        "per_class", "Memory", "What exemplars counts.", in_model="kept"
    )
    selection: Literal["herding", "nearest"] = option("herding", "Memory", "How exemplars are chosen.", in_model="kept")
    store_images: bool = option(
        True, "Memory", "Keep exemplars of image files as bytes; otherwise as path and content hash.", in_grid=True
    )

    ame: bool = option(
        False, "Evaluation", "Evaluate AME too, an oracle that needs all the old classes' images.", in_grid=True
    )
    ame_images: int | None = option(
        None, "Evaluation", "AME (oracle): at most this many images a class; unset: all.", ge=1, le=MANY
    )
    analysis: bool = option(
        True, "Evaluation", "Compare features with phase 0 after each phase (SVCCA, CKA, angles).", in_grid=True
    )

    threads: int | None = option(
        None,
        "Machine",
        "CPU threads; unset: the cores there are, at most OMP_NUM_THREADS.",
        ge=1,
        le=4096,
        identity=False,
        in_model="set",
    )
    devices: int = option(1, "Machine", "Devices (GPUs, or CPU processes) on each node.", ge=1, le=1024, identity=False)
    nodes: int = option(1, "Machine", "Nodes.", ge=1, le=65536, identity=False)
    accelerator: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Machine", "Kind of device; auto: cuda where there is one.", identity=False, in_model="set"
    )
    precision: Literal["auto", "32", "bf16"] = option(
        "auto", "Machine", "Arithmetic: 32 bits, or bf16; auto: bf16 where the device has it.", in_model="set"
    )
    compile: bool = option(
        False, "Machine", "torch.compile the network: pays for long phases.", in_model="set", base=True
    )
    workers: int = option(
        2, "Machine", "Threads that decode image files.", ge=0, le=1024, identity=False, in_model="set"
    )
    checkpoint_steps: int | None = option(
        None,
        "Machine",
        "Save progress every so many steps; unset: at the end of an epoch, 10 seconds apart or more.",
        ge=1,
        le=10**9,
        identity=False,
        in_model="set",
    )
    tensorboard: bool = option(False, "Machine", "Write TensorBoard curves into the run directory.", identity=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.order == "seed" and self.order_seed is None:
            raise ValueError("order = 'seed' needs order_seed")
        if self.order != "seed" and self.order_seed is not None:
            raise ValueError(f"order_seed = {self.order_seed} is used only with order = 'seed', not {self.order!r}")
        if any(not 0 < m < 1 for m in self.milestones) or sorted(self.milestones) != list(self.milestones):
            raise ValueError(f"milestones = {self.milestones}: rising fractions between 0 and 1 are allowed")
        return self

    @classmethod
    def having(cls, role: str, *values: Any) -> list[str]:
        """Return the names of the options that have a role, or one of some values of it."""
        return [name for name, info in cls.model_fields.items() if roles_of(info)[role] in (values or (True,))]

    def identity(self) -> dict[str, Any]:
        """Return the options that decide what is computed, ready for JSON: those that the hash of a run covers."""
        return self.model_dump(mode="json", include=set(self.having("identity")))

    def hash(self) -> str:
        """Return a short hash of the effective configuration."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def restate(name: str, default: Any, *, in_model: str | None = None, **constraints: Any) -> Any:
    """Declare a common option again, with a method's own default; `in_model` where a model of this method treats it otherwise.

    constraints: as declared before, since they are not taken over.
    """
    common = RunConfig.model_fields[name]
    roles = roles_of(common) | ({} if in_model is None else {"in_model": in_model})
    return Field(default, description=common.description, json_schema_extra=roles, **constraints)


def groups_of_options(kind: type[RunConfig]) -> dict[str, dict[str, Any]]:
    """Return the options by group, in the order of their declaration: group -> name -> pydantic's field."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, info in kind.model_fields.items():
        grouped.setdefault(str(roles_of(info)["group"]), {})[name] = info
    return grouped


def derive(seed: int, *keys: int | str) -> int:
    """Return the random key of one purpose: a stable 63-bit hash of the seed and of what it is used for."""
    text = "/".join(str(part) for part in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def roles_of(info: Any) -> dict[str, Any]:
    """Return group and roles of an option, given pydantic's field."""
    return dict(info.json_schema_extra)
