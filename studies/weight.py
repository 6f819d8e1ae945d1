"""The weight of GeoDL and its distance, on the short schedule at T = 5.

Run with `python -m studies.weight CIFAR_DIR OUT [--figures docs]`: LUCIR + GeoDL with the preset cifar100-cpu, one seed, test images,
beside LUCIR's own distillation. Interrupted runs resume, and all share their phase 0.
"""

import argparse
from pathlib import Path

import geodl
from geodl.bench.report.figures import Curve, lines
from geodl.bench.report.tables import PAPERS
from geodl.model.classifiers import titles

WEIGHTS = (6.0, 12.0, 24.0)
GEODESIC = {"distill": "geodesic"}
VARIANTS = {f"GeoDL, {weight:g}": GEODESIC | {"geodesic_weight": weight} for weight in WEIGHTS} | {
    "GeoDL, 6, squared distance": GEODESIC | {"geodesic_distance": "squared"},
    "cosine, 5": {"distill": "cosine"},
}


def main():
    """Run all, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--figures", type=Path, help="a directory for weight.svg and weight.pdf")
    options = parser.parse_args()
    print(
        "| distillation, weight | average 1..T: CNN | k-NME | AME | forgetting: CNN | k-NME | AME |"
    )
    print("|---" + "|---:" * 6 + "|", flush=True)
    averages = {}
    how = {"preset": "cifar100-cpu", "data_dir": options.data_dir, "method": "lucir", "threads": 1}
    for name, variant in VARIANTS.items():
        found = geodl.run(out=options.out / name, seed=1, **how, **variant).results
        averages[name] = [found[each].average for each in PAPERS]
        figures = averages[name] + [found[each].forgetting for each in PAPERS]
        print(f"| {name} | {' | '.join(f'{each:.1f}' for each in figures)} |", flush=True)
    if options.figures:
        curves, points = [], []
        for k, name in enumerate(PAPERS):
            by_weight = [averages[f"GeoDL, {weight:g}"][k] for weight in WEIGHTS]
            curves.append(Curve(titles()[name], WEIGHTS, by_weight, dashed=name == "ame"))
            squared = averages["GeoDL, 6, squared distance"][k]
            points.append(Curve(f"{titles()[name]}, squared distance", [6], [squared]))
        curves += points
        plot = lines("weight", curves, x="weight of GeoDL", y="average 1..T (%)", ticks=WEIGHTS)
        options.figures.mkdir(parents=True, exist_ok=True)
        plot.files(options.figures)


if __name__ == "__main__":
    main()
