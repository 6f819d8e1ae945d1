"""Checkpoints of an unfinished phase: weights, optimizer state and three counters. Random numbers need no state: they come from keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from geodl.core.tensors import part
from geodl.nets import Network


class Checkpoints(Protocol):
    """Storage for the checkpoint of the current phase."""

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of training at a stage, epoch and step, all counted from 0.

    tensors: those of the network, of the stage's module and of the optimizer.
    base: the key under which the base phase will be shared; None: not shared.
    optimizer: the rest of the optimizer's state, as JSON.
    """

    tensors: Mapping[str, Tensor]
    stage: int
    epoch: int
    step: int
    base: str | None
    optimizer: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        network: Network,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: int,
        epoch: int,
        step: int,
        base: str | None,
    ) -> Self:
        """Return the checkpoint of a network, of a stage's module (which may be the network), and of its optimizer."""
        tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        if module is not network:
            tensors |= {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
        saved = optimizer.state_dict()
        rest: dict[int, dict[str, Any]] = {}
        for i, values in saved["state"].items():
            own = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in own.items()}
            rest[i] = {name: value for name, value in values.items() if name not in own}
        state = {"state": rest, "param_groups": saved["param_groups"]}
        return cls(tensors, stage, epoch, step, base, state)

    @classmethod
    def load(cls, progress: Checkpoints | None) -> Self | None:
        """Return the last checkpoint; None if there is none, or none are kept."""
        saved = None if progress is None else progress.load_progress()
        if saved is None:
            return None
        tensors, state = saved
        return cls(tensors, **state)

    def save(self, progress: Checkpoints) -> None:
        """Replace the last checkpoint."""
        state = {name: value for name, value in vars(self).items() if name != "tensors"}
        progress.save_progress(self.tensors, state)

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Load the state of a stage's module and of its optimizer; return the epoch and step to resume from."""
        if own := part(self.tensors, "module"):
            module.load_state_dict(own)
        state = {int(i): dict(values) for i, values in self.optimizer["state"].items()}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for key, tensor in part(self.tensors, "optimizer").items():
            i, _, name = key.partition(".")
            # In the parameter's memory format (channels_last), which the fused step relies on.
            like = parameters[int(i)] if tensor.shape == parameters[int(i)].shape else tensor
            copy = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
            state.setdefault(int(i), {})[name] = copy
        groups = self.optimizer["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return self.epoch, self.step
