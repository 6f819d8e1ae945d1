"""CIFAR-100 by a pre-trained network on enlarged images: frozen, or adapted to the first group of classes and then frozen.

Run with `python -m studies.pretrained CIFAR_DIR OUT.json [--network efficientnet-lite0] [--size 128] [--ways frozen,adapted] [--images 500]`. The closed form
reads each network in three settings: 50 classes first, then 5 groups of 10 or 10 of 5; and 10 groups of 10. Features are float32, of images that are not
mirrored; each network reads every image once: all settings share the frozen one, and those of one first group share the adapted one. --images takes fewer
training images of each class. What is in OUT.json is not computed again.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from geodl import ClassIncremental, Learner, load
from geodl.closed_form.expansion import kept, selected
from geodl.closed_form.primal import Statistics
from geodl.closed_form.random_features import RandomFeatures
from geodl.core.keys import derive
from geodl.data.images import with_rows
from geodl.model.herding import first_of_each
from geodl.nets import expected_images

SETTINGS = {
    "50 + 5 x 10": (50, 10),
    "50 + 10 x 5": (50, 5),
    "10 x 10": (10, 10),
}
"""The classes of the first group and of each later one."""
NETWORKS: dict[str, list[tuple[int, ...]]] = {"frozen": [(50, 10)], "adapted": [(10,), (50,)]}
"""By way: the sizes of the first groups that share a network."""
WIDTH, GAMMA = 5120, 0.01


def learner_of(network, size, way, seed):
    """Return a learner in closed form that keeps sums alone."""
    options = expected_images(network) | {"image_size": size, "network": network}
    adapt = "yes" if way == "adapted" else "no"
    return Learner(
        method="analytic", pretrained=True, adapt=adapt, flip=False, seed=seed, **options
    )


def read(learner, images):
    """Return what a learner's network makes of images, as the closed form keeps it."""
    model = learner.known
    levels = model.network.level_names
    return kept(
        learner.trainer.features(model.network, images, model.transform, levels=levels).levels
    )


def accuracies(train, test, first, each, seed):
    """Return the accuracy in % on all classes seen after each group. train, test: (features, labels in the order of arrival)."""
    (z, labels), (other, wanted) = train, test
    ends = range(first, 101, each)
    base = {name: block[labels < first] for name, block in z.items()}
    expand = RandomFeatures.of(base, WIDTH, derive(seed, "expansion"))
    total, found, seen = Statistics.empty(WIDTH), [], 0
    for end in ends:
        new = (labels >= seen) & (labels < end)
        part = {name: block[new] for name, block in z.items()}
        total, seen = total + expand.sums([part], labels[new], end), end
        head = total.solve(GAMMA).head.float()
        known = (wanted < end).nonzero().squeeze(1)
        guessed = [expand(selected(other, rows)) @ head for rows in known.split(1000)]
        right = torch.cat(guessed).argmax(1) == wanted[known]
        found.append(100 * float(right.double().mean()))
    return found


def measure(data, network, size, way, firsts, seed):
    """Return the accuracies of the settings with the given sizes of the first group, and notes on the adaptation."""
    order = ClassIncremental(data, base=50, phases=5).classes
    train, test = (with_rows(images, order) for images in (data.train, data.test))
    learner = learner_of(network, size, way, seed)
    learner.learn(train.select(train.labels < min(firsts)))
    fitted, tested = ((read(learner, images), images.labels) for images in (train, test))
    found = {
        name: accuracies(fitted, tested, *groups, seed)
        for name, groups in SETTINGS.items()
        if groups[0] in firsts
    }
    return found | {"note": " ".join(learner.known.default.notes())}


def main():
    """Measure what is missing; print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--network", default="efficientnet-lite0")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--ways", default="frozen,adapted")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    data = load("cifar100", given.cifar)
    if given.images < 500:
        fewer = data.train.select(first_of_each(data.train.labels, given.images).sort().values)
        data = replace(data, train=fewer)
    rows = json.loads(given.out.read_text()) if given.out.exists() else {}
    run = partial(measure, data, given.network, given.size, seed=given.seed)
    for way in given.ways.split(","):
        for firsts in NETWORKS[way]:
            first = " ".join(map(str, firsts))
            key = f"{given.network} {given.size} {given.images} {way} {first} seed {given.seed}"
            if key not in rows:
                rows[key] = run(way=way, firsts=firsts)
                given.out.write_text(json.dumps(rows, indent=1) + "\n")
            for name, found in rows[key].items():
                if name != "note":
                    mean = sum(found) / len(found)
                    print(f"{way:8} {name:12} average {mean:.1f} last {found[-1]:.1f}", flush=True)


if __name__ == "__main__":
    main()
