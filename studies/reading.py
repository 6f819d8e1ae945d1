"""How to read a frozen network in closed form: width of the expansion, ridge, grids, mirrored training images.

Run with `python -m studies.reading CIFAR_DIR MODEL`, where MODEL is a network that `studies.base` kept (OUT/trivial). The same split is
used: trained on 40 of the 50 base classes, the other 10 arrive later, 100 training images of each class are set aside to judge by.
"""

import argparse
from pathlib import Path

import torch

from geodl import Learner
from geodl.closed_form import Expansion, Standardization, Statistics, share_out
from geodl.data.batches import evaluation
from geodl.nets import folded
from studies.base import SEEN, parts

CHUNK = 1000
DEFAULT = {"width": 4096, "gamma": 0.01, "grid": 2, "copies": False, "levels": ("stage1", "stage2", "stage3")}
READINGS = {
    "as the preset has it": {},
    "M = 2048": {"width": 2048},
    "M = 8192": {"width": 8192},
    "gamma = 0.001": {"gamma": 0.001},
    "gamma = 0.1": {"gamma": 0.1},
    "stages 2 and 3": {"levels": ("stage2", "stage3")},
    "stage 3": {"levels": ("stage3",)},
    "pooled": {"grid": 1},
    "grids of 4 x 4": {"grid": 4},
    "mirrored training images too": {"copies": True},
}


def features(learner, images, grid, mirror):
    """Return the features of all levels, each on a grid."""
    network = folded(learner.network)
    network.backbone.level_grids = dict.fromkeys(network.level_names, grid)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=learner.trainer.precision == "bf16"):
        batches = evaluation(images, learner.transform, mirror=mirror)
        found = [network.with_levels(batch.images, network.level_names)[1] for batch in batches]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def judge(views, labels, width, gamma, grid, copies, levels):
    """Fit to the training images and return the accuracy in % on those set aside: all, seen, later."""
    z, aside = ([{name: view[name] for name in levels} for view in views[grid][which]] for which in ("train", "aside"))
    seen = labels["train"] < SEEN
    standardization = Standardization.of({name: block[seen] for name, block in z[0].items()})
    expansion = Expansion(share_out(width, {name: z[0][name].shape[1] for name in sorted(levels)}), seed=1)
    statistics, classes = Statistics.empty(width, SEEN + 10), SEEN + 10
    for view in z if copies else z[:1]:
        for rows in torch.arange(len(seen)).split(CHUNK):
            part = {name: block[rows] for name, block in view.items()}
            statistics.add(expansion(standardization(part)), labels["train"][rows], classes)
    head = statistics.solve(gamma).head.double()
    scores = sum(expansion(standardization(view)).double() @ head for view in aside)
    right = scores.argmax(1) == labels["aside"]
    later = labels["aside"] >= SEEN
    return [100 * part.double().mean().item() for part in (right, right[~later], right[later])]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    learner = Learner.load(options.model)
    first, later, aside = parts(options.data_dir)
    images = {"train": (first, later), "aside": (aside,)}
    labels = {which: torch.cat([each.labels for each in some]) for which, some in images.items()}
    views = {
        grid: {
            which: [
                {name: torch.cat([part[name] for part in found]) for name in found[0]}
                for mirror in (False, True)
                for found in [[features(learner, each, grid, mirror) for each in some]]
            ]
            for which, some in images.items()
        }
        for grid in sorted({reading.get("grid", 2) for reading in READINGS.values()})
    }
    print("| reading | all 50 | the 40 trained on | the 10 later |\n|---|---|---|---|")
    for name, reading in READINGS.items():
        found = judge(views, labels, **DEFAULT | reading)
        print(f"| {name} | {' | '.join(f'{each:.1f}' for each in found)} |", flush=True)


if __name__ == "__main__":
    main()
