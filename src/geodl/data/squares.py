"""Decoding of images to the squares that a network sees; unusable images are reported and skipped."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from geodl.core.decoding import SMALLEST, Item, as_square, check_header, shown
from geodl.core.errors import DataError
from geodl.data.batches import in_threads
from geodl.data.dataset import Skipped
from geodl.data.images import ArrayImages, FileImages, Images, sampled_sizes
from geodl.data.intake import Intake

IN_MEMORY = 1 << 28
"""Pixels of up to this many bytes are kept in memory during a learn step; more are decoded at each use."""
LONG = 2.0
"""From this aspect ratio on, the center square is at most half of an image."""
BATCH = 128
"""Number of images that are decoded at a time."""


@dataclass(frozen=True)
class Colors:
    """Mean and deviation of each channel, 0 to 1, and whether all images are gray."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    grey: bool


@dataclass(frozen=True)
class Decoded:
    """The usable images of an intake, at the size of the model.

    images:  in memory at one size, or the files if that would take too much memory.
    kept:    their positions in the intake.
    digests: hashes of their pixels at that size.
    colors:  None if they were not requested.
    """

    images: Images
    kept: tuple[int, ...]
    digests: tuple[str, ...]
    problems: Skipped
    colors: Colors | None


def square(
    images: Images, i: int, size: int, whole: bool = False, reduced: bool = False
) -> Tensor | str:
    """Return one image as uint8 pixels (3, size, size), or the reason why it cannot be used.

    whole: the letterboxed image instead of its center square; reduced: as for `check_header`.
    """
    item: Item = b""
    try:
        if isinstance(images, FileImages):
            item = images.items[i]
            width, height = check_header(item, reduced=reduced)
        else:
            height, width = images.pixels.shape[2:]
        if min(width, height) < SMALLEST:
            return f"only {width} x {height} pixels; at least {SMALLEST} per side are needed"
        pixels = as_square(lambda least: images.decode(i, at_least=least), size, whole=whole)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    except DataError as error:
        return str(error).removeprefix(f"{shown(item)}: ")


def squares(
    images: Images, size: int, workers: int, whole: bool = False
) -> Iterator[tuple[list[int], Tensor, list[tuple[int, str]]]]:
    """Decode images in order and in batches; threads work a few batches ahead.

    workers: number of threads; 0: the calling thread; whole: letterboxed images instead of center squares.

    Yields positions and uint8 pixels (b, 3, size, size) of the usable images, and position and reason of the others.
    """
    batches = (range(len(images))[start : start + BATCH] for start in range(0, len(images), BATCH))
    work = partial(square, images, size=size, whole=whole, reduced=True)
    for batch, results in in_threads(work, ((batch, zip(batch)) for batch in batches), workers, 2):
        pairs = list(zip(batch, results, strict=True))
        good = {i: result for i, result in pairs if isinstance(result, Tensor)}
        bad = [(i, result) for i, result in pairs if isinstance(result, str)]
        empty = torch.empty(0, 3, size, size, dtype=torch.uint8)
        yield list(good), torch.stack([*good.values()]) if good else empty, bad


def decode(
    intake: Intake,
    size: int,
    workers: int,
    progress: Callable[[int, Skipped], None] = lambda done, problems: None,
    *,
    whole: bool = False,
    colors: bool = True,
    use: Callable[[Tensor], None] = lambda pixels: None,
) -> Decoded:
    """Decode all images of an intake once, at the size of the model.

    Args:
        intake: the images.
        size: side of the squares.
        workers: number of threads; 0: the calling thread.
        progress: called after each batch with the number of images done and the problems so far.
        whole: letterboxed images instead of center squares.
        colors: whether to measure the colors.
        use: called with the pixels of each batch, uint8 (b, 3, size, size), in order.
    """
    total = len(intake.images)
    keep = total * 3 * size * size <= IN_MEMORY
    memory = torch.empty((total if keep else 0, 3, size, size), dtype=torch.uint8)
    kept: list[int] = []
    digests: list[str] = []
    problems: list[tuple[str, str]] = []
    meter = _ColorMeter()
    for positions, pixels, bad in squares(intake.images, size, workers, whole):
        if keep:
            memory[len(kept) : len(kept) + len(pixels)] = pixels
        kept += positions
        digests += ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64)).item_digests()
        problems += [(intake.names[i], reason) for i, reason in bad]
        progress(len(kept) + len(problems), tuple(problems))
        if colors:
            meter.add(pixels)
        use(pixels)
    images = intake.images.select(kept)
    if keep and kept:
        images = ArrayImages(memory[: len(kept)], images.labels, images.names)
    else:
        images = replace(images, digests=tuple(digests))
    measured = meter.colors() if colors else None
    return Decoded(images, tuple(kept), tuple(digests), tuple(problems), measured)


class _ColorMeter:
    """Sums over the channels of many images."""

    def __init__(self) -> None:
        self.total, self.squared = torch.zeros(2, 3, dtype=torch.float64)
        self.count, self.grey = 0, True

    def add(self, pixels: Tensor) -> None:
        """Add images: uint8 (b, 3, H, W)."""
        values = pixels.double() / 255
        self.total += values.sum(dim=(0, 2, 3))
        self.squared += values.square().sum(dim=(0, 2, 3))
        self.count += pixels[:, 0].numel()
        self.grey = self.grey and bool((pixels[:, :1] == pixels).all())

    def colors(self) -> Colors:
        """Return mean and deviation of the images so far."""
        mean = self.total / max(self.count, 1)
        # At least 0.05: images that are nearly equal must not be amplified to noise.
        variance = self.squared / max(self.count, 1) - mean.square()
        std = variance.clamp(min=0).sqrt().clamp(min=0.05)
        return Colors(_three(mean), _three(std), self.grey)


def _three(values: Tensor) -> tuple[float, float, float]:
    red, green, blue = (round(value, 4) for value in values.tolist())
    return red, green, blue


@dataclass(frozen=True)
class Sizes:
    """Sizes of images. side: the median of the shorter sides; long: the share of images whose aspect ratio is `LONG` or more."""

    side: int
    long: float


def sizes_of(images: Images) -> Sizes:
    """Return the sizes of images, or of a sample of many files."""
    sizes = sampled_sizes(images)
    if not sizes:
        return Sizes(32, 0.0)
    sides = sorted(min(size) for size in sizes)
    long = sum(max(size) >= LONG * min(size) for size in sizes)
    return Sizes(sides[len(sides) // 2], long / len(sizes))
