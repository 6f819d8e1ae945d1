"""Where an unfinished phase stands: weights, the optimizer's state and three counters, since everything random comes from a key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from geodl.core.tensors import part
from geodl.nets import Network


class Checkpoints(Protocol):
    """Where checkpoints of the phase in work go."""

    def save_progress(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""

    def load_progress(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A place in training: stage, epoch and step, all counted from 0, and the tensors there.

    base: the key under which the base phase in work will be shared; None where it will not.
    optimizer: the optimizer's state but for its tensors, as JSON holds it.
    """

    tensors: Mapping[str, Tensor]
    stage: int
    epoch: int
    step: int
    base: str | None = None
    optimizer: Mapping[str, Any] | None = None

    @classmethod
    def load(cls, progress: Checkpoints | None) -> Self | None:
        """Return the last checkpoint that was saved; None where there is none, or none are kept."""
        found = None if progress is None else progress.load_progress()
        if found is None:
            return None
        tensors, state = found
        place = state["stage"], state["epoch"], state["step"]
        return cls(tensors, *place, state.get("base"), state.get("optimizer"))

    def save(self, progress: Checkpoints) -> None:
        """Replace the checkpoint that was saved before."""
        state = {"stage": self.stage, "epoch": self.epoch, "step": self.step, "base": self.base}
        progress.save_progress(self.tensors, state | {"optimizer": self.optimizer})

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Load a stage's own module and the optimizer's state; return the epoch and step to go on with."""
        own = part(self.tensors, "module")
        if own:
            module.load_state_dict(own)
        tensors = part(self.tensors, "optimizer")
        # Version 0.2 kept the momenta of SGD alone.
        tensors |= {f"{i}.momentum_buffer": b for i, b in part(self.tensors, "momentum").items()}
        kept = self.optimizer or {
            "state": {},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
        state = {int(i): dict(values) for i, values in kept["state"].items()}
        moved = [each for group in optimizer.param_groups for each in group["params"]]
        for key, tensor in tensors.items():
            i, _, name = key.partition(".")
            # Laid out as the parameter is (channels_last): the fused step goes through both in memory order.
            like = moved[int(i)] if tensor.shape == moved[int(i)].shape else tensor
            laid_out = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
            state.setdefault(int(i), {})[name] = laid_out
        optimizer.load_state_dict({"state": state, "param_groups": kept["param_groups"]})
        return self.epoch, self.step


def tensors_of(
    network: Network, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of network, stage's module where that is another, and optimizer; and the rest of its state."""
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    if module is not network:
        tensors |= {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    found = optimizer.state_dict()
    rest: dict[int, dict[str, Any]] = {}
    for i, values in found["state"].items():
        own = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in own.items()}
        rest[i] = {name: value for name, value in values.items() if name not in own}
    return tensors, {"state": rest, "param_groups": found["param_groups"]}
