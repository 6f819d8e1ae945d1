"""Photographs of 20 kinds of flowers in three steps (10 + 5 + 5 classes): four ways to learn them, in one table.

Run with `python -m benchmarks.photographs DIR [--ways default,nearest,adapt,scratch] [--out docs/photographs.md]`. DIR has the folders week1, week2,
week3 and test, each with a folder of photographs for each class; the page in docs is of 20 classes of Oxford Flowers-102. Ways may be measured one at a
time: the figures are kept as JSON beside the table, which shows all that are there.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from geodl import IncrementalClassifier
from geodl.core.files import readable
from geodl.store import Directory

WEEKS = ("week1", "week2", "week3")
WAYS = {
    "default": ("frozen pre-trained features, closed form (the default)", {}, None),
    "nearest": ("frozen pre-trained features, nearest class mean", {}, "ncm"),
    "adapt": ("pre-trained network, trained with GeoDL (`--adapt`)", {"adapt": True}, None),
    "scratch": ("trained from scratch with GeoDL (`--method lucir`)", {"method": "lucir"}, None),
}
TABLE = """# Photographs of 20 kinds of flowers

Written by `python -m benchmarks.photographs DIR --out docs/photographs.md`, do not edit. DIR has the folders `week1`, `week2`, `week3` and `test`,
each with a folder of photographs for each class: here 20 classes of Oxford Flowers-102, 10, then 5, then 5 more, up to 60 images of each to learn and
up to 24 to test.

Accuracy is that on the test photographs of all 20 classes after the third step, by the likeliest class; "unknown" is not counted. Time is processor
seconds of one thread; stored is the state on disk: the network, what is kept of the images, and pictures to show. Calibration error: the mean gap of
confidence and accuracy, in ten bins. Unknown: a model of the first two steps is shown the test photographs of the third one's classes; the area under
the ROC curve is that of the largest score, and the last two columns say how many of the unknown photographs its own threshold catches, and how many
of the known ones it rejects (it is fitted so that 5 % of the learned images, each left out in turn, are rejected).

| | accuracy | seconds, steps 1 / 2 / 3 | stored | images/s predicting | calibration error | unknown: ROC area | caught | rejected |
|---|---|---|---|---|---|---|---|---|
"""


def measure(root: Path, model: Path, options: dict, classifier: str | None) -> dict:
    """Learn the three steps and return all figures."""
    seconds = []
    for week in WEEKS:
        began = time.process_time()
        IncrementalClassifier(model).learn(root / week, threads=1, workers=1, **options)
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
    """Return the expected calibration error of confidences (N,): their mean gap to being right (N,), in ten bins."""
    bins = (sure * 10).long().clamp(max=9)
    gaps = [
        (right[bins == b].mean() - sure[bins == b].mean()).abs() * (bins == b).sum()
        for b in bins.unique()
    ]
    return float(sum(gaps) / len(right))


def unknown(root: Path, model: Path, classifier: str | None) -> dict:
    """Return how well a model of two steps tells photographs of the third one's classes from its own."""
    IncrementalClassifier(model).undo()
    found = IncrementalClassifier(model).predict(root / "test", classifier=classifier)
    new = {path.name for path in (root / "week3").iterdir()}
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
    """Measure; print the table's lines, or write them with those that are there."""
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
            every = (json.loads(kept.read_text()) if kept.exists() else {}) | {way: figures}
            kept.write_text(json.dumps(every, indent=1) + "\n")
            lines = [row(title, every[name]) for name, (title, *_) in WAYS.items() if name in every]
            arguments.out.write_text(TABLE + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
