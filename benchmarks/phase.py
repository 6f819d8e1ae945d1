"""The time of the parts of a phase: before training, an epoch, memory, evaluation.

Run with `python -m benchmarks.phase [CIFAR_DIR] [--threads 1] [--precision auto] [--ame]`; without a directory the images are noise.
Goal: memory and evaluation together take at most 0.45 of an epoch, without AME.
"""

import argparse
import time
from pathlib import Path

import torch

from geodl import ClassIncremental, Learner, load
from geodl.core.events import EpochEnded, StageStarted
from geodl.data import Dataset
from geodl.data.images import ArrayImages, concat

GOAL = 0.45


def noise():
    """Return a dataset of noise with the shape of CIFAR-100."""

    def images(count):
        labels = torch.arange(100).repeat_interleave(count)
        pixels = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8)
        return ArrayImages(pixels, labels)

    classes = tuple(f"class {i}" for i in range(100))
    return Dataset("noise", images(500), images(100), classes, fingerprint="noise")


def main():
    """Print the parts of phase 0 and of the phase after it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto")
    parser.add_argument(
        "--ame", action="store_true", help="evaluate the oracle too, which reads all old images"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times: dict[type, float] = {}
    learner = Learner(
        preset="cifar100-cpu",
        epochs=1,
        base_epochs=1,
        threads=options.threads,
        precision=options.precision,
        listener=lambda event: times.__setitem__(type(event), time.perf_counter()),
    )
    data = load("cifar100", options.data_dir) if options.data_dir else noise()
    scenario = ClassIncremental(data, base=50, phases=5)
    print(f"ResNet-32, LUCIR, precision {learner.trainer.precision}, threads: {options.threads}")
    for phase in list(scenario)[:2]:
        seen = concat([scenario.train(t) for t in range(phase.index + 1)]) if options.ame else None
        began = time.perf_counter()
        learner.learn(phase.train)
        learned = time.perf_counter()
        learner.evaluate(phase.test, seen=seen)
        evaluated = time.perf_counter()
        epoch = times[EpochEnded] - times[StageStarted]
        before, memory = times[StageStarted] - began, learned - times[EpochEnded]
        evaluation = evaluated - learned
        share = (memory + evaluation) / epoch
        print(
            f"phase {phase.index}: before training {before:.1f} s; epoch {epoch:.1f} s; memory {memory:.1f} s, evaluation {evaluation:.1f} s: "
            f"{share:.2f} of an epoch{'' if options.ame else f' (goal: {GOAL})'}"
        )


if __name__ == "__main__":
    main()
