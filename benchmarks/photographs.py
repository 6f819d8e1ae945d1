"""Photographs of 20 kinds of flowers in three steps (10 + 5 + 5 classes): accuracy, time and storage of four ways to learn them.

``python -m benchmarks.photographs DIR [--ways default,nearest,adapt,scratch] [--out docs/photographs.md]`` with DIR as week1, week2, week3 and test, each a
folder of class folders. Processor seconds of one thread; the accuracy is on the test photographs of all classes known.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from geodl import IncrementalClassifier
from geodl.learner import Learner

WEEKS = ("week1", "week2", "week3")
WAYS = {
    "default": ("frozen pre-trained features, closed form (the default)", {}, None),
    "nearest": ("frozen pre-trained features, nearest class mean", {}, "ncm"),
    "adapt": ("pre-trained network trained with GeoDL (`--adapt`)", {"adapt": True}, None),
    "scratch": ("trained from scratch with GeoDL (`--method lucir`)", {"method": "lucir"}, None),
}


def learn(root: Path, model: Path, options: dict) -> list[float]:
    """Learn the three steps; return the processor seconds of each."""
    seconds = []
    for week in WEEKS:
        began = time.process_time()
        IncrementalClassifier(model).learn(root / week, threads=1, workers=1, **options)
        seconds.append(time.process_time() - began)
    return seconds


def unknown(root: Path, model: Path) -> tuple[float, float, float]:
    """Return how well a model of two steps tells photographs of the third one's classes from its own.

    The area under the ROC curve of the largest score, the share of known ones that the model's threshold rejects, and the share of unknown
    ones that it catches.
    """
    learner = Learner.load(model)
    scorer = learner.recognizer().scorer
    new = [path.name for path in (root / "week3").iterdir()]
    known, strange = (_largest(learner, root, names) for names in (learner.classes, new))
    above = (known[:, None] > strange).double().mean() + (known[:, None] == strange).double().mean() / 2
    rejected, caught = ((each < scorer.threshold).double().mean() for each in (known, strange))
    return float(above), float(rejected), float(caught)


def _largest(learner: Learner, root: Path, classes) -> torch.Tensor:
    from geodl.data.intake import as_images

    images, _, _ = as_images([root / "test" / name for name in classes])
    views = [learner.features(images, mirror=side) for side in (False, True)]
    return learner.recognizer().scorer(*views).amax(1)


def calibration(model: Path, root: Path) -> float:
    """Return the expected calibration error on the test photographs: the mean gap of confidence and accuracy in ten bins."""
    found = IncrementalClassifier(model).predict(root / "test")
    right = torch.tensor([Path(each.name).parent.name == each.top[0][0] for each in found]).double()
    sure = torch.tensor([each.confidence for each in found]).double()
    bins = (sure * 10).long().clamp(max=9)
    gaps = [(right[bins == b].mean() - sure[bins == b].mean()).abs() * (bins == b).sum() for b in bins.unique()]
    return float(sum(gaps) / len(right))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| | accuracy on 20 classes | processor seconds, steps 1 / 2 / 3 | stored | images/s predicting |",
        "|---|---|---|---|---|",
    ]
    notes = []
    with tempfile.TemporaryDirectory() as scratch:
        for way in arguments.ways.split(","):
            title, options, classifier = WAYS[way]
            model = Path(scratch) / way
            seconds = learn(arguments.root, model, options)
            classifiers = IncrementalClassifier(model)
            began = time.process_time()
            found = classifiers.evaluate(arguments.root / "test", classifier=classifier)
            rate = found.images / (time.process_time() - began)
            last = sorted((model / "phases").iterdir())[-1]
            size = sum(path.stat().st_size for path in last.iterdir()) / 1e6
            took = " / ".join(f"{each:.0f}" for each in seconds)
            lines.append(f"| {title} | {found.accuracy:.1f} % | {took} | {size:.0f} MB | {rate:.0f} |")
            print(lines[-1], flush=True)
            if way == "default":
                notes.append(
                    f"Calibration error of the default's confidence on the test photographs: {calibration(model, arguments.root):.3f}."
                )
                IncrementalClassifier(model).undo()
                area, rejected, caught = unknown(arguments.root, model)
                notes.append(
                    f"Unknown classes, after the second step: area under the ROC curve {area:.3f}; at the model's own threshold "
                    f"{caught:.0%} of the photographs of the third step's classes are called unknown, and {rejected:.0%} of the known ones."
                )
    text = "\n".join([*lines, "", *notes]) + "\n"
    print("\n" + text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
