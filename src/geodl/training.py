"""THE loop: it prepares a phase, runs its stages step by step, and can stop and go on at any step.

Lightning Fabric (devices, precision, processes) lives here and nowhere else. Everything random is derived from the seed,
the phase, the stage and the step, so a checkpoint is weights, momenta and three counters.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import islice
from typing import Any, Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, distributed, nn

from geodl.analysis import leading_angles
from geodl.cache import Cache
from geodl.config import RunConfig, derive
from geodl.data.batches import Batch, Transform, evaluation
from geodl.data.images import Images
from geodl.devices import device_kind
from geodl.errors import GeodlError, TrainingError
from geodl.files import fingerprint
from geodl.geometry import GeometryError
from geodl.memory import Memory, quota
from geodl.methods import Losses, Method, Phase, Shard, Stage
from geodl.nets import Network, build_network, frozen_copy
from geodl.predictors import Features, class_means, drift, exemplar_means, features_of

# Part of the key of cached base phases: to be raised whenever training computes something else than before.
BASE_VERSION = 1
SAVE_SECONDS = 10.0
SAMPLE = 128
"""Images of a stage that are looked at between epochs."""

Listener = Callable[..., None]
"""Called as ``listener(kind, **fields)`` with what happens: phase, stage, step, epoch, ..."""


class Interrupted(GeodlError):  # noqa: N818  # it is a wish of the user's, not an error
    """The user asked to stop; progress is saved and the same command goes on."""


class Progress(Protocol):
    """Where checkpoints of the phase in work go."""

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Give the last checkpoint."""


class Trainer:
    """Trains a network through phases, on whatever devices there are.

    ``base`` names the data of phase 0 for the cache: runs that give the same one share a trained base phase.
    """

    def __init__(
        self,
        config: RunConfig,
        method: Method,
        transform: Transform,
        *,
        cache: Cache | None = None,
        base: str = "",
        listener: Listener = lambda kind, **fields: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.method = method
        self.transform = transform
        self.cache = cache
        self.base = base
        self.listener = listener
        self.stop = stop
        processes = config.devices * config.nodes
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces every process
        self.fabric = Fabric(
            accelerator=device_kind(config.accelerator),
            strategy="ddp" if processes > 1 else "auto",
            devices=config.devices,
            num_nodes=config.nodes,
            precision="bf16-mixed" if config.precision == "bf16" else "32-true",
        )
        if processes > 1:
            self.fabric.launch()
        group = distributed.group.WORLD if processes > 1 else None
        self.shard = Shard(self.fabric.global_rank, self.fabric.world_size, group)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files and speaks."""
        return self.shard.rank == 0

    def build(self, classes: int) -> Network:
        """Build the network, random from the seed."""
        config = self.config
        network = build_network(
            config.network,
            classes,
            head=self.method.head,
            scale=config.scale,
            seed=derive(config.seed, "network"),
            weights=config.weights,
            pretrained=config.pretrained,
        )
        if self.shard.world > 1 and self.fabric.device.type == "cuda":  # it has no form for CPUs
            nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return network

    def learn(
        self, index: int, network: Network | None, memory: Memory, images: Images, classes: int, progress: Progress
    ) -> Phase:
        """Learn one phase and give it back with its network trained and its memory chosen anew.

        ``network`` has learned all before, None at the start; ``images`` are the phase's, with internal labels;
        ``classes`` counts all the classes known when the phase is over.
        """
        phase = self._prepare(index, network, memory, images, classes)
        checkpoint = progress.load_progress()
        if checkpoint is not None:
            _load_network(phase.network, _part(checkpoint[0], "network"))
        start = checkpoint[1]["stage"] if checkpoint is not None else 0
        for number, stage in enumerate(self.method.stages(phase)):
            if number >= start:
                self._run(phase, stage, number, checkpoint if number == start else None, progress)
        phase.network.head.thaw()
        share = quota(classes, self.config.exemplars, self.config.budget)
        phase.settled = self.features(phase.network, phase.at_hand())
        means = self._means(phase, phase.settled, classes)
        chosen = self.method.exemplars(phase, share - self.method.held_out(share))
        phase.memory = replace(chosen, means=means)
        return phase

    def features(self, network: Network, images: Images, *, mirror: bool = False) -> Features:
        """Run the network over un-augmented images, each rank over its share, and give every rank all of it."""
        # Fewer images than ranks: every rank takes them all.
        world = self.shard.world if len(images) >= self.shard.world else 1
        rank = self.shard.rank if world > 1 else 0
        workers = self.config.workers
        batches = evaluation(images, self.transform, mirror=mirror, rank=rank, world=world, workers=workers)
        network.to(self.fabric.device)
        found = features_of(network, batches, self.fabric.device)
        if world == 1:
            return found
        sizes = [len(images) * (r + 1) // world - len(images) * r // world for r in range(world)]
        pooled, logits = (self._gather(part, sizes) for part in (found.pooled, found.logits))
        return Features(pooled, logits, images.labels)

    def exemplar_means(self, network: Network, images: Images, classes: int) -> Tensor:
        """Give the (C, d) means of k-NME: over exemplars and, where mirroring keeps the class, their mirrored copies."""
        views = [self.features(network, images, mirror=mirror) for mirror in (False, True)[: 1 + self.config.flip]]
        return exemplar_means(views, classes)

    def _gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        padded = torch.cat([part, part.new_zeros(max(sizes) - len(part), part.shape[1])]).to(self.fabric.device)
        gathered = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(gathered, padded)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)]).cpu()

    def _prepare(self, index: int, network: Network | None, memory: Memory, images: Images, classes: int) -> Phase:
        """Make the phase's network: teacher copied, head grown, new rows imprinted, rows of absent classes frozen."""
        old = 0 if network is None else network.head.classes
        teacher = None if network is None else frozen_copy(network).to(self.fabric.device)
        if network is None:
            network = self.build(classes)
        elif classes > old:
            network.head.grow(classes - old, derive(self.config.seed, "rows", index))
        network.to(self.fabric.device)
        held = self.method.held_out(quota(classes, self.config.exemplars, self.config.budget))
        images, memory = memory.hold_out(images, range(old, classes), held, self.config.seed)
        if old and network.head.can_imprint and classes > old:
            fresh = images.select(images.labels >= old)
            found = self.features(network, fresh)
            network.head.imprint(range(old, classes), class_means(found.pooled, found.labels, classes)[old:])  # type: ignore[operator]
        if old and self.method.freezes_old_rows:
            absent = torch.arange(classes) < old
            absent[images.labels] = False
            network.head.freeze(absent)
        trained = network
        return Phase(
            index,
            self.config,
            self.transform,
            network,
            teacher,
            images,
            memory,
            old,
            classes - old,
            lambda some: self.features(trained, some).pooled,
            self.fabric.device,
            self.shard,
        )

    def _means(self, phase: Phase, now: Features, classes: int) -> Tensor:
        """Give the stored class means (C, d) of NCM with drift compensation: those of classes at hand are taken, the others drift along."""
        taken = class_means(now.pooled, now.labels, classes)
        if phase.teacher is None or phase.memory.means is None:
            return taken
        before = self.features(phase.teacher, phase.at_hand())
        moved = drift(phase.memory.means, before.pooled, now.pooled)
        known = torch.cat([moved, moved.new_zeros(classes - len(moved), moved.shape[1])])
        return torch.where((taken != 0).any(dim=1, keepdim=True), taken, known)

    def _run(
        self,
        phase: Phase,
        stage: Stage,
        number: int,
        checkpoint: tuple[dict[str, Tensor], dict[str, Any]] | None,
        progress: Progress,
    ) -> None:
        """Run one stage from its start or from a checkpoint inside it."""
        shared = self.cache is not None and self.base and phase.index == 0 and number == 0
        key = self._base_key(stage, phase.new) if shared else None
        if key and checkpoint is None and self._take_cached(key, phase):
            return
        schedule = stage.schedule
        stage.module.to(self.fabric.device)
        optimizer = torch.optim.SGD(
            [p for p in stage.module.parameters() if p.requires_grad],
            schedule.lr,
            schedule.momentum,
            weight_decay=schedule.weight_decay,
            fused=True,
        )
        epoch, step = _restore(stage.module, optimizer, *checkpoint) if checkpoint is not None else (0, 0)
        if checkpoint is not None and checkpoint[1].get("base") != key:
            key = None  # begun with other threads, devices or versions: what comes of it is nobody else's base
        # Compiled for training alone: evaluation comes in other shapes and modes, each of which would be compiled anew.
        compiled: Any = torch.compile(stage.module) if self.config.compile and number == 0 else stage.module
        module, wrapped = self.fabric.setup(compiled, optimizer)
        steps = min(len(stage.batches), stage.steps or len(stage.batches))
        where = {"phase": phase.index, "stage": stage.name}
        self.listener("stage", **where, epochs=schedule.epochs, steps=steps, epoch=epoch)
        every, saved = self.config.checkpoint_steps, time.monotonic()
        sample, old = _spread(stage.batches.images, SAMPLE), None
        if self.config.analysis and phase.teacher is not None and stage.module is phase.network:
            old = self.features(phase.teacher, sample)

        def save(epoch: int, step: int) -> None:
            nonlocal saved
            self._save(phase, stage, optimizer, {"stage": number, "epoch": epoch, "step": step, "base": key}, progress)
            saved = time.monotonic()

        while epoch < schedule.epochs:
            phase.network.train(stage.training)
            meter, last = _Meter(), epoch + 1 == schedule.epochs
            try:
                for batch in islice(stage.batches.epoch(epoch, step), steps - step):
                    for group in wrapped.param_groups:
                        group["lr"] = schedule.lr_at(epoch, step, steps)
                    parts = self._descend(stage, module, wrapped, _to(batch, self.fabric.device))
                    step += 1
                    meter.add(parts, batch.size)
                    self.listener("step", **where, epoch=epoch, step=step, loss=meter.loss, rate=meter.rate)
                    stopping = self._any(self.stop())
                    if stopping or (every and (epoch * steps + step) % every == 0):
                        save(epoch, step)
                    if stopping:
                        raise Interrupted(
                            f"stopped in phase {phase.index}, epoch {epoch + 1}, step {step}; progress is saved"
                        )
                looks = old is not None or (last and stage.module is phase.network)
                seen = self._look(phase, sample, old) if looks else {}
            except (FloatingPointError, GeometryError) as error:  # features that are not finite have no subspace
                at = min(step + 1, steps)
                raise TrainingError(self._not_finite(phase, stage, epoch + 1, at, str(error), progress)) from None
            epoch, step = epoch + 1, 0
            self.listener("epoch", **where, epoch=epoch, epochs=schedule.epochs, **meter.summary(), **seen)
            late = not every and time.monotonic() - saved > SAVE_SECONDS
            if last or self._any(late):
                self._agree(phase.network)
                save(epoch, step)
        stage.finish()
        if key and self.leads:
            assert self.cache is not None
            self.cache.put(key, phase.network.state_dict())

    def _descend(self, stage: Stage, module: nn.Module, optimizer: Any, batch: Batch) -> Losses:
        """Take one step down the loss of a batch; give its parts. A FloatingPointError names those of one that is not finite."""
        parts = stage.loss(module, batch)
        loss = torch.stack(list(parts.values())).sum()
        if not math.isfinite(loss.detach().item()):
            raise FloatingPointError(", ".join(f"{name} = {value.item():.4g}" for name, value in parts.items()))
        self.fabric.backward(loss)
        if self.config.clip_norm is not None and stage.training:  # not pixels: they move by grey levels
            self.fabric.clip_gradients(module, optimizer, max_norm=self.config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return parts

    def _look(self, phase: Phase, sample: Images, old: Features | None) -> dict[str, list[float]]:
        """See whether the last step left the network sound; give the angles of its features to the old network's."""
        now = self.features(phase.network, sample)
        if not bool(now.logits.isfinite().all()):
            raise FloatingPointError("what the network gives after that step")
        return {} if old is None else {"angles": leading_angles(old.pooled, now.pooled)}

    def _any(self, mine: bool) -> bool:
        """Whether any rank says so: signals and clocks differ between ranks, what they do must not."""
        if self.shard.world == 1:
            return mine
        flag = torch.tensor(float(mine), device=self.fabric.device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        return bool(flag.item())

    def _agree(self, network: Network) -> None:
        """Give every rank the batch statistics of the first: each has gathered its own since the last forward pass."""
        if self.shard.world > 1:
            for buffer in network.buffers():
                distributed.broadcast(buffer, 0)

    def _save(
        self,
        phase: Phase,
        stage: Stage,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        progress: Progress,
    ) -> None:
        tensors = {f"network.{name}": tensor for name, tensor in phase.network.state_dict().items()}
        if stage.module is not phase.network:
            tensors |= {f"module.{name}": tensor for name, tensor in stage.module.state_dict().items()}
        for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
            buffer = optimizer.state[parameter].get("momentum_buffer")
            if buffer is not None:
                tensors[f"momentum.{i}"] = buffer
        if self.leads:
            progress.save_progress(tensors, state)
        self.fabric.barrier()

    def _not_finite(self, phase: Phase, stage: Stage, epoch: int, step: int, what: str, progress: Progress) -> str:
        where = "the start of the phase"
        with suppress(GeodlError):
            last = progress.load_progress()
            if last is not None:
                where = f"epoch {last[1]['epoch'] + 1}, step {last[1]['step']}"
        return (
            f"the loss is not finite in phase {phase.index}, stage {stage.name}, epoch {epoch}, step {step} ({what}); "
            f"the last good checkpoint is {where}: try a lower lr or clip_norm"
        )

    def _base_key(self, stage: Stage, classes: int) -> str:
        """Give the key of the base phase: all that its trained network depends on."""
        config = self.config
        names = ("network", "pretrained", "scale", "seed", "batch_size", "label_smoothing", "clip_norm")
        share = quota(classes, config.exemplars, config.budget)
        return fingerprint(
            {
                "version": BASE_VERSION,
                "torch": torch.__version__,
                "data": self.base,
                "held out": self.method.held_out(share),
                "head": self.method.head,
                "loss": self.method.base_loss or type(self.method).__name__,
                "weights": sha256(config.weights.read_bytes()).hexdigest() if config.weights else None,
                "schedule": asdict(stage.schedule),
                "transform": self.transform.to_dict(),
                "options": config.model_dump(mode="json", include={*names, "precision", "compile"}),
                "machine": [self.fabric.device.type, self.shard.world, torch.get_num_threads()],
            }
        )

    def _take_cached(self, key: str, phase: Phase) -> bool:
        assert self.cache is not None
        entry = self.cache.load(key)
        if self._any(entry is None) or entry is None:  # every rank goes the same way, also when only one machine has it
            return False
        _load_network(phase.network, entry)
        self.listener("cached", phase=phase.index)
        return True


class _Meter:
    """Mean losses and the speed of an epoch."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = 0
        self.began = time.monotonic()

    def add(self, parts: Mapping[str, Tensor], size: int) -> None:
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach()) * size
        self.count += size

    @property
    def loss(self) -> float:
        return sum(self.sums.values()) / max(self.count, 1)

    @property
    def rate(self) -> float:
        return self.count / max(time.monotonic() - self.began, 1e-9)

    def summary(self) -> dict[str, Any]:
        parts = {name: value / max(self.count, 1) for name, value in self.sums.items()}
        return {"loss": self.loss, "parts": parts, "rate": self.rate}


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    return batch._replace(
        images=batch.images.to(device, non_blocking=True), labels=batch.labels.to(device, non_blocking=True)
    )


def _restore(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, int]
) -> tuple[int, int]:
    """Load a stage's module (where it is not the network, loaded before) and momenta; give the epoch and step."""
    own = _part(tensors, "module")
    if own:
        module.load_state_dict(own)
    parameters = optimizer.param_groups[0]["params"]
    for i, buffer in _part(tensors, "momentum").items():
        parameter = parameters[int(i)]
        # Laid out as the parameter is (channels_last): the fused step goes through both in memory order.
        optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffer)
    return state["epoch"], state["step"]


def _part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def _load_network(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Load weights into a network whose head may have other rows frozen than the saved one."""
    network.head.thaw()
    order = tensors.get("head.order")
    if order is not None:
        network.head.freeze(order >= len(tensors["head.weight"]))
    network.load_state_dict(dict(tensors))


def _spread(images: Images, count: int) -> Images:
    """Take at most ``count`` images, evenly spread."""
    return images.select(torch.arange(0, len(images), max(1, math.ceil(len(images) / count))))
