"""The options of a run: one validated definition for the command line, TOML files and Python.

``RunConfig`` declares what every method has. A method's own class, in the method's file, inherits it, adds its options and
restates the defaults it wants otherwise. Values come in layers (preset, file, command line; later ones win) and
``resolve`` merges them, so that the origin of every value can be told.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from geodl.errors import ConfigError

Distillation = Literal["none", "lwf", "cosine", "geodesic"]
DISTILLATIONS: tuple[str, ...] = get_args(Distillation)


def option(default: Any, group: str, description: str, *, identity: bool = True, **constraints: Any) -> Any:
    """Declare one option. ``identity=False``: the option does not change what is computed, only how and where."""
    extra: dict[str, Any] = {"group": group, "identity": identity}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


class RunConfig(BaseModel):
    """The options that every method has. Frozen: what is stored with a run is what the run did."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    method: str = option("lucir", "Method", "The learning method; `geodl methods` lists them.")
    distill: Distillation = option("none", "Method", "How the old network's knowledge is carried over.")
    lwf_weight: float = option(1.0, "Method", "Weight of the lwf distillation.", ge=0)
    cosine_weight: float = option(
        5.0, "Method", "Weight of the cosine distillation, before the factor sqrt(old/new).", ge=0
    )
    geodesic_weight: float = option(6.0, "Method", "Weight of the geodesic distillation, before sqrt(old/new).", ge=0)
    subspace_dim: int = option(127, "Method", "Dimension n of the subspaces of the geodesic distillation.", ge=1)
    through_flow: bool = option(False, "Method", "Differentiate through the geodesic flow too.")
    centre: bool = option(True, "Method", "Subspaces of the geodesic distillation: about the mean of the batch.")
    temperature: float = option(2.0, "Method", "Temperature of the lwf distillation.", gt=0)

    data: str = option(
        "digits", "Data", "Data source: digits, folder, cifar100, hub, imagenet, imagenet-subset, arrays."
    )
    data_dir: Path | None = option(None, "Data", "Where the source finds its files (hub: the dataset's name or path).")
    test_fraction: float = option(
        0.2, "Data", "Data without a test part (folder, arrays, hub): share kept for testing.", gt=0, lt=1
    )
    split_seed: int = option(0, "Data", "Data without a test part: seed of the split.")
    image_column: str | None = option(None, "Data", "Hub: the column of images; unset: found.")
    label_column: str | None = option(None, "Data", "Hub: the column of labels; unset: found.")
    base: int | None = option(
        None, "Data", "Classes of phase 0; unset: half of them; 0: no more than in the other phases.", ge=0
    )
    phases: int = option(5, "Data", "Incremental phases T; 0: one phase with all the classes.", ge=0)
    groups: tuple[int, ...] | tuple[tuple[str, ...], ...] | None = option(
        None, "Data", "Sizes of the groups, or lists of class names, instead of base and phases."
    )
    order: str | tuple[str, ...] = option(
        "lucir-1993",
        "Data",
        "Class order: lucir-1993, icarl-1993, natural, seed (with order_seed), or a list of names.",
    )
    order_seed: int | None = option(None, "Data", "Seed of the class order, with order = seed.", ge=0, lt=2**32)

    network: str = option(
        "resnet32", "Network", "Backbone: resnet8, resnet20, resnet32, resnet18, convnet, or timm:NAME."
    )
    pretrained: bool = option(False, "Network", "Start from published weights (efficientnet-lite0, timm:NAME).")
    weights: Path | None = option(None, "Network", "A file with weights for the backbone: safetensors, .pth or .pt.")
    scale: float = option(
        1.0, "Network", "Initial scale sigma of the cosine head (about 10 suits short schedules).", gt=0
    )

    epochs: int = option(160, "Training", "Epochs of each phase.", ge=1)
    base_epochs: int | None = option(None, "Training", "Epochs of phase 0; unset: as epochs.", ge=1)
    batch_size: int = option(128, "Training", "Images a step, over all devices.", ge=2)
    lr: float = option(0.1, "Training", "Learning rate (onecycle: its peak).", gt=0)
    base_lr: float | None = option(None, "Training", "Learning rate of phase 0; unset: as lr.", gt=0)
    schedule: Literal["step", "onecycle"] = option(
        "step", "Training", "step: lr x lr_decay at milestones; onecycle: up, then down."
    )
    milestones: tuple[float, ...] = option(
        (0.5, 0.75), "Training", "Where the step schedule decays, as fractions of the epochs."
    )
    lr_decay: float = option(0.1, "Training", "Factor of the step schedule at each milestone.", gt=0, le=1)
    momentum: float = option(0.9, "Training", "Momentum of SGD.", ge=0, lt=1)
    weight_decay: float = option(5e-4, "Training", "Weight decay of SGD.", ge=0)
    label_smoothing: float = option(0.0, "Training", "Label smoothing of the cross-entropy.", ge=0, lt=1)
    clip_norm: float | None = option(None, "Training", "Clip the gradient's norm; unset: no clipping.", gt=0)
    seed: int = option(1, "Training", "Seed of initialisation, shuffling and augmentation.", ge=0)

    image_size: int | None = option(
        None, "Images", "Side of the images fed to the network; unset: that of the data.", ge=1
    )
    crop: Literal["pad", "resized"] = option("pad", "Images", "Training crop: pad and crop, or crop and resize.")
    padding: int = option(4, "Images", "Padding of the pad crop.", ge=0)
    flip: bool = option(True, "Images", "Mirror images at random (and the exemplars of k-NME).")
    jitter: float = option(0.0, "Images", "Colour jitter: brightness, contrast, saturation.", ge=0, lt=1)
    mean: tuple[float, float, float] = option((0.5071, 0.4866, 0.4409), "Images", "Mean of the colours.")
    std: tuple[float, float, float] = option((0.2009, 0.1984, 0.2023), "Images", "Standard deviation of the colours.")

    exemplars: int = option(20, "Memory", "Exemplars: per class, or in total, as budget says.", ge=0)
    budget: Literal["per_class", "total"] = option("per_class", "Memory", "What exemplars counts.")
    selection: Literal["herding", "nearest"] = option("herding", "Memory", "How exemplars are chosen.")
    embed: bool = option(True, "Memory", "Keep exemplars of image files as bytes; otherwise as path and content hash.")

    ame_images: int | None = option(
        None, "Evaluation", "AME (oracle): at most this many images a class; unset: all.", ge=1
    )
    analysis: bool = option(True, "Evaluation", "Compare features with phase 0 after each phase (SVCCA, CKA, angles).")

    threads: int | None = option(
        None, "Machine", "CPU threads; unset: the cores there are.", ge=1, le=4096, identity=False
    )
    devices: int = option(1, "Machine", "Devices (GPUs, or CPU processes) on each node.", ge=1, identity=False)
    nodes: int = option(1, "Machine", "Nodes.", ge=1, identity=False)
    accelerator: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Machine", "Kind of device; auto: cuda where there is one.", identity=False
    )
    precision: Literal["32", "bf16"] = option("32", "Machine", "Arithmetic: 32 bits, or bf16 where it serves.")
    compile: bool = option(False, "Machine", "torch.compile the network: pays for long phases.")
    workers: int = option(2, "Machine", "Threads that decode image files.", ge=0, identity=False)
    checkpoint_steps: int | None = option(
        None,
        "Machine",
        "Save progress every so many steps; unset: at the end of an epoch, 10 seconds apart or more.",
        ge=1,
        identity=False,
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

    def identity(self) -> dict[str, Any]:
        """Give the options that decide what is computed, ready for JSON: those that the hash of a run covers."""
        values = self.model_dump(mode="json")
        fields = type(self).model_fields
        return {name: value for name, value in values.items() if _extra(fields[name])["identity"]}

    def hash(self) -> str:
        """Give a short hash of the effective configuration."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Layer:
    """Values from one origin; a key that is a method's name holds a table of values for that method alone."""

    origin: str
    values: Mapping[str, Any]

    def flat(self, method: str, methods: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the method's table over the common values."""
        common = {key: value for key, value in self.values.items() if key not in methods}
        own = self.values.get(method, {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"{method} = {own!r} in {self.origin}: a table of options is allowed here")
        return common | dict(own)


@dataclass(frozen=True)
class Effective:
    """A checked configuration and, for every option, where its value came from."""

    config: RunConfig
    origins: dict[str, str] = field(default_factory=dict)


def resolve(layers: Sequence[Layer], methods: Mapping[str, type[RunConfig]]) -> Effective:
    """Merge layers, later ones winning, over the defaults of the method they name, and check the result."""
    named = [layer for layer in layers if "method" in layer.values]
    method = named[-1].values["method"] if named else RunConfig.model_fields["method"].default
    if not isinstance(method, str) or method not in methods:
        origin = f" ({named[-1].origin})" if named else ""
        raise ConfigError(f"method = {method!r}{origin}: {', '.join(methods)} are allowed")
    kind = methods[method]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(kind.model_fields, "default")
    for name, info in kind.model_fields.items():
        common = RunConfig.model_fields.get(name)
        if name != "method" and (common is None or common.default != info.default):
            origins[name] = f"default of {method}"
    for layer in layers:
        _check_tables(layer, methods)
        flat = layer.flat(method, methods)
        for key in flat:
            if key not in kind.model_fields:
                raise ConfigError(_unknown(key, layer.origin, method, methods))
        values |= flat
        origins |= dict.fromkeys(flat, layer.origin)
    try:
        return Effective(kind(**values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None


def presets() -> dict[str, str]:
    """Give the names of the presets in the package, each with its first comment line."""
    files = (item for item in resources.files("geodl").joinpath("presets").iterdir() if item.name.endswith(".toml"))
    found = {
        item.name.removesuffix(".toml"): item.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for item in files
    }
    return dict(sorted(found.items()))


def preset_layer(name: str) -> Layer:
    """Read a preset that ships inside the package."""
    if not isinstance(name, str) or name not in presets():
        raise ConfigError(f"preset = {name!r}: {', '.join(presets())} are allowed")
    text = resources.files("geodl").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return Layer(f"preset {name}", tomllib.loads(text))


def file_layers(path: Path) -> list[Layer]:
    """Read a TOML file of options; its key ``preset`` names a preset to stand on."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: not TOML: {error}") from None
    below = [preset_layer(values.pop("preset"))] if "preset" in values else []
    return [*below, Layer(f"file {path}", values)]


def groups_of_options(kind: type[RunConfig]) -> dict[str, dict[str, Any]]:
    """Give the options by group, in the order of their declaration: group -> name -> pydantic's field."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, info in kind.model_fields.items():
        grouped.setdefault(str(_extra(info)["group"]), {})[name] = info
    return grouped


def derive(seed: int, *keys: int | str) -> int:
    """Give the random key of one purpose: a stable 63-bit hash of the seed and of what it is used for."""
    text = "/".join(str(part) for part in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _extra(info: Any) -> dict[str, Any]:
    return dict(info.json_schema_extra)


def _check_tables(layer: Layer, methods: Mapping[str, type[RunConfig]]) -> None:
    """Refuse unknown keys also in the tables of methods that are not used now."""
    for method in methods:
        table = layer.values.get(method, {})
        for key in table if isinstance(table, Mapping) else ():
            if key not in methods[method].model_fields:
                raise ConfigError(_unknown(key, f"{layer.origin}, table {method}", method, methods))


def _unknown(key: str, origin: str, method: str, methods: Mapping[str, type[RunConfig]]) -> str:
    owners = [name for name, kind in methods.items() if key in kind.model_fields]
    if owners:
        return f"{key} ({origin}): an option of {', '.join(owners)}, not of {method}"
    close = difflib.get_close_matches(key, [*methods[method].model_fields, "preset"], n=1)
    hint = f"did you mean {close[0]}?" if close else "`geodl config show` lists the options"
    return f"{key} ({origin}): no such option; {hint}"


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not first["loc"]:
        return message
    key = str(first["loc"][0])
    return f"{key} = {first['input']!r} ({origins[key]}): {message}"
