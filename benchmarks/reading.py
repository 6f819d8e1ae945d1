"""The cost of predicting and learning photographs: processor time beside onnxruntime, start-up of commands, memory.

    python -m benchmarks.reading [--parts speed,start,growth] [--images 200] [--growth 1000,5000,10000,20000] [--size 192] [--out docs/cost.md]

speed: `predict` beside onnxruntime and Pillow on the exported file (the code of the tutorial), on the same JPEG files: processor milliseconds per
image with one thread, the largest difference between confidences, and images per second on all cores.
start: processor seconds of `geodl predict MODEL PHOTO` and of a `learn` step with fifty photographs, and the frameworks that they load.
growth: `learn` with growing numbers of photographs of ten classes: processor and wall seconds, peak memory.

Photographs are generated (`benchmarks.pictures`). The page has the parts that were run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from PIL import Image

from benchmarks.pictures import write_photographs
from geodl import IncrementalClassifier
from geodl.core.devices import available_cores
from geodl.learning.timing import take_turns

CLASSES, TURNS, FEW = 10, 3, 50
COMMAND = "from geodl.cli import main; main()"
PAGE = """# The cost of photographs

Written by `python -m benchmarks.reading --out docs/cost.md`, do not edit.

"""
FRAMEWORKS = ("torch", "lightning_fabric", "onnxruntime")


class Exported:
    """The exported file in onnxruntime, with numpy and Pillow."""

    def __init__(self, file: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(str(file), options)
        about = self.session.get_modelmeta().custom_metadata_map
        self.size = json.loads(about["preprocessing"])["size"]
        self.input = self.session.get_inputs()[0].name

    def __call__(self, files: list[Path]) -> np.ndarray:
        """Return the probabilities (N, C) of files, predicted one by one."""
        return np.concatenate([self.session.run(None, self.one(file))[0] for file in files])

    def one(self, file: Path) -> dict[str, np.ndarray]:
        """Return the input for a file: the center square, 0 to 255."""
        with Image.open(file) as image:
            rgb = image.convert("RGB")
        side, width, height = min(rgb.size), *rgb.size
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        square = rgb.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        return {self.input: np.asarray(square).transpose(2, 0, 1)[None]}


def speed(root: Path, images: int, size: int) -> list[str]:
    """Compare `predict` with onnxruntime on the exported file."""
    photos = write_photographs(root / "photos", images)
    files = sorted(photos.rglob("*.jpg"))
    torch.set_num_threads(1)
    model = IncrementalClassifier(root / "model")
    model.learn(write_photographs(root / "few", 100), image_size=size, threads=1)
    model.export(root / "model.onnx")
    exported, found = Exported(root / "model.onnx", 1), {}
    recognizer = model.recognizer()
    ways = {
        "geodl": lambda: found.update(ours=recognizer.predict(files, workers=1).probabilities),
        "onnxruntime": lambda: found.update(theirs=exported(files)),
    }
    times = take_turns(ways, TURNS, time.process_time)
    each = {name: 1000 * statistics.median(took) / len(files) for name, took in times.items()}
    apart = float(np.abs(found["ours"] - found["theirs"]).max())
    lines = [
        f"| {name} | {each[name]:.1f} | {each[name] / each['onnxruntime']:.2f} |" for name in each
    ]
    cores = available_cores()
    torch.set_num_threads(cores)
    exported = Exported(root / "model.onnx", cores)
    walls = take_turns(
        {"geodl": lambda: recognizer.predict(files), "onnxruntime": lambda: exported(files)}, TURNS
    )
    rates = {name: len(files) / statistics.median(took) for name, took in walls.items()}
    return [
        "## Files to scores",
        "",
        f"{len(files)} JPEG files at {size} x {size} pixels, each read as it is and mirrored where that keeps the class. One thread; the largest difference",
        f"between confidences is {apart:.1g}. On {cores} cores: geodl {rates['geodl']:.0f} images/s, onnxruntime {rates['onnxruntime']:.0f}.",
        "",
        "| | processor ms an image | times onnxruntime |",
        "|---|---:|---:|",
        *lines,
    ]


def processor_seconds(words: list[str], *, loads: bool = False) -> dict[str, Any]:
    """Run a geodl command in a child process; return processor and wall seconds, and its peak memory or loaded frameworks."""
    # Not ru_maxrss, which starts with the memory of the parent process.
    report = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    if loads:
        report = f"import sys; print([m for m in {FRAMEWORKS} if m in sys.modules])"
    code = f"try:\n {COMMAND}\nexcept SystemExit as end: assert not end.code\nfinally:\n {report}"
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        output.seek(0)
        last = output.read().decode().strip().splitlines()[-1:]
    if status:
        raise RuntimeError(f"geodl {' '.join(words)} failed")
    return {
        "processor": usage.ru_utime + usage.ru_stime,
        "wall": wall,
        "last": "".join(last),
    }


def start(root: Path, size: int) -> list[str]:
    """Measure commands in a second, warm run."""
    few = write_photographs(root / "few", FEW)
    model = root / "model"
    how = ["--image-size", str(size), "--threads", "1"]
    processor_seconds(["learn", str(model), str(few), *how])
    predict = ["predict", str(model), str(next(few.rglob("*.jpg")))]
    processor_seconds(predict)
    commands = {
        "predict of one photograph": lambda name: predict,
        f"learn of {FEW} photographs": lambda name: ["learn", str(root / name), str(few), *how],
    }
    lines = []
    for title, words in commands.items():
        took = processor_seconds(words("one"))
        loaded = processor_seconds(words("other"), loads=True)["last"]
        names = ", ".join(json.loads(loaded.replace("'", '"'))) or "none"
        used = f"{took['processor']:.2f} | {int(took['last']) / 1e3:.0f} MB"
        lines.append(f"| {title} | {used} | {names} |")
    return [
        "## The start of a command",
        "",
        "| | processor seconds | memory | loads |",
        "|---|---:|---:|---|",
        *lines,
    ]


def growth(root: Path, counts: list[int], size: int) -> list[str]:
    """Measure `learn` with growing numbers of photographs."""
    lines = []
    for count in counts:
        photos = write_photographs(root / f"{count}", count)
        words = ["learn", str(root / f"m{count}"), str(photos), "--image-size", str(size), "-q"]
        took = processor_seconds(words)
        stored = sum(
            each.stat().st_size for each in (root / f"m{count}").rglob("*") if each.is_file()
        )
        line = f"| {count} | {took['processor']:.0f} | {1000 * took['processor'] / count:.1f} | {took['wall']:.0f} "
        lines.append(f"{line}| {int(took['last']) / 1e6:.2f} GB | {stored / 1e6:.0f} MB |")
        print(lines[-1], flush=True)
    return [
        "## More photographs",
        "",
        f"`geodl learn` in one step, {CLASSES} classes, {size} x {size} pixels.",
        "",
        "| photographs | processor seconds | ms each | wall seconds | most memory | stored |",
        "|---:|---:|---:|---:|---:|---:|",
        *lines,
    ]


def main() -> None:
    """Measure, print the tables, and write them to a page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="speed,start,growth")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--growth", default="1000,5000,10000,20000")
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = [int(count) for count in options.growth.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        parts = {
            "speed": lambda: speed(root, options.images, options.size),
            "start": lambda: start(root, options.size),
            "growth": lambda: growth(root, counts, options.size),
        }
        lines = []
        for name in options.parts.split(","):
            lines += [*parts[name](), ""]
    text = PAGE + "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
