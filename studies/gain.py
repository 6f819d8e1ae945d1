"""When does GeoDL help? GeoDL and cosine distillation, each at its best setting, over the number of phases.

    python -m studies.gain CIFAR_DIR OUT choose               eight settings a side at T = 10, the best two again at T = 25
    python -m studies.gain CIFAR_DIR OUT compare --seeds 3    both sides at their settings, with LUCIR and with cross-entropy
    python -m studies.gain CIFAR_DIR OUT tables --figures docs

Preset cifar100-cpu. A setting is chosen by the average 1..T under k-NME on a tenth of the training images, held out of all phases, with
seed 1; test images choose nothing. T = 5 and cross-entropy take the choice of T = 10. The primary comparison is LUCIR, T = 10, k-NME,
average 1..T, paired by seed over three seeds; it runs first, and all others are secondary. Each run leaves OUT/NAME.json, with which it
is complete; an interrupted one resumes. If the JSON files of all runs exist, `tables` needs neither data nor run directories.
"""

import argparse
import json
from pathlib import Path

import geodl
from geodl.bench.experiment import commit
from geodl.bench.report.figures import Curve, lines
from geodl.model.classifiers import titles
from studies.verdicts import Difference

CHOSEN_AT, LONG, SEED = 10, 25, 1
NO_MARGIN = {"margin_weight": 0.0}
GEODESIC: dict[str, dict[str, float | str]] = {
    f"GeoDL {weight:g}": {"geodesic_weight": weight} for weight in (6.0, 3.0, 1.5)
}
GEODESIC["GeoDL 6, factor as printed"] = {"weight_factor": "new/old"}
SIDES = {
    "GeoDL": {
        name + margin: {"distill": "geodesic"} | options | more
        for name, options in GEODESIC.items()
        for margin, more in ((", no margin", NO_MARGIN), ("", {}))
    },
    "cosine": {
        f"cosine {weight:g}, {features}": {
            "distill": "cosine",
            "cosine_weight": weight,
            "cosine_features": features,
        }
        for weight in (5.0, 2.5, 1.25, 10.0)
        for features in ("pooled", "grid")
    },
}
"""The settings of each side; cosine's best gets a ninth, the same without margin."""
SHOWN = ("nme", "cnn", "ncm", "ame")
METHODS = {"LUCIR": "lucir", "CE": "finetune"}


class Study:
    """The runs in a directory, one JSON file each."""

    def __init__(self, data_dir, out):
        self.data_dir, self.out = data_dir, out

    def read(self, name):
        """Return what a run found, by classifier; None where it was not run."""
        path = self.out / f"{name}.json"
        return json.loads(path.read_text())["results"] if path.exists() else None

    def run(self, name, *, held_out=False, **options):
        """Run, or resume, or find complete; keep the figures of the test images, or those of held-out images alone."""
        if (done := self.read(name)) is not None:
            return done
        if held_out:
            options |= {"hold_out": 0.1, "ame": False, "analysis": False}
        how = {
            "preset": "cifar100-cpu",
            "data_dir": self.data_dir,
            "threads": 1,
            "out": self.out / name,
        }
        found = geodl.run(**how, **options)
        kept = ("average", "average_incremental", "final", "forgetting", "accuracy")
        each = (found.held_out if held_out else found.results).items()
        results = {
            key: {figure: result.to_dict()[figure] for figure in kept} for key, result in each
        }
        record = {
            "options": options,
            "images": "held out" if held_out else "test",
            "commit": commit(),
            "results": results,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{name}.json").write_text(json.dumps(record, indent=1))
        print(f"{name}: {results['nme']['average']:.2f}", flush=True)
        return results

    def choose(self):
        """Run the settings at T = 10, cosine's best without margin too, and the best two of each side at T = 25."""
        pairs = zip(*(settings.items() for settings in SIDES.values()), strict=True)
        for name, options in (setting for pair in pairs for setting in pair):
            self.held_out_run(CHOSEN_AT, name, options)
        self.held_out_run(CHOSEN_AT, *without_margin(*self.ranked("cosine", CHOSEN_AT)[0]))
        for side in SIDES:
            for name, options in self.ranked(side, CHOSEN_AT)[:2]:
                self.held_out_run(LONG, name, options)

    def held_out_run(self, phases, name, options):
        """Run LUCIR with a setting, without the held-out images."""
        return self.run(
            f"choose T={phases} {name}",
            held_out=True,
            method="lucir",
            phases=phases,
            seed=SEED,
            **options,
        )

    def ranked(self, side, phases):
        """Return the settings of a side that were run at this T, as (name, options), the best first."""
        settings = dict(SIDES[side])
        if side == "cosine":
            settings |= dict(without_margin(*setting) for setting in SIDES[side].items())
        found = {name: self.read(f"choose T={phases} {name}") for name in settings}
        there = [name for name in settings if found[name] is not None]
        return [
            (name, settings[name])
            for name in sorted(there, key=lambda each: -found[each]["nme"]["average"])
        ]

    def compare(self, seeds):
        """Run both sides at their settings, once these are chosen: the primary comparison first, cross-entropy last."""
        self.choose()
        wanted = [
            ("LUCIR", 10, seeds),
            ("LUCIR", 5, seeds),
            ("LUCIR", LONG, 1),
            ("CE", 10, seeds),
            ("CE", 5, seeds),
        ]
        for method, phases, count in [*wanted, ("CE", LONG, 1)]:
            for seed in range(1, count + 1):
                for side in SIDES:
                    _, options = self.ranked(side, LONG if phases == LONG else CHOSEN_AT)[0]
                    options = {
                        key: each
                        for key, each in options.items()
                        if method == "LUCIR" or key != "margin_weight"
                    }
                    name = f"{method} + {side}, T={phases}, seed {seed}"
                    self.run(name, method=METHODS[method], phases=phases, seed=seed, **options)

    def gain(self, method, phases, classifier, figure="average"):
        """Return GeoDL minus cosine, seed by seed; None where no seed was run on both sides."""
        values = []
        for seed in range(1, 11):
            both = [self.read(f"{method} + {side}, T={phases}, seed {seed}") for side in SIDES]
            if all(each is not None and classifier in each for each in both):
                values.append(both[0][classifier][figure] - both[1][classifier][figure])
        return Difference(values) if values else None


def without_margin(name, options):
    """Return a setting without the margin ranking."""
    return f"{name}, no margin", options | NO_MARGIN


def tables(study, figures):
    """Print the table of the choice and that of the comparison; draw the gain over T."""
    for phases in (CHOSEN_AT, LONG):
        print(
            f"| held-out images, T = {phases}, average 1..T | k-NME | CNN | NCM | forgetting: k-NME |"
        )
        print("|---|---:|---:|---:|---:|")
        for side in SIDES:
            for name, _ in study.ranked(side, phases):
                found = study.read(f"choose T={phases} {name}")
                shown = [found[each]["average"] for each in ("nme", "cnn", "ncm")] + [
                    found["nme"]["forgetting"]
                ]
                print(f"| {name} | {' | '.join(f'{each:.2f}' for each in shown)} |")
        print()
    print(
        "| GeoDL minus cosine, average 1..T | T | seeds | "
        + " | ".join(titles()[each] for each in SHOWN)
        + " |"
    )
    print("|---|---:|---:|" + "---:|" * len(SHOWN))
    for method in METHODS:
        for phases in (5, 10, LONG):
            gains = [study.gain(method, phases, each) for each in SHOWN]
            if gains[0] is not None:
                shown = ["-" if each is None else each.shown for each in gains]
                print(f"| {method} | {phases} | {len(gains[0].values)} | {' | '.join(shown)} |")
    if figures:
        curves = [
            curve
            for method in METHODS
            for name in ("nme", "cnn")
            if (curve := gain_curve(study, method, name))
        ]
        figures.mkdir(parents=True, exist_ok=True)
        lines(
            "gain", curves, x="phases T", y="GeoDL minus cosine (points)", ticks=(5, 10, LONG)
        ).files(figures)


def gain_curve(study, method, classifier):
    """Return the gain over T with its interval, of no width where there is one seed; None where nothing was run."""
    found = {phases: study.gain(method, phases, classifier) for phases in (5, 10, LONG)}
    there = {phases: each for phases, each in found.items() if each is not None}
    bounds = [each.interval or (each.mean, each.mean) for each in there.values()]
    label = f"{method}, {titles()[classifier]}"
    means = [each.mean for each in there.values()]
    return (
        Curve(label, list(there), means, *(list(each) for each in zip(*bounds, strict=True)))
        if there
        else None
    )


def main():
    """Run the selected part of the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=("choose", "compare", "tables"))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of compare; T = 25 has one")
    parser.add_argument("--figures", type=Path, help="a directory for gain.svg and gain.pdf")
    options = parser.parse_args()
    study = Study(options.data_dir, options.out)
    if options.what == "choose":
        study.choose()
    elif options.what == "compare":
        study.compare(options.seeds)
    tables(study, options.figures)


if __name__ == "__main__":
    main()
