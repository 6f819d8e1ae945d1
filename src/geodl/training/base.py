"""Shared base phases: what a trained phase 0 depends on, so that runs that agree on it train it once."""

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256

import torch

from geodl.config import RunConfig
from geodl.data.batches import Transform
from geodl.files import fingerprint
from geodl.memory import quota
from geodl.methods import Method

# To be raised whenever training computes something else than before.
VERSION = 2


def base_key(
    config: RunConfig, method: Method, transform: Transform, data: str, classes: int, machine: Sequence[str | int]
) -> str:
    """Return the key of the base phase: all that its trained network depends on.

    data: names its images and classes; machine: the kind of device, the number of processes, the precision.
    """
    return fingerprint(
        {
            "version": VERSION,
            "torch": torch.__version__,
            "data": data,
            "held out": method.held_out(quota(classes, config.exemplars, config.memory_budget)),
            "head": method.head,
            "loss": method.base_loss or type(method).__name__,
            "weights": sha256(config.weights.read_bytes()).hexdigest() if config.weights else None,
            "schedule": asdict(method.main_schedule(0)),
            "transform": transform.to_dict(),
            "options": config.model_dump(mode="json", include=set(config.having("base"))),
            "machine": [*machine, torch.get_num_threads()],
        }
    )
