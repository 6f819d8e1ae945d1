"""Learning photographs in steps: a table of several ways for each set of images.

Run with `python -m benchmarks.photographs DIR [--ways default,lite2,adapt,nearest,trained,scratch] [--out docs/photographs.md]`. DIR has the folders week1,
week2, ... and test, each with a folder of photographs for each class; the page in docs has 20 classes of Oxford Flowers-102 (folder flowers20) and 12
traffic signs of GTSRB (signs12). Sets and ways can be measured one at a time: results are stored as JSON beside the page, which shows all of them.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from geodl import IncrementalClassifier
from geodl.core.text import readable
from geodl.store import Directory

WAYS = {
    "default": ("frozen pre-trained features, closed form (the default)", {}, None),
    "lite2": (
        "the same with `--backbone efficientnet-lite2`",
        {"network": "efficientnet-lite2"},
        None,
    ),
    "adapt": (
        "the same, adapted to the first step's images (`--adapt yes`)",
        {"adapt": "yes"},
        None,
    ),
    "nearest": ("frozen pre-trained features, nearest class mean", {}, "ncm"),
    "trained": (
        "pre-trained network, trained with GeoDL (`--method lucir --backbone efficientnet-lite0 --pretrained`)",
        {"method": "lucir", "network": "efficientnet-lite0", "pretrained": True},
        None,
    ),
    "scratch": ("trained from scratch with GeoDL (`--method lucir`)", {"method": "lucir"}, None),
}
PAGE = """# Photographs

Written by `python -m benchmarks.photographs DIR --out docs/photographs.md`, do not edit. DIR has the folders `week1`, `week2`, ... and `test`, each with a
folder of photographs for each class.

Accuracy: on the test photographs of all classes after the last step, by the most likely class, ignoring "unknown". Time: processor seconds of one
thread. Stored: the size on disk of network, stored features and exemplars, and thumbnails. Calibration error: the mean gap between confidence and
accuracy in ten bins. Unknown: a model of all steps but the last is tested on photographs of the last step's classes; the area under the ROC curve is
that of `score`, and the last two columns are the shares of unknown photographs caught by its threshold and of known ones rejected by it (it is fitted
to reject 5 % of the learned images, each left out in turn).
"""
SETS = {
    "flowers20": "20 classes of Oxford Flowers-102: 10, then 5, then 5 more, with up to 60 training and 24 test images each.",
    "signs12": "12 traffic signs of GTSRB: 8, then 4 more, six drive-bys of 30 frames of each to learn and 40 images of other drive-bys to test.",
}
HEAD = """| | accuracy | seconds of each step | stored | images/s predicting | calibration error | unknown: ROC area | caught | rejected |
|---|---|---|---|---|---|---|---|---|
"""


def steps_of(root: Path) -> list[Path]:
    """Return the folders to learn in order."""
    return sorted(root.glob("week*"))


def measure(root: Path, model: Path, options: dict, classifier: str | None) -> dict:
    """Learn the steps and return all results."""
    seconds = []
    for week in steps_of(root):
        began = time.process_time()
        IncrementalClassifier(model).learn(week, threads=1, workers=1, **options)
        seconds.append(time.process_time() - began)
    stored = sum(size for _, size in Directory(model).phase(-1).files.values())
    began = time.process_time()
    found = IncrementalClassifier(model).predict(
        root / "test", classifier=classifier, threshold=-torch.inf, workers=1
    )
    rate = len(found) / (time.process_time() - began)
    right = torch.tensor([Path(each.name).parent.name == each.label for each in found]).double()
    sure = torch.tensor([each.confidence for each in found]).double()
    figures = {
        "accuracy": 100 * float(right.mean()),
        "seconds": seconds,
        "stored": stored,
        "rate": rate,
    }
    return figures | {"calibration": calibration(sure, right)} | unknown(root, model, classifier)


def calibration(sure: torch.Tensor, right: torch.Tensor) -> float:
    """Return the expected calibration error of confidences (N,) with correctness (N,), in ten bins."""
    bins = (sure * 10).long().clamp(max=9)
    gaps = [
        (right[bins == b].mean() - sure[bins == b].mean()).abs() * (bins == b).sum()
        for b in bins.unique()
    ]
    return float(sum(gaps) / len(right))


def unknown(root: Path, model: Path, classifier: str | None) -> dict:
    """Return how well a model of all steps but the last separates photographs of the last step's classes from known ones."""
    IncrementalClassifier(model).undo()
    found = IncrementalClassifier(model).predict(root / "test", classifier=classifier)
    new = {path.name for path in steps_of(root)[-1].iterdir()}
    is_new = torch.tensor([Path(each.name).parent.name in new for each in found])
    score = torch.tensor([each.score for each in found]).double()
    said = torch.tensor([each.unknown for each in found]).double()
    known, strange = score[~is_new, None], score[is_new]
    area = float((known > strange).double().mean() + (known == strange).double().mean() / 2)
    has_threshold = (
        IncrementalClassifier(model).recognizer(classifier).scorer.threshold > -torch.inf
    )
    shares = (
        {"caught": float(said[is_new].mean()), "rejected": float(said[~is_new].mean())}
        if has_threshold
        else {}
    )
    return {"area": area} | shares


def row(title: str, figures: dict) -> str:
    """Return a line of the table."""
    share = [f"{figures[key]:.1%}" if key in figures else "" for key in ("caught", "rejected")]
    took = " / ".join(f"{each:.0f}" for each in figures["seconds"])
    start = f"| {title} | {figures['accuracy']:.1f} % | {took} | {readable(figures['stored'])} | {figures['rate']:.0f} "
    return (
        start
        + f"| {figures['calibration']:.3f} | {figures['area']:.3f} | {share[0]} | {share[1]} |"
    )


def main() -> None:
    """Measure, print lines of the table, and update the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for way in arguments.ways.split(","):
        title, options, classifier = WAYS[way]
        with tempfile.TemporaryDirectory() as scratch:
            figures = measure(arguments.root, Path(scratch) / way, options, classifier)
        print(row(title, figures), flush=True)
        if arguments.out:
            kept = arguments.out.with_suffix(".json")
            every = json.loads(kept.read_text()) if kept.exists() else {}
            every.setdefault(arguments.root.name, {})[way] = figures
            kept.write_text(json.dumps(every, indent=1) + "\n")
            arguments.out.write_text(page(every))


def page(every: dict) -> str:
    """Return the page with all results by set and way."""
    text = PAGE
    for name, found in every.items():
        rows = [row(WAYS[way][0], found[way]) for way in WAYS if way in found]
        text += "\n".join(
            ["", f"## {name}", "", SETS.get(name, ""), "", HEAD + "\n".join(rows), ""]
        )
    return text


if __name__ == "__main__":
    main()
