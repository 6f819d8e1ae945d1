"""What a user hands over: folders, arrays, datasets. Whatever cannot be used is skipped and named in one plain line."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from geodl.data.batches import fit, in_threads
from geodl.data.dataset import Skipped
from geodl.data.folder import identity, natural_key, scan_folder, walk
from geodl.data.images import ArrayImages, FileImages, Images, Item, check_header, pack, shown, upright_rgb
from geodl.data.names import class_name, class_names
from geodl.data.sources import as_pixels
from geodl.errors import DataError
from geodl.files import is_folder
from geodl.text import count, one_line

SMALLEST = 4
"""Pictures with a side below this many pixels show nothing that could be learned."""
IN_MEMORY = 1 << 30
"""Bytes of pixels that are kept in memory while a step is learned; more are decoded anew at each use."""
BATCH = 128
"""Images that are decoded at a time."""


@dataclass(frozen=True)
class Intake:
    """Images with labels that are positions in `classes`; `names` says for people where each came from."""

    title: str
    images: Images
    classes: tuple[str, ...]
    names: tuple[str, ...]
    problems: Skipped = ()

    @cached_property
    def key(self) -> str:
        """Hash what there is to learn: class names and image contents, whatever the order and the file names."""
        labels = self.images.labels.tolist()
        pairs = sorted(
            (self.classes[label], digest) for label, digest in zip(labels, self.images.item_digests(), strict=True)
        )
        return hashlib.sha256(repr(pairs).encode()).hexdigest()


@dataclass(frozen=True)
class Decoded:
    """Images that could be decoded, at the model's size, and what is known of their pixels.

    images:  in memory at one size, or the files where that would take too much memory.
    kept:    their positions in the intake.
    digests: hashes of their pixels at that size.
    """

    images: Images
    kept: tuple[int, ...]
    digests: tuple[str, ...]
    problems: Skipped
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    grey: bool


# ------------------------------------------------------------------------------------------------------------- taking


def take(source: Any, labels: Any = None, classes: Sequence[str] | None = None, *, strict: bool = False) -> Intake:
    """Take a folder of class folders, arrays with labels, a torch Dataset of (image, label) pairs, or an intake as it is."""
    if isinstance(source, Intake):
        return source
    if isinstance(source, str | Path):
        if labels is not None:
            raise DataError(f"labels were given with the folder {source}: the folders of a folder are its classes")
        return _folder(Path(source), strict)
    if labels is not None:
        pictures, _, _ = as_images(source)
        named = _listed(labels)
        if len(named) != len(pictures):
            given = f"{count(len(pictures), 'image')} with {count(len(named), 'label')}"
            raise DataError(f"{given} given: one each is needed")
        return _labelled("arrays", pictures, named, classes)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        try:
            pairs = [source[i] for i in range(len(source))]
        except Exception as error:  # a user's own code, or no dataset at all
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise DataError(f"the {type(source).__name__} cannot be read as a dataset ({reason})") from error
        if any(not isinstance(pair, tuple | list) or len(pair) < 2 for pair in pairs):
            raise DataError("a dataset of (image, label) pairs is needed; images alone need labels")
        images = _unlabelled(tuple(_png(pair[0]) for pair in pairs))
        return _labelled("dataset", images, _listed([pair[1] for pair in pairs]), classes or _own_names(source))
    raise DataError(f"{type(source).__name__} given: allowed are a folder, arrays with labels, or a torch Dataset")


def labelled(images: Any, labels: Any = None) -> Images:
    """Return what `take` takes, or images of ours, as images whose labels are positions in their names."""
    if isinstance(images, ArrayImages | FileImages) and labels is None:
        numbers = range(int(images.labels.max()) + 1 if len(images) else 0)
        if len(images) and int(images.labels.min()) < 0:
            raise DataError(f"label {int(images.labels.min())} given: labels are numbers from 0")
        if images.names and len(numbers) > len(images.names):
            raise DataError(f"label {len(numbers) - 1} has no name: {count(len(images.names), 'class name')} given")
        return replace(images, names=class_names(images.names or numbers))
    found = take(images, labels, strict=True)
    return replace(pack(found.images), names=found.classes)  # those of one small size become what arrays would be


def with_rows(images: Images, classes: Sequence[str]) -> Images:
    """Return images whose labels are positions in `classes`, found by their names; -1 where there is none."""
    position = {name: i for i, name in enumerate(classes)}
    mapping = torch.tensor([position.get(name, -1) for name in images.names], dtype=torch.int64)
    return images.relabel(mapping, classes)


def _folder(root: Path, strict: bool) -> Intake:
    images, classes, problems = scan_folder(root, strict)
    if not classes:
        first = f"; first: {problems[0][0]}: {problems[0][1]}" if problems else ""
        raise DataError(
            f"{shown(root)}: no class folders with images found; put the images of each class into a folder of its own, "
            f"named after the class{first}"
        )
    paths = [item.relative_to(root) for item in images.items if isinstance(item, Path)]
    if all(len(path.parts) > 2 for path in paths):
        # Not the images that are to be tested with, as far as names tell.
        part = root / min(classes, key=lambda name: (name != "train", name.lower().startswith(("test", "val"))))
        raise DataError(
            f"{shown(root)}: its folders hold folders, not images, so they are parts of a dataset, not classes; give one of them, "
            f"such as {shown(part)}"
        )
    names = tuple(shown(path) for path in paths)
    return Intake(shown(root), images, classes, names, problems)


def _listed(labels: Any) -> list[Any]:
    """Return labels, (N,) or (N, 1), as a list of plain values."""
    try:
        values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        found = [value.item() if isinstance(value, Tensor | np.generic) else value for value in values]
    except (TypeError, ValueError, RuntimeError) as error:  # no list at all; several numbers in one; no values (meta)
        raise DataError(
            f"labels: {type(labels).__name__} given; one class name or number an image is needed"
        ) from error
    return [value[0] if isinstance(value, list | tuple) and len(value) == 1 else value for value in found]


def _own_names(dataset: Any) -> Sequence[str] | None:
    """Return the class names that a dataset has, as those of torchvision do."""
    names = getattr(dataset, "classes", None)
    return names if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else None


def _labelled(title: str, images: Images, labels: list[Any], classes: Sequence[str] | None) -> Intake:
    """Name the classes: by position in `classes` where labels are whole numbers and names are given, else as they are."""
    if isinstance(classes, str) or not isinstance(classes, Iterable | None):
        raise DataError(f"classes: {type(classes).__name__} given; a list of class names is needed")
    if not labels:
        raise DataError(f"{title}: no images given")
    known = None if classes is None else class_names(classes)
    if known is not None and all(isinstance(label, int) for label in labels):
        wrong = [label for label in labels if not 0 <= label < len(known)]
        if wrong:
            raise DataError(f"label {wrong[0]} has no name: {count(len(known), 'class name')} given")
        texts = [known[label] for label in labels]
    else:
        texts = [class_name(label) for label in labels]
        foreign = set(texts) - set(texts if known is None else known)
        if foreign:
            raise DataError(f"label {min(foreign)!r} is not one of the classes given")
    names = tuple(sorted(set(texts), key=lambda text: (natural_key(text), text)))
    position = {name: i for i, name in enumerate(names)}
    mapped = torch.tensor([position[text] for text in texts])
    images = ArrayImages(images.pixels, mapped) if isinstance(images, ArrayImages) else FileImages(images.items, mapped)
    return Intake(title, images, names, tuple(f"{text}/image {i}" for i, text in enumerate(texts)))


def as_images(source: Any) -> tuple[Images, list[str], Skipped]:
    """Take images without labels: files, folders (with all that is in them), arrays, PIL images; with names for people."""
    if isinstance(source, np.ndarray | Tensor):
        pixels = as_pixels(source)
        if source.ndim == 3 and 3 in (source.shape[0], source.shape[2]):
            raise DataError(
                f"an array of shape {tuple(source.shape)} may be one color picture or {source.shape[0]} grey ones; "
                "give one axis more: (1, 3, H, W) or (1, H, W, 3), or (N, 1, H, W)"
            )
        return _unlabelled(pixels), [f"image {i}" for i in range(len(pixels))], ()
    if not isinstance(source, str | Path | Image.Image | Iterable):
        raise DataError(f"images: {source!r} given; allowed: files, folders, arrays, PIL images, or several of them")
    try:
        parts = [source] if isinstance(source, str | Path | Image.Image) else list(source)
    except Exception as error:  # whatever a user's own object raises
        raise DataError(
            f"images: the {type(source).__name__} cannot be iterated over ({type(error).__name__})"
        ) from error
    items: list[Item] = []
    names: list[str] = []
    skipped: list[tuple[str, str]] = []
    for i, part in enumerate(parts):
        if isinstance(part, str | Path):
            paths = _files(Path(part), skipped)
            items += paths
            names += [shown(path) for path in paths]
        else:
            items.append(_png(part))
            names.append(f"image {i}")
    return _unlabelled(tuple(items)), names, tuple(skipped)


def _unlabelled(content: Tensor | tuple[Item, ...]) -> Images:
    labels = torch.zeros(len(content), dtype=torch.int64)
    return ArrayImages(content, labels) if isinstance(content, Tensor) else FileImages(content, labels)


def _files(path: Path, skipped: list[tuple[str, str]]) -> list[Path]:
    """Return a file, or all files below a folder; what cannot be read there is added to `skipped`."""
    if os.path.isfile(path):  # noqa: PTH113  # Path.is_file raises where a name is too long
        return [path]
    if not is_folder(path):  # a pipe or a device would be waited for: it is not opened
        skipped.append((shown(path), "not a regular file" if os.path.lexists(path) else "no such file or folder"))
        return []
    found: list[tuple[str, str]] = []
    files = list(walk(path, path, {identity(path)}, found))
    skipped += [(shown(path / name), reason) for name, reason in found]
    return files


def _png(image: Any) -> bytes:
    """Encode an image in memory without loss: a PIL image, or an array of one image."""
    if isinstance(image, Image.Image):
        try:
            image = upright_rgb(image)
        except Exception as error:  # a closed file, no pixels: pillow raises whatever it comes to
            raise DataError(f"a PIL image cannot be used ({type(error).__name__}: {one_line(error)})") from error
    else:
        image = Image.fromarray(as_pixels(image, one=True)[0].permute(1, 2, 0).contiguous().numpy())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


# ----------------------------------------------------------------------------------------------------------- decoding


def square(images: Images, i: int, size: int) -> Tensor | str:
    """Return one image as uint8 pixels (3, size, size), or why it cannot be used."""
    item = images.items[i] if isinstance(images, FileImages) else b""
    try:
        width, height = check_header(item) if isinstance(images, FileImages) else images.pixels.shape[:1:-1]  # (W, H)
        if min(width, height) < SMALLEST:
            return f"only {width} x {height} pixels; at least {SMALLEST} a side are needed"
        return fit(images.select([i]), size).pixels[0]
    except DataError as error:
        return str(error).removeprefix(f"{shown(item)}: ")


def squares(images: Images, size: int, workers: int) -> Iterator[tuple[list[int], Tensor, list[tuple[int, str]]]]:
    """Decode images in order, by threads, a few batches ahead; a bad one is named and never stops the others.

    Gives (positions, uint8 pixels (b, 3, size, size), [(position, reason)]).
    """
    parts = (range(start, min(start + BATCH, len(images))) for start in range(0, len(images), BATCH))
    groups = ((part, ((images, i, size) for i in part)) for part in parts)
    for part, found in in_threads(square, groups, max(workers, 1), 2):
        good = [(i, pixels) for i, pixels in zip(part, found, strict=True) if isinstance(pixels, Tensor)]
        bad = [(i, reason) for i, reason in zip(part, found, strict=True) if isinstance(reason, str)]
        empty = torch.empty(0, 3, size, size, dtype=torch.uint8)
        yield [i for i, _ in good], torch.stack([pixels for _, pixels in good]) if good else empty, bad


def decode(
    intake: Intake, size: int, workers: int, told: Callable[[int, Skipped], None] = lambda done, problems: None
) -> Decoded:
    """Decode all images of an intake once, at the model's size; `told` hears how many are done, and what is wrong."""
    keep = len(intake.images) * 3 * size * size <= IN_MEMORY
    kept: list[int] = []
    digests: list[str] = []
    parts: list[Tensor] = []
    problems: list[tuple[str, str]] = []
    total, squared = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    grey = True
    for positions, pixels, bad in squares(intake.images, size, workers):
        kept += positions
        digests += _unlabelled(pixels).item_digests()
        problems += [(intake.names[i], reason) for i, reason in bad]
        told(len(kept) + len(problems), tuple(problems))
        values = pixels.double() / 255
        total += values.sum(dim=(0, 2, 3))
        squared += values.square().sum(dim=(0, 2, 3))
        grey = grey and bool((pixels[:, :1] == pixels).all())
        if keep:
            parts.append(pixels)
    count = max(len(kept) * size * size, 1)
    mean = total / count
    # Not below 0.05: pictures that are nearly all alike must not be blown up into noise.
    std = (squared / count - mean.square()).clamp(min=0).sqrt().clamp(min=0.05)
    chosen = intake.images.select(kept)
    images = ArrayImages(torch.cat(parts), chosen.labels) if keep and kept else chosen
    return Decoded(images, tuple(kept), tuple(digests), tuple(problems), _three(mean), _three(std), grey)


def _three(values: Tensor) -> tuple[float, float, float]:
    red, green, blue = (round(value, 4) for value in values.tolist())
    return red, green, blue


def typical_side(images: Images, looks: int = 500) -> int:
    """Return the median of the shorter sides; of many files only some, evenly spread, are looked at."""
    if isinstance(images, ArrayImages):
        return min(images.pixels.shape[2:])
    sides = []
    for item in images.items[:: max(1, len(images) // looks)]:
        with suppress(DataError):  # named later, when it is decoded
            sides.append(min(check_header(item)))
    return sorted(sides)[len(sides) // 2] if sides else 32
