"""The stages of a phase, one after the other; the first of phase 0 is shared by all runs that agree on what it depends on."""

import inspect
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from secrets import token_hex
from typing import Any

import torch

from geodl.config import RunConfig
from geodl.core.cache import Cache
from geodl.core.content import fingerprint
from geodl.core.errors import Interrupted
from geodl.core.events import BaseAwaited, BaseCached
from geodl.core.tensors import part
from geodl.data.batches import Transform
from geodl.data.trivial import AUGMENTATIONS
from geodl.learning.angles import watching_angles
from geodl.learning.checkpoint import Checkpoint, Checkpoints
from geodl.learning.loop import StageRun, Trainer
from geodl.methods import Method, Phase
from geodl.nets import BACKBONES

# To be raised whenever training computes something else than before.
VERSION = 3
BASE = frozenset(
    {
        "network",
        "pretrained",
        "scale",
        "batch_size",
        "label_smoothing",
        "clip_norm",
        "seed",
        "compile",
    }
)
"""Options that a trained base phase depends on, besides its data, schedule, transform and weights."""


@dataclass(frozen=True)
class SharedBase:
    """Shared base phases: where they are kept, and the name of the data that phase 0 learns."""

    cache: Cache
    data: str


def run_stages(
    trainer: Trainer,
    method: Method,
    phase: Phase,
    progress: Checkpoints | None,
    shared: SharedBase | None,
) -> None:
    """Run the method's stages, each from its start or from where it was interrupted."""
    checkpoint = Checkpoint.load(progress)
    if checkpoint is not None:
        phase.network.load(part(checkpoint.tensors, "network"))
    begun = 0 if checkpoint is None else checkpoint.stage
    with watching_angles(trainer, phase):
        for number, stage in enumerate(method.stages(phase)):
            if number < begun:
                continue
            place = checkpoint if number == begun else None
            run = StageRun(trainer, phase, stage, number, progress)
            if shared is not None and method.base_loss and not phase.index and not number:
                _shared_stage(run, method, place, shared)
            else:
                run.through(place)
    phase.network.head.thaw()


def _shared_stage(
    run: StageRun, method: Method, place: Checkpoint | None, shared: SharedBase
) -> None:
    """Take the stage from the shared base phases, or run it and put it there."""
    trainer, phase = run.trainer, run.phase
    machine = (trainer.device.type, trainer.ranks.world, trainer.precision)
    key = base_key(method, phase.transform, shared.data, phase.new, machine)
    if place is not None and place.base != key:
        # Begun with other threads, devices or versions: nobody else's base comes of it.
        run.through(place)
        return
    with _claimed(trainer, shared.cache, key):
        if place is None and _taken(trainer, shared.cache, key, phase):
            return
        replace(run, base=key).through(place)
        if trainer.ranks.is_main_process:
            shared.cache.put(key, phase.network.state_dict())


def base_key(
    method: Method, transform: Transform, data: str, classes: int, machine: Sequence[str | int]
) -> str:
    """Return the key of the base phase: all that its trained network depends on.

    data: names its images and classes; machine: the kind of device, the number of processes, the precision.
    """
    weights = method.config.weights
    facts = {
        "version": VERSION,
        "torch": torch.__version__,
        "data": data,
        "weights": sha256(weights.read_bytes()).hexdigest() if weights else None,
        "transform": transform.to_dict(),
        "machine": [*machine, torch.get_num_threads()],
    }
    return fingerprint(base_options(method, classes) | facts)


def base_options(method: Method, classes: int) -> dict[str, Any]:
    """Return what the base phase depends on of a method and its options; classes: how many it learns."""
    config = method.config
    return {
        "held out": method.held_out(method.share(classes)),
        "head": method.head,
        "loss": method.base_loss,
        "code": _foreign_code(config),
        "schedule": asdict(method.main_schedule(0)),
        "options": {key: value for key, value in config.identity().items() if key in BASE},
    }


def _foreign_code(config: RunConfig) -> list[str]:
    """Return the code of backbone and augmentation where they are not geodl's: it may change under the same name."""
    used = BACKBONES.get(config.network), AUGMENTATIONS.get(config.augment)
    made_by = [getattr(part, "func", part) for part in used if part is not None]  # of a partial
    return [_code(part) for part in made_by if not part.__module__.startswith("geodl.")]


def _code(part: Any) -> str:
    """Return the code of a class or function; code that cannot be read, typed at a prompt, is like no other."""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        return token_hex()


def _claimed(trainer: Trainer, cache: Cache, key: str) -> ExitStack:
    """Wait until no other process trains this base phase; hold it for ourselves until the stack is closed."""
    held, ranks, told = ExitStack(), trainer.ranks, False
    # All ranks ask together, again and again: one that waited alone would keep the others beyond their time limit.
    while ranks.any(ranks.is_main_process and not cache.claim(key, held), trainer.device):
        if not told:
            trainer.listener(BaseAwaited(0))
            told = True
        if ranks.any(trainer.stop(), trainer.device):
            raise Interrupted(
                "stopped while another run was training the base phase that both share"
            )
        time.sleep(0.5)
    return held


def _taken(trainer: Trainer, cache: Cache, key: str, phase: Phase) -> bool:
    """Load the base phase from the cache; False where some rank does not have it: all go the same way."""
    entry = cache.load(key)
    if trainer.ranks.any(entry is None, trainer.device) or entry is None:
        return False
    phase.network.load(entry)
    trainer.listener(BaseCached(phase.index))
    return True
