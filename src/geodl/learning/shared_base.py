"""Running the stages of a phase. The first stage of phase 0 is shared by all runs that agree on what it depends on."""

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

VERSION = 3
"""Increased whenever a change of the code changes the result of training."""
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
"""Options that a base phase depends on, besides its data, schedule, transform and weights."""


@dataclass(frozen=True)
class SharedBase:
    """Shared base phases; cache: where they are stored; data: identifies the data of phase 0."""

    cache: Cache
    data: str


def run_stages(
    trainer: Trainer,
    method: Method,
    phase: Phase,
    progress: Checkpoints | None,
    shared: SharedBase | None,
) -> None:
    """Run the method's stages, each from its start or from its checkpoint."""
    checkpoint = Checkpoint.load(progress)
    if checkpoint is not None:
        phase.network.load(part(checkpoint.tensors, "network"))
    first = 0 if checkpoint is None else checkpoint.stage
    with watching_angles(trainer, phase):
        for number, stage in enumerate(method.stages(phase)):
            if number < first:
                continue
            resumed = checkpoint if number == first else None
            run = StageRun(trainer, phase, stage, number, progress)
            if shared is not None and method.base_loss and not phase.index and not number:
                _run_shared(run, method, resumed, shared)
            else:
                run.run(resumed)
    phase.network.head.thaw()


def _run_shared(
    run: StageRun, method: Method, checkpoint: Checkpoint | None, shared: SharedBase
) -> None:
    """Load the stage's result from the cache, or run the stage and store the result there."""
    trainer, phase = run.trainer, run.phase
    machine = (trainer.device.type, trainer.ranks.world, trainer.precision)
    key = base_key(method, phase.transform, shared.data, phase.new, machine)
    if checkpoint is not None and checkpoint.base != key:
        # Started with other threads, devices or versions: the result is not that of this key.
        run.run(checkpoint)
        return
    with _claimed(trainer, shared.cache, key):
        if checkpoint is None and _loaded(trainer, shared.cache, key, phase):
            return
        replace(run, base=key).run(checkpoint)
        if trainer.ranks.is_main_process:
            shared.cache.put(key, phase.network.state_dict())


def base_key(
    method: Method, transform: Transform, data: str, classes: int, machine: Sequence[str | int]
) -> str:
    """Return the cache key of the base phase: a hash of all that its trained network depends on.

    data: identifies images and classes; machine: the kind of device, the number of processes, the precision.
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
    """Return the method's and the options' part of what the base phase depends on; classes: their number."""
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
    """Return the source code of a backbone or augmentation of the user's: it may change under the same name."""
    used = BACKBONES.get(config.network), AUGMENTATIONS.get(config.augment)
    parts = [getattr(part, "func", part) for part in used if part is not None]  # func: of a partial
    return [_code(part) for part in parts if not part.__module__.startswith("geodl.")]


def _code(part: Any) -> str:
    """Return the source code of a class or function; code without a source file counts as unique."""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        return token_hex()


def _claimed(trainer: Trainer, cache: Cache, key: str) -> ExitStack:
    """Wait until no other process trains this base phase; return a lock on it, released by closing the stack."""
    held, ranks, reported = ExitStack(), trainer.ranks, False
    # All ranks poll together: if one waited alone, the others would run into their time limit.
    while ranks.any(ranks.is_main_process and not cache.claim(key, held), trainer.device):
        if not reported:
            trainer.listener(BaseAwaited(0))
            reported = True
        if ranks.any(trainer.stop(), trainer.device):
            raise Interrupted(
                "stopped while another run was training the base phase that both share"
            )
        time.sleep(0.5)
    return held


def _loaded(trainer: Trainer, cache: Cache, key: str, phase: Phase) -> bool:
    """Load the base phase from the cache; return False, on all ranks, if some rank does not find it."""
    entry = cache.load(key)
    if trainer.ranks.any(entry is None, trainer.device) or entry is None:
        return False
    phase.network.load(entry)
    trainer.listener(BaseCached(phase.index))
    return True
