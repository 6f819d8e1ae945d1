"""Weights for a backbone from a file: safetensors, or what `torch.save` wrote. The one place that reads a pickle."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from geodl.errors import ConfigError, DataError
from geodl.nets.backbone import Backbone
from geodl.text import one_line

log = logging.getLogger("geodl")

PICKLED = (".pth", ".pt")


def load_weights(backbone: Backbone, file: Path) -> None:
    """Load weights by name (the backbone's own or the published ones, also under a prefix), or by order and shape.

    The file may hold more than the backbone, such as the classifier it was trained with. Only a file of `torch.save`
    keeps an order; when it is used, a line is logged.
    """
    found = read_weights(file)
    # Counters of batches: nothing here depends on them, and older files lack them.
    wanted = {key: value for key, value in backbone.state_dict().items() if not key.endswith("num_batches_tracked")}
    names = _by_name(wanted, found, backbone)
    wrong = _misfits(wanted, found, names)
    if wrong and file.suffix.lower() in PICKLED:
        in_order = _by_order(wanted, found)
        if in_order is not None:
            log.warning("weights %s: the names are those of another program; matched by order and shape", file)
            names, wrong = in_order, []
    if wrong:
        raise DataError(
            f"weights {file} do not fit the network: {len(wrong)} of {len(wanted)} tensors are missing or of another "
            f"shape, first {wrong[0]}"
        )
    chosen = {key: found[name] for key, name in names.items()}
    for key, value in chosen.items():
        if not value.isfinite().all():
            raise DataError(f"weights {file}: {names[key]} has values that are not finite")
    backbone.load_state_dict(chosen, strict=False)  # but for the counters, everything is there


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name, in the order of the file where it has one."""
    if file.suffix.lower() in PICKLED:
        return _tensors(_unpickle(file), file)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"weights {file} cannot be read as a safetensors file: {one_line(error)}") from error


def _unpickle(file: Path) -> Any:
    if torch.__version__ < "2.6":  # torch compares the parts as numbers
        raise ConfigError(
            f"weights {file}: torch {torch.__version__} can be made to run code by such a file; "
            "it needs torch 2.6 or newer, or the weights as a safetensors file"
        )
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever it leads the unpickler to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"weights {file} cannot be read as tensors: {reason}") from error


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, which may lie inside a checkpoint."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    entries = content.items() if isinstance(content, Mapping) else ()
    found = {str(key): value for key, value in entries if isinstance(value, Tensor)}
    if not found:
        raise DataError(f"weights {file} hold no tensors by name")
    return found


def _by_name(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], backbone: Backbone) -> dict[str, str]:
    """Return the name in the file for each wanted one, under the naming and the prefix that fit best."""
    candidates = []
    for naming in (str, backbone.published_name):
        names = {key: naming(key) for key in wanted}
        first = next(iter(names.values()))
        prefixes = {name.removesuffix(first) for name in found if name == first or name.endswith(f".{first}")}
        candidates += [{key: prefix + name for key, name in names.items()} for prefix in sorted(prefixes | {""})]
    return min(candidates, key=lambda names: len(_misfits(wanted, found, names)))


def _by_order(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Pair the tensors one by one from the first; None if shapes differ, or the last part of a name (`weight`)."""
    names = [name for name in found if not name.endswith("num_batches_tracked")]
    pairs = dict(zip(wanted, names, strict=False))
    same_parts = all(key.rpartition(".")[2] == name.rpartition(".")[2] for key, name in pairs.items())
    return pairs if len(pairs) == len(wanted) and same_parts and not _misfits(wanted, found, pairs) else None


def _misfits(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], names: Mapping[str, str]) -> list[str]:
    """Return the wanted tensors that the file does not have in that shape."""
    return [key for key, value in wanted.items() if names[key] not in found or found[names[key]].shape != value.shape]
