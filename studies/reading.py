"""How to read a frozen network in closed form: width of the expansion, ridge, grids, mirrored training images.

Run with `python -m studies.reading CIFAR_DIR MODEL`, where MODEL is a network that `studies.base` kept (OUT/trivial). The same split is
used, with random features of its own: trained on 40 of the 50 base classes, the other 10 arrive later, 100 training images of each class
are set aside to judge by. Test images are mirrored too, always.
"""

import argparse
from pathlib import Path

import torch

from geodl import Learner
from geodl.closed_form import Expansion, Standardization, Statistics, share_out
from geodl.data.batches import evaluation
from geodl.data.images import concat
from geodl.nets import folded
from studies.base import SEEN, parts

CHUNK = 1000
STAGES = ("stage1", "stage2", "stage3")
COARSE, FINE = ([f"{name}@{cells}" for name in STAGES] for cells in (2, 4))
MANY = {"expansion": 8192, "mirrored": True}
READINGS = {
    "as cifar100-analytic has it: M = 4096, gamma = 0.01, grids of 2 x 2": {},
    "M = 2048": {"expansion": 2048},
    "M = 8192": {"expansion": 8192},
    "gamma = 0.001": {"gamma": 0.001},
    "gamma = 0.1": {"gamma": 0.1},
    "stages 2 and 3": {"levels": COARSE[1:]},
    "stage 3": {"levels": COARSE[2:]},
    "no grids: averages": {"levels": [f"{name}@1" for name in STAGES]},
    "grids of 4 x 4": {"levels": FINE},
    "mirrored training images": {"mirrored": True},
    "M = 8192, mirrored": MANY,
    "M = 8192, mirrored, 4 x 4": MANY | {"levels": FINE},
    "M = 8192, mirrored, 2 x 2 and 4 x 4": MANY | {"levels": COARSE + FINE},
    "as cifar100-beyond has it: the same, gamma = 0.03": MANY | {"levels": COARSE + FINE, "gamma": 0.03},
}
"""What each changes of the first."""


def features(learner, images, mirror):
    """Return the features of all levels on all grids."""
    network = folded(learner.network)
    levels = {name for reading in READINGS.values() for name in reading.get("levels", COARSE)}
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=learner.trainer.precision == "bf16"):
        batches = evaluation(images, learner.transform, mirror=mirror)
        found = [network.with_levels(batch.images, sorted(levels))[1] for batch in batches]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def judge(train, aside, expansion=4096, gamma=0.01, levels=COARSE, mirrored=False):
    """Fit to the training images and return the accuracy in % on those set aside: all, seen, later. Each comes as views, labels."""
    (views, labels), (test_views, test_labels) = train, aside
    views = views if mirrored else views[:1]
    standardization = Standardization.of({name: views[0][name][labels < SEEN] for name in levels})
    expand = Expansion(share_out(expansion, {name: views[0][name].shape[1] for name in sorted(levels)}), seed=1)

    def mean(views, rows):
        each = (expand(standardization({name: view[name][rows] for name in levels})) for view in views)
        return sum(each) / len(views)

    statistics = Statistics.empty(expansion, SEEN + 10)
    for rows in torch.arange(len(labels)).split(CHUNK):
        statistics.add(mean(views, rows), labels[rows], SEEN + 10)
    head = statistics.solve(gamma).head.float()
    scores = torch.cat([mean(test_views, rows) @ head for rows in torch.arange(len(test_labels)).split(CHUNK)])
    right, later = scores.argmax(1) == test_labels, test_labels >= SEEN
    return [100 * part.double().mean().item() for part in (right, right[~later], right[later])]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    learner = Learner.load(options.model)
    first, later, aside = parts(options.data_dir)
    train, held_out = (
        ([features(learner, images, mirror) for mirror in (False, True)], images.labels)
        for images in (concat([first, later]), aside)
    )
    print("| reading | all 50 | the 40 trained on | the 10 later |\n|---|---:|---:|---:|")
    for name, reading in READINGS.items():
        found = judge(train, held_out, **reading)
        print(f"| {name} | {' | '.join(f'{each:.1f}' for each in found)} |", flush=True)


if __name__ == "__main__":
    main()
