"""Which changes of the training of a base network help with classes that it has not seen.

Run with `python -m studies.base CIFAR_DIR OUT [VARIANT ...] --images 1000000`: every variant sees about that many images, including
rotated copies. Results are OUT/VARIANT.json and the network; complete variants are not trained again, interrupted ones resume. Use
another OUT for another length or seed. Only the training images of the 50 classes of phase 0 are used: the network is trained on 40
classes, the other 10 arrive later in closed form, and 100 images per class are held out for evaluation.

Variants combine: `rotations+cosine`. With --whole the network is trained on all training images of the 50 classes without evaluation;
OUT/VARIANT.safetensors is then a base for `geodl reproduce beyond --weights`.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from geodl import Learner, load
from geodl.bench.experiment import commit
from geodl.core.keys import derive
from geodl.core.tensors import tensor_file
from geodl.data import ClassIncremental
from geodl.learning.saving import load_model, model_directory
from geodl.losses import LogitDistillation
from geodl.methods.analytic import Analytic
from geodl.nets import Network, build_network, frozen_copy
from geodl.nets.heads import CosineHead
from geodl.nets.weights import read_weights

SEEN, HELD_OUT = 40, 100


class Mixup(Analytic):
    """Mixup (Zhang et al. 2018) with alpha = 0.2: pairs of images are blended, and so are their losses."""

    def main_stage(self, phase):
        """Return the ordinary stage on blended images."""
        stage = super().main_stage(phase)

        def loss(student, batch):
            draw = generator(self, "mixup", batch)
            other = torch.randperm(len(batch.labels), generator=draw)
            share = float(np.random.default_rng(draw.initial_seed()).beta(0.2, 0.2))
            logits = student(share * batch.images + (1 - share) * batch.images[other]).logits
            parts = [
                phase.cross_entropy(logits, labels)
                for labels in (batch.labels, batch.labels[other])
            ]
            yield "ce", share * parts[0] + (1 - share) * parts[1]

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
            yield "ce", phase.cross_entropy(student(images), labels)

        stage.loss = loss
        return stage


class Rotations(Analytic):
    """Every image is in the batch in all four rotations, each a class of its own: 4N labels (PASS++, CLOVER)."""

    def main_stage(self, phase):
        """Return the ordinary stage with three more rows for each class, which are dropped at the end."""
        stage = super().main_stage(phase)
        stage.module = _Turned(phase.network, phase.new, self.config)

        def loss(student, batch):
            images = torch.cat([batch.images.rot90(turn, (2, 3)) for turn in range(4)])
            images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.cat([turn * phase.new + batch.labels for turn in range(4)])
            yield "ce", phase.cross_entropy(student(images), labels)

        stage.loss = loss
        return stage


class _Turned(nn.Module):
    def __init__(self, network, classes, config):
        super().__init__()
        self.network = network
        self.more = CosineHead(
            network.width, 3 * classes, config.scale, seed=derive(config.seed, "turned")
        )

    def forward(self, images):
        output = self.network(images)
        return torch.cat([output.logits, self.more(output.pooled)], dim=1)


class Decorrelation(Analytic):
    """Decorrelation of features within classes (after Shi et al. 2022)."""

    def loss(self, phase, batch, student, teacher):
        """Add the mean square of the correlations."""
        one_hot = F.one_hot(batch.labels, phase.new).to(student.pooled.dtype)
        means = one_hot.T @ student.pooled / one_hot.sum(0).clamp_min(1)[:, None]
        residuals = F.normalize(student.pooled - means[batch.labels], dim=0)
        more = (residuals.T @ residuals).square().mean()
        yield from super().loss(phase, batch, student, teacher)
        yield "decorrelation", more


class Distilled(Analytic):
    """A tenth of the cross-entropy, and KL from the average logits of teachers of the same classes at temperature 4 (Hinton et al. 2015)."""

    teachers: Sequence[Network] = ()
    temperature = 4.0

    def loss(self, phase, batch, student, teacher):
        """Weigh the cross-entropy and add the divergence."""
        with torch.no_grad(), phase.autocast():
            taught = torch.stack(
                [each(batch.images).logits.float() for each in self.teachers]
            ).mean(0)
        divergence = self.temperature**2 * LogitDistillation(self.temperature)(
            student.logits, taught
        )
        yield "ce", 0.1 * phase.cross_entropy(student.logits, batch.labels)
        yield "distill", 0.9 * divergence


class Averaged(Analytic):
    """A running average of the weights (EMA 0.998), which restarts when training resumes."""

    def main_stage(self, phase):
        """Return the ordinary stage; at its end the average replaces the network."""
        stage = super().main_stage(phase)
        ordinary = stage.loss
        average = torch.optim.swa_utils.AveragedModel(
            phase.network,
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998),
            use_buffers=True,
        )

        def loss(student, batch):
            average.update_parameters(phase.network)
            return ordinary(student, batch)

        stage.loss = loss
        stage.finish = lambda: phase.network.load_state_dict(average.module.state_dict())
        return stage


class Linear(Analytic):
    """A linear head in place of the cosine head."""

    head = "linear"


TRIVIAL = {"augment": "trivial"}
VARIANTS = {
    "plain": (Analytic, {}),
    "trivial": (Analytic, TRIVIAL),
    "rotation": (Rotation, TRIVIAL),
    "rotations": (Rotations, TRIVIAL),
    "distilled": (Distilled, TRIVIAL),
    "cosine": (Analytic, TRIVIAL | {"schedule": "cosine", "lr": 0.5, "batch_size": 256}),
    "mixup": (Mixup, TRIVIAL),
    "decorrelation": (Decorrelation, TRIVIAL),
    "nesterov": (Analytic, TRIVIAL | {"nesterov": True}),
    "no decay on norms": (Analytic, TRIVIAL | {"norm_decay": False}),
    "average of weights": (Averaged, TRIVIAL),
    "label smoothing": (Analytic, TRIVIAL | {"label_smoothing": 0.1}),
    "linear head": (Linear, TRIVIAL),
}
"""Method and options of each variant; all but the first train with TrivialAugment."""


def variant(name):
    """Return the method and the options of a variant, or of several joined by +."""
    methods, options = zip(*(VARIANTS[part] for part in name.split("+")), strict=True)
    special = {method for method in methods if method is not Analytic}
    if len(special) > 1:
        raise ValueError(
            f"{name}: at most one of these may change the loss, the head or the batches"
        )
    merged = {key: value for part in options for key, value in part.items()}
    return next(iter(special), Analytic), merged


def generator(method, name, batch):
    """Return a generator that depends on the seed and on the images of the batch."""
    return torch.Generator().manual_seed(
        derive(method.config.seed, name, *batch.indices[:4].tolist())
    )


def parts(data_dir):
    """Return the training images of the first 40 and of the next 10 classes of phase 0, and the held-out images of all 50."""
    images = next(iter(ClassIncremental(load("cifar100", data_dir)))).train
    aside = torch.zeros(len(images), dtype=torch.bool)
    for label in range(SEEN + 10):
        aside[(images.labels == label).nonzero().squeeze(1)[-HELD_OUT:]] = True
    first = images.labels < SEEN
    return images.select(first & ~aside), images.select(~first & ~aside), images.select(aside)


def trained(name, images, out, epochs, seed, teachers=()):
    """Return a learner trained on the first classes; a complete one is loaded, an interrupted one resumes."""
    kind, options = variant(name)
    batch = options.pop("batch_size", 128) // copies(name)
    how = {"epochs": epochs, "seed": seed, "batch_size": batch, "checkpoint_steps": 200}
    learner = Learner(preset="cifar100-analytic", threads=1, **how, **options)
    learner.method = method = kind(learner.config)
    if isinstance(method, Distilled):
        method.teachers = [teacher(path, learner.config) for path in teachers]
    store = model_directory(out)
    if store.completed():
        learner.model = load_model(store.phase(0))
        return learner
    with store.lock():
        learner.learn(images, progress=store)
    learner.save(out)
    return learner


def teacher(path, config):
    """Return the network of a directory of this study, or of a file of weights of a ResNet-32 with a cosine head."""
    if path.suffix != ".safetensors":
        return frozen_copy(Learner.load(path).network)
    weights = read_weights(path)
    network = build_network(config.network, len(weights["head.weight"]), head="cosine")
    network.load(weights)
    return frozen_copy(network)


def copies(name):
    """Return how many copies of each image a variant uses."""
    return 4 if variant(name)[0] is Rotations else 1


def epochs_of(name, images, options):
    """Return the number of epochs of a variant."""
    if not options.images:
        return options.epochs
    return max(1, round(options.images / (len(images) * copies(name))))


def judge(name, options, out):
    """Train a variant, save its network to a directory, and return its accuracies."""
    first, later, aside = parts(options.data_dir)
    epochs = epochs_of(name, first, options)
    began = time.process_time()
    learner = trained(name, first, out, epochs, options.seed, options.teachers)
    cost = time.process_time() - began
    head = learner.evaluate(aside.select(aside.labels < SEEN))["cnn"].accuracy
    learner.learn(later)
    both, single = (learner.evaluate(aside, mirror=mirror)["analytic"] for mirror in (True, False))
    return {
        "all 50": both.accuracy,
        "seen 40": both.rate(range(SEEN)),
        "later 10": both.rate(range(SEEN, SEEN + 10)),
        "single view": single.accuracy,
        "own head": head,
        "seconds": cost,
        "epochs": epochs,
        "images": epochs * len(first) * copies(name),
        "seed": options.seed,
        "teachers": [path.name for path in options.teachers]
        if variant(name)[0] is Distilled
        else [],
        "commit": commit(),
    }


def main():
    """Train the variants and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)}, joined by + to combine; default: all",
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--images",
        type=int,
        help="images seen in training, to the nearest epoch; in place of --epochs",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--teachers",
        type=Path,
        nargs="+",
        default=[],
        help="for distilled: networks of this study, as directories or as files of weights",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="train on all images of the 50 classes, evaluate nothing",
    )
    options = parser.parse_args()
    if any(variant(name)[0] is Distilled for name in options.variants) and not options.teachers:
        parser.error("distilled needs --teachers")
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.variants or [
        name for name in VARIANTS if name != "distilled" or options.teachers
    ]
    if options.whole:
        images = ClassIncremental(load("cifar100", options.data_dir)).train(0)
        for name in names:
            epochs = epochs_of(name, images, options)
            learner = trained(
                name, images, options.out / name, epochs, options.seed, options.teachers
            )
            file = options.out / f"{name}.safetensors"
            file.write_bytes(tensor_file(learner.network.state_dict()))
        return
    for name in names:
        path = options.out / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(judge(name, options, options.out / name), indent=1))
    print(
        "| variant | all 50 | the 40 trained on | the 10 later | all 50, one view | own head, 40 | images | CPU s |"
    )
    print("|---" + "|---:" * 7 + "|")
    for path in sorted(options.out.glob("*.json")):
        found = json.loads(path.read_text())
        keys = ("all 50", "seen 40", "later 10", "single view", "own head")
        columns = " | ".join(f"{found[key]:.1f}" for key in keys)
        print(f"| {path.stem} | {columns} | {found['images']} | {found['seconds']:.0f} |")


if __name__ == "__main__":
    main()
