"""May the backbone move? The closed form over a network that adapts with GeoDL in each phase, against one that stays as it is.

Run with `python -m studies.moving CIFAR_DIR RUN OUT.json [--epochs 3]`; RUN is a complete run of the preset cifar100-analytic, whose phase 0
both sides start from. Features z of all training images are kept. Where the network moves, those of old images are left as they were
(stale), carried along by an affine map from old to new z that is fitted on the images at hand (mapped), or, at the end, read anew from all
old images, which a learner does not have (oracle). What came out is written to OUT.json.
"""

import argparse
import json
from pathlib import Path

import torch

from geodl import ClassIncremental, Learner, load
from geodl.closed_form import Expansion, Standardization, Statistics, moved, share_out
from geodl.config import derive
from geodl.data.images import concat
from geodl.methods.lucir import Lucir
from geodl.metrics import Confusion, Trajectory
from geodl.store import RunDirectory

WIDTH, GAMMA, CHUNK = 4096, 0.01, 2000


class Moving(Lucir):
    """LUCIR + GeoDL from phase 1 on, over a base network that was trained before; all levels are read."""

    def stages(self, phase):
        """Yield LUCIR's stages; in phase 0 the network does not move."""
        yield from super().stages(phase) if phase.index else ()

    def levels(self, network):
        """Return all levels."""
        return network.level_names


def start(run, epochs, data):
    """Return a learner that knows the base classes by the network of the run's phase 0."""
    base = Learner.restored(RunDirectory(run).load_phase(0))
    options = {"method": "lucir", "distill": "geodesic", "epochs": epochs, "lr": 0.05, "exemplars": 20}
    weights = run / "phases" / "00" / "model.safetensors"  # exemplars are chosen by the trained network
    learner = Learner(preset="cifar100-analytic", threads=1, seed=base.config.seed, weights=weights, **options)
    learner.method = Moving(learner.config)
    learner.learn(data.train)
    learner.network.load_state_dict(base.network.state_dict())
    return learner


def judge(learner, test, z, labels, names):
    """Return the confusion on test images, mirrored copies averaged in, by the closed form over all the features z kept."""
    standardization = Standardization.of(z)
    blocks = share_out(WIDTH, {name: block.shape[1] for name, block in sorted(z.items())})
    expansion = Expansion(blocks, derive(learner.config.seed, "expansion"))
    statistics = Statistics.empty(WIDTH, len(names))
    for rows in torch.arange(len(labels)).split(CHUNK):
        part = {name: block[rows] for name, block in z.items()}
        statistics.add(expansion(standardization(part)), labels[rows], len(names))
    head = statistics.solve(GAMMA).head.double()
    views = [learner.features(test, mirror=mirror).levels for mirror in (False, True)]
    scores = sum(expansion(standardization(view)).double() @ head for view in views)
    return Confusion.of(test.labels, scores.argmax(1), names)


def joined(parts):
    """Put blocks of several groups of images together."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def main():
    """Go through the phases on both sides and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    scenario = ClassIncremental(load("cifar100", options.data_dir), base=50, phases=5)
    first, *later = scenario
    moving = start(options.run, options.epochs, first)
    still = start(options.run, options.epochs, first)
    base = moving.features(moving.rows_of(first.train)).levels
    kept = {name: [base] for name in ("frozen", "stale", "mapped")}
    labels = [first.train.labels]
    found = {name: [] for name in kept}
    for phase in (first, *later):
        if phase.index:
            hand = concat([phase.train, moving.memory.images])
            before = moving.features(hand).levels
            moving.learn(phase.train)
            after = moving.features(hand).levels
            kept["mapped"] = [moved(part, before, after) for part in kept["mapped"]]
            new = {name: block[: len(phase.train)] for name, block in after.items()}
            for side in ("stale", "mapped"):
                kept[side].append(new)
            kept["frozen"].append(still.features(phase.train).levels)
            labels.append(phase.train.labels)
        classes = max(max(group) for group in scenario.groups[: phase.index + 1]) + 1
        for side, parts in kept.items():
            learner = still if side == "frozen" else moving
            found[side].append(judge(learner, phase.test, joined(parts), torch.cat(labels), scenario.classes[:classes]))
            print(f"phase {phase.index}, {side}: {found[side][-1].accuracy:.2f}", flush=True)
    everything = moving.features(concat([each.train for each in scenario])).levels
    oracle = judge(moving, later[-1].test, everything, torch.cat(labels), scenario.classes)
    rows = {side: Trajectory(scenario.groups, each) for side, each in found.items()}
    results = {side: row.to_dict() | {"later": row.matrix[-1][-1]} for side, row in rows.items()}
    options.out.write_text(json.dumps({"epochs": options.epochs, "results": results, "oracle": oracle.accuracy}))
    print("| z of old images | average 0..T | average 1..T | final | forgetting |\n|---|---:|---:|---:|---:|")
    for side, row in rows.items():
        figures = (row.average_incremental, row.average, row.accuracy[-1], row.forgetting)
        print(f"| {side} | {' | '.join(f'{each:.2f}' for each in figures)} |")
    print(f"| oracle | - | - | {oracle.accuracy:.2f} | - |")


if __name__ == "__main__":
    main()
