"""Detection of unknown images by models in closed form: other images, odd pictures, and images of known classes.

Run with `python -m benchmarks.unknown DATA [--cache FOLDER] [--out docs/unknown.md]`. DATA has the folders flowers20, signs12 (week1, week2, ...,
test, each with a folder of images for each class) and cifar100 (the parquet files of the Hugging Face hub) and omniglot28.npz. Features are read
once and cached in the folder, if given. `--classes 2 3` measures only these numbers of classes. `--limit` measures instead the share of known
images called unknown around the limit where sums replace stored features: with 4,999, 5,000 and 5,001 images of CIFAR-100; `--at 600` sets
the limit to 600 for a quick check.
"""

import argparse
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.parts import OTHERS, Part, Reader, as_features
from benchmarks.photographs import calibration
from geodl.app.choices import CLOSED_FORM, PRETRAINED
from geodl.app.series import clues_of
from geodl.closed_form.novelty import REJECTED, separation
from geodl.config import Layer, RunConfig
from geodl.data import load
from geodl.data.batches import transform_of
from geodl.data.images import FileImages, Images
from geodl.data.intake import Intake
from geodl.methods import configure
from geodl.model.classifiers import ClosedForm, Scorer, fitting
from geodl.model.features import Features
from geodl.model.memory import Memory
from geodl.model.phase import Phase
from geodl.nets import Network, build_network

SIZES = {"flowers": 192, "signs": 128}
"""Image size of `learn` for each set in pixels."""
LEARNED = {
    "flowers": ("flowers20/week1", "flowers20/week2", "flowers20/week3"),
    "signs": ("signs12/week1", "signs12/week2"),
}
TESTED = {"flowers": "flowers20/test", "signs": "signs12/test"}
CLASSES = {"flowers": (2, 3, 5, 10, 15, 20), "signs": (2, 3, 5, 10, 12)}
NETWORK = build_network("convnet", 1, head="linear")
"""A placeholder: the closed form reads features only."""
FEW_DRAWS = 5
"""Draws of more than two classes, but not all."""

PAGE = """# Unknown images

Written by `python -m benchmarks.unknown DATA --out docs/unknown.md`, do not edit. Models in closed form, learned on random subsets of 20 kinds
of flowers (a part of Oxford Flowers-102) or of 12 kinds of traffic signs (a part of GTSRB), predict images of other kinds. An image is `unknown` if its
probability of belonging to a known class is below 95 %, as it is for one in twenty learned images, each left out.

- Rejected: test images of known classes predicted as unknown. Calibration error: the mean gap between confidence and accuracy in ten bins, on test
  images of known classes of all draws together.
- The other columns: other images predicted as unknown. Other set: signs for models of flowers, flowers for models of signs (test images). Odd pictures:
  black, white, gray, colored and gray noise, a page of text, two screenshots. CIFAR-100 and Omniglot: {others} images each. Other classes: test images of
  the set's classes that were not drawn; the ROC area measures their separation from known ones over all thresholds.
- Score alone: the largest score with a threshold that rejects 5 % of the learned images, as in version 0.2.

{draws} random pairs of classes are drawn, {few} random sets of more classes, and all of them; results are means.

{table}
"""


def configuration(**options: object) -> RunConfig:
    """Return the options of `learn` for photographs."""
    start = {"network": PRETRAINED, "pretrained": True, "image_size": 192}
    return configure([Layer("benchmark", start | CLOSED_FORM | options)]).config


def learned(part: Part, names: Sequence[str], config: RunConfig) -> ClosedForm:
    """Return the closed form of a learn step on images of classes."""
    numbers = torch.arange(len(part.labels))

    def features(network: Network, images: Images, *, mirror: bool = False) -> Features:
        """Return features of images, whose labels are their numbers."""
        rows = images.labels.tolist()
        return as_features(part.select(rows).views[mirror], part.rows(names)[rows])

    images = FileImages(tuple(map(Path, part.files)), part.rows(names), tuple(names))
    clues = None
    if all(part.files):
        places = (f"{Path(file).parent.name}/{Path(file).name}" for file in part.files)
        clues = clues_of(Intake("", images, tuple(places)), "auto")
    phase = Phase(
        index=0,
        config=config,
        transform=transform_of(config, size=192),
        network=NETWORK,
        teacher=None,
        images=replace(images, labels=numbers, clues=clues),
        memory=Memory(),
        old=0,
        names=tuple(names),
        features=features,
        device=torch.device("cpu"),
        now=as_features(part.features, part.rows(names)),
    )
    return ClosedForm.fit(phase)


@dataclass(frozen=True)
class Shown:
    """The output of a model: confidences, predicted classes, measures of novelty, largest scores, (N,)."""

    confidences: Tensor
    predictions: Tensor
    measures: Tensor
    unknown: Tensor
    scores: Tensor

    @classmethod
    def to(cls, scorer: Scorer, part: Part) -> "Shown":
        """Predict images."""
        none = torch.zeros(len(part.labels), dtype=torch.int64)
        answers = scorer.answers(*(as_features(view, none) for view in part.views))
        confidences, predictions = answers.probabilities.max(dim=1)
        largest = answers.scores.amax(1)
        return cls(confidences, predictions, answers.measure, answers.unknown, largest)


def share(marks: Tensor) -> float:
    """Return the share of marked images in %."""
    return 100 * float(marks.double().mean())


Figures = dict[str, list[float]]


def drawn(kind: str, every: Collection[str], count: int, times: int) -> list[list[str]]:
    """Return up to `times` different random sets of `count` classes."""
    found: list[list[str]] = []
    times = min(times, math.comb(len(every), count))
    for number in itertools.count():
        names = sorted(random.Random(f"{kind} {count} {number}").sample(sorted(every), count))
        if names not in found:
            found.append(names)
        if len(found) == times:
            break
    return found


def draw(kind: str, parts: dict[str, Part], names: Sequence[str]) -> tuple[Figures, Tensor]:
    """Learn some classes; return all results, and confidences with correctness (N, 2)."""
    train, test = (parts[name].where(lambda label: label in names) for name in ("train", "test"))
    found = learned(train, names, configuration(image_size=SIZES[kind]))
    scorer, novelty = found.scorer(NETWORK), found.fitted.novelty
    assert novelty is not None
    known = Shown.to(scorer, test)
    # The threshold of the score alone that rejects 5 % of the learned images.
    quantile = float(torch.special.ndtri(torch.tensor(REJECTED)))
    least = novelty.score.center + quantile * novelty.score.unit
    figures: Figures = {"rejected": [share(known.unknown), share(known.scores < least)]}
    shown = {
        name: Shown.to(scorer, parts[name]) for name in ("other", "odd", "cifar100", "omniglot")
    }
    rest = parts["test"].where(lambda label: label not in names)
    if len(rest.labels):
        shown["classes"] = Shown.to(scorer, rest)
        pairs = (
            (known.measures, shown["classes"].measures),
            (known.scores, shown["classes"].scores),
        )
        figures["area"] = [separation(*pair) for pair in pairs]
    for name, each in shown.items():
        figures[name] = [share(each.unknown), share(each.scores < least)]
    right = known.predictions == test.rows(names)
    return figures, torch.stack([known.confidences.double(), right.double()], dim=1)


COLUMNS = {
    "rejected": "rejected",
    "calibration": "calibration error",
    "other": "other set",
    "odd": "odd pictures",
    "cifar100": "CIFAR-100",
    "omniglot": "Omniglot",
    "classes": "other classes",
    "area": "ROC area",
}


def row(title: str, figures: Figures, which: int) -> str:
    """Return a line of the table: with all measures, or (1) by the score alone."""

    def cell(name: str) -> str:
        values = figures.get(name, [])
        if len(values) <= which:
            return ""
        number = values[which]
        return f"{number:.3f}" if name in ("area", "calibration") else f"{number:.1f} %"

    return f"| {title} | {' | '.join(cell(name) for name in COLUMNS)} |"


def measure(root: Path, reader: Reader, draws: int, wanted: Collection[int]) -> list[str]:
    """Return the lines of the table for the given numbers of classes; empty: all."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind, size in SIZES.items():
        other = next(name for name in SIZES if name != kind)
        parts = {
            "train": reduce(add, [reader.read(root, name, size) for name in LEARNED[kind]]),
            "test": reader.read(root, TESTED[kind], size),
            "other": reader.read(root, TESTED[other], size),
            "odd": reader.read(root, "odd", size),
            "cifar100": reader.read(root, "cifar100/test", size, OTHERS),
            "omniglot": reader.read(root, "omniglot", size, OTHERS),
        }
        for count in [each for each in CLASSES[kind] if not wanted or each in wanted]:
            times = draws if count == 2 else 1 if count == CLASSES[kind][-1] else FEW_DRAWS
            sets = drawn(kind, set(parts["train"].labels), count, min(times, draws))
            found = [draw(kind, parts, names) for names in sets]
            values = defaultdict(list)
            for figures, _ in found:
                for name, pair in figures.items():
                    values[name].append(pair)
            means = {name: torch.tensor(each).mean(0).tolist() for name, each in values.items()}
            sure, right = torch.cat([pairs for _, pairs in found]).unbind(1)
            means["calibration"] = [calibration(sure, right)]
            title = f"{count} {kind}"
            lines += [row(title, means, 0), row(f"{title}, score alone", means, 1)]
            print("\n".join(lines[-2:]), flush=True)
    return lines


def limit(root: Path, reader: Reader, at: int) -> None:
    """Print the share of known images called unknown by models with one image less than the limit, with the limit, and one more."""
    fitting.MOST = at
    size, classes = SIZES["signs"], 20
    data = load("cifar100", root / "cifar100")
    names = data.classes[:classes]

    def some(images: Images, each: int) -> tuple[Images, Sequence[str]]:
        # One of each class in turn, so that any first part has as many of each.
        rows = [(images.labels == c).nonzero().flatten()[:each] for c in range(classes)]
        found = images.select(torch.stack(rows, dim=1).flatten())
        return found, [names[label] for label in found.labels.tolist()]

    train = reader.kept(f"train-{at}", lambda: some(data.train, at // classes + 1), size)
    test = reader.kept("test-25", lambda: some(data.test, 25), size)
    config = configuration(image_size=size)
    for count in (at - 1, at, at + 1):
        found = learned(train.select(range(count)), names, config)
        shown = Shown.to(found.scorer(NETWORK), test)
        right = (shown.predictions == test.rows(names)).double()
        error = calibration(shown.confidences.double(), right)
        kept = "features" if found.stored().images else "sums"
        print(
            f"{count} images, {kept}: {share(shown.unknown):.1f} % of {len(right)} known images called unknown, "
            f"accuracy {share(right):.1f} %, calibration error {error:.3f}",
            flush=True,
        )


def main() -> None:
    """Measure, print lines of the table, and write the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--classes", type=int, nargs="*", default=[])
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--at", type=int, default=5000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reader = Reader(arguments.cache)
    if arguments.limit:
        limit(arguments.root, reader, arguments.at)
        return
    table = "\n".join(measure(arguments.root, reader, arguments.draws, arguments.classes))
    if arguments.out:
        page = PAGE.format(others=OTHERS, draws=arguments.draws, few=FEW_DRAWS, table=table)
        arguments.out.write_text(page)


if __name__ == "__main__":
    main()
