"""Why optimized exemplars do not help here: the effect of changing their pixels, by variant of the optimization.

Run with `python -m studies.mnemonics CIFAR_DIR OUT [VARIANT ...]`: 20 classes of CIFAR-100 and then twice 10, with the preset cifar100-cpu;
interrupted runs resume, and all share their phase 0. For the second table a copy of the base network is trained further on the exemplars of
phase 0 alone, as drawn or cropped and flipped as in training; it shows the loss of the base classes' other images, averaged over some draws
of the exemplars.
"""

import argparse
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

import geodl
from geodl.core.keys import derive
from geodl.data.batches import as_inputs
from geodl.data.images import ArrayImages
from geodl.data.scenario import class_order
from geodl.learning.saving import load_model
from geodl.methods.lucir import Lucir
from geodl.methods.method import register
from geodl.store import Directory

SIZES, NOISE, OTHERS, BATCH, LR = (20, 10, 10), 4.0, 1000, 16, 0.01
STEPS, DRAWS = (0, 5, 20), 6


@register
class Noise(Lucir):
    """LUCIR with noise on its exemplars, about as strong as the changes by Mnemonics."""

    name, title, summary = "noise", "LUCIR, noisy exemplars", "a control for Mnemonics"

    def exemplars(self, phase, quota):
        """Return the herded exemplars; those of new classes with noise."""
        kept = super().exemplars(phase, quota)
        generator = torch.Generator().manual_seed(derive(self.config.seed, "noise", phase.index))
        pixels = kept.images.pixels.float()
        new = (kept.images.labels >= phase.old)[:, None, None, None]
        moved = pixels + NOISE * new * torch.randn(pixels.shape, generator=generator)
        return replace(
            kept,
            images=ArrayImages(moved.clamp(0, 255).round().to(torch.uint8), kept.images.labels),
        )


LONG = {"method": "mnemonics", "outer_rate": 1.0}
VARIANTS = {
    "LUCIR": {"method": "lucir"},
    "LUCIR, noise of 4 grey levels on its exemplars": {"method": "noise"},
    "Mnemonics, 1 grey level a step": LONG,
    "the same, looking ahead on cropped and flipped exemplars": LONG | {"inner_augment": True},
    "the same, 15 inner steps instead of 5": LONG | {"inner_steps": 15},
    "Mnemonics, 0.25 grey levels a step": LONG | {"outer_rate": 0.25},
}


def exemplars_of(directory):
    """Return the learner after phase 0 and its exemplars in memory."""
    model = load_model(Directory(directory).phase(0))
    return geodl.Learner(model.config, model=model), model.memory.images


def inputs(learner, images, generator=None):
    """Return images in memory as the network sees them; with a generator cropped and flipped, as in training."""
    return as_inputs(images.pixels.float(), learner.transform, generator)


def after_training(learner, exemplars, others, augment, seed):
    """Return the loss of other images of the base classes after training on the exemplars alone, for each number in STEPS."""
    network, found = deepcopy(learner.network).eval().requires_grad_(), []
    network.head.thaw()
    optimizer = torch.optim.SGD(network.parameters(), LR)
    generator = torch.Generator().manual_seed(seed)
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            with torch.inference_mode():
                found.append(
                    F.cross_entropy(network(inputs(learner, others)).logits, others.labels)
                )
        some = exemplars.select(torch.randperm(len(exemplars), generator=generator)[:BATCH])
        optimizer.zero_grad()
        x = inputs(learner, some, generator if augment else None)
        F.cross_entropy(network(x).logits, some.labels).backward()
        optimizer.step()
    return torch.stack(found)


def main():
    """Run the variants and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", default=list(VARIANTS))
    options = parser.parse_args()
    # Changes of exemplars are relative to LUCIR's, which are herded.
    variants = dict.fromkeys(["LUCIR", *options.variants])
    data = geodl.load("cifar100", options.data_dir)
    order = iter(class_order("lucir-1993", data.classes))
    groups = [[data.classes[next(order)] for _ in range(size)] for size in SIZES]
    print("| variant | average 1..T: CNN | k-NME | AME |\n|---|---:|---:|---:|", flush=True)
    for name in variants:
        out = options.out / name
        how = {"data": "cifar100", "data_dir": options.data_dir, "groups": groups}
        found = geodl.run(
            preset="cifar100-cpu", out=out, threads=1, **how, **VARIANTS[name]
        ).results
        averages = [f"{found[each].average:.1f}" for each in ("cnn", "nme", "ame")]
        print(f"| {name} | {' | '.join(averages)} |", flush=True)
    train = geodl.ClassIncremental(data, groups=groups).train(0)
    others = train.select(
        torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:OTHERS]
    )
    steps = " | ".join(f"after {step}" for step in STEPS)
    print(
        f"\n| exemplars of phase 0 | moved by | right | their loss | training | loss of others: {steps} |"
    )
    print("|---|---:|---:|---:|---|" + "---:|" * len(STEPS))
    _, herded = exemplars_of(options.out / "LUCIR")
    for name in variants:
        learner, exemplars = exemplars_of(options.out / name)
        move = (exemplars.pixels.float() - herded.pixels.float()).square().mean().sqrt()
        with torch.inference_mode():
            logits = learner.network.eval()(inputs(learner, exemplars)).logits
        right = 100 * (logits.argmax(1) == exemplars.labels).float().mean()
        own = F.cross_entropy(logits, exemplars.labels)
        for augment in (False, True):
            after = [
                after_training(learner, exemplars, others, augment, seed) for seed in range(DRAWS)
            ]
            losses = " | ".join(f"{each:.3f}" for each in torch.stack(after).mean(0))
            shown = f"{move:.1f} | {right:.1f} % | {own:.3f} | {'cropped, flipped' if augment else 'as drawn'}"
            print(f"| {name} | {shown} | {losses} |", flush=True)


if __name__ == "__main__":
    main()
