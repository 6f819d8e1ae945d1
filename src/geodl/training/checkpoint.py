"""Where an unfinished phase stands: weights, momenta and three counters, since everything random comes from a key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from geodl.files import part
from geodl.nets import Network


class Progress(Protocol):
    """Where checkpoints of the phase in work go."""

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A place in training: stage, epoch and step, all counted from 0, and the tensors there.

    base: the key under which the base phase in work will be shared; None where it will not.
    """

    tensors: Mapping[str, Tensor]
    stage: int
    epoch: int
    step: int
    base: str | None = None

    @classmethod
    def load(cls, progress: Progress | None) -> Self | None:
        """Return the last checkpoint that was saved; None where there is none, or none are kept."""
        found = None if progress is None else progress.load_progress()
        if found is None:
            return None
        tensors, state = found
        return cls(tensors, state["stage"], state["epoch"], state["step"], state.get("base"))

    def save(self, progress: Progress) -> None:
        """Replace the checkpoint that was saved before."""
        state = {"stage": self.stage, "epoch": self.epoch, "step": self.step, "base": self.base}
        progress.save_progress(self.tensors, state)

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Load a stage's own module and the momenta; return the epoch and step to go on with."""
        own = part(self.tensors, "module")
        if own:
            module.load_state_dict(own)
        parameters = _moved(optimizer)
        for i, buffer in part(self.tensors, "momentum").items():
            parameter = parameters[int(i)]
            # Laid out as the parameter is (channels_last): the fused step goes through both in memory order.
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffer)
        return self.epoch, self.step


def tensors_of(network: Network, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the network, the stage's module where that is another, and the optimizer's momenta."""
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    if module is not network:
        tensors |= {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    for i, parameter in enumerate(_moved(optimizer)):
        buffer = optimizer.state[parameter].get("momentum_buffer")
        if buffer is not None:
            tensors[f"momentum.{i}"] = buffer
    return tensors


def _moved(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer moves, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
