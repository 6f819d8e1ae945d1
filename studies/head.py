"""The effect of a head in bf16: each phase of a run under CNN with logits of 8 and of 24 bits.

Run with `python -m studies.head CIFAR_DIR RUN [RUN ...]`, on complete runs of CIFAR-100 with a cosine head. Both use the same
features. Cosines of 8 bits tie, and a tie is decided for the class that was learned first.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F

from geodl import Learner, load
from geodl.bench.experiment import scenario_of
from geodl.learning.saving import load_model
from geodl.model.metrics import Confusion, Trajectory, to_metrics
from geodl.store import Directory


def logits(head, pooled, dtype):
    """Return the logits (N, C) of pooled features (N, d), as a linear layer in a given precision computes them."""
    rows = (F.normalize(each, dim=1).to(dtype) for each in (pooled, head.rows()))
    return head.scale * F.linear(*rows).float()


@torch.no_grad()
def main():
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    options = parser.parse_args()
    data = load("cifar100", options.data_dir)
    print(
        "| run | average 1..T: bf16 | float32 | forgetting: bf16 | float32 | ties | other predictions | of an older class |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for run in options.runs:
        store, metrics, counts = Directory(run), [], torch.zeros(4)
        for t in range(store.completed()):
            model = load_model(store.phase(t))
            learner = Learner(model.config, model=model)
            seen = learner.features(learner.rows_of(scenario_of(learner.config, data).test(t)))
            low, high = (
                logits(learner.network.head, seen.pooled, dtype)
                for dtype in (torch.bfloat16, torch.float32)
            )
            predictions = {"bf16": low.argmax(1), "float32": high.argmax(1)}
            confusions = {
                name: Confusion.of(seen.labels, each, learner.classes)
                for name, each in predictions.items()
            }
            metrics.append(to_metrics(t, confusions))
            ties = (low == low.amax(1, keepdim=True)).sum(1) > 1
            other = predictions["bf16"] != predictions["float32"]
            older = predictions["bf16"] < predictions["float32"]
            counts += torch.tensor([len(ties), *(int(each.sum()) for each in (ties, other, older))])
        read = {name: each.to_dict() for name, each in Trajectory.of(metrics).items()}
        figures = [
            f"{each[name]:.2f}" for name in ("average", "forgetting") for each in read.values()
        ]
        shares = [f"{100 * part:.2f} %" for part in (counts[1:3] / counts[0]).tolist()]
        print(
            f"| {run.name} | {' | '.join([*figures, *shares])} | {100 * counts[3] / max(counts[2], 1):.0f} % |"
        )


if __name__ == "__main__":
    main()
