"""Image-classification datasets of the Hugging Face hub, by name or from a local copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geodl.core.decoding import Item
from geodl.core.errors import ConfigError, DataError, MissingExtraError
from geodl.core.text import one_line
from geodl.data.dataset import Dataset, drawn, fingerprint_of, packed, source
from geodl.data.images import FileImages
from geodl.data.names import class_name, numbered

_TEST_SPLITS = ("test", "validation", "valid", "val")
_LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")


@source("hub")
def read_hub(
    root: Path | None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Dataset:
    """Any image-classification dataset of the Hugging Face hub, by its name or from a local folder."""
    if root is None:
        raise ConfigError("data_dir: hub needs the name of a dataset, or a local folder")
    splits = _load(root)
    if "train" not in splits:
        raise DataError(f"{root}: no split 'train', only {', '.join(splits)}")
    image, label = _columns(splits["train"].features, image_column, label_column)
    names = getattr(splits["train"].features[label], "names", None)
    train, classes = _images(splits["train"], image, label, names)
    held = next((split for split in _TEST_SPLITS if split in splits), None)
    if held is None:
        train, test, split = drawn(train, classes, test_fraction, split_seed)
    else:
        test, _ = _images(splits[held], image, label, classes)
        split = f"splits train and {held}"
    words = f"{split}; columns {image}, {label}"
    fingerprint = fingerprint_of(train, test)
    return Dataset(str(root), *packed(train, test), classes, fingerprint, split=words)


def _load(root: Path) -> Any:
    """Return the splits by name; a local folder is one that `save_to_disk` wrote or that `load_dataset` reads."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("hub", "reading datasets of the Hugging Face hub") from None
    try:
        if (root / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(root))
        return datasets.load_dataset(str(root))
    except Exception as error:  # network, authentication, format: each has its own exceptions
        raise DataError(f"{root}: cannot be loaded ({one_line(error)})") from None


def _columns(features: Any, image: str | None, label: str | None) -> tuple[str, str]:
    """Return the names of the image and the label column: those given, or the only candidates."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    columns = ", ".join(kinds)
    for key, column in (("image_column", image), ("label_column", label)):
        if column is not None and column not in kinds:
            raise ConfigError(f"{key}: no column {column!r}, allowed: {columns}")
    pictures = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    if len(labels) != 1:
        labels = [name for name in _LABEL_NAMES if name in (labels or kinds)]
    if image is None and len(pictures) != 1:
        found = f"{len(pictures)} image columns found"
        raise ConfigError(f"image_column: {found}, choose one of: {columns}")
    if label is None and not labels:
        raise ConfigError(f"label_column: no label column found, choose one of: {columns}")
    return image or pictures[0], label or labels[0]


def _images(split: Any, image: str, label: str, names: Any) -> tuple[FileImages, tuple[str, ...]]:
    """Return the images of a split and the names of its classes."""
    import datasets

    values = list(split[label])
    if names is not None and getattr(split.features[label], "names", None) is None:
        values = [class_name(value) for value in values]  # numbers are names too, not positions
    try:
        rows, classes = numbered(values, names)
    except DataError as error:
        raise DataError(f"label_column: {label!r}: {error}") from None
    undecoded = split.cast_column(image, datasets.Image(decode=False))
    return FileImages(tuple(_item(picture) for picture in undecoded[image]), rows), classes


def _item(picture: dict[str, Any] | None) -> Item:
    """Return the content of an image, or its file if the dataset has only the path."""
    if picture is None:
        raise DataError("image_column: a row without an image")
    content = picture.get("bytes")
    return bytes(content) if content is not None else Path(picture["path"])
