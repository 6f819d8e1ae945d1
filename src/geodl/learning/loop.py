"""THE loop: it runs a stage step by step, and can stop and go on at any step.

Lightning Fabric (devices, precision, processes) lives here and nowhere else. Everything random is derived from the seed,
the phase, the stage and the step.
"""

import atexit
import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from geodl.config import RunConfig
from geodl.core.devices import choose_precision, device_kind
from geodl.core.errors import GeodlError, Interrupted, TrainingError
from geodl.core.events import EpochEnded, FeaturesTaken, Listener, StageStarted, StepTaken, ignore
from geodl.core.ranks import Ranks, gather_rows
from geodl.data.batches import Batch, Transform, evaluation
from geodl.data.images import Images
from geodl.geometry import GeometryError
from geodl.learning.checkpoint import Checkpoint, Checkpoints, tensors_of
from geodl.methods import Phase, Stage
from geodl.model.features import Features, features_of
from geodl.nets import Network, reading_copy

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SAVE_SECONDS = 10.0
SAMPLE = 128
"""Images that are looked at after an epoch."""
READ_STEPS = 20
"""On a GPU the losses are read back every so many steps: each time the device is waited for."""


class Trainer:
    """Trains and evaluates networks on whatever devices there are."""

    def __init__(
        self,
        config: RunConfig,
        *,
        precision: str | None = None,
        listener: Listener = ignore,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        kind = device_kind(config.accelerator)
        self.precision = precision or choose_precision(config.precision, kind)
        self.listener = listener
        self.stop = stop
        self.device, self.ranks = torch.device(kind), Ranks()
        if config.devices * config.nodes > 1:
            self.fabric.launch()
            atexit.register(_leave_group)
            self.ranks = Ranks(self.fabric.global_rank, self.fabric.world_size)
        if kind != "cpu":
            self.device = self.fabric.device
        self.read_steps = 1 if self.device.type == "cpu" else READ_STEPS

    @cached_property
    def fabric(self) -> "Fabric":
        """What knows devices, precision and processes; made when something is trained."""
        # Not above: it takes twice as long to import as torch, and reading features needs none.
        from lightning_fabric import Fabric

        config = self.config
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces processes
        return Fabric(
            accelerator=device_kind(config.accelerator),
            strategy="ddp" if config.devices * config.nodes > 1 else "auto",
            devices=config.devices,
            num_nodes=config.nodes,
            precision="bf16-mixed" if self.precision == "bf16" else "32-true",
        )

    def place(self, network: Network) -> Network:
        """Bring a network to the device, its batch statistics shared by all GPUs."""
        if self.ranks.world > 1 and self.device.type == "cuda":  # it has no form for CPUs
            nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return network.to(self.device)

    def features(
        self,
        network: Network,
        images: Images,
        transform: Transform,
        *,
        mirror: bool = False,
        levels: Sequence[str] = (),
    ) -> Features:
        """Run the network over un-augmented images, each rank over its share, and return all of it on every rank.

        In float32 whatever the precision of training, so that features do not depend on the processor; batch norms
        are folded into the convolutions; ``levels`` names those to read too.
        """
        # Fewer images than ranks: every rank takes them all.
        world = self.ranks.world if len(images) >= self.ranks.world else 1
        rank = self.ranks.rank if world > 1 else 0
        batches = evaluation(
            images, transform, mirror=mirror, rank=rank, world=world, workers=self.config.workers
        )
        batches = self._told(batches, len(images))
        found = features_of(reading_copy(network, self.device), batches, self.device, levels)
        if world == 1:
            return found

        def gathered(part: Tensor) -> Tensor:
            return gather_rows(part.to(self.device), self.ranks.group)[0].cpu()

        more = {name: gathered(part) for name, part in found.levels.items()}
        return Features(gathered(found.pooled), gathered(found.logits), images.labels, more)

    def _told(self, batches: Iterable[Batch], total: int) -> Iterator[Batch]:
        """Pass batches on, and tell how many of this rank's images came by."""
        done = 0
        for batch in batches:
            yield batch
            done += len(batch.labels)
            self.listener(FeaturesTaken(done, total))


@dataclass
class StageRun:
    """One stage of a phase, run step by step; it can stop and resume at any step.

    number: of the stage in its phase; progress: where checkpoints go; base: the key under which the
    result will be shared, kept in checkpoints.
    """

    trainer: Trainer
    phase: Phase
    stage: Stage
    number: int = 0
    progress: Checkpoints | None = None
    base: str | None = None

    def through(self, checkpoint: Checkpoint | None = None) -> None:
        """Run all epochs, from the start or from a checkpoint inside the stage."""
        trainer, stage = self.trainer, self.stage
        stage.module.to(trainer.device)
        if checkpoint is None:
            stage.begin()
        self.optimizer = stage.schedule.optimizer(stage.module.parameters())
        self.epoch, self.step = 0, 0
        if checkpoint is not None:
            self.epoch, self.step = checkpoint.restore(stage.module, self.optimizer)
        compiles = trainer.config.compile and self.number == 0
        # Compiled for training alone: evaluation comes in other shapes and modes.
        module: Any = torch.compile(stage.module) if compiles else stage.module
        self.module, self.wrapped = trainer.fabric.setup(module, self.optimizer)
        self.steps = min(len(stage.batches), stage.steps or len(stage.batches))
        self.saved = time.monotonic()
        epochs = stage.schedule.epochs
        trainer.listener(StageStarted(*self._where, epochs, self.steps, self.epoch))
        while self.epoch < epochs:
            self._epoch()
        stage.finish()

    @property
    def _where(self) -> tuple[int, str]:
        return self.phase.index, self.stage.name

    def _epoch(self) -> None:
        """Take the steps of an epoch that are left; a loss that is not finite ends the training."""
        trainer, stage, epochs = self.trainer, self.stage, self.stage.schedule.epochs
        self.phase.network.train(stage.training)
        at, meter, last = self.epoch, _Meter(self.step), self.epoch + 1 == epochs
        try:
            for batch in islice(stage.batches.epoch(at, self.step), self.steps - self.step):
                self._step(batch, meter)
            if last and stage.module is self.phase.network:
                self._check_sound()
            self.epoch, self.step = at + 1, 0
            if meter.count:  # an epoch that was stopped at its last step has no loss to report
                phase, name = self._where
                told = meter.loss, meter.parts, meter.rate
                trainer.listener(EpochEnded(phase, name, self.epoch, epochs, *told))
            late = not trainer.config.checkpoint_steps
            late = late and time.monotonic() - self.saved > SAVE_SECONDS
            if last or trainer.ranks.any(late, trainer.device):
                trainer.ranks.broadcast(self.phase.network.buffers())
                self._save()
        except (FloatingPointError, GeometryError) as error:
            # Features that are not finite have no subspace.
            raise TrainingError(self._not_finite(at, meter.step, str(error))) from None

    def _step(self, batch: Batch, meter: "_Meter") -> None:
        """Take one step down the loss of a batch, and save or stop where that is due."""
        trainer, schedule = self.trainer, self.stage.schedule
        for group in self.wrapped.param_groups:
            group["lr"] = schedule.lr_at(self.epoch, self.step, self.steps)
        meter.add(self._descend(_to(batch, trainer.device)), batch.size)
        self.step += 1
        every = trainer.config.checkpoint_steps
        due = bool(every) and (self.epoch * self.steps + self.step) % (every or 1) == 0
        if not due and self.step % trainer.read_steps and self.step < self.steps:
            return
        meter.check()
        trainer.listener(StepTaken(*self._where, self.epoch, self.step, meter.loss, meter.rate))
        stopping = trainer.ranks.any(trainer.stop(), trainer.device)
        if stopping or due:
            self._save()
        if stopping:
            place = f"phase {self.phase.index}, epoch {self.epoch + 1}, step {self.step}"
            raise Interrupted(f"stopped in {place}; progress is saved")

    def _descend(self, batch: Batch) -> dict[str, Tensor]:
        """Move the parameters by one step; return the parts of the loss."""
        fabric, clip = self.trainer.fabric, self.trainer.config.clip_norm
        found = self.stage.loss(self.module, batch)
        parts = {name: part for name, part in found if part is not None}
        fabric.backward(torch.stack(list(parts.values())).sum())
        if clip is not None and self.stage.training:  # not pixels: they move by grey levels
            fabric.clip_gradients(self.module, self.wrapped, max_norm=clip)
        self.wrapped.step()
        self.wrapped.zero_grad()
        return parts

    def _save(self) -> None:
        """Write a checkpoint; weights that are not finite are none."""
        ranks = self.trainer.ranks
        tensors, rest = tensors_of(self.phase.network, self.stage.module, self.optimizer)
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors.values())
        if ranks.any(not finite, self.trainer.device):  # the loss was computed before the step
            raise FloatingPointError("the weights after that step")
        if self.progress is not None and ranks.is_main_process:
            place = Checkpoint(tensors, self.number, self.epoch, self.step, self.base, rest)
            place.save(self.progress)
        ranks.barrier()
        self.saved = time.monotonic()

    def _check_sound(self) -> None:
        """See whether the last step left the network sound: its loss was computed before it."""
        sample = evenly(self.stage.batches.images, SAMPLE)
        found = self.trainer.features(self.phase.network, sample, self.phase.transform)
        if not bool(found.logits.isfinite().all()):
            raise FloatingPointError("the network's output after that step")

    def _not_finite(self, epoch: int, step: int, what: str) -> str:
        good = "the start of the phase"
        with suppress(GeodlError):
            last = Checkpoint.load(self.progress)
            if last is not None:
                good = f"epoch {last.epoch + 1}, step {last.step}"
        phase, stage = self._where
        return (
            f"the loss is not finite in phase {phase}, stage {stage}, epoch {epoch + 1}, step {step} "
            f"({what}); the last good checkpoint is {good}: try a lower lr or clip_norm"
        )


def evenly(images: Images, count: int) -> Images:
    """Return at most ``count`` images, evenly spread."""
    return images.select(torch.arange(0, len(images), max(1, math.ceil(len(images) / count))))


class _Meter:
    """Mean losses and the speed of an epoch, summed on the device: `check` reads them back, and only then waits for it."""

    def __init__(self, step: int) -> None:
        self.names: list[str] = []
        self.count, self.step = 0, step
        self.began = time.monotonic()
        self._sums: Tensor | None = None
        self._bad: Tensor | None = (
            None  # the step, counted from 1, and the parts of the first loss that is not finite
        )

    def add(self, parts: Mapping[str, Tensor], size: int) -> None:
        """Count the parts of the loss of a step, a mean over ``size`` images each."""
        self.names = list(parts)
        values = torch.stack([value.detach().double() for value in parts.values()])
        self.step += 1
        self.count += size
        found = torch.cat([values.new_tensor([self.step]), values])
        if self._sums is None or self._bad is None:
            self._sums, self._bad = torch.zeros_like(values), torch.zeros_like(found)
        first = ~values.isfinite().all() & (self._bad[0] == 0)
        self._bad = torch.where(first, found, self._bad)
        self._sums = self._sums + values * size

    def check(self) -> None:
        """Raise a FloatingPointError with the parts of the first loss that was not finite; `step` is then its step."""
        bad = [] if self._bad is None else self._bad.tolist()
        if bad and bad[0]:
            self.step = int(bad[0])
            found = zip(self.names, bad[1:], strict=True)
            raise FloatingPointError(", ".join(f"{name} = {value:.4g}" for name, value in found))

    @property
    def parts(self) -> dict[str, float]:
        """The mean of each part of the loss so far."""
        values = [] if self._sums is None else (self._sums / self.count).tolist()
        return dict(zip(self.names, values, strict=True))

    @property
    def loss(self) -> float:
        """The mean loss so far."""
        return math.fsum(self.parts.values())

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.count / max(time.monotonic() - self.began, 1e-9)


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    # Copied while the device still works on the batch before, which needs pinned memory.
    images, labels = (
        part.pin_memory().to(device, non_blocking=True) for part in (batch.images, batch.labels)
    )
    return batch._replace(images=images, labels=labels)


def _leave_group() -> None:
    """End the threads by which the processes talk before the interpreter ends: one that still holds a tensor would abort it."""
    gc.collect()  # wrapped modules hold the group in cycles, and its threads end with the last that holds it
    if distributed.is_initialized():
        distributed.destroy_process_group()
