"""The parts of a bilevel problem over exemplars: their pixels as parameters, and differentiable training on them."""

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from geodl.data.images import ArrayImages
from geodl.nets import Network


class Pixels(nn.Module):
    """Exemplars as parameters: values (N, 3, H, W) in gray levels 0 to 255; ``steps`` counts their steps."""

    steps: Tensor
    labels: Tensor

    def __init__(self, start: ArrayImages) -> None:
        super().__init__()
        self.values = nn.Parameter(start.pixels.float())
        self.register_buffer("labels", start.labels, persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor, directions: Tensor) -> Tensor:
        """Return a scalar with gradient `directions`: (E, 3, H, W) at rows: (E,)."""
        self.steps += 1
        return (self.values[rows] * directions).sum()

    def stored(self) -> Tensor:
        """Return the pixels to store: uint8 (N, 3, H, W), clipped and rounded, never wrapped."""
        return self.values.detach().clamp(0, 255).round().to(torch.uint8).cpu()


def unrolled(
    network: Network, x: Tensor, y: Tensor, places: Tensor, lr: float
) -> dict[str, Tensor]:
    """Return the weights after SGD steps on exemplars x: (E, 3, H, W), y: (E,), differentiable by x (the inner problem).

    places: (steps, batch), the exemplars of each step.
    """
    weights: dict[str, Tensor] = dict(network.named_parameters())
    for batch in places:
        loss = F.cross_entropy(functional_call(network, weights, (x[batch],)).logits, y[batch])
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {
            name: w - lr * g for (name, w), g in zip(weights.items(), gradients, strict=True)
        }
    return weights


def halves(labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Divide the rows under the mask into two halves, alternating within each class; labels: (N,), sorted."""
    rank = torch.arange(len(labels)) - torch.searchsorted(labels, labels)
    even, odd = ((mask & (rank % 2 == turn)).nonzero().squeeze(1) for turn in (0, 1))
    return even, odd


def draw(rows: Tensor, count: int, generator: Generator) -> Tensor:
    """Draw at most `count` of the rows without replacement."""
    return rows[torch.randperm(len(rows), generator=generator)[:count]]
