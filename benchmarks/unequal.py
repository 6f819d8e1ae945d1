"""Classes with unequal numbers of images: balanced accuracy on test images, over ten draws.

Run with `python -m benchmarks.unequal DATA [--sets flowers20,cifar100] [--draws 10] [--out docs/unequal.md]`. DATA has the folders `flowers20` (photographs in steps and `test`)
and `cifar100` (parquet files). In each draw every class has the same five images; then a third of the classes have all their images. Features are
read once, with the network that `geodl learn` chooses.
"""

import argparse
import tempfile
from functools import reduce
from operator import add
from pathlib import Path

import torch

from geodl import IncrementalClassifier
from geodl.closed_form.fitted import Fitted
from geodl.closed_form.kept_features import KeptFeatures, fit
from geodl.data.dataset import load
from geodl.data.images import ArrayImages, Images, concat, with_rows
from geodl.data.intake import take
from geodl.data.squares import squares
from geodl.model.recognizer import Recognizer

SETS = ("flowers20", "cifar100")
FEW = 5
CLASSES, TEST = 10, 60
"""Of CIFAR-100: every tenth class, and 60 test images of each."""


def flowers(data: Path) -> tuple[Images, Images]:
    """Return training and test photographs of all classes."""
    parts = [take(folder).images for folder in sorted((data / "flowers20").glob("week*"))]
    names = tuple(name for part in parts for name in part.names)
    train = concat([with_rows(part, names) for part in parts])
    return train, with_rows(take(data / "flowers20" / "test").images, names)


def cifar(data: Path) -> tuple[Images, Images]:
    """Return training and test images of some classes."""
    found = load("cifar100", data / "cifar100")
    rows = torch.full((100,), -1)
    rows[::CLASSES] = torch.arange(CLASSES)
    train, test = (part.relabel(rows) for part in (found.train, found.test))
    train, test = (part.select(part.labels >= 0) for part in (train, test))
    return train, test.select(first_of_each(test.labels, TEST))


def first_of_each(labels: torch.Tensor, number: int) -> torch.Tensor:
    """Return the rows of the first images of each class."""
    rows = [(labels == label).nonzero().squeeze(1)[:number] for label in torch.unique(labels)]
    return torch.cat(rows)


def features_of(images: Images, recognizer: Recognizer) -> KeptFeatures:
    """Return all levels of the features of images."""
    parts = []
    for positions, pixels, _ in squares(images, recognizer.transform.shorter_side, 1):
        labels = images.labels[positions]
        levels = recognizer.features(ArrayImages(pixels, labels)).levels
        parts.append(KeptFeatures.of(levels, labels))
    return reduce(add, parts)


def reader(train: Images) -> Recognizer:
    """Return a recognizer that reads all feature levels of a model learned from such images."""
    names = [str(label) for label in range(int(train.labels.max()) + 1)]
    some = train.select(first_of_each(train.labels, 2)).relabel(torch.arange(len(names)), names)
    with tempfile.TemporaryDirectory() as scratch:
        model = IncrementalClassifier(Path(scratch) / "model")
        model.learn(some, threads=1, workers=1)
        found = model.recognizer()
    levels = tuple(found.network.level_names)
    scorer = found.scorer.__class__(found.scorer.score, levels=levels)
    return Recognizer(found.network, found.transform, found.classes, scorer)


def balanced(fitted: Fitted, test: KeptFeatures) -> float:
    """Return the mean accuracy of the classes, in %."""
    z = {name: block.float() for name, block in test.z.items()}
    right = (fitted.scores(z).argmax(1) == test.labels).double()
    each = [right[test.labels == label].mean() for label in torch.unique(test.labels)]
    return 100 * float(torch.stack(each).mean())


def draw(train: KeptFeatures, test: KeptFeatures, seed: int) -> tuple[float, float, float]:
    """Return balanced accuracies: with five images per class; with more of some; with these but without offsets."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(train.labels.max()) + 1
    large = set(torch.randperm(classes, generator=generator)[: (classes + 1) // 3].tolist())
    few, many = [], []
    for label in range(classes):
        rows = (train.labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        few.append(rows[:FEW])
        many.append(rows if label in large else rows[:FEW])
    equal = fit(train.select(torch.cat(few)), classes, 0).fitted
    found = fit(train.select(torch.cat(many)), classes, 0).fitted
    plain = Fitted(found.expand, found.head, found.temperature)
    return balanced(equal, test), balanced(found, test), balanced(plain, test)


PAGE = """# Classes of unequal size

Written by `python -m benchmarks.unequal DATA --out docs/unequal.md`, do not edit.

Balanced accuracy (the mean of the accuracies of the classes) of a model in closed form on test images, averaged over {draws} draws: with five images per
class; with all images of a third of the classes and five of the others; and the latter without the score offsets that keep large classes from being
favored. `flowers20`: 20 kinds of flowers with up to 60 images. `cifar100`: every tenth class of CIFAR-100 with up to 500 images, enlarged as by `learn`,
and 60 test images per class.

{table}
"""


def main() -> None:
    """Measure, print a line for each set, and write the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"| set | {FEW} images of each class | more of a third | the same without offsets |"]
    lines.append("|---|---|---|---|")
    print("\n".join(lines))
    for name in arguments.sets.split(","):
        images = {"flowers20": flowers, "cifar100": cifar}[name](arguments.data)
        recognizer = reader(images[0])
        train, test = (features_of(part, recognizer) for part in images)
        found = torch.tensor([draw(train, test, seed) for seed in range(arguments.draws)])
        lines.append(f"| {name} | " + " | ".join(f"{each:.1f} %" for each in found.mean(0)) + " |")
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text(PAGE.format(draws=arguments.draws, table="\n".join(lines)))


if __name__ == "__main__":
    main()
