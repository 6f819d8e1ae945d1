"""Cached features of parts of image sets, and meaningless pictures."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from geodl.app.choices import PRETRAINED
from geodl.data import load
from geodl.data.batches import Transform, evaluation
from geodl.data.images import ArrayImages, FileImages, Images
from geodl.data.intake import as_images, take
from geodl.data.squares import squares
from geodl.model.features import Features, features_of
from geodl.nets import build_network, expected_images, reading_copy

OTHERS = 400
"""Images of CIFAR-100 and of Omniglot."""


@dataclass(frozen=True)
class Part:
    """Features of images and of their mirrored copies by level, with their classes and file names."""

    features: dict[str, Tensor]
    mirrored: dict[str, Tensor]
    labels: tuple[str, ...]
    files: tuple[str, ...]

    def select(self, rows: Sequence[int]) -> "Part":
        """Return some of the images."""
        views = [{name: z[list(rows)] for name, z in view.items()} for view in self.views]
        labels, files = (tuple(each[i] for i in rows) for each in (self.labels, self.files))
        return Part(views[0], views[1], labels, files)

    def where(self, wanted: Callable[[str], bool]) -> "Part":
        """Return the images of the selected classes."""
        return self.select([i for i, label in enumerate(self.labels) if wanted(label)])

    def __add__(self, other: "Part") -> "Part":
        pairs = zip(self.views, other.views, strict=True)
        views = [
            {name: torch.cat([z, more[name]]) for name, z in one.items()} for one, more in pairs
        ]
        return Part(views[0], views[1], self.labels + other.labels, self.files + other.files)

    @property
    def views(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The levels of the images, and of their mirrored copies."""
        return self.features, self.mirrored

    def rows(self, names: Sequence[str]) -> Tensor:
        """Return the classes (N,) as positions in `names`."""
        return torch.tensor([names.index(label) for label in self.labels])


def as_features(levels: dict[str, Tensor], labels: Tensor) -> Features:
    """Return levels as Features for a classifier."""
    deepest = list(levels.values())[-1]
    return Features(deepest, torch.empty(len(deepest), 0), labels, levels)


def odd_pictures() -> dict[str, Image.Image]:
    """Return meaningless pictures by name."""
    generator, shape = np.random.default_rng(0), (480, 640, 3)
    noise = generator.integers(0, 256, shape)
    flat = {"black": 0, "white": 255, "gray": 128}
    arrays = {name: np.full(shape, value) for name, value in flat.items()}
    arrays |= {"noise": noise, "gray noise": noise[:, :, :1].repeat(3, axis=2)}
    found = {name: Image.fromarray(each.astype(np.uint8)) for name, each in arrays.items()}
    found["text"] = Image.new("RGB", (640, 480), "white")
    draw = ImageDraw.Draw(found["text"])
    for line in range(30):
        draw.text(
            (20, 10 + 15 * line), "The quick brown fox jumps over the lazy dog. " * 3, "black"
        )
    docs = Path(__file__).parents[1] / "docs"
    for name in ("serve-page", "serve-phone"):
        found[name] = Image.open(docs / f"{name}.png").convert("RGB")
    return found


def images_of(root: Path, name: str) -> tuple[Images, tuple[str, ...]]:
    """Return the images of a part of the data, and the names of their classes."""
    if name == "odd":
        pictures = odd_pictures()
        return as_images(list(pictures.values()))[0], tuple(pictures)
    if name == "omniglot":
        test = load("arrays", root / "omniglot28.npz").test
        some: Images = test.select(range(0, len(test), len(test) // OTHERS))
        return some, tuple(map(str, some.labels.tolist()))
    if name.startswith("cifar100"):
        data = load("cifar100", root / "cifar100")
        images = data.train if name == "cifar100/train" else data.test
        return images, tuple(data.classes[label] for label in images.labels.tolist())
    intake = take(root / name)
    return intake.images, tuple(intake.classes[label] for label in intake.images.labels.tolist())


class Reader:
    """Reads features of images once, as `predict` does, and caches them in a folder if one is given."""

    def __init__(self, cache: Path | None) -> None:
        network = build_network(PRETRAINED, 1, head="linear", pretrained=True)
        self.levels, self._network = network.level_names, reading_copy(network, "cpu")
        self._cache = cache

    def read(self, root: Path, name: str, size: int, most: int | None = None) -> Part:
        """Return the features of a part of the data at an image size, of at most `most` evenly spaced images."""

        def some() -> tuple[Images, Sequence[str]]:
            images, labels = images_of(root, name)
            rows = range(0, len(images), max(1, len(images) // (most or len(images))))[:most]
            return images.select(list(rows)), [labels[i] for i in rows]

        return self.kept(f"{name}-{size}", some, size)

    def kept(self, key: str, some: Callable[[], tuple[Images, Sequence[str]]], size: int) -> Part:
        """Return the features of images with their classes, from the cache if possible."""
        file = self._cache and self._cache / f"{key.replace('/', '-')}.safetensors"
        if file is None or not file.exists():
            found = self._features(*some(), size)
            if file is None:
                return found
            file.parent.mkdir(parents=True, exist_ok=True)
            tensors = {f"0.{name}": z for name, z in found.features.items()}
            tensors |= {f"1.{name}": z for name, z in found.mirrored.items()}
            about = {"labels": json.dumps(found.labels), "files": json.dumps(found.files)}
            save_file(tensors, file, about)
        with safe_open(file, "pt") as stored:
            about = stored.metadata()
            views = [
                {name: stored.get_tensor(f"{side}.{name}") for name in self.levels} for side in "01"
            ]
        return Part(*views, *(tuple(json.loads(about[key])) for key in ("labels", "files")))

    def _features(self, images: Images, labels: Sequence[str], size: int) -> Part:
        known = expected_images(PRETRAINED)
        transform = Transform(size=size, mean=known["mean"], std=known["std"])
        pixels = torch.cat([part for _, part, _ in squares(images, size, 1)])
        seen = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
        views = []
        for mirror in (False, True):
            batches = evaluation(seen, transform, mirror=mirror)
            views.append(dict(features_of(self._network, batches, "cpu", self.levels).levels))
        items = images.items if isinstance(images, FileImages) else [""] * len(images)
        names = tuple(str(item) if isinstance(item, Path) else "" for item in items)
        return Part(views[0], views[1], tuple(labels), names)
