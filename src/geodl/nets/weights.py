"""Loading weights of a backbone from a file of safetensors or `torch.save`."""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from geodl.core.errors import ConfigError, DataError, StoreError
from geodl.core.files import open_regular
from geodl.core.text import count, one_line
from geodl.nets.backbone import Backbone

log = logging.getLogger("geodl")

PICKLED = (".pth", ".pt")

Tensors = Mapping[str, Tensor]


def load_weights(
    backbone: Backbone, file: Path, others: Mapping[str, Callable[[], Backbone]]
) -> list[str]:
    """Load weights by name (the backbone's own or the published names, also with a prefix), or by order and shape.

    Returns the names of unused tensors, such as those of a classifier. If some of them belong to layers like the backbone's,
    the file is of another network and an error, which names the network if it is one of `others`. Only a file of
    `torch.save` has an order; a warning is logged if it is used.
    """
    tensors = _without_counters(read_weights(file))
    ordered = file.suffix.lower() in PICKLED
    names, reason = _match(backbone, tensors, ordered)
    if reason:
        reason += _hint(tensors, ordered, others)
        raise DataError(f"weights {file} do not fit the network: {reason}")
    for name in names.values():
        if not tensors[name].isfinite().all():
            raise DataError(f"weights {file}: {name} has values that are not finite")
    if names != _by_name(backbone, tensors):
        log.warning("weights %s: unknown names of tensors; matched by order and shape", file)
    # Not strict: the counters are missing.
    backbone.load_state_dict({key: tensors[name] for key, name in names.items()}, strict=False)
    return sorted(set(tensors) - set(names.values()))


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a regular file by name, in the order of the file if it has one."""
    try:
        with open_regular(file) as opened:
            if file.suffix.lower() in PICKLED:
                return _tensors(_unpickle(opened, file), file)
        return load_file(file)
    except StoreError as error:
        raise DataError(f"weights {file} cannot be read: {one_line(error)}") from error
    except (OSError, SafetensorError) as error:
        reason = one_line(error)
        raise DataError(f"weights {file} cannot be read as a safetensors file: {reason}") from error


def _unpickle(file: Any, path: Path) -> Any:
    if torch.__version__ < "2.6":  # torch compares the parts as numbers
        raise ConfigError(
            f"weights {path}: such a file can make torch {torch.__version__} run code; "
            "use torch 2.6 or newer, or a safetensors file"
        )
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"weights {path} cannot be read as tensors: {reason}") from error


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, which may be inside a checkpoint."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    entries = content.items() if isinstance(content, Mapping) else ()
    tensors = {str(key): value for key, value in entries if isinstance(value, Tensor)}
    if not tensors:
        raise DataError(f"weights {file} hold no tensors by name")
    return tensors


# ---------------------------------------------------------------------------------------------------------- matching


def _without_counters(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors without the batch counters of norms: nothing depends on them, and older files lack them."""
    return {key: x for key, x in tensors.items() if not key.endswith("num_batches_tracked")}


def _match(backbone: Backbone, found: Tensors, ordered: bool) -> tuple[dict[str, str], str]:
    """Return the name in the file for each tensor of a backbone, and why the file does not fit ("" if it does)."""
    wanted = _without_counters(backbone.state_dict())
    names = _by_name(backbone, found)
    wrong = _misfits(wanted, found, names)
    if wrong and ordered:
        pairs = _by_order(wanted, found)
        names, wrong = (names, wrong) if pairs is None else (pairs, [])
    if wrong:
        missing = f"{len(wrong)} of {len(wanted)} tensors are missing or of another shape"
        return names, f"{missing}, first {wrong[0]}"
    # Without biases: those of a classifier may have names like those of a norm.
    used = set(names.values())
    kinds = {_kind(name, found) for name in used}
    left = [name for name in found if found[name].ndim > 1 and name not in used]
    alike = [name for name in left if _kind(name, found) in kinds]
    return names, f"{count(len(alike), 'tensor')} too many, first {alike[0]}" if alike else ""


def _kind(name: str, found: Tensors) -> tuple[str, int]:
    """Return what tensors of similar layers have in common: the name without numbers, and the number of axes."""
    return re.sub(r"\d+", "#", name), found[name].ndim


def _hint(found: Tensors, ordered: bool, others: Mapping[str, Callable[[], Backbone]]) -> str:
    """Return a hint, for a message, at the network that the weights fit, or ""."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        fitting = [name for name, build in others.items() if not _match(build(), found, ordered)[1]]
    return f"; they fit the network {fitting[0]}" if fitting else ""


def _by_name(backbone: Backbone, found: Tensors) -> dict[str, str]:
    """Return the name in the file for each tensor, with the naming scheme and the prefix that fit best."""
    wanted = _without_counters(backbone.state_dict())
    named = []
    for naming in (str, backbone.published_name):
        names = {key: naming(key) for key in wanted}
        first = next(iter(names.values()))
        ends = [name for name in found if name == first or name.endswith(f".{first}")]
        prefixes = {name.removesuffix(first) for name in ends} | {""}
        for prefix in sorted(prefixes):
            named.append({key: prefix + name for key, name in names.items()})
    return min(named, key=lambda names: len(_misfits(wanted, found, names)))


def _by_order(wanted: Tensors, found: Tensors) -> dict[str, str] | None:
    """Pair the tensors in order; None if shapes, or last parts of names (`weight`), differ."""
    pairs = dict(zip(wanted, found, strict=False))
    parts = [(key.rpartition(".")[2], name.rpartition(".")[2]) for key, name in pairs.items()]
    alike = len(pairs) == len(wanted) and all(one == other for one, other in parts)
    return pairs if alike and not _misfits(wanted, found, pairs) else None


def _misfits(wanted: Tensors, found: Tensors, names: Mapping[str, str]) -> list[str]:
    """Return the names of the wanted tensors that the file does not have in the same shape."""
    shapes = {name: x.shape for name, x in found.items()}
    return [key for key, value in wanted.items() if shapes.get(names[key]) != value.shape]
