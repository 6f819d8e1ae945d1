"""The parts of the page that show one setting by itself: groups, confusions, classes, exemplars, training, origin."""

import base64
import io
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image

from geodl.config import groups_of_options
from geodl.data.images import Images
from geodl.errors import GeodlError
from geodl.methods import METHODS
from geodl.predictors import CLASSIFIERS
from geodl.report import plots
from geodl.report.markup import definitions, escape, figure, grid, note, section, table, tabs
from geodl.report.results import PUBLIC, Run, Setting
from geodl.report.tables import Cell, Table

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


def details(settings: Sequence[Setting], with_images: bool | None) -> str:
    """Show each setting by itself; of several, each is folded."""
    if len(settings) == 1:
        return _setting(settings[0], "", True, with_images)
    parts = [
        f'<details class="setting"><summary>{escape(setting.label)}</summary>'
        f"{_setting(setting, f's{number}-', len(settings) <= FEW, with_images)}</details>"
        for number, setting in enumerate(settings)
    ]
    words = f"Of more than {FEW} settings each is shown under one classifier, without exemplars. A report of one shows all of it."
    return section("details", "Each setting by itself", note(words if len(settings) > FEW else ""), *parts)


def _setting(setting: Setting, prefix: str, whole: bool, with_images: bool | None) -> str:
    run = setting.first
    small = len(run.classes) <= HUGE
    shown = setting.classifiers if whole and small else [setting.main] if setting.main else []
    # The main classifier first: it is the panel that is open.
    ordered = sorted(shown, key=lambda name: name != setting.main)
    panels = {CLASSIFIERS[name]: _classifier(setting, name, prefix) for name in ordered}
    words = f"Of the run with seed {run.config['seed']}. " if len(setting.runs) > 1 and "seed" in run.config else ""
    if len(shown) < len(setting.classifiers):
        words += f"Under {CLASSIFIERS[shown[0]]} alone."
    return (
        section(f"{prefix}classes", "Class by class", note(words.strip()), tabs(f"{prefix}classifier", panels))
        + (section(f"{prefix}exemplars", "Exemplars kept", _exemplars(run, with_images)) if whole else "")
        + section(f"{prefix}training", "Training", _training(run, prefix))
        + section(f"{prefix}origin", "Where this comes from", _origin(setting))
    )


def _classifier(setting: Setting, classifier: str, prefix: str) -> str:
    """Show one classifier: group by phase, what is taken for what, class after class."""
    drawn = plots.groups(setting, classifier)
    caption = "A row fades to the right where its classes are forgotten."
    over_time = figure(drawn, f"{prefix}{drawn.name}", "Each phase's classes over time", caption) if drawn else ""
    count = len(setting.first.classes)
    matrix = plots.confusion(setting, classifier)
    caption = (
        "Rows: the true class; columns: what it is taken for, in % of its test images. Classes in the order of learning, lines "
        "between phases. Colour by square root."
    )
    zoom = min(18 * count + 160, 4000) if count > 20 else 0
    taken = figure(matrix, f"{prefix}{matrix.name}", "What is taken for what", caption, zoom=zoom)
    beside = over_time + _confusions(setting.first, classifier)
    return f'<div class="grid pair"><div>{beside}</div>{taken}</div>' + _per_class(setting.first, classifier)


def _confusions(run: Run, classifier: str) -> str:
    """List the most frequent confusions."""
    counts = run.confusion(classifier)
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:SHOWN]
    pairs = [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[i, j]]
    rows: list[list[Cell]] = [
        [run.classes[i], run.classes[j], int(wrong[i, j]), 100.0 * float(wrong[i, j] / counts[i].sum())]
        for i, j in pairs
    ]
    if not rows:
        return ""
    return "<h3>Most frequent confusions</h3>" + table(
        Table(["true class", "taken for", "images", "% of the class"], rows)
    )


def _per_class(run: Run, classifier: str) -> str:
    """Show the accuracy on each class as bars, phase by phase."""
    values = run.results[classifier]["per_class"]
    tests = dict(zip(run.classes, run.confusion(classifier).sum(axis=1).tolist(), strict=True))
    blocks = []
    for phase, group in enumerate(run.groups):
        items = "".join(_bar(name, values.get(name), tests[name]) for name in group)
        small = ' class="small"' if len(group) <= 12 else ""
        blocks.append(f"<div{small}><h4>phase {phase}</h4><ul>{items}</ul></div>")
    title, body = "Accuracy on each class", f'<div class="bars">{"".join(blocks)}</div>'
    return _folded(title, body) if len(run.classes) > MANY else f"<h3>{title}</h3>{body}"


def _bar(name: str, value: float | None, tests: int) -> str:
    shown = "-" if value is None else f"{value:.0f}"
    width = 0 if value is None else value
    return (
        f'<li title="{escape(name)}: {shown} % of {tests} test images"><span>{escape(name)}</span>'
        f'<i><i style="width:{width:.1f}%"></i></i><b>{shown}</b></li>'
    )


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _exemplars(run: Run, with_images: bool | None) -> str:
    """Show the first exemplars of each class; those of data that may be private only when asked for."""
    if not run.done:
        return ""
    try:
        memory = run.memory()
        counts = memory.per_class()
        words = f"{sum(counts.values())} images of {len(counts)} classes, {memory.nbytes / 1024:,.0f} KiB."
        if memory.images is None:
            return note("No images are kept.")
        public = run.config.get("data") in PUBLIC
        if not (public if with_images is None else with_images):
            more = (
                "" if with_images is False else " They may be private, so they are not shown; --with-images shows them."
            )
            return note(words + more)
        each = max(1, min(SHOWN, SHOWN * HUGE // len(counts)))
        strips = _strips(memory.images, run.classes, each)
        items = "".join(f"<figure>{image}<figcaption>{escape(name)}</figcaption></figure>" for name, image in strips)
    except GeodlError as error:  # an image file that is kept by reference may have gone
        return note(f"The exemplars cannot be shown: {error}")
    shown = f" The first {each} of each class, best first." if max(counts.values()) > each else " Best first."
    body = f'<div class="strips">{items}</div>'
    return note(words + shown) + (_folded("Show them", body) if len(counts) > MANY else body)


def _strips(images: Images, classes: Sequence[str], each: int) -> Iterator[tuple[str, str]]:
    """Give each class's name and its first exemplars side by side as one <img>."""
    for label, rows in groupby(range(len(images)), key=lambda i: int(images.labels[i])):
        thumbnails = [_thumbnail(images.decode(i)) for i in list(rows)[:each]]
        height = max(image.height for image in thumbnails)
        gap = max(1, height // 16)
        strip = Image.new("RGBA", (sum(image.width + gap for image in thumbnails) - gap, height))
        left = 0
        for image in thumbnails:
            strip.paste(image, (left, 0))
            left += image.width + gap
        buffer = io.BytesIO()
        strip.save(buffer, "WEBP", lossless=height <= 16, quality=82)
        data = base64.b64encode(buffer.getvalue()).decode()
        alt = f"{len(thumbnails)} exemplars of {classes[label]}"
        shape = f'style="--count:{strip.width / height:.2f}"'
        yield classes[label], f'<img loading="lazy" {shape} alt="{escape(alt)}" src="data:image/webp;base64,{data}">'


def _thumbnail(image: Image.Image) -> Image.Image:
    """Cut the middle square and make it small."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((SIDE, SIDE), Image.Resampling.LANCZOS) if side > SIDE else square


def _training(run: Run, prefix: str) -> str:
    """Show the loss epoch by epoch, and the speed."""
    drawn = [figure(plot, f"{prefix}{plot.name}", "Loss") for plot in plots.training(run)]
    if not run.epochs:
        return ""
    rate = statistics.median(epoch.rate for epoch in run.epochs)
    words = f"Epochs: {len(run.epochs)}, at {rate:,.0f} images per second (median)."
    if run.done and run.epochs[0].phase > 0:
        words += " Phase 0 was not trained here: it came from the cache of base phases."
    return grid(drawn) + note(words)


def _origin(setting: Setting) -> str:
    """Show the command that computes each run again, the configuration and the environment."""
    commands = [run.command() for run in setting.runs]
    known = "".join(f"<pre><code>{escape(command)}</code></pre>" for command in commands if command)
    parts = [known or note("No command computes this again: its data came from memory, or a person's images.")]
    parts += [f"<h3>Configuration</h3>{_configuration(setting.first)}"]
    environment = [(name, value, False) for name, value in sorted(setting.first.environment.items())]
    directories = ", ".join(run.path.name for run in setting.runs)
    parts += [f"<h3>Environment</h3>{definitions([('directory', directories, False), *environment])}"]
    return "".join(parts)


def _configuration(run: Run) -> str:
    """Show every option by group; bold where it is not the method's default."""
    config: dict[str, Any] = dict(run.config)
    parts = []
    method = METHODS.get(str(config.get("method")))
    for title, options in (groups_of_options(method.Config) if method else {}).items():
        defaults = method.Config().identity() if method else {}
        values = [(name, value := config.pop(name), value != defaults.get(name)) for name in options if name in config]
        if values:
            parts.append(f"<h4>{escape(title)}</h4>{definitions(values)}")
    if config:
        parts.append(f"<h4>Other</h4>{definitions((name, value, False) for name, value in sorted(config.items()))}")
    return f'<div class="options">{"".join(f"<div>{part}</div>" for part in parts)}</div>' + note(
        "Bold: not the method's default."
    )
