"""The options that a learn step takes when its user sets none: chosen from the data and the device, never from a clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geodl.config import Effective, Layer, RunConfig
from geodl.devices import device_kind
from geodl.errors import ConfigError
from geodl.files import readable
from geodl.methods import configure
from geodl.nets import expected_images
from geodl.own.intake import Decoded

FIXED = ("network", "scale", "image_size", "crop", "padding", "flip", "mean", "std")
"""What a model is made with: the same in every later step."""
KEPT = (*FIXED, "weights", "pretrained", "method", "distill", "exemplars", "budget", "selection", "seed")
"""What a later step takes over from the step before unless its user says otherwise."""

TINY = 16
"""Pictures up to this many pixels a side need a small network and one thread."""
VALIDATION = 10
"""At most so many images of a class are set aside to check the model with."""


@dataclass(frozen=True)
class Choice:
    """One line of what was chosen: the option as it is typed, its value, and why."""

    option: str
    value: str
    why: str


ALLOWED = (
    *("method", "distill", "lwf_weight", "cosine_weight", "geodesic_weight", "subspace_dim", "through_flow"),
    *("temperature", "margin", "hard_classes"),
    *("margin_weight", "finetune_epochs", "network", "pretrained", "weights", "scale", "image_size", "padding", "flip"),
    *("jitter", "mean", "std", "epochs", "batch_size", "lr", "schedule", "milestones", "lr_decay", "momentum"),
    *("weight_decay", "label_smoothing", "clip_norm", "seed", "exemplars", "budget", "selection", "threads"),
    *("accelerator", "precision", "compile", "workers", "checkpoint_steps"),
)
"""The options of a run that make sense for a learn step."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check what the user set, before anything is read or written; give the values as they were understood."""
    wanted = {key: value for key, value in options.items() if value is not None}
    for key in wanted:
        if key not in ALLOWED:
            raise ConfigError(f"{key}: not an option of learn; allowed are {', '.join(ALLOWED)}")
    if wanted.get("method", "lucir") not in ("lucir", "finetune"):
        raise ConfigError(f"method = {wanted['method']!r}: allowed for your own images are lucir and finetune")
    config = configure([Layer("your option", wanted)]).config
    return {key: getattr(config, key) for key in wanted}


def choose_network(side: int, options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Choose network and image size for pictures whose shorter side typically has `side` pixels."""
    network = str(options.get("network") or _own_network(side, kind))
    known = expected_images(network)
    if not known:
        return {"network": network, "image_size": int(options.get("image_size") or _own_size(side, kind))}
    pretrained = options.get("weights") is None
    return (
        {"network": network, "pretrained": pretrained}
        | known
        | {key: options[key] for key in ("image_size", "pretrained") if options.get(key) is not None}
    )


def _own_size(side: int, kind: str) -> int:
    # A CPU needs minutes for 64 pixels where it would need hours for 224.
    return max(8, min(side, 64 if kind == "cpu" else 128))


def _own_network(side: int, kind: str) -> str:
    size = _own_size(side, kind)
    if size <= TINY:
        return "resnet8"
    return "resnet20" if kind == "cpu" else "resnet32" if size <= 64 else "resnet18"


def choose(
    decoded: Decoded,
    images: int,
    options: Mapping[str, Any],
    network: Mapping[str, Any],
    last: RunConfig | None,
    *,
    trained: bool,
) -> Effective:
    """Choose all options of a step that trains on `images` images; what the user set wins.

    `last` is the configuration of the step before, None for the first one; `trained`: whether the network is already.
    """
    wanted = dict(options)
    if last is None:
        size = int(network["image_size"])
        values = {"mean": decoded.mean, "std": decoded.std, "flip": not decoded.grey, "padding": max(1, size // 8)}
        values |= {"method": "lucir", "distill": "geodesic", "scale": 10.0} | dict(network)
    else:
        _refuse_other(last, wanted)
        values = {key: getattr(last, key) for key in KEPT if hasattr(last, key)}
        wanted = {key: value for key, value in wanted.items() if key not in ("weights", "pretrained")}
    kind = device_kind(str(wanted.get("accelerator", "auto")))
    values |= _schedule(
        images, first=not trained, foreign=str(values["network"]).startswith(("timm:", "efficientnet")), kind=kind
    )
    return configure([Layer("chosen", values), Layer("your option", wanted)])


def _schedule(images: int, *, first: bool, foreign: bool, kind: str) -> dict[str, Any]:
    """Choose how long to train: about as many image passes for few images as for many, within bounds."""
    batch = 32 if images < 1500 else 64 if images < 6000 or kind == "cpu" else 128
    passes, least, most = (60_000, 15, 60) if first else (40_000, 10, 40)
    if foreign:  # a network that has seen many images before needs fewer passes, each far dearer
        passes, least, most = passes // 8, 4, 12
    epochs = max(least, min(most, round(passes / max(images, 1))))
    lr = (0.01 if first else 0.005) if foreign else 0.1
    return {"schedule": "onecycle", "batch_size": batch, "epochs": epochs, "lr": lr, "weight_decay": 5e-4}


def _refuse_other(last: RunConfig, wanted: Mapping[str, Any]) -> None:
    for key in FIXED:
        there = getattr(last, key)
        if key in wanted and wanted[key] != there:
            raise ConfigError(f"{key} = {wanted[key]}: this model was made with {there}; another needs a new model")


def explain(found: Effective, decoded: Decoded, images: int, classes: int, *, first: bool) -> list[Choice]:
    """Put the choices into words; `first`: this step makes the model."""
    config = found.config

    def why(option: str, reason: str) -> str:
        if found.origins[option] == "your option":
            return "as you set it"
        return reason if first or option not in FIXED else "as this model was made"

    pixels = 3 * (config.image_size or 0) ** 2
    held = VALIDATION if config.exemplars else 0
    each = config.exemplars + held if config.budget == "per_class" else held
    most = each * classes + (config.exemplars if config.budget == "total" else 0)
    mirrored = "grey pictures are often writing" if decoded.grey else "colour pictures are often photographs"
    size = f"{config.image_size} x {config.image_size} pixels"
    return [
        Choice(
            "--backbone",
            config.network,
            why("network", f"for pictures of this size on this machine ({device_kind(config.accelerator)})"),
        ),
        Choice("--image-size", size, why("image_size", "what the network sees of a picture: its middle square")),
        Choice("--flip", "yes" if config.flip else "no", why("flip", f"learn mirrored pictures too? {mirrored}")),
        Choice("--epochs", str(config.epochs), why("epochs", f"times through {images} images")),
        Choice("--batch-size", str(config.batch_size), why("batch_size", "images a training step")),
        Choice("--lr", f"{config.lr:g}", why("lr", "learning rate, at its highest")),
        Choice(
            "--exemplars",
            str(config.exemplars),
            f"images {'a class' if config.budget == 'per_class' else 'in all'} to keep, and up to {held} a class to check "
            f"with: at most {most} images, {readable(most * pixels)} for {classes} classes",
        ),
    ]
