"""A learner on its way through a tiny scenario, whose stages can be run one by one, for tests of single methods."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from tests.helpers import tiny

from geodl.bench.experiment import scenario_of
from geodl.config import RunConfig
from geodl.data import Dataset
from geodl.data.batches import Batch
from geodl.data.images import ArrayImages, Images
from geodl.data.scenario import ClassIncremental
from geodl.learning.algorithm import begin
from geodl.learning.learner import Learner
from geodl.learning.loop import StageRun
from geodl.methods import Losses, Phase, Stage
from geodl.nets import Output


class KeptProgress:
    """Checkpoints that are kept in memory, all of them."""

    def __init__(self) -> None:
        self.saved: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = []

    def save_progress(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Keep a copy."""
        self.saved.append(({name: tensor.clone() for name, tensor in tensors.items()}, dict(state)))

    def load_progress(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return the last one."""
        return self.saved[-1] if self.saved else None


class ScenarioLearner(Learner):
    """Learns, or only prepares, the phases of a scenario one after the other."""

    def __init__(self, config: RunConfig, data: Dataset | None = None) -> None:
        super().__init__(config)
        self.scenario: ClassIncremental = scenario_of(config, data or tiny.dataset())

    def learn_next(self) -> Self:
        """Learn the next phase."""
        self.learn(self.scenario.train(self.phases))
        return self

    def prepare_next(self, images: Images | None = None) -> Phase:
        """Prepare the next phase, or one with more images of known classes; nothing is learned."""
        images = self.scenario.train(self.phases) if images is None else images
        return begin(self.model, images, self.method, self.trainer, self.seen)

    def run(self, phase: Phase, stage: Stage, number: int = 0) -> None:
        """Run one stage to its end."""
        StageRun(self.trainer, phase, stage, number).run()

    def at_stage(self, number: int, learned: int = 1) -> tuple[Phase, Stage]:
        """Learn some phases, run the next one's stages before a given one; return phase and stage."""
        while self.phases < learned:
            self.learn_next()
        phase = self.prepare_next()
        for place, stage in enumerate(self.method.stages(phase)):
            if place == number:
                return phase, stage
            self.run(phase, stage, place)
        raise AssertionError(f"there is no stage {number}")


def bare_phase(
    config: RunConfig, old: int = 3, new: int = 2, network: Any = None, back: Sequence[int] = ()
) -> Phase:
    """Return a phase for losses alone: numbers of classes, and a black pixel of each new class and of those that come back."""
    labels = torch.tensor([*back, *range(old, old + new)], dtype=torch.int64)
    images = ArrayImages(torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8), labels)
    teacher, none = object() if old else None, None
    device = torch.device("cpu")
    names = tuple(map(str, range(old + new)))
    return Phase(1, config, none, network, teacher, images, none, old, names, none, device)


def parts_of(losses: Losses) -> dict[str, torch.Tensor]:
    """Return the parts of a loss by name, without those that are left out."""
    return {name: value for name, value in losses if value is not None}


def weights_of(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of all tensors of a network."""
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of tensors that are not the same bits."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def batch_of(labels: list[int]) -> Batch:
    """Return a batch with labels; its pictures are never looked at."""
    return Batch(
        torch.zeros(len(labels), 3, 1, 1),
        torch.tensor(labels),
        torch.arange(len(labels)),
        len(labels),
    )


def output(logits: Any, width: int = 3, seed: int = 0) -> Output:
    """Return a network's output with these logits and random features: pooled (B, width), grid (B, 4 width)."""
    rng = np.random.default_rng(seed)
    pooled, grid = (
        torch.tensor(rng.standard_normal((len(logits), d))).float() for d in (width, 4 * width)
    )
    return Output(torch.as_tensor(logits, dtype=torch.float32), pooled, grid)


# -- independent references in numpy


def log_softmax(logits: Any) -> np.ndarray:
    logits = np.asarray(logits, dtype=np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def cross_entropy(logits: Any, labels: list[int]) -> float:
    return float(-log_softmax(logits)[np.arange(len(labels)), labels].mean())


def divergence(student: Any, teacher: Any, temperature: float = 2.0) -> float:
    """KL(teacher || student) over the columns, mean over the rows."""
    new, old = (
        log_softmax(np.asarray(logits, dtype=np.float64) / temperature)
        for logits in (student, teacher)
    )
    return float((np.exp(old) * (old - new)).sum(axis=1).mean())


def cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    x, y = a.double().numpy(), b.double().numpy()
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    return float((1 - cosines).mean())
