"""Batches of augmented, normalized images that depend on (seed, epoch, step) alone.

Small images live in memory as one uint8 tensor and are cropped and flipped as a batch; image files are decoded by
threads a few batches ahead (Pillow decodes and resizes outside the interpreter lock). Both have one interface, and
neither the number of threads, nor of processes, nor the step at which an epoch is entered changes a pixel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from geodl.config import RunConfig
from geodl.core.decoding import as_square
from geodl.core.errors import ConfigError, DataError
from geodl.core.keys import derive
from geodl.data.images import ArrayImages, Images, insist_on_images
from geodl.data.trivial import AUGMENTATIONS, augmented

K = TypeVar("K")
R = TypeVar("R")
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Areas and aspect ratios of a random resized crop."""
_ATTEMPTS = 10  # at a crop that fits into the picture, before the center is taken
# Random numbers an image: flip, row, column, three of color jitter, then the attempts.
_COLUMNS = 6 + 2 * _ATTEMPTS
_AHEAD = 3  # batches that the threads may be ahead of the consumer


@dataclass(frozen=True)
class Transform:
    """From a picture to the network's input, at training and at test time.

    crop="pad" fits the picture to a square (shorter side to `size`, center), then in training pads it with black and
    crops it at random; crop="whole" does the same with all of the picture (longer side to `size`, the rest gray);
    crop="resized" takes a random part of it in training, and at test time the center of the picture whose shorter side
    is `shorter_side`. `geodl.config` checks the values.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    padding: int = 4
    flip: bool = True
    jitter: float = 0.0
    crop: Literal["pad", "whole", "resized"] = "pad"
    augment: str = "none"

    @property
    def shorter_side(self) -> int:
        """What the shorter side of a picture is resized to at test time."""
        return round(self.size * 256 / 224) if self.crop == "resized" else self.size

    @property
    def whole(self) -> bool:
        """Whether the network sees all of a picture, not its center square."""
        return self.crop == "whole"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Transform:
        """Undo `to_dict`; earlier versions had a field more, which nobody set."""
        known = {key: value for key, value in fields.items() if key != "resize"}
        return cls(**known | {"mean": tuple(fields["mean"]), "std": tuple(fields["std"])})


def transform_of(config: RunConfig, images: Images | None = None, *, size: int = 224) -> Transform:
    """Return the transform of a run; without image_size as large as the images in memory, or as ``size`` says."""
    if isinstance(images, ArrayImages):
        size = min(images.pixels.shape[2:])
    named = {field.name for field in fields(Transform)} & set(RunConfig.model_fields)
    return Transform(config.image_size or size, **{name: getattr(config, name) for name in named})


class Batch(NamedTuple):
    """A process's share of a batch."""

    images: Tensor
    """float32 (b, 3, H, W), normalized, channels_last."""
    labels: Tensor
    """int64 (b,)."""
    indices: Tensor
    """int64 (b,): positions in the images that the batches were made of."""
    size: int
    """Images in the whole batch, over all processes."""


class _Plan(NamedTuple):
    """What a batch will hold. indices: int64 (b,); numbers: float64 (b, columns) in [0, 1), or None at test time."""

    indices: Tensor
    numbers: Tensor | None
    size: int


class Batches:
    """The training batches of a stage; `epoch(e)` iterates over one epoch.

    Args:
        images: what to train on.
        transform: how to augment and normalize.
        batch_size: images in a batch, over all processes.
        seed: of the order and of the augmentation.
        rank: number of this process, which gets a contiguous share of each batch.
        world: number of processes.
        workers: threads that decode files; 0 decodes in the calling thread. Unused for small images in memory.
    """

    def __init__(
        self,
        images: Images,
        transform: Transform,
        batch_size: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
    ) -> None:
        insist_on_images(images)
        if batch_size < world:
            raise ConfigError(f"batch_size = {batch_size}: {world} processes need {world} or more")
        if len(images) < world:
            raise DataError(f"{len(images)} training images cannot be shared by {world} processes")
        self.images, self.transform, self.seed = images, transform, seed
        self.rank, self.world, self.workers = rank, world, workers
        self._starts = _starts(len(images), batch_size, world)

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self._starts) - 1

    def epoch(self, e: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch e from step `start` on."""
        generator = torch.Generator().manual_seed(derive(self.seed, "order", e))
        order = torch.randperm(len(self.images), generator=generator)
        plans = (self._plan(order, e, step) for step in range(start, len(self)))
        for plan, pixels in _decoded(self.images, self.transform, plans, self.workers):
            assert plan.numbers is not None
            inputs = _augment(pixels, plan.numbers, self.transform)
            yield Batch(inputs, self.images.labels[plan.indices], plan.indices, plan.size)

    def _plan(self, order: Tensor, e: int, step: int) -> _Plan:
        """Draw for the whole batch, then take this process's share, so that the share never matters."""
        indices = order[self._starts[step] : self._starts[step + 1]]
        size = len(indices)
        generator = torch.Generator().manual_seed(derive(self.seed, "augment", e, step))
        numbers = torch.rand((size, _COLUMNS), dtype=torch.float64, generator=generator)
        augment = AUGMENTATIONS.get(self.transform.augment)
        if augment is not None:  # drawn apart, so that all else is as without it
            key = derive(self.seed, self.transform.augment, e, step)
            generator = torch.Generator().manual_seed(key)
            more = torch.rand((size, augment.count), dtype=torch.float64, generator=generator)
            numbers = torch.cat([numbers, more], dim=1)
        share = slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)
        return _Plan(indices[share], numbers[share], size)


def _starts(count: int, batch_size: int, world: int) -> list[int]:
    """Return where each batch of an epoch starts, and the end.

    A small remainder joins the batch before it: batch statistics of a few images are noise, and every process needs
    some. The limit is a quarter of a batch, whatever the number of processes (unless these have below 8 images each).
    """
    starts = list(range(0, count, batch_size))
    if len(starts) > 1 and count - starts[-1] < max(2 * world, batch_size // 4):
        starts.pop()
    return [*starts, count]


def evaluation(
    images: Images,
    transform: Transform,
    *,
    batch_size: int = 128,
    mirror: bool = False,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield the images in order under the test-time transform; with `mirror` each flipped left to right.

    A process gets a contiguous share of all images, so that the shares in the order of the ranks are the whole.
    """
    insist_on_images(images)
    first, last = rank * len(images) // world, (rank + 1) * len(images) // world
    for plan, pixels in _decoded(images, transform, _in_order(first, last, batch_size), workers):
        inputs = _normalize(pixels.to(torch.float32, memory_format=torch.channels_last), transform)
        if mirror:
            inputs = inputs.flip(3).contiguous(memory_format=torch.channels_last)
        yield Batch(inputs, images.labels[plan.indices], plan.indices, plan.size)


def _in_order(first: int, last: int, batch_size: int) -> Iterator[_Plan]:
    for start in range(first, last, batch_size):
        end = min(start + batch_size, last)
        yield _Plan(torch.arange(start, end), None, end - start)


def resized(images: Images, size: int, *, whole: bool = False, workers: int = 0) -> ArrayImages:
    """Bring images into memory at one size, as crop="pad" would at each use, or crop="whole"."""
    crop: Literal["pad", "whole"] = "whole" if whole else "pad"
    transform = Transform(size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), crop=crop)
    plans = _in_order(0, len(images), 64)
    parts = [pixels for _, pixels in _decoded(images, transform, plans, workers)]
    pixels = torch.cat(parts) if parts else torch.empty((0, 3, size, size), dtype=torch.uint8)
    return ArrayImages(pixels.contiguous(), images.labels, images.names)


# ---------------------------------------------------------------------------------------------- from images to pixels


def _decoded(
    images: Images, transform: Transform, plans: Iterable[_Plan], workers: int
) -> Iterator[tuple[_Plan, Tensor]]:
    """Yield each plan with its pixels, uint8 (b, 3, size, size): decoded and brought to size."""
    if (
        isinstance(images, ArrayImages)
        and transform.crop != "resized"
        and images.pixels.shape[2:] == (transform.size,) * 2
    ):
        for plan in plans:
            yield plan, images.pixels[plan.indices]
    else:
        groups = ((plan, _tasks(images, plan, transform)) for plan in plans)
        for plan, squares in in_threads(_square, groups, workers, _AHEAD):
            yield plan, torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)


def in_threads(
    work: Callable[..., R],
    groups: Iterable[tuple[K, Iterable[tuple[Any, ...]]]],
    workers: int,
    ahead: int,
) -> Iterator[tuple[K, list[R]]]:
    """Yield each group with the results of its tasks, in order; threads are up to `ahead` groups in advance.

    workers: how many threads; with 0 the calling thread works.
    """
    if not workers:
        for key, tasks in groups:
            yield key, [work(*task) for task in tasks]
        return
    pool = ThreadPoolExecutor(workers)
    waiting: deque[tuple[K, list[Future[R]]]] = deque()
    try:
        for key, tasks in groups:
            waiting.append((key, [pool.submit(work, *task) for task in tasks]))
            if len(waiting) > ahead:
                done, futures = waiting.popleft()
                yield done, [future.result() for future in futures]
        for done, futures in waiting:
            yield done, [future.result() for future in futures]
    finally:  # also when the consumer stops early, or a file turns out to be damaged
        pool.shutdown(cancel_futures=True)


def _tasks(images: Images, plan: _Plan, transform: Transform) -> Iterator[tuple[Any, ...]]:
    rows = [None] * len(plan.indices) if plan.numbers is None else plan.numbers.tolist()
    for i, numbers in zip(plan.indices.tolist(), rows, strict=True):
        yield images, i, numbers, transform


def _square(
    images: Images, i: int, numbers: list[float] | None, transform: Transform
) -> NDArray[np.uint8]:
    """Decode image i and bring it to (size, size, 3): the center, or a random part if training wants that."""
    size, side = transform.size, transform.shorter_side
    if transform.crop != "resized" or numbers is None:
        return as_square(
            lambda least: images.decode(i, at_least=least), size, side, whole=transform.whole
        )
    # Enough detail for the smallest part that may be magnified to `size`.
    image = images.decode(i, at_least=math.ceil(size / math.sqrt(SCALE[0])))
    box = random_box(image.width, image.height, numbers)
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    augment = AUGMENTATIONS.get(transform.augment)
    if augment is not None:
        # After the flip, which the whole batch takes later: mirrored here, and back again.
        mirrored = transform.flip and numbers[0] < 0.5
        square = augment(ImageOps.mirror(square) if mirrored else square, numbers[_COLUMNS:])
        square = ImageOps.mirror(square) if mirrored else square
    return np.asarray(square)


def random_box(width: int, height: int, numbers: list[float]) -> tuple[float, float, float, float]:
    """Choose a random part of the picture (RandomResizedCrop): (left, top, right, bottom)."""
    for area, shape in zip(numbers[6:_COLUMNS:2], numbers[7:_COLUMNS:2], strict=True):
        pixels = width * height * (SCALE[0] + area * (SCALE[1] - SCALE[0]))
        ratio = math.exp(math.log(RATIO[0]) + shape * (math.log(RATIO[1]) - math.log(RATIO[0])))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(numbers[1] * (height - h + 1)), int(numbers[2] * (width - w + 1))
            return left, top, left + w, top + h
    # a very long picture: its center, as long as the ratios allow
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# --------------------------------------------------------------------------------------------- from pixels to inputs


def as_inputs(
    pixels: Tensor, transform: Transform, generator: torch.Generator | None = None
) -> Tensor:
    """Return the center of pixels in memory as the network sees it at test time, differentiably.

    pixels: float32 (b, 3, H, H) in 0..255, H = `transform.shorter_side` -> (b, 3, size, size); with a generator each is padded,
    cropped and flipped by chance, as in training.
    """
    edge = (pixels.shape[2] - transform.size) // 2
    center = pixels[:, :, edge : edge + transform.size, edge : edge + transform.size]
    if generator is not None:
        numbers = torch.rand((len(pixels), 3), dtype=torch.float64, generator=generator)
        return _augment(center, numbers, replace(transform, jitter=0.0, augment="none"))
    return _normalize(center.clone(memory_format=torch.channels_last), transform)


def _augment(pixels: Tensor, numbers: Tensor, transform: Transform) -> Tensor:
    """Crop, flip, jitter and normalize. pixels: uint8 (b, 3, size, size) -> float32 (b, 3, size, size)."""
    count, size = len(pixels), transform.size
    padding = transform.padding if transform.crop != "resized" else 0
    padded = F.pad(pixels, (padding,) * 4) if padding else pixels
    steps = torch.arange(size)
    top, left = (numbers[:, 1:3] * (2 * padding + 1)).long().T
    columns = steps.expand(count, size)
    if transform.flip:
        columns = torch.where(numbers[:, :1] < 0.5, size - 1 - columns, columns)
    # One gather crops, flips, and puts the channels last.
    cropped = padded.permute(0, 2, 3, 1)[
        torch.arange(count)[:, None, None],
        (top[:, None] + steps)[:, :, None],
        (left[:, None] + columns)[:, None, :],
    ]
    if transform.augment != "none" and transform.crop != "resized":
        augment = AUGMENTATIONS[transform.augment]
        cropped = augmented(cropped, numbers[:, _COLUMNS:], augment)
    inputs = cropped.float()
    if transform.jitter:
        inputs = _jitter(inputs, 1 + transform.jitter * (2 * numbers[:, 3:6].float() - 1))
    return _normalize(inputs.permute(0, 3, 1, 2), transform)


def _jitter(inputs: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, contrast and saturation. inputs: (b, H, W, 3) in 0..255; factors: (b, 3), 1 changes nothing."""
    grey_weights = torch.tensor([0.299, 0.587, 0.114])
    brightness, contrast, saturation = factors.T[:, :, None, None, None]
    inputs = (inputs * brightness).clamp_(0, 255)
    mean = (inputs @ grey_weights).mean(dim=(1, 2))[:, None, None, None]
    inputs = torch.lerp(mean, inputs, contrast).clamp_(0, 255)
    return torch.lerp((inputs @ grey_weights)[..., None], inputs, saturation).clamp_(0, 255)


def _normalize(inputs: Tensor, transform: Transform) -> Tensor:
    """Scale in place by the dataset's mean and deviation. inputs: float32 (b, 3, H, W) in 0..255."""
    mean, std = (inputs.new_tensor(part)[:, None, None] for part in (transform.mean, transform.std))
    return inputs.mul_(1 / (255 * std)).sub_(mean / std)
