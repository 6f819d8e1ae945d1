"""The accuracy that `geodl learn` reports for photographs in series, beside that on test photographs.

Run with `python -m benchmarks.series DATA [--sets signs12,crops,flowers20] [--out docs/series.md]`. DATA has the folders `signs12` (frames of drive-bys, named
TRACK_FRAME.png) and `flowers20` (photographs, one by one), each with folders of steps (`week1`, ...) and `test`, which hold a folder for each class.
`crops` are series made from flowers20: ten photographs of each class, twenty jittered crops of each, under random names. Sets can be measured
one at a time: results are stored as JSON beside the table, which shows all of them.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image, ImageEnhance

from geodl import IncrementalClassifier

SETS = ("signs12", "crops", "flowers20")
PHOTOGRAPHS, CROPS = 10, 20
"""Photographs of each class, and crops of each photograph."""
CLOSE = 6.0
"""Accepted difference between reported and test accuracy for series, in points."""
TABLE = """# Series of photographs

Written by `python -m benchmarks.series DATA --out docs/series.md`, do not edit.

The accuracy that `geodl learn` reports after each step, with its interval, beside the accuracy on test photographs. `signs12`: traffic signs, 30 frames of
each of six drive-bys per class. `crops`: ten photographs per class of `flowers20`, twenty jittered crops of each, under random names. `flowers20`:
single photographs. All options are defaults. Each image is predicted by the model without its series; see [Your own images](own-images.md).
The test accuracy is an estimate as well: on 455 photographs of flowers its standard error is 0.7 points.

| set | step | images | series | reported | 95 % interval | test | difference | within the interval |
|---|---|---|---|---|---|---|---|---|
"""


def steps_of(data: Path, name: str, scratch: Path) -> Iterator[Path]:
    """Yield the folders of the steps of a set."""
    source = data / ("flowers20" if name == "crops" else name)
    for folder in sorted(source.glob("week*")):
        if name != "crops":
            yield folder
        else:
            yield made(folder, scratch / folder.name)


def made(source: Path, folder: Path, seed: int = 0) -> Path:
    """Write jittered crops of photographs in a folder of class folders, under random names."""
    draw = random.Random(f"{seed} {source.name}")
    for label in sorted(source.iterdir()):
        (folder / label.name).mkdir(parents=True)
        for photograph in draw.sample(sorted(label.iterdir()), PHOTOGRAPHS):
            with Image.open(photograph) as image:
                picture = image.convert("RGB")
            for _ in range(CROPS):
                name = f"{draw.getrandbits(64):016x}.jpg"
                jittered(picture, draw).save(folder / label.name / name, quality=90)
    return folder


def jittered(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Return a random crop near the center with random brightness and color."""
    side = int(min(picture.size) * draw.uniform(0.8, 1))
    shift = 0.1 * min(picture.size)
    centers = [(length - side) / 2 + draw.uniform(-shift, shift) for length in picture.size]
    x, y = (
        min(max(int(at), 0), length - side)
        for at, length in zip(centers, picture.size, strict=True)
    )
    crop = picture.crop((x, y, x + side, y + side))
    brighter = ImageEnhance.Brightness(crop).enhance(draw.uniform(0.8, 1.2))
    return ImageEnhance.Color(brighter).enhance(draw.uniform(0.8, 1.2))


def measure(data: Path, name: str, scratch: Path) -> list[dict]:
    """Learn a set step by step; return reported and test accuracy after each."""
    model = IncrementalClassifier(scratch / "model")
    test = data / ("flowers20" if name == "crops" else name) / "test"
    found = []
    for folder in steps_of(data, name, scratch):
        began = time.process_time()
        done = model.learn(folder, threads=1, workers=1)
        figures = {
            "images": done.judged,
            "series": done.judged - done.in_series + done.series,
            "claimed": done.accuracy,
            "interval": done.interval,
            "test": model.evaluate(test, workers=1).accuracy,
            "seconds": time.process_time() - began,
        }
        found.append(figures)
        print(row(name, len(found), figures), flush=True)
    return found


def row(name: str, step: int, figures: dict) -> str:
    """Return a line of the table."""
    low, high = figures["interval"]
    test, claimed = figures["test"], figures["claimed"]
    inside = "yes" if low <= test <= high else "no"
    return (
        f"| {name} | {step} | {figures['images']:,} | {figures['series']:,} | {claimed:.1f} % | {low:.1f} to {high:.1f} "
        f"| {test:.1f} % | {test - claimed:+.1f} | {inside} |"
    )


def main() -> None:
    """Measure, print lines of the table, and update the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.sets.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            figures = measure(arguments.data, name, Path(scratch))
        if arguments.out:
            kept = arguments.out.with_suffix(".json")
            every = (json.loads(kept.read_text()) if kept.exists() else {}) | {name: figures}
            kept.write_text(json.dumps(every, indent=1) + "\n")
            lines = [
                row(name, step, each)
                for name in SETS
                for step, each in enumerate(every.get(name, []), 1)
            ]
            arguments.out.write_text(TABLE + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
