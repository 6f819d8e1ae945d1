"""One-cycle or step schedule: which is better for phase 0 and for phase 1, in 40 epochs each.

Run with `python -m studies.schedule CIFAR_DIR OUT [VARIANT ...]`. Classes and images are those of `studies.base`: 40 classes are learned first, then
10 by LUCIR + GeoDL, evaluated on held-out images. All variants of phase 1 start from the first network of phase 0. Complete variants are not
trained again.
"""

import argparse
import json
from pathlib import Path

from geodl import Learner
from geodl.learning.saving import load_model
from geodl.store import Directory
from studies.base import SEEN, parts

STEP = {"schedule": "step"}
FIRST = {
    "phase 0, one-cycle up to 0.2": {"base_lr": 0.2},
    "phase 0, step from 0.1": STEP | {"base_lr": 0.1},
}
LATER = {
    "phase 1, one-cycle up to 0.1": {"lr": 0.1},
    "phase 1, one-cycle up to 0.05": {"lr": 0.05},
    "phase 1, one-cycle up to 0.02": {"lr": 0.02},
    "phase 1, step from 0.1": STEP | {"lr": 0.1},
}
"""Options of the variants of phase 0 and phase 1."""


def learner_of(options):
    """Return a new learner."""
    return Learner(
        preset="cifar100-quarter", method="lucir", distill="geodesic", threads=1, seed=1, **options
    )


def first_phase(images, options, out):
    """Return a learner of the first 40 classes, trained or loaded."""
    learner = learner_of(options)
    if (out / "phases").exists():
        learner.model = load_model(Directory(out).phase(0), learner.config)
    else:
        learner.learn(images)
        learner.save(out)
    return learner


def main():
    """Train the variants and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "variants", nargs="*", metavar="VARIANT", default=[*FIRST, *LATER], help="default: all"
    )
    options = parser.parse_args()
    first, later, aside = parts(options.data_dir)
    old = aside.select(aside.labels < SEEN)
    print("| schedule | CNN |\n|---|---:|", flush=True)
    for name in [each for each in FIRST if each in options.variants]:
        learner = first_phase(first, FIRST[name], options.out / name)
        print(f"| {name} | {learner.evaluate(old)['cnn'].accuracy:.1f} |", flush=True)
    print("\n| schedule | CNN: all 50 | old 40 | new 10 | k-NME: all 50 | old 40 | new 10 |")
    print("|---" + "|---:" * 6 + "|", flush=True)
    for name in [each for each in LATER if each in options.variants]:
        path = options.out / f"{name}.json"
        if not path.exists():
            base = next(iter(FIRST))
            learner = first_phase(first, FIRST[base] | LATER[name], options.out / base)
            learner.learn(later)
            found = learner.evaluate(aside)
            rates = []
            for one in (found["cnn"], found["nme"]):
                rates += [one.accuracy, one.rate(range(SEEN)), one.rate(range(SEEN, SEEN + 10))]
            path.write_text(json.dumps(rates))
        shown = " | ".join(f"{rate:.1f}" for rate in json.loads(path.read_text()))
        print(f"| {name} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
