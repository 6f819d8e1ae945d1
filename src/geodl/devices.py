"""What training and prediction run on."""

import os

import torch

from geodl.errors import ConfigError


def device_kind(accelerator: str) -> str:
    """Say what training runs on: cuda where there is one and nothing else is asked for, else cpu.

    Apple's mps is left out: it has no float64, in which the subspaces are computed.
    """
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError("accelerator = 'cuda': torch finds no CUDA device here; auto and cpu are allowed")
    return "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
