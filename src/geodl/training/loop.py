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
from itertools import islice
from typing import Any

import torch
from torch import Tensor, distributed, nn

from geodl.config import RunConfig
from geodl.data.batches import Batch, Transform, evaluation
from geodl.data.images import Images
from geodl.devices import choose_precision, device_kind
from geodl.errors import GeodlError, Interrupted, TrainingError
from geodl.events import EpochEnded, FeaturesTaken, Listener, StageStarted, StepTaken, ignore
from geodl.geometry import GeometryError
from geodl.methods import Losses, Phase, Stage
from geodl.nets import Network, folded
from geodl.predictors import Features, features_of
from geodl.ranks import Ranks, gather_rows
from geodl.training.angles import SAMPLE, spread
from geodl.training.checkpoint import Checkpoint, Progress, tensors_of

SAVE_SECONDS = 10.0
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
        from lightning_fabric import Fabric  # not above: it takes as long to import as torch, and predicting needs none

        self.config = config
        kind = device_kind(config.accelerator)
        self.precision = precision or choose_precision(config.precision, kind)
        self.listener = listener
        self.stop = stop
        processes = config.devices * config.nodes
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces every process
        self.fabric = Fabric(
            accelerator=kind,
            strategy="ddp" if processes > 1 else "auto",
            devices=config.devices,
            num_nodes=config.nodes,
            precision="bf16-mixed" if self.precision == "bf16" else "32-true",
        )
        if processes > 1:
            self.fabric.launch()
            atexit.register(_leave_group)
        self.ranks = Ranks(self.fabric.global_rank, self.fabric.world_size)
        self.device = self.fabric.device
        self.read_steps = 1 if self.device.type == "cpu" else READ_STEPS

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

        In the run's precision, with batch norms folded into the convolutions; ``levels`` names those to read too.
        """
        # Fewer images than ranks: every rank takes them all.
        world = self.ranks.world if len(images) >= self.ranks.world else 1
        rank = self.ranks.rank if world > 1 else 0
        batches = evaluation(images, transform, mirror=mirror, rank=rank, world=world, workers=self.config.workers)
        with self.fabric.autocast():
            found = features_of(folded(network).to(self.device), self._told(batches, len(images)), self.device, levels)
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

    def run(
        self,
        phase: Phase,
        stage: Stage,
        *,
        number: int = 0,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
        base: str | None = None,
    ) -> None:
        """Run stage ``number`` of a phase, from its start or from a checkpoint inside it.

        progress: where checkpoints go, if any are kept; base: the key under which the result will be shared, kept in them.
        """
        schedule = stage.schedule
        stage.module.to(self.device)
        optimizer = schedule.optimizer(stage.module.parameters())
        epoch, step = checkpoint.restore(stage.module, optimizer) if checkpoint is not None else (0, 0)
        # Compiled for training alone: evaluation comes in other shapes and modes, each of which would be compiled anew.
        compiled: Any = torch.compile(stage.module) if self.config.compile and number == 0 else stage.module
        module, wrapped = self.fabric.setup(compiled, optimizer)
        steps = min(len(stage.batches), stage.steps or len(stage.batches))
        where = (phase.index, stage.name)
        self.listener(StageStarted(*where, schedule.epochs, steps, epoch))
        every, saved = self.config.checkpoint_steps, time.monotonic()

        def save() -> None:
            nonlocal saved
            taken = Checkpoint(tensors_of(phase.network, stage.module, optimizer), number, epoch, step, base)
            finite = all(bool(tensor.isfinite().all()) for tensor in taken.tensors.values())
            if self.ranks.any(not finite, self.device):  # the loss was computed before the step
                raise FloatingPointError("the weights after that step")
            if progress is not None and self.ranks.is_main_process:
                taken.save(progress)
            self.ranks.barrier()
            saved = time.monotonic()

        while epoch < schedule.epochs:
            phase.network.train(stage.training)
            at, meter, last = epoch, _Meter(step), epoch + 1 == schedule.epochs
            try:
                for batch in islice(stage.batches.epoch(epoch, step), steps - step):
                    for group in wrapped.param_groups:
                        group["lr"] = schedule.lr_at(epoch, step, steps)
                    meter.add(self._descend(stage, module, wrapped, _to(batch, self.device)), batch.size)
                    step += 1
                    due = bool(every) and (epoch * steps + step) % (every or 1) == 0
                    if not due and step % self.read_steps and step < steps:
                        continue
                    meter.check()
                    self.listener(StepTaken(*where, epoch, step, meter.loss, meter.rate))
                    stopping = self.ranks.any(self.stop(), self.device)
                    if stopping or due:
                        save()
                    if stopping:
                        raise Interrupted(
                            f"stopped in phase {phase.index}, epoch {epoch + 1}, step {step}; progress is saved"
                        )
                if last and stage.module is phase.network:
                    self._check_sound(phase, stage)
                epoch, step = epoch + 1, 0
                if meter.count:  # an epoch that was stopped at its last step has no loss to tell
                    self.listener(EpochEnded(*where, epoch, schedule.epochs, meter.loss, meter.parts, meter.rate))
                late = not every and time.monotonic() - saved > SAVE_SECONDS
                if last or self.ranks.any(late, self.device):
                    self.ranks.broadcast(phase.network.buffers())
                    save()
            except (FloatingPointError, GeometryError) as error:  # features that are not finite have no subspace
                raise TrainingError(_not_finite(phase, stage, at, meter, str(error), progress)) from None
        stage.finish()

    def _descend(self, stage: Stage, module: nn.Module, optimizer: Any, batch: Batch) -> Losses:
        """Take one step down the loss of a batch; return its parts."""
        parts = stage.loss(module, batch)
        self.fabric.backward(torch.stack(list(parts.values())).sum())
        if self.config.clip_norm is not None and stage.training:  # not pixels: they move by grey levels
            self.fabric.clip_gradients(module, optimizer, max_norm=self.config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return parts

    def _check_sound(self, phase: Phase, stage: Stage) -> None:
        """See whether the last step left the network sound: its loss was computed before it."""
        found = self.features(phase.network, spread(stage.batches.images, SAMPLE), phase.transform)
        if not bool(found.logits.isfinite().all()):
            raise FloatingPointError("what the network gives after that step")


class _Meter:
    """Mean losses and the speed of an epoch, summed on the device: `check` reads them back, and only then waits for it."""

    def __init__(self, step: int) -> None:
        self.names: list[str] = []
        self.count, self.step = 0, step
        self.began = time.monotonic()
        self._sums: Tensor | None = None
        self._bad: Tensor | None = None  # the step, counted from 1, and the parts of the first loss that is not finite

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


def _not_finite(phase: Phase, stage: Stage, epoch: int, meter: _Meter, what: str, progress: Progress | None) -> str:
    where = "the start of the phase"
    with suppress(GeodlError):
        last = Checkpoint.load(progress)
        if last is not None:
            where = f"epoch {last.epoch + 1}, step {last.step}"
    return (
        f"the loss is not finite in phase {phase.index}, stage {stage.name}, epoch {epoch + 1}, step {meter.step} "
        f"({what}); the last good checkpoint is {where}: try a lower lr or clip_norm"
    )


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    # Copied while the device still works on the batch before, which needs pinned memory.
    images, labels = (part.pin_memory().to(device, non_blocking=True) for part in (batch.images, batch.labels))
    return batch._replace(images=images, labels=labels)


def _leave_group() -> None:
    """End the threads by which the processes talk before the interpreter ends: one that still holds a tensor would abort it."""
    gc.collect()  # wrapped modules hold the group in cycles, and its threads end with the last that holds it
    if distributed.is_initialized():
        distributed.destroy_process_group()
