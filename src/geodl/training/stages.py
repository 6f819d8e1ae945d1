"""The stages of a phase, one after the other; the first of phase 0 is shared by all runs that agree on what it depends on."""

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from secrets import token_hex
from typing import Any

import torch

from geodl.cache import Cache
from geodl.config import RunConfig
from geodl.data.batches import Transform
from geodl.errors import Interrupted
from geodl.events import BaseAwaited, BaseCached, Listener
from geodl.files import fingerprint, part
from geodl.memory import quota
from geodl.methods import Method, Phase
from geodl.training.angles import with_angles
from geodl.training.checkpoint import Checkpoint, Progress
from geodl.training.loop import Trainer

# To be raised whenever training computes something else than before.
VERSION = 3


@dataclass(frozen=True)
class Base:
    """Shared base phases: where they are kept, and the name of the data that phase 0 learns."""

    cache: Cache
    data: str


def run_stages(
    trainer: Trainer, method: Method, phase: Phase, progress: Progress | None, listener: Listener, shared: Base | None
) -> None:
    """Run the method's stages, each from its start or from where it was stopped."""
    checkpoint = Checkpoint.load(progress)
    if checkpoint is not None:
        phase.network.load(part(checkpoint.tensors, "network"))
    trainer.listener = with_angles(phase, partial(trainer.features, transform=phase.transform), listener)
    for number, stage in enumerate(method.stages(phase)):
        if checkpoint is not None and number < checkpoint.stage:
            continue
        place = checkpoint if checkpoint is not None and number == checkpoint.stage else None
        run = partial(trainer.run, phase, stage, number=number, checkpoint=place, progress=progress)
        if shared is not None and not phase.index and not number:
            _shared_stage(trainer, method, phase, place, run, shared)
        else:
            run()
    phase.network.head.thaw()


def _shared_stage(
    trainer: Trainer, method: Method, phase: Phase, place: Checkpoint | None, run: Callable[..., None], shared: Base
) -> None:
    """Take the stage from the shared base phases, or run it and put it there."""
    machine = (trainer.device.type, trainer.ranks.world, trainer.precision)
    key = base_key(method, phase.transform, shared.data, phase.new, machine)
    if place is not None and place.base != key:
        # Begun with other threads, devices or versions: what comes of it is nobody else's base.
        run()
        return
    with _claimed(trainer, shared.cache, key):
        if place is None and _taken(trainer, shared.cache, key, phase):
            return
        run(base=key)
        if trainer.ranks.is_main_process:
            shared.cache.put(key, phase.network.state_dict())


def base_key(method: Method, transform: Transform, data: str, classes: int, machine: Sequence[str | int]) -> str:
    """Return the key of the base phase: all that its trained network depends on.

    data: names its images and classes; machine: the kind of device, the number of processes, the precision.
    """
    config = method.config
    return fingerprint(
        {
            "version": VERSION,
            "torch": torch.__version__,
            "data": data,
            "held out": method.held_out(quota(classes, config.exemplars, config.memory_budget)),
            "head": method.head,
            "loss": method.base_loss or _own(method),
            "weights": sha256(config.weights.read_bytes()).hexdigest() if config.weights else None,
            "schedule": asdict(method.main_schedule(0)),
            "transform": transform.to_dict(),
            "options": config.model_dump(mode="json", include=set(config.having("base"))),
            "machine": [*machine, torch.get_num_threads()],
        }
    )


def _own(method: Method) -> list[Any]:
    """Return what the loss of a method depends on that shares it with no other: its options and its code."""
    names = type(method).Config.model_fields.keys() - RunConfig.model_fields.keys()
    try:
        code = [inspect.getsource(kind) for kind in type(method).__mro__[:-1]]
    except (OSError, TypeError):  # typed at a prompt, say: code that cannot be read is like no other
        code = [token_hex()]
    return [type(method).__name__, method.config.model_dump(mode="json", include=names), code]


def _claimed(trainer: Trainer, cache: Cache, key: str) -> ExitStack:
    """Wait until no other process trains this base phase; hold it for ourselves until the stack is closed."""
    held, ranks, told = ExitStack(), trainer.ranks, False
    # All ranks ask together, again and again: one that waited alone would keep the others beyond their time limit.
    while ranks.any(ranks.is_main_process and not cache.claim(key, held), trainer.device):
        if not told:
            trainer.listener(BaseAwaited(0))
            told = True
        if ranks.any(trainer.stop(), trainer.device):
            raise Interrupted("stopped while another run was training the base phase that both share")
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
