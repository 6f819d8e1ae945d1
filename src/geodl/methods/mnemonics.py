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
from geodl.methods.method import Losses, Phase, Schedule, Stage, register
from geodl.model.memory import Memory
from geodl.nets import Network


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
        share = self.share(phase.old + phase.new)
        if share and self.options.outer_steps:
            yield self._exemplar_stage(phase, phase.exemplars(share))

    def _exemplar_stage(self, phase: Phase, herded: Memory) -> Stage:
        assert herded.images is not None
        # At the size from which the test-time transform only cuts, so that the network sees later what it sees here.
        seen, workers = phase.transform, phase.config.workers
        start = resized(herded.images, seen.shorter_side, whole=seen.whole, workers=workers)
        pixels = Pixels(start)
        network = deepcopy(phase.network).eval().requires_grad_()
        network.head.thaw()
        present = torch.isin(start.labels, phase.images.labels)
        old_halves = halves(start.labels, ~present)

        def loss(module: nn.Module, batch: Batch) -> Losses:
            with torch.no_grad():
                pixels.values.clamp_(0, 255)  # a step may have taken them out of range
            step = int(pixels.steps)
            generator = Generator().manual_seed(
                derive(phase.config.seed, "exemplars", phase.index, step)
            )
            # New classes' exemplars move for the phase's data; half of the old ones, in turns, for the other half
            # as it was: a half that has moved is no measure of what was learned.
            tasks = {"new": (present.nonzero().squeeze(1), batch.images, batch.labels)}
            moved, kept = old_halves[step % 2], old_halves[1 - step % 2]
            if len(moved) and len(kept):
                kept = draw(kept, max(phase.config.batch_size // 2, 1), generator)
                x = as_inputs(start.pixels[kept].float(), phase.transform)
                tasks["old"] = (moved, x.to(phase.device), start.labels[kept].to(phase.device))
            moves = {
                name: self._move(phase, network, pixels, *task, generator)
                for name, task in tasks.items()
            }
            rows, values, directions = zip(*moves.values(), strict=True)
            slope = module(torch.cat(rows), torch.cat(directions))
            # The losses' values, with the normalized gradients as their slope.
            yield "new", values[0] + (slope - slope.detach())
            yield from zip(list(moves)[1:], values[1:], strict=True)

        def finish() -> None:
            phase.optimized = replace(herded, images=ArrayImages(pixels.stored(), start.labels))

        schedule = Schedule(self.options.outer_steps, self.options.outer_rate, momentum=0.0)
        batches = phase.batches(phase.images, "exemplars")
        return Stage(
            "exemplars", pixels, batches, loss, schedule, training=False, steps=1, finish=finish
        )

    def _move(
        self,
        phase: Phase,
        network: Network,
        pixels: Pixels,
        rows: Tensor,
        x: Tensor,
        y: Tensor,
        generator: Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw E exemplars among the rows; return them (E,), the loss of (x, y) after training on them, its direction."""
        steps, lr = self.options.inner_steps, self.options.inner_lr
        drawn = draw(rows, steps * self.options.inner_batch, generator)
        size = min(self.options.inner_batch, len(drawn))
        # Few exemplars serve again and again.
        places = torch.arange(steps * size).view(steps, size) % len(drawn)
        some = pixels.values.detach()[drawn].requires_grad_()
        labels = pixels.labels[drawn]
        with torch.autocast(phase.device.type, enabled=False):
            inputs = as_inputs(
                some, phase.transform, generator if self.options.inner_augment else None
            )
            weights = unrolled(network, inputs, labels, places, lr)
            each = F.cross_entropy(
                functional_call(network, weights, (x,)).logits, y, reduction="none"
            )
            value = global_mean(each, phase.ranks.group)
            (gradient,) = torch.autograd.grad(value, some)
        # Every rank moves the exemplars by the gradient of the whole batch.
        gradient = phase.ranks.add_up(gradient, phase.device)
        # An image moves by one grey level (root mean square) times the rate; one without gradient stays.
        length = gradient.square().mean((1, 2, 3), keepdim=True).sqrt()
        return drawn, value.detach(), gradient / length.clamp(min=1e-30)
