"""Mnemonics: LUCIR with exemplars whose pixels are optimized by a bilevel problem (Liu et al. 2020)."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from geodl.config import MANY
from geodl.core.keys import derive
from geodl.core.ranks import global_mean
from geodl.data.batches import Batch, as_inputs, resized
from geodl.data.images import ArrayImages
from geodl.methods.lucir import Lucir, LucirOptions
from geodl.methods.method import Losses, Schedule, Stage, register
from geodl.model.memory import Memory
from geodl.model.phase import Phase
from geodl.nets import Network


class MnemonicsOptions(LucirOptions):
    """Options of Mnemonics: those of LUCIR, and for optimizing exemplars."""

    outer_steps: int = Field(20, ge=0, le=MANY)
    """Optimization steps of the exemplars' pixels in each phase."""
    outer_rate: float = Field(0.25, gt=0)
    """Change of an exemplar's pixels per step in gray levels (root mean square); 1 overshoots."""
    inner_steps: int = Field(5, ge=1, le=MANY)
    """SGD steps of the temporary network on the exemplars."""
    inner_lr: float = Field(0.01, gt=0)
    """Learning rate of the temporary network."""
    inner_batch: int = Field(16, ge=1, le=MANY)
    """Exemplars in each step of the temporary network."""
    inner_augment: bool = False
    """Crop and flip the exemplars in these steps, as in training."""


@register
class Mnemonics(Lucir):
    """LUCIR; then its herded exemplars are optimized so that training on them helps most (Mnemonics Sec. 4.3)."""

    name = "mnemonics"
    title = "Mnemonics"
    summary = "lucir with exemplars whose pixels are optimized so that training on them serves the phase's data"
    paper = "Liu, Su, Liu, Schiele, Sun: Mnemonics Training, CVPR 2020"
    Options = MnemonicsOptions
    options: MnemonicsOptions
    effort = 1.5

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Yield LUCIR's stages, then the optimization of the exemplars, starting from the herded ones."""
        yield from super().stages(phase)
        share = self.share(phase.classes)
        options = self.options
        if share and options.outer_steps:
            problem = Problem(phase, options, phase.exemplars(share))
            yield Stage(
                "exemplars",
                problem.pixels,
                phase.batches(phase.images, "exemplars"),
                problem.loss,
                Schedule(options.outer_steps, options.outer_rate, momentum=0.0),
                training=False,
                steps=1,
                finish=problem.finish,
            )


class Problem:
    """The bilevel problem of a phase: optimize exemplars so that training on them lowers the loss on the phase's data."""

    def __init__(self, phase: Phase, options: MnemonicsOptions, herded: Memory) -> None:
        assert herded.images is not None
        self.phase, self.options, self.herded = phase, options, herded
        # At the size that the test-time transform only crops, so that the network later sees the same pixels.
        transform, workers = phase.transform, phase.config.workers
        self.start = resized(
            herded.images, transform.shorter_side, whole=transform.whole, workers=workers
        )
        self.pixels = Pixels(self.start)
        self.network = deepcopy(phase.network).eval().requires_grad_()
        self.network.head.thaw()
        self.present = torch.isin(self.start.labels, phase.images.labels)
        self.halves = halves(self.start.labels, ~self.present)

    def loss(self, module: nn.Module, batch: Batch) -> Losses:
        """Yield the loss of each task; that of the new classes has the gradient of all."""
        pixels = self.pixels
        with torch.no_grad():
            pixels.values.clamp_(0, 255)  # the last step may have left the range
        seed, step = self.phase.config.seed, int(pixels.steps)
        generator = Generator().manual_seed(derive(seed, "exemplars", self.phase.index, step))
        tasks = self._tasks(batch, step, generator)
        moves = {name: self._move(*task, generator) for name, task in tasks.items()}
        rows, values, directions = zip(*moves.values(), strict=True)
        slope = module(torch.cat(rows), torch.cat(directions))
        # The values are those of the losses, the gradient is the normalized one.
        yield "new", values[0] + (slope - slope.detach())
        yield from zip(list(moves)[1:], values[1:], strict=True)

    def finish(self) -> None:
        """Store the optimized exemplars as the memory for the next phase."""
        images = ArrayImages(self.pixels.stored(), self.start.labels)
        self.phase.kept = replace(self.herded, images=images)

    def _tasks(
        self, batch: Batch, step: int, generator: Generator
    ) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return by name the rows of the exemplars to optimize, and the images and labels of the loss."""
        # Exemplars of new classes are optimized for the phase's data; alternating halves of the old ones for the other
        # half as it was before: an optimized half would not represent what was learned.
        tasks = {"new": (self.present.nonzero().squeeze(1), batch.images, batch.labels)}
        phase, moved, fixed = self.phase, self.halves[step % 2], self.halves[1 - step % 2]
        if len(moved) and len(fixed):
            fixed = draw(fixed, max(phase.config.batch_size // 2, 1), generator)
            x = as_inputs(self.start.pixels[fixed].float(), phase.transform)
            tasks["old"] = (moved, x.to(phase.device), self.start.labels[fixed].to(phase.device))
        return tasks

    def _move(
        self, rows: Tensor, x: Tensor, y: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw E exemplars among the rows; return these (E,), the loss of (x, y) after training on them, and its direction."""
        phase, options, network = self.phase, self.options, self.network
        steps = options.inner_steps
        drawn = draw(rows, steps * options.inner_batch, generator)
        size = min(options.inner_batch, len(drawn))
        # Few exemplars are repeated.
        places = torch.arange(steps * size).view(steps, size) % len(drawn)
        some = self.pixels.values.detach()[drawn].requires_grad_()
        labels, augmented = self.pixels.labels[drawn], generator if options.inner_augment else None
        with torch.autocast(phase.device.type, enabled=False):
            inputs = as_inputs(some, phase.transform, augmented)
            weights = unrolled(network, inputs, labels, places, options.inner_lr)
            logits = functional_call(network, weights, (x,)).logits
            value = global_mean(F.cross_entropy(logits, y, reduction="none"), phase.ranks.group)
            (gradient,) = torch.autograd.grad(value, some)
        # The gradient of the whole batch, the same on every rank.
        gradient = phase.ranks.add_up(gradient, phase.device)
        # Each image changes by one gray level (root mean square) times the rate, or not at all without a gradient.
        length = gradient.square().mean((1, 2, 3), keepdim=True).sqrt()
        return drawn, value.detach(), gradient / length.clamp(min=1e-30)


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
