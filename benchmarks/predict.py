"""How fast `geodl predict` is: start-up of the command, and images a second with 1, 2 and more decoding threads.

    python -m benchmarks.predict [--images 300] [--side 1000] [--network resnet20]

Writes JPEG photographs (noise over smooth color, so that they cost what photographs cost to decode) into a temporary
folder, trains a model on a few of them for one epoch (what it predicts does not matter here), and measures.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from geodl.app.classifier import IncrementalClassifier


def write_photographs(root: Path, count: int, side: int) -> None:
    """Write `count` JPEG files of side x 3/4 side pixels in two class folders."""
    generator = np.random.default_rng(0)
    height = side * 3 // 4
    for i in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8)).resize(
            (side, height)
        )
        pixels = np.asarray(coarse, np.int16) + generator.integers(
            -12, 13, (height, side, 3), np.int16
        )
        path = root / f"class {i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def seconds_of_command(*words: str) -> float:
    """Run the command in a process of its own, twice, and give the time of the second, warm run."""
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "from geodl.cli import main; main()", *words],
            check=True,
            capture_output=True,
        )
        seconds = time.perf_counter() - began
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--side", type=int, default=1000)
    parser.add_argument("--network", default="resnet20")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root / "photos", options.images, options.side)
        write_photographs(root / "few", 8, options.side)
        model = IncrementalClassifier(root / "model")
        model.learn(root / "few", epochs=1, network=options.network)
        print(
            f"{options.images} JPEG of {options.side} x {options.side * 3 // 4}, {options.network}, {os.cpu_count()} cores"
        )
        photo = str(next((root / "few").rglob("*.jpg")))
        print(
            f"start-up: geodl predict of one image, warm: {seconds_of_command('predict', str(root / 'model'), photo):.2f} s"
        )
        for workers in (1, 2, torch.get_num_threads() + 1):
            began = time.process_time()
            rate = model.predict(root / "photos", workers=workers).rate
            busy = (time.process_time() - began) * rate / options.images
            print(f"{workers} decoding threads: {rate:.0f} images/s, {busy:.1f} cores busy")


if __name__ == "__main__":
    main()
