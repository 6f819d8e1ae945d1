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
    # Copies, because safetensors wants each tensor dense and sharing memory with no other.
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(plain)


def shaped(
    tensor: Tensor, what: str, *sides: int | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor that was read; one of another shape or type is an error that `content.interpreting` knows.

    sides: None where any length will do; dtype: None: any floating-point type.
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
    """Return the entries whose names begin with `name` and a dot, without that."""
    begin = f"{name}."
    return {key[len(begin) :]: each for key, each in tensors.items() if key.startswith(begin)}
