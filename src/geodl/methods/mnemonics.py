"""Mnemonics: LUCIR whose exemplars are optimized, pixel by pixel, by a bilevel problem (Liu et al. 2020)."""

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
from geodl.methods.bilevel import Pixels, draw, halves, unrolled
from geodl.methods.lucir import Lucir, LucirOptions
from geodl.methods.method import Losses, Schedule, Stage, register
from geodl.model.memory import Memory
from geodl.model.phase import Phase


class MnemonicsOptions(LucirOptions):
    """Options of Mnemonics: those of LUCIR and of the exemplars' optimization."""

    outer_steps: int = Field(20, ge=0, le=MANY)
    """Steps that the exemplars' pixels take in each phase."""
    outer_rate: float = Field(0.25, gt=0)
    """Grey levels that an exemplar's pixels move in a step (root mean square); 1 overshoots."""
    inner_steps: int = Field(5, ge=1, le=MANY)
    """SGD steps of the temporary network on the exemplars."""
    inner_lr: float = Field(0.01, gt=0)
    """Learning rate of the temporary network."""
    inner_batch: int = Field(16, ge=1, le=MANY)
    """Exemplars in each step of the temporary network."""
    inner_augment: bool = False
    """Crop and flip the exemplars in these steps, as phases do that train on them."""


@register
class Mnemonics(Lucir):
    """LUCIR; then its herded exemplars move to where training on them helps most (Mnemonics Sec. 4.3)."""

    name = "mnemonics"
    title = "Mnemonics"
    summary = "lucir with exemplars whose pixels are optimized: training on them shall serve the phase's data"
    paper = "Liu, Su, Liu, Schiele, Sun: Mnemonics Training, CVPR 2020"
    Options = MnemonicsOptions
    options: MnemonicsOptions
    effort = 1.5

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Return LUCIR's stages, then that of the exemplars, from the herded ones on."""
        yield from super().stages(phase)
        share = self.share(phase.classes)
        if share and self.options.outer_steps:
            yield self._exemplar_stage(phase, phase.exemplars(share))

    def _exemplar_stage(self, phase: Phase, herded: Memory) -> Stage:
        problem = Problem(phase, self.options, herded)
        options = self.options
        return Stage(
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
    """The bilevel problem of a phase: pixels of exemplars move to where training on them serves the phase's data."""

    def __init__(self, phase: Phase, options: MnemonicsOptions, herded: Memory) -> None:
        assert herded.images is not None
        self.phase, self.options, self.herded = phase, options, herded
        # At the size from which the test-time transform only cuts, so that the network sees later what it sees here.
        seen, workers = phase.transform, phase.config.workers
        self.start = resized(herded.images, seen.shorter_side, whole=seen.whole, workers=workers)
        self.pixels = Pixels(self.start)
        self.network = deepcopy(phase.network).eval().requires_grad_()
        self.network.head.thaw()
        self.present = torch.isin(self.start.labels, phase.images.labels)
        self.halves = halves(self.start.labels, ~self.present)

    def loss(self, module: nn.Module, batch: Batch) -> Losses:
        """Yield the loss of each task; that of the new classes carries the slope of all."""
        pixels = self.pixels
        with torch.no_grad():
            pixels.values.clamp_(0, 255)  # a step may have taken them out of range
        seed, step = self.phase.config.seed, int(pixels.steps)
        generator = Generator().manual_seed(derive(seed, "exemplars", self.phase.index, step))
        tasks = self._tasks(batch, step, generator)
        moves = {name: self._move(*task, generator) for name, task in tasks.items()}
        rows, values, directions = zip(*moves.values(), strict=True)
        slope = module(torch.cat(rows), torch.cat(directions))
        # The losses' values, with the normalized gradients as their slope.
        yield "new", values[0] + (slope - slope.detach())
        yield from zip(list(moves)[1:], values[1:], strict=True)

    def finish(self) -> None:
        """Make the memory for the next phase."""
        images = ArrayImages(self.pixels.stored(), self.start.labels)
        self.phase.kept = replace(self.herded, images=images)

    def _tasks(
        self, batch: Batch, step: int, generator: Generator
    ) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return by name which exemplars move, and for which images and labels."""
        # New classes' exemplars move for the phase's data; half of the old ones, in turns, for the other half
        # as it was: a half that has moved is no measure of what was learned.
        tasks = {"new": (self.present.nonzero().squeeze(1), batch.images, batch.labels)}
        phase, moved, kept = self.phase, self.halves[step % 2], self.halves[1 - step % 2]
        if len(moved) and len(kept):
            kept = draw(kept, max(phase.config.batch_size // 2, 1), generator)
            x = as_inputs(self.start.pixels[kept].float(), phase.transform)
            tasks["old"] = (moved, x.to(phase.device), self.start.labels[kept].to(phase.device))
        return tasks

    def _move(
        self, rows: Tensor, x: Tensor, y: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw E exemplars among the rows; return them (E,), the loss of (x, y) after training on them, its direction."""
        phase, options, network = self.phase, self.options, self.network
        steps = options.inner_steps
        drawn = draw(rows, steps * options.inner_batch, generator)
        size = min(options.inner_batch, len(drawn))
        # Few exemplars serve again and again.
        places = torch.arange(steps * size).view(steps, size) % len(drawn)
        some = self.pixels.values.detach()[drawn].requires_grad_()
        labels, augmented = self.pixels.labels[drawn], generator if options.inner_augment else None
        with torch.autocast(phase.device.type, enabled=False):
            inputs = as_inputs(some, phase.transform, augmented)
            weights = unrolled(network, inputs, labels, places, options.inner_lr)
            logits = functional_call(network, weights, (x,)).logits
            value = global_mean(F.cross_entropy(logits, y, reduction="none"), phase.ranks.group)
            (gradient,) = torch.autograd.grad(value, some)
        # Every rank moves the exemplars by the gradient of the whole batch.
        gradient = phase.ranks.add_up(gradient, phase.device)
        # An image moves by one grey level (root mean square) times the rate; one without gradient stays.
        length = gradient.square().mean((1, 2, 3), keepdim=True).sqrt()
        return drawn, value.detach(), gradient / length.clamp(min=1e-30)
