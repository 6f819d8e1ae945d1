"""Batches of augmented, normalized images that depend only on (seed, epoch, step).

Small images are one uint8 tensor in memory, cropped and flipped as a batch; image files are decoded by threads, a few
batches ahead (Pillow decodes and resizes without the interpreter lock). Both have the same interface. Neither the number
of threads or processes nor the step at which an epoch is resumed changes a pixel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import repeat
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
_ATTEMPTS = 10  # to draw a crop that fits into the image, before the center is used
# Random numbers per image: flip, row, column, three for color jitter, then the attempts.
_COLUMNS = 6 + 2 * _ATTEMPTS
_AHEAD = 3  # batches that the threads may be ahead of the consumer


@dataclass(frozen=True)
class Transform:
    """The preprocessing of images for the network, in training and at test time.

    crop="pad" resizes the shorter side to `size` and crops the center; in training, the square is then padded with black
    and cropped at random. crop="whole" is the same with the whole image, letterboxed with gray. crop="resized" is a
    random resized crop in training, and at test time the center crop of the image whose shorter side is `shorter_side`.
    `geodl.config` checks the values.
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
        """The length of the shorter side after resizing at test time."""
        return round(self.size * 256 / 224) if self.crop == "resized" else self.size

    @property
    def whole(self) -> bool:
        """Whether the network sees the whole image instead of its center square."""
        return self.crop == "whole"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields ready for JSON."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Transform:
        """Undo `to_dict`; earlier versions had another field, which was never set."""
        known = {key: value for key, value in fields.items() if key != "resize"}
        return cls(**known | {"mean": tuple(fields["mean"]), "std": tuple(fields["std"])})


def transform_of(config: RunConfig, images: Images | None = None, *, size: int = 224) -> Transform:
    """Return the transform of a run; without `image_size`, the size is that of images in memory, else `size`."""
    if isinstance(images, ArrayImages):
        size = min(images.pixels.shape[2:])
    options = {field.name for field in fields(Transform)} & set(RunConfig.model_fields)
    return Transform(config.image_size or size, **{name: getattr(config, name) for name in options})


class Batch(NamedTuple):
    """A process's share of a batch."""

    images: Tensor
    """float32 (b, 3, H, W), normalized, channels_last."""
    labels: Tensor
    """int64 (b,)."""
    indices: Tensor
    """int64 (b,): positions in the images."""
    size: int
    """Number of images in the whole batch, over all processes."""


class _Plan(NamedTuple):
    """A batch before decoding. indices: int64 (b,); numbers: random, float64 (b, columns) in [0, 1), None at test time."""

    indices: Tensor
    numbers: Tensor | None
    size: int


class Batches:
    """The training batches of a stage; `epoch(e)` iterates over one epoch.

    Args:
        images: the training images.
        transform: augmentation and normalization.
        batch_size: number of images in a batch, over all processes.
        seed: of the order and the augmentation.
        rank: number of this process, which gets a contiguous share of each batch.
        world: number of processes.
        workers: number of threads that decode files; 0: the calling thread. Unused for small images in memory.
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
            raise ConfigError(f"batch_size = {batch_size}: {world} processes need at least {world}")
        if len(images) < world:
            raise DataError(f"{len(images)} training images cannot be shared by {world} processes")
        self.images, self.transform, self.seed = images, transform, seed
        self.rank, self.world, self.workers = rank, world, workers
        self._starts = _starts(len(images), batch_size, world)

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self._starts) - 1

    def epoch(self, e: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch e, starting at step `start`."""
        generator = torch.Generator().manual_seed(derive(self.seed, "order", e))
        order = torch.randperm(len(self.images), generator=generator)
        plans = (self._plan(order, e, step) for step in range(start, len(self)))
        for plan, pixels in _decoded(self.images, self.transform, plans, self.workers):
            assert plan.numbers is not None
            inputs = _augment(pixels, plan.numbers, self.transform)
            yield Batch(inputs, self.images.labels[plan.indices], plan.indices, plan.size)

    def _plan(self, order: Tensor, e: int, step: int) -> _Plan:
        """Draw for the whole batch, then select this process's share, so that the number of processes does not matter."""
        indices = order[self._starts[step] : self._starts[step + 1]]
        size = len(indices)
        generator = torch.Generator().manual_seed(derive(self.seed, "augment", e, step))
        numbers = torch.rand((size, _COLUMNS), dtype=torch.float64, generator=generator)
        augment = AUGMENTATIONS.get(self.transform.augment)
        if augment is not None:  # from its own generator, so that all other numbers stay the same
            key = derive(self.seed, self.transform.augment, e, step)
            generator = torch.Generator().manual_seed(key)
            more = torch.rand((size, augment.count), dtype=torch.float64, generator=generator)
            numbers = torch.cat([numbers, more], dim=1)
        share = slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)
        return _Plan(indices[share], numbers[share], size)


def _starts(count: int, batch_size: int, world: int) -> list[int]:
    """Return the start of each batch of an epoch, and the end of the last.

    A small remainder is added to the last full batch: batch statistics of a few images are noise, and every process
    needs some. The limit is a quarter of a batch for any number of processes that have 8 or more images each.
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
    """Yield the images in order with the test-time transform; `mirror` flips each left to right.

    Each process gets a contiguous share of the images, in the order of the ranks.
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
    """Decode images into memory at one size, as crop="pad" (or "whole") does at test time."""
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
    """Yield each plan with its pixels, decoded and resized: uint8 (b, 3, size, size)."""
    if (
        isinstance(images, ArrayImages)
        and transform.crop != "resized"
        and images.pixels.shape[2:] == (transform.size,) * 2
    ):
        for plan in plans:
            yield plan, images.pixels[plan.indices]
    else:
        work = partial(_square, images, transform)
        for plan, squares in in_threads(
            work, ((plan, _tasks(plan)) for plan in plans), workers, _AHEAD
        ):
            yield plan, torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)


def in_threads(
    work: Callable[..., R],
    groups: Iterable[tuple[K, Iterable[tuple[Any, ...]]]],
    workers: int,
    ahead: int,
) -> Iterator[tuple[K, list[R]]]:
    """Yield each group with the results of its tasks, in order; threads work up to `ahead` groups in advance.

    workers: number of threads; 0: the calling thread.
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
    finally:  # also if the consumer stops early or a file is damaged
        pool.shutdown(cancel_futures=True)


def _tasks(plan: _Plan) -> Iterable[tuple[int, list[float] | None]]:
    rows = repeat(None) if plan.numbers is None else plan.numbers.tolist()
    return zip(plan.indices.tolist(), rows, strict=False)


def _square(
    images: Images, transform: Transform, i: int, numbers: list[float] | None
) -> NDArray[np.uint8]:
    """Decode image i and return its square (size, size, 3): that of test time, or a random crop in training."""
    size, side = transform.size, transform.shorter_side
    if transform.crop != "resized" or numbers is None:
        return as_square(
            lambda least: images.decode(i, at_least=least), size, side, whole=transform.whole
        )
    # Enough detail for the smallest crop that may be enlarged to `size`.
    image = images.decode(i, at_least=math.ceil(size / math.sqrt(SCALE[0])))
    box = random_box(image.width, image.height, numbers)
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    augment = AUGMENTATIONS.get(transform.augment)
    if augment is not None:
        # It comes after the flip, which is applied to the whole batch later: flip here, and back again.
        mirrored = transform.flip and numbers[0] < 0.5
        square = augment(ImageOps.mirror(square) if mirrored else square, numbers[_COLUMNS:])
        square = ImageOps.mirror(square) if mirrored else square
    return np.asarray(square)


def random_box(width: int, height: int, numbers: list[float]) -> tuple[float, float, float, float]:
    """Return a random crop (RandomResizedCrop) of an image: (left, top, right, bottom)."""
    for area, shape in zip(numbers[6:_COLUMNS:2], numbers[7:_COLUMNS:2], strict=True):
        pixels = width * height * (SCALE[0] + area * (SCALE[1] - SCALE[0]))
        ratio = math.exp(math.log(RATIO[0]) + shape * (math.log(RATIO[1]) - math.log(RATIO[0])))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(numbers[1] * (height - h + 1)), int(numbers[2] * (width - w + 1))
            return left, top, left + w, top + h
    # A very long image: the center crop, as long as the ratios allow.
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# --------------------------------------------------------------------------------------------- from pixels to inputs


def as_inputs(
    pixels: Tensor, transform: Transform, generator: torch.Generator | None = None
) -> Tensor:
    """Return pixels in memory as network inputs at test time, differentiably.

    pixels: float32 (b, 3, H, H) in 0..255, H = `transform.shorter_side` -> (b, 3, size, size). With a generator, they are
    padded, cropped and flipped at random, as in training.
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
    """Scale brightness, contrast and saturation by factors: (b, 3). inputs: (b, H, W, 3) in 0..255."""
    gray_weights = torch.tensor([0.299, 0.587, 0.114])
    brightness, contrast, saturation = factors.T[:, :, None, None, None]
    inputs = (inputs * brightness).clamp_(0, 255)
    mean = (inputs @ gray_weights).mean(dim=(1, 2))[:, None, None, None]
    inputs = torch.lerp(mean, inputs, contrast).clamp_(0, 255)
    return torch.lerp((inputs @ gray_weights)[..., None], inputs, saturation).clamp_(0, 255)


def _normalize(inputs: Tensor, transform: Transform) -> Tensor:
    """Normalize in place by the mean and deviation of the dataset. inputs: float32 (b, 3, H, W) in 0..255."""
    mean, std = (inputs.new_tensor(part)[:, None, None] for part in (transform.mean, transform.std))
    return inputs.mul_(1 / (255 * std)).sub_(mean / std)
