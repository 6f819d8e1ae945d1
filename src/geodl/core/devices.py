"""Devices, precision and cores for training and prediction."""

import ctypes
import os
from contextlib import suppress

import torch

from geodl.core.errors import ConfigError

LARGE = 4 << 20
"""Memory blocks of at least this many bytes are returned to the system when they are freed."""
_MMAP_THRESHOLD = -3  # of glibc's mallopt


def device_kind(accelerator: str) -> str:
    """Return the device to run on: cuda or cpu; auto prefers cuda.

    Apple's mps is not supported: it has no float64, in which the subspaces are computed.
    """
    if accelerator not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"accelerator = {accelerator!r}: allowed values are auto, cpu, cuda")
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "accelerator = 'cuda': torch finds no CUDA device here; allowed values are auto, cpu"
        )
    return "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def choose_precision(precision: str, kind: str) -> str:
    """Return 32 or bf16; auto becomes the precision that suits the device."""
    return precision_of(kind)[0] if precision == "auto" else precision


def precision_of(kind: str) -> tuple[str, str]:
    """Return the precision that suits a device, and why: bf16 if the hardware supports it.

    Processors without bf16 instructions emulate it, which is slower. The choice depends on the device, never on a clock.
    """
    if kind == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU has bf16") if supported else ("32", "the GPU has no bf16")
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    instructions = [name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)]
    if instructions:
        return "bf16", f"the processor has {', '.join(instructions)}"
    return "32", "the processor has no bf16 instructions"


def available_cores() -> int:
    """Return the number of cores that this process may use, at most OMP_NUM_THREADS."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) else cores


def return_memory() -> None:
    """Return freed memory to the system, now and whenever a large block is freed: glibc keeps hundreds of megabytes."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)
        libc.malloc_trim(0)
