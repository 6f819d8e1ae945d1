"""Phases as the trainer prepares them, and stages run one by one, for tests of single methods."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from tests import tiny

from geodl.config import RunConfig
from geodl.data.batches import Batch
from geodl.data.images import Images
from geodl.data.scenario import ClassIncremental
from geodl.experiment import scenario_of, transform_of
from geodl.memory import Memory
from geodl.methods import Phase, Stage, build
from geodl.nets import Output
from geodl.training import Trainer


class NoProgress:
    """Checkpoints that are kept nowhere."""

    def save_progress(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Forget it."""

    def load_progress(self) -> None:
        """Have none."""


class Learner:
    """A method at work: phases are learned, or only prepared, one after the other."""

    def __init__(self, config: RunConfig, data: tiny.Dataset | None = None) -> None:
        data = data or tiny.dataset()
        self.scenario: ClassIncremental = scenario_of(config, data)
        self.method = build(config)
        self.trainer = Trainer(config, self.method, transform_of(config, data.train))
        self.network, self.memory, self.next = None, Memory.empty(), 0

    def learn(self, images: Images | None = None) -> Phase:
        """Learn the next phase."""
        images, classes = self._images(images)
        phase = self.trainer.learn(self.next, self.network, self.memory, images, classes, NoProgress())
        self.network, self.memory, self.next = phase.network, phase.memory, self.next + 1
        return phase

    def prepare(self, images: Images | None = None) -> Phase:
        """Prepare the next phase, with a copy of the network: it can be prepared or learned again."""
        images, classes = self._images(images)
        return self.trainer._prepare(self.next, deepcopy(self.network), self.memory, images, classes)

    def run(self, phase: Phase, stage: Stage, number: int = 0) -> None:
        """Run one stage to its end."""
        self.trainer._run(phase, stage, number, None, NoProgress())

    def _images(self, images: Images | None) -> tuple[Images, int]:
        if images is not None:  # a group that brings no class of its own
            return images, self.network.head.classes
        return self.scenario.train(self.next), self.scenario.seen(self.next)


def batch_of(labels: list[int]) -> Batch:
    """Give a batch with labels; its pictures are never looked at."""
    return Batch(torch.zeros(len(labels), 3, 1, 1), torch.tensor(labels), torch.arange(len(labels)), len(labels))


def output(logits: Any, width: int = 3, seed: int = 0) -> Output:
    """Give a network's output with these logits and random features: pooled (B, width), grid (B, 4 width)."""
    rng = np.random.default_rng(seed)
    pooled, grid = (torch.tensor(rng.standard_normal((len(logits), d))).float() for d in (width, 4 * width))
    return Output(torch.as_tensor(logits, dtype=torch.float32), pooled, grid)


# -- independent references in numpy


def log_softmax(logits: Any) -> np.ndarray:
    logits = np.asarray(logits, dtype=np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def cross_entropy(logits: Any, labels: list[int]) -> float:
    return float(-log_softmax(logits)[np.arange(len(labels)), labels].mean())


def divergence(student: Any, teacher: Any, temperature: float = 2.0) -> float:
    """KL(teacher || student) over the columns, mean over the rows."""
    new, old = (log_softmax(np.asarray(logits, dtype=np.float64) / temperature) for logits in (student, teacher))
    return float((np.exp(old) * (old - new)).sum(axis=1).mean())


def cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    x, y = a.double().numpy(), b.double().numpy()
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    return float((1 - cosines).mean())
