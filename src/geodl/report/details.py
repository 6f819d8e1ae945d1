"""What the page shows of one setting by itself, as plain data for its templates: classes, exemplars, training, origin."""

import base64
import io
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from PIL import Image

from geodl.config import groups_of_options
from geodl.data.images import Images
from geodl.errors import GeodlError
from geodl.methods import METHODS
from geodl.predictors import CLASSIFIERS
from geodl.report import plots
from geodl.report.results import PUBLIC, Run, Setting
from geodl.report.tables import Table

FEW = 3
"""A page of more settings than these shows the details of each under its main classifier alone, without exemplars."""
SHOWN = 8
"""Exemplars of a class, and confusions, that are shown."""
SIDE = 48
"""Largest side of a thumbnail in pixels."""
MANY = 40
"""Lists of more classes are folded."""
HUGE = 200
"""Of more classes only the main classifier is shown, and fewer exemplars: the page stays small."""


def details(settings: Sequence[Setting], with_images: bool | None) -> list[dict[str, Any]]:
    """Return what is shown of each setting."""
    prefixes = [f"s{i}-" for i in range(len(settings))] if len(settings) > 1 else [""]
    whole = len(settings) <= FEW
    return [_setting(each, prefix, whole, with_images) for each, prefix in zip(settings, prefixes, strict=True)]


def _setting(setting: Setting, prefix: str, whole: bool, with_images: bool | None) -> dict[str, Any]:
    run = setting.first
    small = len(run.classes) <= HUGE
    shown = setting.classifiers if whole and small else [setting.main] if setting.main else []
    words = f"Of the run with seed {run.config['seed']}. " if len(setting.runs) > 1 and "seed" in run.config else ""
    if len(shown) < len(setting.classifiers):
        words += f"Under {CLASSIFIERS[shown[0]]} alone."
    environment = [("directory", ", ".join(each.path.name for each in setting.runs)), *sorted(run.environment.items())]
    return {
        "label": setting.label,
        "prefix": prefix,
        "words": words.strip(),
        "folded": len(run.classes) > MANY,
        # The main classifier first: it is the panel that is open.
        "panels": [_panel(setting, name) for name in sorted(shown, key=lambda name: name != setting.main)],
        "exemplars": _exemplars(run, with_images) if whole and run.done else None,
        "training": _training(run) if run.epochs else None,
        "commands": [command for each in setting.runs if (command := each.command())],
        "configuration": _configuration(run),
        "environment": [(name, _plain(value), False) for name, value in environment],
    }


def _panel(setting: Setting, classifier: str) -> dict[str, Any]:
    """Return what is shown under one classifier: group by phase, what is taken for what, class after class."""
    run = setting.first
    count = len(run.classes)
    accuracies, found = run.results[classifier]["per_class"], run.confusion(classifier)
    tests = dict(zip(found.classes, found.counts.sum(dim=1).tolist(), strict=True))
    confusions = [
        [found.classes[i], found.classes[j], n, 100 * n / tests[found.classes[i]]] for i, j, n in found.mistakes(SHOWN)
    ]
    return {
        "name": CLASSIFIERS[classifier],
        "groups": plots.groups(setting, classifier),
        "matrix": plots.confusion(setting, classifier),
        "zoom": min(18 * count + 160, 4000) if count > 20 else 0,
        "confusions": Table(["true class", "taken for", "images", "% of the class"], confusions),
        "bars": [[(name, accuracies.get(name), tests[name]) for name in group] for group in run.groups],
    }


def _exemplars(run: Run, with_images: bool | None) -> dict[str, Any]:
    """Return the first exemplars of each class; those of data that may be private only when asked for."""
    try:
        memory = run.memory()
        if memory.images is None:
            return {"words": "No images are kept.", "strips": []}
        counts = memory.per_class()
        words = f"{sum(counts.values())} images of {len(counts)} classes, {memory.nbytes / 1024:,.0f} KiB."
        if not (run.config.get("data") in PUBLIC if with_images is None else with_images):
            if with_images is None:
                words += " They may be private, so they are not shown; --with-images shows them."
            return {"words": words, "strips": []}
        each = max(1, min(SHOWN, SHOWN * HUGE // len(counts)))
        strips = list(_strips(memory.images, run.classes, each))
    except GeodlError as error:  # an image file that is kept by reference may have gone
        return {"words": f"The exemplars cannot be shown: {error}", "strips": []}
    words += f" The first {each} of each class, best first." if max(counts.values()) > each else " Best first."
    return {"words": words, "strips": strips, "folded": len(counts) > MANY}


def _strips(images: Images, classes: Sequence[str], each: int) -> Iterator[dict[str, Any]]:
    """Return each class's name and its first exemplars side by side as one WebP image in base 64."""
    for label, rows in groupby(range(len(images)), key=lambda i: int(images.labels[i])):
        thumbnails = [thumbnail(images.decode(i), SIDE) for i in list(rows)[:each]]
        height = max(image.height for image in thumbnails)
        gap = max(1, height // 16)
        strip = Image.new("RGBA", (sum(image.width + gap for image in thumbnails) - gap, height))
        left = 0
        for image in thumbnails:
            strip.paste(image, (left, 0))
            left += image.width + gap
        ratio = strip.width / height
        yield {"name": classes[label], "count": len(thumbnails), "ratio": ratio, "data": webp(strip)}


def thumbnail(image: Image.Image, most: int) -> Image.Image:
    """Return the middle square, made small where it has more than `most` pixels a side."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((most, most), Image.Resampling.LANCZOS) if side > most else square


def webp(image: Image.Image) -> str:
    """Return a picture as WebP in base 64."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", lossless=image.height <= 16, quality=82)
    return base64.b64encode(buffer.getvalue()).decode()


def _training(run: Run) -> dict[str, Any]:
    """Return the loss epoch by epoch, and the speed."""
    rate = statistics.median(epoch.rate for epoch in run.epochs)
    words = f"Epochs: {len(run.epochs)}, at {rate:,.0f} images per second (median)."
    if run.done and run.epochs[0].phase > 0:
        words += " Phase 0 was not trained here: it came from the cache of base phases."
    return {"plots": plots.training(run), "words": words}


def _configuration(run: Run) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Return every option by group, with whether it is not the method's default."""
    config: dict[str, Any] = dict(run.config)
    parts = []
    method = METHODS.get(str(config.get("method")))
    defaults = method.Config().identity() if method else {}
    for title, options in (groups_of_options(method.Config) if method else {}).items():
        known = [(name, config.pop(name)) for name in options if name in config]
        parts.append((title, [(name, _plain(value), value != defaults.get(name)) for name, value in known]))
    parts.append(("Other", [(name, _plain(value), False) for name, value in sorted(config.items())]))
    return [part for part in parts if part[1]]


def _plain(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
