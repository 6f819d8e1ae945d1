"""What helps a base network with classes that it has not seen: one change of its training at a time, short schedules.

Run with `python -m studies.base CIFAR_DIR OUT [VARIANT ...] [--epochs 12]`; each variant leaves OUT/VARIANT.json and its network, and
those that are there are not trained again, whatever their epochs: take another OUT for another number of epochs. Only the 50 classes of
phase 0 take part, and of them only the training images: the network is trained on 40 classes, the other 10 arrive later in closed form,
and 100 images of each class are set aside to judge by.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from geodl import Learner, load
from geodl.config import derive
from geodl.data import ClassIncremental
from geodl.methods.analytic import Analytic
from geodl.nets.heads import CosineHead

SEEN, HELD_OUT = 40, 100


class Mixup(Analytic):
    """Pairs of images are blended, and so are their losses (Zhang et al. 2018), alpha = 0.2."""

    def main_stage(self, phase):
        """Return the ordinary stage on blended images."""
        stage = super().main_stage(phase)

        def loss(student, batch):
            draw = generator(self, "mixup", batch)
            other = torch.randperm(len(batch.labels), generator=draw)
            share = float(np.random.default_rng(draw.initial_seed()).beta(0.2, 0.2))
            logits = student(share * batch.images + (1 - share) * batch.images[other]).logits
            parts = [self.cross_entropy(phase, logits, labels) for labels in (batch.labels, batch.labels[other])]
            return {"ce": share * parts[0] + (1 - share) * parts[1]}

        stage.loss = loss
        return stage


class Rotation(Analytic):
    """Half of the images are turned by 90, 180 or 270 degrees, and are then of classes of their own."""

    def main_stage(self, phase):
        """Return the ordinary stage with three more rows for each class, which are dropped at the end."""
        stage = super().main_stage(phase)
        stage.module = _Turned(phase.network, phase.new, self.config)

        def loss(student, batch):
            draw = generator(self, "rotation", batch)
            turns = torch.randint(1, 4, batch.labels.shape, generator=draw)
            turns *= torch.rand(batch.labels.shape, generator=draw) < 0.5
            images = batch.images.clone()
            for turn in (1, 2, 3):
                images[turns == turn] = images[turns == turn].rot90(turn, (2, 3))
            labels = torch.where(turns > 0, turns * phase.new + batch.labels, batch.labels)
            return {"ce": self.cross_entropy(phase, student(images), labels)}

        stage.loss = loss
        return stage


class _Turned(nn.Module):
    def __init__(self, network, classes, config):
        super().__init__()
        self.network = network
        self.more = CosineHead(network.width, 3 * classes, config.scale, seed=derive(config.seed, "turned"))

    def forward(self, images):
        output = self.network(images)
        return torch.cat([output.logits, self.more(output.pooled)], dim=1)


class Decorrelation(Analytic):
    """The features' correlations within classes are pressed towards zero (after Shi et al. 2022)."""

    def losses(self, phase, batch, student, teacher, distill):
        """Add the mean square of the correlations."""
        one_hot = F.one_hot(batch.labels, phase.new).to(student.pooled.dtype)
        means = one_hot.T @ student.pooled / one_hot.sum(0).clamp_min(1)[:, None]
        residuals = F.normalize(student.pooled - means[batch.labels], dim=0)
        more = (residuals.T @ residuals).square().mean()
        return super().losses(phase, batch, student, teacher, distill) | {"decorrelation": more}


class Averaged(Analytic):
    """The network that counts is a running average of the weights (EMA 0.998)."""

    def main_stage(self, phase):
        """Return the ordinary stage; at its end the average takes the network's place."""
        stage = super().main_stage(phase)
        ordinary = stage.loss
        average = torch.optim.swa_utils.AveragedModel(
            phase.network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998), use_buffers=True
        )

        def loss(student, batch):
            average.update_parameters(phase.network)
            return ordinary(student, batch)

        stage.loss = loss
        stage.finish = lambda: phase.network.load_state_dict(average.module.state_dict())
        return stage


class Linear(Analytic):
    """A linear head in place of the cosine head."""

    @property
    def head(self):
        """Name it."""
        return "linear"


TRIVIAL = {"augment": "trivial"}
VARIANTS = {
    "plain": (Analytic, {}),
    "trivial": (Analytic, TRIVIAL),
    "rotation": (Rotation, TRIVIAL),
    "mixup": (Mixup, TRIVIAL),
    "decorrelation": (Decorrelation, TRIVIAL),
    "nesterov": (Analytic, TRIVIAL | {"nesterov": True}),
    "no decay on norms": (Analytic, TRIVIAL | {"norm_decay": False}),
    "average of weights": (Averaged, TRIVIAL),
    "label smoothing": (Analytic, TRIVIAL | {"label_smoothing": 0.1}),
    "linear head": (Linear, TRIVIAL),
}
"""What each changes; all but the first train with TrivialAugment."""


def generator(method, name, batch):
    """Return a generator that depends on the seed and on the images of the batch."""
    return torch.Generator().manual_seed(derive(method.config.seed, name, *batch.indices[:4].tolist()))


def parts(data_dir):
    """Return the training images of the first 40 and of the next 10 classes of phase 0, and those set aside of all 50."""
    images = next(iter(ClassIncremental(load("cifar100", data_dir)))).train
    aside = torch.zeros(len(images), dtype=torch.bool)
    for label in range(SEEN + 10):
        aside[(images.labels == label).nonzero().squeeze(1)[-HELD_OUT:]] = True
    first = images.labels < SEEN
    return images.select(first & ~aside), images.select(~first & ~aside), images.select(aside)


def judge(name, data_dir, epochs, seed, out):
    """Train a variant, keep its network in a directory, and return what came of it."""
    kind, options = VARIANTS[name]
    first, later, aside = parts(data_dir)
    learner = Learner(preset="cifar100-analytic", epochs=epochs, seed=seed, threads=1, **options)
    learner.method = kind(learner.config)
    began = time.process_time()
    learner.learn(first)
    cost = time.process_time() - began
    learner.save(out)
    head = learner.evaluate(aside.select(aside.labels < SEEN))["cnn"].accuracy
    learner.learn(later)
    found = learner.evaluate(aside)["analytic"]
    return {
        "all 50": found.accuracy,
        "seen 40": found.rate(range(SEEN)),
        "later 10": found.rate(range(SEEN, SEEN + 10)),
        "own head": head,
        "seconds": cost,
        "epochs": epochs,
        "seed": seed,
    }


def main():
    """Train what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default: all")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.variants or VARIANTS:
        path = options.out / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(judge(name, options.data_dir, options.epochs, options.seed, options.out / name)))
    print("| variant | all 50 | the 40 trained on | the 10 later | own head, 40 | CPU s |\n|---|---|---|---|---|---|")
    for name in VARIANTS:
        if (options.out / f"{name}.json").exists():
            found = json.loads((options.out / f"{name}.json").read_text())
            columns = [f"{found[key]:.1f}" for key in ("all 50", "seen 40", "later 10", "own head")]
            print(f"| {name} | {' | '.join(columns)} | {found['seconds']:.0f} |")


if __name__ == "__main__":
    main()
