"""`geodl.ClosedFormClassifier` beside classifiers of scikit-learn on the same pixels: accuracy and time.

Run with `python -m benchmarks.estimator [omniglot28.npz] [--threads 1] [--only WORD] [--out docs/estimator.md]`; without a file on the embedded
digits. The file has x_train, y_train, x_test and y_test; Omniglot has 1623 classes with 15 training images each, extended by shifted copies for
larger sizes. Seconds are processor time, which does not count other work on the machine.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import RidgeClassifier, SGDClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from threadpoolctl import threadpool_limits

import geodl
from geodl.data.images import Images

GROUPS = 10
WIDTH = 4096
SIDE = 14
SIZES = {"digits": [(500, 10), (1400, 10)], "file": [(2000, 200), (15_000, 1000), (100_000, 1000)]}
SHIFTS = sorted(product((-2, -1, 0, 1, 2), repeat=2), key=lambda by: (abs(by[0]) + abs(by[1]), by))
Rows = tuple[np.ndarray, np.ndarray]
PAGE = """# The closed form as an estimator

Written by `python -m benchmarks.estimator omniglot28.npz --out docs/estimator.md`, do not edit. `geodl.ClosedFormClassifier` beside classifiers of
scikit-learn, on the same pixels (14 x 14, gray) of handwritten characters: 15 images per class and shifted copies of them. Classes arrive in ten groups:

- *groups*: the rows of each group are seen once, in order;
- *at once*: all rows are fitted together, and every further group costs as much again.

Accuracy is on test images of all classes; seconds are processor time of one thread, for all groups and for the last one. `ClosedFormClassifier` chooses
its ridge by leave-one-out, unlike the others. There are 4,096 random features, also for Nystroem; with more rows than that, `partial_fit` stores sums,
and standardization and ridge remain those of the first groups. `SGDClassifier.partial_fit` forgets earlier groups.
"""


def random_relu(x: np.ndarray) -> np.ndarray:
    """Return the random features that the closed form uses: ReLU(W x / sqrt(d)). x: (N, d)."""
    weights = np.random.default_rng(0).normal(size=(x.shape[1], WIDTH)).astype(np.float32)
    return np.maximum(x @ (weights / x.shape[1] ** 0.5), 0)


CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "ClosedFormClassifier.partial_fit": lambda: geodl.ClosedFormClassifier(WIDTH),
    "ClosedFormClassifier.fit": lambda: geodl.ClosedFormClassifier(WIDTH),
    "random features, RidgeClassifier": lambda: make_pipeline(
        StandardScaler(), FunctionTransformer(random_relu), RidgeClassifier(alpha=30.0)
    ),
    "Nystroem, RidgeClassifier": lambda: make_pipeline(
        StandardScaler(), Nystroem(n_components=WIDTH, random_state=0), RidgeClassifier(alpha=0.01)
    ),
    "RidgeClassifier": lambda: make_pipeline(StandardScaler(), RidgeClassifier(alpha=1.0)),
    "LinearDiscriminantAnalysis": lambda: LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1),
    "SGDClassifier.partial_fit": lambda: SGDClassifier(alpha=1e-5, random_state=0),
}


def pixels(images: Images) -> np.ndarray:
    """Return gray pixels (N, side, side) between 0 and 1, the side at most 14."""
    gray = images.pixels[:, :1].float() / 255
    small = torch.nn.functional.adaptive_avg_pool2d(gray, min(SIDE, gray.shape[2]))
    return small[:, 0].numpy()


def of_classes(x: np.ndarray, y: np.ndarray, classes: int, rows: int) -> Rows:
    """Return about `rows` rows of the first classes, equally many of each: images, then copies shifted by a pixel or two."""
    x, y = x[y < classes], y[y < classes]
    parts: list[Rows] = []
    while rows > 0:
        down, right = SHIFTS[len(parts)]
        some = np.random.default_rng(0).permutation(len(y))[:rows]
        parts.append((np.roll(x, (down, right), (1, 2))[some], y[some]))
        rows -= len(some)
    together = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return together[0].reshape(len(together[0]), -1), together[1]


def fits(name: str, model: Any, x: np.ndarray, y: np.ndarray, classes: int) -> Iterator[None]:
    """Fit group after group, or everything at once."""
    if "partial_fit" not in name:
        yield model.fit(x, y)
        return
    known = {"classes": np.arange(classes)} if isinstance(model, SGDClassifier) else {}
    for group in np.array_split(np.arange(classes), GROUPS):
        of_group = np.isin(y, group)
        yield model.partial_fit(x[of_group], y[of_group], **known)


def measure(name: str, train: Rows, test: Rows, classes: int) -> str:
    """Return a row of the table."""
    model, seconds = CLASSIFIERS[name](), []
    steps = fits(name, model, *train, classes)
    while True:
        began = time.process_time()
        if not list(islice(steps, 1)):
            break
        seconds.append(time.process_time() - began)
    seen = "groups" if len(seconds) > 1 else "at once"
    accuracy = 100 * model.score(*test)
    return f"| {name} | {seen} | {accuracy:.1f} | {sum(seconds):.1f} | {seconds[-1]:.1f} |"


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="classifiers whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Where there are fewer rows than random features, Nystroem takes as many as there are rows.
    warnings.filterwarnings("ignore", message="n_components > n_samples")
    data = geodl.load("arrays", options.file) if options.file else geodl.load("digits")
    lines = []
    for rows, classes in SIZES["file" if options.file else "digits"]:
        train = of_classes(pixels(data.train), data.train.labels.numpy(), classes, rows)
        x, y = pixels(data.test), data.test.labels.numpy()
        test = x[y < classes].reshape(-1, train[0].shape[1]), y[y < classes]
        sizes = f"{len(train[1]):,} rows, {classes:,} classes, {len(test[1]):,} test images"
        lines += [
            "",
            f"## {sizes}",
            "",
            "| classifier | rows come | accuracy % | seconds | last group |",
        ]
        lines += ["|---|---|---:|---:|---:|"]
        print("\n".join(lines[-5:]))
        for name in filter(lambda each: options.only in each, CLASSIFIERS):
            with threadpool_limits(options.threads):
                lines.append(measure(name, train, test, classes))
            print(lines[-1], flush=True)
        if options.out:
            options.out.write_text(PAGE + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
