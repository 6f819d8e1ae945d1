"""Measure the speed of training steps and of evaluation on random images, for estimates of durations."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from geodl.core.devices import device_kind
from geodl.losses import DISTILLATIONS
from geodl.nets import build_network, frozen_copy, reading_copy

LOSSES = ("none", "lwf", "cosine", "geodesic")
"""The distillations that the paper compares."""
TURNS = 3


@dataclass(frozen=True)
class Shape:
    """The work of a step: network, batch of size x size images, old and new classes, precision and device."""

    network: str
    size: int
    batch: int = 128
    old: int = 50
    new: int = 10
    precision: str = "32"
    accelerator: str = "auto"


class Step:
    """A training step of an incremental phase on random images; last: train only the last stages."""

    def __init__(self, distill: str, shape: Shape, *, last: bool = False) -> None:
        self.shape, self.device = shape, torch.device(device_kind(shape.accelerator))
        classes = shape.old + shape.new
        self.student = build_network(shape.network, classes, head="cosine", seed=0)
        self.student.to(self.device).train()
        if last:
            self.student.move_last_alone()
        self.optimizer = torch.optim.SGD(
            [each for each in self.student.parameters() if each.requires_grad],
            lr=0.1,
            momentum=0.9,
            weight_decay=5e-4,
            fused=True,
        )
        self.teacher = self.loss = None
        if distill != "none":
            base = build_network(shape.network, shape.old, head="cosine", seed=0)
            self.teacher = frozen_copy(base).to(self.device)
            kind = DISTILLATIONS[distill]
            self.loss = kind.build(kind.Options())
        rng = torch.Generator().manual_seed(1)
        images = torch.randn(shape.batch, 3, shape.size, shape.size, generator=rng)
        self.images = images.to(self.device, memory_format=torch.channels_last)
        self.labels = torch.randint(0, classes, (shape.batch,), generator=rng).to(self.device)

    def __call__(self) -> None:
        """Take one step and wait for the device."""
        with self._autocast():
            teacher = None if self.teacher is None else self.teacher(self.images)
            student = self.student(self.images)
            loss = F.cross_entropy(student.logits, self.labels)
            if teacher is not None and self.loss is not None:
                outputs = (student, teacher)
                loss += self.loss(*(self.loss.compared(each, self.shape.old) for each in outputs))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        loss.item()  # waits for the GPU

    def evaluate(self) -> None:
        """Run the network over the images as an evaluation does."""
        with torch.inference_mode(), self._autocast():
            self.student.eval()(self.images).logits.sum().item()
            self.student.train()

    def _autocast(self) -> torch.autocast:
        enabled = self.shape.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


def take_turns(
    actions: Mapping[str, Callable[[], object]],
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time each action once per turn, in rotating order; a first turn, for warming up, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            actions[name]()
            if turn:
                times[name].append(clock() - start)
    return times


@dataclass(frozen=True)
class Speed:
    """Measured images per second: of training steps by distillation, and of evaluation."""

    training: Mapping[str, float]
    evaluation: float


def reading_speed(shape: Shape) -> float:
    """Measure how many images per second a frozen network processes."""
    device = torch.device(device_kind(shape.accelerator))
    network = reading_copy(build_network(shape.network, 1, head="cosine"), device)
    images = torch.zeros(shape.batch, 3, shape.size, shape.size, device=device)

    def read() -> None:
        with torch.inference_mode():
            network(images).logits.sum().item()

    times = take_turns({"reading": read}, TURNS)
    return shape.batch / statistics.median(times["reading"])


def measure(shape: Shape, losses: Collection[str] = LOSSES, *, last: bool = False) -> Speed:
    """Measure training steps with each distillation, and evaluation; last: as for `Step`."""
    steps = {name: Step(name, shape, last=last) for name in losses}
    evaluated = steps.get("none") or Step("none", shape)
    times = take_turns({**steps, "evaluation": evaluated.evaluate}, TURNS)
    speeds = {name: shape.batch / statistics.median(each) for name, each in times.items()}
    evaluation = speeds.pop("evaluation")
    return Speed(speeds, evaluation)
