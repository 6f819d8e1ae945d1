"""Tensors as bytes of the safetensors format: equal values give equal bytes, and nothing is pickled."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from geodl.core.content import interpreting

T = TypeVar("T")


def tensor_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a safetensors file with tensors of any shape, type and device."""
    # Copies: safetensors needs each tensor contiguous and in memory of its own.
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(plain)


def shaped(
    tensor: Tensor, what: str, *sides: int | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the tensor `what` if it has the expected shape and type; else raise a ValueError, for `interpreting`.

    sides: the expected shape, None for any length; dtype: None for any floating-point type.
    """
    fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    lengths = zip(sides, tensor.shape, strict=False)
    if not fits or tensor.ndim != len(sides) or any(a not in (None, b) for a, b in lengths):
        raise ValueError(f"{what}: {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


def parse_tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors, on the CPU, of a safetensors file that was read from `path`."""
    with interpreting(path):
        try:
            return load(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from error


def part(tensors: Mapping[str, T], name: str) -> dict[str, T]:
    """Return the entries whose names begin with `name` and a dot, without this prefix."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }
