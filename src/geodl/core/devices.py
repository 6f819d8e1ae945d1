"""What training and prediction run on."""

import ctypes
import os
from contextlib import suppress

import torch

from geodl.core.errors import ConfigError

LARGE = 4 << 20
"""Bytes of a block of memory that is worth returning at once."""
_MMAP_THRESHOLD = -3  # of glibc's mallopt


def device_kind(accelerator: str) -> str:
    """Say what training runs on: cuda where there is one and nothing else is asked for, else cpu.

    Apple's mps is left out: it has no float64, in which the subspaces are computed.
    """
    if accelerator not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"accelerator = {accelerator!r}: auto, cpu and cuda are allowed")
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "accelerator = 'cuda': torch finds no CUDA device here; auto and cpu are allowed"
        )
    return "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def choose_precision(wanted: str, kind: str) -> str:
    """Return 32 or bf16: what is wanted, or where that is left open (auto) what suits the device."""
    return precision_of(kind)[0] if wanted == "auto" else wanted


def precision_of(kind: str) -> tuple[str, str]:
    """Return the precision that suits a device, bf16 where it computes in it, and why.

    Processors without bf16 instructions imitate it, which is slower. Decided by what the device says, never by a clock.
    """
    if kind == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU has it") if has else ("32", "the GPU has no bf16")
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    found = [name for name in ("amx_bf16", "avx512_bf16") if known.get(name)]
    if found:
        return "bf16", f"the processor has {', '.join(found)}"
    return "32", "the processor has no bf16 instructions"


def available_cores() -> int:
    """Count the cores that this process may use: those it may run on, and no more than OMP_NUM_THREADS says."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(wanted)) if wanted.isdigit() and int(wanted) else cores


def return_memory() -> None:
    """Have freed memory returned to the system, from now on each large block at once: glibc keeps hundreds of megabytes."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, LARGE)
        libc.malloc_trim(0)
