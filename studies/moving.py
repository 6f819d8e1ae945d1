"""Whether the backbone may move: the closed form over a network trained with GeoDL in each phase, against a frozen one.

Run with `python -m studies.moving CIFAR_DIR RUN OUT.json [--epochs 3]`; both sides start from phase 0 of RUN, a complete run of the preset
cifar100-analytic. Features z of all training images are stored. When the network moves, those of old images are left unchanged (stale),
transformed by an affine map from old to new z fitted on the available images (mapped), or, at the end, recomputed from all old images, which
a learner does not have (oracle). Results are written to OUT.json.
"""

import argparse
import json
from pathlib import Path

import torch

from geodl import ClassIncremental, Learner, load
from geodl.closed_form.expansion import Expansion, Standardization, share_out
from geodl.closed_form.primal import Statistics
from geodl.core.keys import derive
from geodl.data.images import concat
from geodl.learning.saving import load_model
from geodl.methods.lucir import Lucir
from geodl.model.metrics import Confusion, Trajectory
from geodl.store import Directory
from studies.drift import moved

WIDTH, GAMMA, CHUNK = 4096, 0.01, 2000
LUCIR = {"method": "lucir", "distill": "geodesic", "lr": 0.05, "exemplars": 20}


class Moving(Lucir):
    """LUCIR + GeoDL from phase 1 on, over a trained base network."""

    def __init__(self, config, base):
        super().__init__(config)
        self.base = base

    def stages(self, phase):
        """Yield LUCIR's stages; phase 0 loads the base network."""
        if phase.index:
            yield from super().stages(phase)
        else:
            phase.network.load_state_dict(self.base.state_dict())


def start(base, data, **options):
    """Return a learner that knows the base classes, with the network of a model."""
    given = {"preset": "cifar100-analytic", "threads": 1, "seed": base.config.seed}
    learner = Learner(**given | LUCIR | options)
    learner.method = Moving(learner.config, base.network)
    learner.learn(data.train)
    return learner


def features(learner, images, mirror=False):
    """Return the features of images at all levels, (N, d_l) by name."""
    model = learner.model
    levels = model.network.level_names
    read = learner.trainer.features
    return read(model.network, images, model.transform, mirror=mirror, levels=levels).levels


def judge(learner, test, z, labels, names):
    """Return the confusion on test images and their mirrored copies by the closed form over all stored features z."""
    standardization = Standardization.of(z)
    blocks = share_out(WIDTH, {name: block.shape[1] for name, block in sorted(z.items())})
    expansion = Expansion(blocks, derive(learner.config.seed, "expansion"))
    statistics = Statistics.empty(WIDTH, len(names))
    for rows in torch.arange(len(labels)).split(CHUNK):
        part = {name: block[rows] for name, block in z.items()}
        statistics.add(expansion(standardization(part)), labels[rows], len(names))
    head = statistics.solve(GAMMA).head.double()
    views = [features(learner, test, mirror) for mirror in (False, True)]
    scores = sum(expansion(standardization(view)).double() @ head for view in views)
    return Confusion.of(test.labels, scores.argmax(1), names)


def joined(parts):
    """Concatenate the blocks of several groups of images."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def study(base, scenario, **options):
    """Run the phases on all sides; return the trajectories by side and the oracle's confusion."""
    first, *later = scenario
    moving, still = (start(base, first, **options) for _ in range(2))
    z = features(moving, first.train)
    kept = {name: [z] for name in ("frozen", "stale", "mapped")}
    labels = [first.train.labels]
    found = {name: [] for name in kept}
    for phase in (first, *later):
        if phase.index:
            hand = concat([phase.train, moving.memory.images])
            before = features(moving, hand)
            moving.learn(phase.train)
            after = features(moving, hand)
            kept["mapped"] = [moved(part, before, after) for part in kept["mapped"]]
            new = {name: block[: len(phase.train)] for name, block in after.items()}
            for side in ("stale", "mapped"):
                kept[side].append(new)
            kept["frozen"].append(features(still, phase.train))
            labels.append(phase.train.labels)
        names = scenario.classes[: scenario.seen(phase.index)]
        for side, parts in kept.items():
            learner = still if side == "frozen" else moving
            judged = judge(learner, phase.test, joined(parts), torch.cat(labels), names)
            found[side].append(judged)
            print(f"phase {phase.index}, {side}: {judged.accuracy:.2f}", flush=True)
    everything = features(moving, concat([each.train for each in scenario]))
    oracle = judge(moving, later[-1].test, everything, torch.cat(labels), scenario.classes)
    return {side: Trajectory(each) for side, each in found.items()}, oracle


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    scenario = ClassIncremental(load("cifar100", options.data_dir), base=50, phases=5)
    base = load_model(Directory(options.run).phase(0))
    rows, oracle = study(base, scenario, epochs=options.epochs)
    results = {side: row.to_dict() | {"later": row.matrix[-1][-1]} for side, row in rows.items()}
    options.out.write_text(
        json.dumps({"epochs": options.epochs, "results": results, "oracle": oracle.accuracy})
    )
    print(
        "| z of old images | average 0..T | average 1..T | final | forgetting |\n|---|---:|---:|---:|---:|"
    )
    for side, row in rows.items():
        figures = (row.average_incremental, row.average, row.accuracy[-1], row.forgetting)
        print(f"| {side} | {' | '.join(f'{each:.2f}' for each in figures)} |")
    print(f"| oracle | - | - | {oracle.accuracy:.2f} | - |")


if __name__ == "__main__":
    main()
