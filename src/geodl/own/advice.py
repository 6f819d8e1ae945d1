"""What a step says about the model in plain sentences: which classes are tiny, weak or mixed up, and what would help."""

from collections.abc import Sequence

from torch import Tensor

from geodl.config import RunConfig
from geodl.memory import quota
from geodl.own.state import KnownClass

TINY = 10  # images: below, a class is called tiny
FEW = 100  # images a class: below, training from scratch is called hard
WEAK = 60.0  # % of its check images recognised: below, a class is called weak
CHECKED = 2  # check images: with fewer, a class is not judged
LIST = 8  # as many classes are named in one sentence


def advise(matrix: Tensor, classes: Sequence[KnownClass], config: RunConfig, present: Sequence[int]) -> list[str]:
    """Give the sentences. matrix: (C, C) counts of check images, true class first; `present`: the step's classes."""
    if len(classes) == 1:
        return [
            f"The model knows one class, {classes[0].name!r}: there is nothing to tell apart until a second one comes."
        ]
    sentences = _tiny([classes[i] for i in present])
    if max(known.step for known in classes) == 1:  # later it is too late for another network
        sentences += _few(classes, config)
    sentences += _weak(matrix, classes) + _mixed(matrix, classes)
    if not quota(len(classes), config.exemplars, config.budget):
        sentences.append(
            f"No images are kept (exemplars {config.exemplars}, {config.budget}): earlier classes will be forgotten faster"
            + ("." if config.exemplars else ", and cannot be checked any more.")
        )
    return sentences


def _tiny(classes: Sequence[KnownClass]) -> list[str]:
    tiny = [f"{known.name} ({known.images})" for known in classes if known.images < TINY]
    if not tiny:
        return []
    return [f"Very few images: {_listed(tiny)}. Predictions of such classes are shaky; {TINY} or more images help."]


def _few(classes: Sequence[KnownClass], config: RunConfig) -> list[str]:
    """Recommend a pre-trained network where photographs are too few to learn from scratch what an image is."""
    if not classes or config.network.startswith("timm:") or (config.image_size or 0) < 24:
        return []
    middle = sorted(known.images for known in classes)[len(classes) // 2]
    if middle >= FEW:
        return []
    return [
        f"About {middle} images a class are few to train a network from scratch: a pre-trained one would help "
        "(in a new model: --backbone timm:resnet18, after pip install 'geodl[timm]')."
    ]


def _weak(matrix: Tensor, classes: Sequence[KnownClass]) -> list[str]:
    counts = matrix.sum(dim=1).tolist()
    right = matrix.diagonal().tolist()
    weak = [
        f"{known.name} ({right[i]} of {counts[i]} right)"
        for i, known in enumerate(classes)
        if counts[i] >= CHECKED and 100 * right[i] < WEAK * counts[i]
    ]
    return [f"Weak on the check images: {_listed(weak)}. More, and more varied, images of them help."] if weak else []


def _mixed(matrix: Tensor, classes: Sequence[KnownClass]) -> list[str]:
    found = []
    for i, known in enumerate(classes):
        total = int(matrix[i].sum())
        row = matrix[i].clone()
        row[i] = 0
        other = int(row.argmax())
        if total >= CHECKED and int(row[other]) >= 2 and 10 * int(row[other]) >= 3 * total:
            found.append(f"{known.name} is taken for {classes[other].name} ({int(row[other])} of {total})")
    return [f"Mixed up: {_listed(found)}."] if found else []


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:LIST]) + (f", and {len(items) - LIST} more" if len(items) > LIST else "")
