"""Template data for the part of the page about a single setting: classes, exemplars, training, origin."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from geodl.bench.report import plots
from geodl.bench.report.published import reference
from geodl.bench.report.results import PUBLIC, Run, Setting
from geodl.bench.report.tables import Table
from geodl.core.errors import ConfigError, GeodlError
from geodl.data.images import Images
from geodl.model.classifiers import titles
from geodl.model.page import thumbnail, webp

FEW = 3
"""With more settings, the page shows each under its main classifier only, without exemplars."""
SHOWN = 8
"""Number of exemplars per class, and of confusions, shown."""
SIDE = 48
"""Largest side of a thumbnail in pixels."""
MANY = 40
"""Longer lists of classes are collapsed."""
HUGE = 200
"""With more classes, only the main classifier and fewer exemplars are shown to limit the size of the page."""


def details(settings: Sequence[Setting], with_images: bool | None) -> list[dict[str, Any]]:
    """Return the template data of each setting."""
    found = []
    for i, setting in enumerate(settings):
        prefix = f"s{i}-" if len(settings) > 1 else ""
        found.append(_setting(setting, prefix, len(settings) <= FEW, with_images))
    return found


def _setting(
    setting: Setting, prefix: str, whole: bool, with_images: bool | None
) -> dict[str, Any]:
    run, shown, words = setting.first, setting.classifiers, ""
    if setting.main and not (whole and len(run.classes) <= HUGE):
        shown = [setting.main]
    if len(setting.runs) > 1 and "seed" in run.config:
        words = f"Of the run with seed {run.config['seed']}. "
    if len(shown) < len(setting.classifiers):
        words += f"Under {titles()[shown[0]]} alone."
    # The main classifier first: its panel is open.
    order = sorted(shown, key=lambda name: name != setting.main)
    directories = ", ".join(one.path.name for one in setting.runs)
    environment = {"directory": directories, **dict(sorted(run.environment.items()))}
    return {
        "label": setting.label,
        "prefix": prefix,
        "words": words.strip(),
        "folded": len(run.classes) > MANY,
        "panels": [_panel(setting, name) for name in order],
        "exemplars": _exemplars(run, with_images) if whole and run.done else None,
        "training": _training(run) if run.epochs else None,
        "commands": [command for one in setting.runs if (command := one.command())],
        "configuration": _configuration(run),
        "environment": [(name, _plain(value), False) for name, value in environment.items()],
    }


def _panel(setting: Setting, classifier: str) -> dict[str, Any]:
    """Return the data of one classifier: accuracy by group and phase, confusion matrix, accuracy by class."""
    run = setting.first
    count = len(run.classes)
    accuracies, confusion = run.results[classifier]["per_class"], run.confusion(classifier)
    tests = dict(zip(confusion.classes, confusion.counts.sum(dim=1).tolist(), strict=True))
    mistakes = []
    for i, j, wrong in confusion.mistakes(SHOWN):
        name = confusion.classes[i]
        mistakes.append([name, confusion.classes[j], wrong, 100 * wrong / tests[name]])
    bars = []
    for group in run.groups:
        bars.append([(name, accuracies.get(name), tests[name]) for name in group])
    return {
        "name": titles()[classifier],
        "groups": plots.groups(setting, classifier),
        "matrix": plots.confusion(setting, classifier),
        "zoom": min(18 * count + 160, 4000) if count > 20 else 0,
        "confusions": Table(["true class", "predicted as", "images", "% of the class"], mistakes),
        "bars": bars,
    }


def _exemplars(run: Run, with_images: bool | None) -> dict[str, Any]:
    """Return the first exemplars of each class; those of data that may be private only on request."""
    try:
        memory = run.memory()
        if memory.images is None:
            return {"words": "No images are stored.", "strips": []}
        counts = memory.per_class()
        words = f"{sum(counts.values())} images of {len(counts)} classes, {memory.nbytes / 1024:,.0f} KiB."
        if not (run.config.get("data") in PUBLIC if with_images is None else with_images):
            if with_images is None:
                words += " They may be private, so they are not shown; --with-images shows them."
            return {"words": words, "strips": []}
        limit = max(1, min(SHOWN, SHOWN * HUGE // len(counts)))
        strips = list(_strips(memory.images, run.classes, limit))
    except GeodlError as error:  # an image file that is stored by reference may be missing
        return {"words": f"The exemplars cannot be shown: {error}", "strips": []}
    cut = max(counts.values()) > limit
    words += f" The first {limit} of each class, best first." if cut else " Best first."
    return {"words": words, "strips": strips, "folded": len(counts) > MANY}


def _strips(images: Images, classes: Sequence[str], limit: int) -> Iterator[dict[str, Any]]:
    """Yield each class's name and its first exemplars side by side as one WebP image in base64."""
    for label, rows in groupby(range(len(images)), key=lambda i: int(images.labels[i])):
        thumbnails = [thumbnail(images.decode(i), SIDE) for i in list(rows)[:limit]]
        height = max(image.height for image in thumbnails)
        gap = max(1, height // 16)
        strip = Image.new("RGBA", (sum(image.width + gap for image in thumbnails) - gap, height))
        left = 0
        for image in thumbnails:
            strip.paste(image, (left, 0))
            left += image.width + gap
        yield {
            "name": classes[label],
            "count": len(thumbnails),
            "ratio": strip.width / height,
            "data": webp(strip),
        }


def _training(run: Run) -> dict[str, Any]:
    """Return the loss by epoch, and the speed."""
    rate = statistics.median(epoch.rate for epoch in run.epochs)
    words = f"Epochs: {len(run.epochs)}, at {rate:,.0f} images per second (median)."
    if run.done and run.epochs[0].phase > 0:
        words += " Phase 0 was not trained here: it came from the cache of base phases."
    return {"plots": plots.training(run), "words": words}


def _configuration(run: Run) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Return the options by heading: name, value, and whether it differs from the method's default."""
    config, parts = dict(run.config), []
    if run.is_model and config.get("weights"):
        config["weights"] = Path(config["weights"]).name  # no local paths: the page may be shared
    with suppress(ConfigError):  # a method that this version does not have
        usual = reference(config)
        defaults = usual.identity()
        for title, options in usual.headings().items():
            known = {name: config.pop(name) for name in options if name in config}
            rows = [
                (name, _plain(each), each != defaults.get(name)) for name, each in known.items()
            ]
            parts.append((title, rows))
    others = [(name, _plain(value), False) for name, value in sorted(config.items())]
    return [part for part in (*parts, ("Other", others)) if part[1]]


def _plain(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
