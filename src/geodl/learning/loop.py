"""The training loop: it runs a stage step by step, and can stop and resume at any step.

This is the only module that uses Lightning Fabric (devices, precision, processes). Everything random is derived from
the seed, the phase, the stage and the step.
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
from geodl.learning.checkpoint import Checkpoint, Checkpoints
from geodl.methods import Phase, Stage
from geodl.model.features import Features, features_of
from geodl.nets import Network, reading_copy

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SAVE_SECONDS = 10.0
"""Checkpoints at the end of an epoch are at least this far apart."""
SAMPLE = 128
"""Images that are checked after an epoch."""
READ_STEPS = 20
"""Steps between reading losses back from a GPU, which waits for the device each time."""


class Trainer:
    """Trains and evaluates networks on the available devices."""

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
        """Lightning Fabric, which handles devices, precision and processes; created on first use."""
        # Imported here, because that takes twice as long as importing torch, and reading features needs none.
        from lightning_fabric import Fabric

        config = self.config
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it logs every process
        return Fabric(
            accelerator=device_kind(config.accelerator),
            strategy="ddp" if config.devices * config.nodes > 1 else "auto",
            devices=config.devices,
            num_nodes=config.nodes,
            precision="bf16-mixed" if self.precision == "bf16" else "32-true",
        )

    def place(self, network: Network) -> Network:
        """Move a network to the device, with batch statistics shared by all GPUs."""
        if self.ranks.world > 1 and self.device.type == "cuda":  # not available on CPUs
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
        """Return the features of un-augmented images, the same on every rank; each rank computes its share.

        They are float32 whatever the precision of training, so that they do not depend on the processor; batch norms
        are folded into the convolutions. levels: the levels to include.
        """
        # With fewer images than ranks, every rank computes all.
        world = self.ranks.world if len(images) >= self.ranks.world else 1
        rank = self.ranks.rank if world > 1 else 0
        batches = evaluation(
            images, transform, mirror=mirror, rank=rank, world=world, workers=self.config.workers
        )
        batches = self._reporting(batches, len(images))
        features = features_of(reading_copy(network, self.device), batches, self.device, levels)
        if world == 1:
            return features
        return features.map(
            lambda part: gather_rows(part.to(self.device), self.ranks.group)[0].cpu()
        )

    def _reporting(self, batches: Iterable[Batch], total: int) -> Iterator[Batch]:
        """Yield batches, and report how many of this rank's images are done."""
        done = 0
        for batch in batches:
            yield batch
            done += len(batch.labels)
            self.listener(FeaturesTaken(done, total))


@dataclass
class StageRun:
    """The run of one stage of a phase, which can stop and resume at any step.

    number: the stage's position in the phase; progress: where checkpoints are kept; base: the key under which the
    result will be shared, which checkpoints store.
    """

    trainer: Trainer
    phase: Phase
    stage: Stage
    number: int = 0
    progress: Checkpoints | None = None
    base: str | None = None

    def run(self, checkpoint: Checkpoint | None = None) -> None:
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
        # Compiled only for training: evaluation uses other shapes and modes.
        module: Any = torch.compile(stage.module) if compiles else stage.module
        self.module, self.wrapped = trainer.fabric.setup(module, self.optimizer)
        self.steps = min(len(stage.batches), stage.steps or len(stage.batches))
        self.saved = time.monotonic()
        epochs = stage.schedule.epochs
        trainer.listener(StageStarted(*self._place, epochs, self.steps, self.epoch))
        while self.epoch < epochs:
            self._run_epoch()
        stage.finish()

    @property
    def _place(self) -> tuple[int, str]:
        return self.phase.index, self.stage.name

    def _run_epoch(self) -> None:
        """Take the remaining steps of an epoch; a loss that is not finite ends the training."""
        trainer, stage, epochs = self.trainer, self.stage, self.stage.schedule.epochs
        self.phase.network.train(stage.training)
        epoch, meter, last = self.epoch, _Meter(self.step), self.epoch + 1 == epochs
        try:
            for batch in islice(stage.batches.epoch(epoch, self.step), self.steps - self.step):
                self._take_step(batch, meter)
            if last and stage.module is self.phase.network:
                self._check_network()
            self.epoch, self.step = epoch + 1, 0
            if meter.count:  # an epoch resumed after its last step has no loss to report
                phase, name = self._place
                means = meter.loss, meter.parts, meter.rate
                trainer.listener(EpochEnded(phase, name, self.epoch, epochs, *means))
            late = not trainer.config.checkpoint_steps
            late = late and time.monotonic() - self.saved > SAVE_SECONDS
            if last or trainer.ranks.any(late, trainer.device):
                trainer.ranks.broadcast(self.phase.network.buffers())
                self._save()
        except (FloatingPointError, GeometryError) as error:
            # GeometryError: features that are not finite have no subspace.
            raise TrainingError(self._not_finite(epoch, meter.step, str(error))) from None

    def _take_step(self, batch: Batch, meter: "_Meter") -> None:
        """Minimize the loss of a batch by one step; save a checkpoint or stop if that is due."""
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
        trainer.listener(StepTaken(*self._place, self.epoch, self.step, meter.loss, meter.rate))
        stopping = trainer.ranks.any(trainer.stop(), trainer.device)
        if stopping or due:
            self._save()
        if stopping:
            place = f"phase {self.phase.index}, epoch {self.epoch + 1}, step {self.step}"
            raise Interrupted(f"stopped in {place}; progress is saved")

    def _descend(self, batch: Batch) -> dict[str, Tensor]:
        """Take a step of the optimizer; return the parts of the loss."""
        fabric, clip = self.trainer.fabric, self.trainer.config.clip_norm
        losses = self.stage.loss(self.module, batch)
        parts = {name: part for name, part in losses if part is not None}
        fabric.backward(torch.stack(list(parts.values())).sum())
        if clip is not None and self.stage.training:  # exemplars' pixels are not clipped
            fabric.clip_gradients(self.module, self.wrapped, max_norm=clip)
        self.wrapped.step()
        self.wrapped.zero_grad()
        return parts

    def _save(self) -> None:
        """Save a checkpoint; weights that are not finite are an error."""
        ranks, place = self.trainer.ranks, (self.number, self.epoch, self.step, self.base)
        checkpoint = Checkpoint.of(self.phase.network, self.stage.module, self.optimizer, *place)
        finite = all(bool(tensor.isfinite().all()) for tensor in checkpoint.tensors.values())
        if ranks.any(not finite, self.trainer.device):  # the loss was computed before the step
            raise FloatingPointError("the weights after that step")
        if self.progress is not None and ranks.is_main_process:
            checkpoint.save(self.progress)
        ranks.barrier()
        self.saved = time.monotonic()

    def _check_network(self) -> None:
        """Raise an error if the network's output is not finite: no loss is computed after the last step."""
        sample = evenly(self.stage.batches.images, SAMPLE)
        features = self.trainer.features(self.phase.network, sample, self.phase.transform)
        if not bool(features.logits.isfinite().all()):
            raise FloatingPointError("the network's output after that step")

    def _not_finite(self, epoch: int, step: int, what: str) -> str:
        good = "the start of the phase"
        with suppress(GeodlError):
            last = Checkpoint.load(self.progress)
            if last is not None:
                good = f"epoch {last.epoch + 1}, step {last.step}"
        phase, stage = self._place
        return (
            f"the loss is not finite in phase {phase}, stage {stage}, epoch {epoch + 1}, step {step} "
            f"({what}); the last good checkpoint is {good}: try a lower lr or clip_norm"
        )


def evenly(images: Images, count: int) -> Images:
    """Return at most ``count`` images, evenly spaced."""
    return images.select(torch.arange(0, len(images), max(1, math.ceil(len(images) / count))))


class _Meter:
    """Mean losses and the speed of an epoch, summed on the device; only reading them waits for it."""

    def __init__(self, step: int) -> None:
        self.names: list[str] = []
        self.count, self.step = 0, step
        self.began = time.monotonic()
        self._sums: Tensor | None = None
        # The step, counted from 1, and the parts of the first loss that is not finite; zeros if there is none.
        self._bad: Tensor | None = None

    def add(self, parts: Mapping[str, Tensor], size: int) -> None:
        """Add the parts of the loss of a step, means over ``size`` images."""
        self.names = list(parts)
        values = torch.stack([value.detach().double() for value in parts.values()])
        self.step += 1
        self.count += size
        numbered = torch.cat([values.new_tensor([self.step]), values])
        if self._sums is None or self._bad is None:
            self._sums, self._bad = torch.zeros_like(values), torch.zeros_like(numbered)
        first = ~values.isfinite().all() & (self._bad[0] == 0)
        self._bad = torch.where(first, numbered, self._bad)
        self._sums = self._sums + values * size

    def check(self) -> None:
        """Raise a FloatingPointError with the first loss that is not finite, and set `step` to its step."""
        bad = [] if self._bad is None else self._bad.tolist()
        if bad and bad[0]:
            self.step = int(bad[0])
            parts = zip(self.names, bad[1:], strict=True)
            raise FloatingPointError(", ".join(f"{name} = {value:.4g}" for name, value in parts))

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
    # From pinned memory, so that the copy overlaps with the work on the previous batch.
    images, labels = (
        part.pin_memory().to(device, non_blocking=True) for part in (batch.images, batch.labels)
    )
    return batch._replace(images=images, labels=labels)


def _leave_group() -> None:
    """End the communication threads before the interpreter ends: one that still held a tensor would abort it."""
    gc.collect()  # wrapped modules keep the group alive in reference cycles
    if distributed.is_initialized():
        distributed.destroy_process_group()
