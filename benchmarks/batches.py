"""The cost of the input pipelines: in memory beside a ResNet-32 step; from files with 0, 1 and 2 threads.

Run with `python -m benchmarks.batches`. Goals: the in-memory pipeline takes less than 3 % of a training step; the file
pipeline keeps two cores busy.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.pictures import write_photographs
from geodl.data import ArrayImages, Batches, FileImages, Transform
from geodl.learning.timing import take_turns
from geodl.nets import build_network

CIFAR = Transform(32, (0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023))
IMAGENET = Transform(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop="resized")


def in_memory(repeats, batch_size=128, images=25_000):
    """Return the milliseconds of a batch (plain, and with color jitter) and of a ResNet-32 training step."""
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8)
    data = ArrayImages(pixels, torch.arange(images) % 50)
    plain = Batches(data, CIFAR, batch_size, 0).epoch(0)
    jittered = Batches(data, replace(CIFAR, jitter=0.25), batch_size, 0).epoch(0)
    network = build_network("resnet32", 50, head="cosine").train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    batch = next(plain)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(network(batch.images).logits, batch.labels).backward()
        optimizer.step()

    works = {
        "batch": lambda: next(plain),
        "batch with jitter": lambda: next(jittered),
        "step": step,
    }
    return {
        name: 1000 * statistics.median(each) for name, each in take_turns(works, repeats).items()
    }


def from_files(count=256, batch_size=64, sides=(500, 4000)):
    """Return images/s and busy cores for photographs of each size with 0, 1 and 2 threads."""
    rows = []
    for side in sides:
        with tempfile.TemporaryDirectory() as folder:
            used = count if side < 1000 else count // 8
            paths = sorted(write_photographs(Path(folder), used, side).rglob("*.jpg"))
            images = FileImages(tuple(paths), torch.arange(used) % 10)
            for workers in (0, 1, 2):
                batches = Batches(images, IMAGENET, min(batch_size, used // 4), 0, workers=workers)
                wall, cpu = time.perf_counter(), time.process_time()
                seen = sum(len(batch.labels) for batch in batches.epoch(0))
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                row = {"side": side, "workers": workers}
                rows.append(row | {"images/s": seen / wall, "cores busy": cpu / wall})
    return rows


def main():
    """Measure, print, and write the results to a file on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    arguments = parser.parse_args()
    memory = in_memory(2 if arguments.quick else 20)
    print(f"threads of torch: {torch.get_num_threads()}")
    print(f"ResNet-32 step, batch 128: {memory['step']:.1f} ms")
    for name in ("batch", "batch with jitter"):
        print(
            f"{name} in memory: {memory[name]:.2f} ms, {memory[name] / memory['step']:.2%} of the step"
        )
    files = from_files(32 if arguments.quick else 256)
    for row in files:
        rate, busy = row["images/s"], row["cores busy"]
        size = f"{row['side']} x {row['side'] * 3 // 4}"
        print(f"JPEG {size}, {row['workers']} threads: {rate:.0f} images/s, {busy:.2f} cores busy")
    if arguments.json:
        arguments.json.write_text(json.dumps({"in memory (ms)": memory, "files": files}, indent=2))


if __name__ == "__main__":
    main()
