"""Any image-classification dataset of the Hugging Face hub, by name or from a local copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from geodl.data.dataset import Dataset, drawn, fingerprint_of, packed, source
from geodl.data.images import FileImages, Item
from geodl.data.names import class_name, class_names
from geodl.errors import ConfigError, DataError, MissingExtraError
from geodl.text import one_line

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
    known = getattr(splits["train"].features[label], "names", None)
    names = class_names(sorted(set(splits["train"][label])) if known is None else known)
    train = _images(splits["train"], image, label, names)
    held = next((split for split in _TEST_SPLITS if split in splits), None)
    if held is None:
        train, test, split = drawn(train, names, test_fraction, split_seed)
    else:
        test, split = _images(splits[held], image, label, names), f"splits train and {held}"
    words = f"{split}; columns {image}, {label}"
    return Dataset(str(root), *packed(train, test), names, fingerprint_of(train, test), split=words)


def _load(root: Path) -> Any:
    """Return the splits by name. A local folder is one that `save_to_disk` wrote, or whatever `load_dataset` reads."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("hub", "reading datasets of the Hugging Face hub") from None
    try:
        if (root / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(root))
        return datasets.load_dataset(str(root))
    except Exception as error:  # network, authentication, format: the library has its own exceptions for each
        raise DataError(f"{root}: cannot be loaded ({one_line(error)})") from None


def _columns(features: Any, image: str | None, label: str | None) -> tuple[str, str]:
    """Find the image and the label column: those named, or the only candidates."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    for key, column in (("image_column", image), ("label_column", label)):
        if column is not None and column not in kinds:
            raise ConfigError(f"{key}: no column {column!r}, allowed: {', '.join(kinds)}")
    pictures = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    usual = [name for name in _LABEL_NAMES if name in (labels or kinds)]
    label_candidates = labels if len(labels) == 1 else usual[:1]
    if image is None and len(pictures) != 1:
        raise ConfigError(f"image_column: {len(pictures)} image columns found, name one of: {', '.join(kinds)}")
    if label is None and not label_candidates:
        raise ConfigError(f"label_column: no label column found, name one of: {', '.join(kinds)}")
    return image or pictures[0], label or label_candidates[0]


def _images(split: Any, image: str, label: str, names: tuple[str, ...]) -> FileImages:
    import datasets

    values = list(split[label])
    if getattr(split.features[label], "names", None) is None:
        position = {name: i for i, name in enumerate(names)}
        values = [position.get(class_name(value), -1) for value in values]
    if any(not isinstance(value, int) or not 0 <= value < len(names) for value in values):
        raise DataError(f"label_column: {label!r} has labels that are not among the {len(names)} training classes")
    undecoded = split.cast_column(image, datasets.Image(decode=False))
    items = tuple(_item(picture) for picture in undecoded[image])
    return FileImages(items, torch.tensor(values, dtype=torch.int64))


def _item(picture: dict[str, Any] | None) -> Item:
    """Return the contents of a picture, or its file where the dataset only has the path."""
    if picture is None:
        raise DataError("image_column: a row without a picture")
    content = picture.get("bytes")
    return bytes(content) if content is not None else Path(picture["path"])
