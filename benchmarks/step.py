"""The cost of a training step of a ResNet-32 on a batch of 128 images of 32 x 32.

Run with `python -m benchmarks.step [loop] [loss] [teacher] [--threads 1] [--turns N] [--no-compile]`; all three by default. Alternatives
take turns, and ratios are taken within a turn, so that load on the machine affects all equally.

loop: images per second in float32, bf16 and compiled, with the fraction of the processor's peak (that of a matrix product in the same
precision) that the step reaches; then the loop (batches, augmentation, meters, checks) beside bare steps on one batch in memory.
Goal: less than 3 % overhead.
loss: whole steps with GeoDL beside cosine distillation, in float32 with a frozen teacher; on a CPU in processor time, which does not
count other programs.
teacher: a teacher with batch norms folded into the convolutions beside one with separate batch norms.
"""

import argparse
import statistics
import sys
import time
from copy import deepcopy

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.phase import noise
from benchmarks.steps import CIFAR, ratio
from geodl import ClassIncremental, Learner
from geodl.core.events import StepTaken
from geodl.learning.timing import Step, take_turns
from geodl.nets import build_network, frozen_copy
from geodl.nets.network import FrozenNetwork

BATCH, STEPS = 128, 4


def peak(dtype):
    """Return the operations per second of a matrix product."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    times = []
    for _ in range(6):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(times)


def step_of(precision, *, compiled=False):
    """Return a function that takes one step on a batch in memory, and its number of operations."""
    network = build_network("resnet32", 50, head="cosine").train()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, weight_decay=5e-4, fused=True)
    images = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 50, (BATCH,))
    module = torch.compile(network) if compiled else network

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(module(images).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(network(images).logits, labels).backward()
    optimizer.zero_grad()
    return step, counter.get_total_flops()


def in_the_loop(precision, threads):
    """Return a function that trains for an epoch of a few steps through a Learner and returns the seconds of a step."""
    count = BATCH * (STEPS + 1)
    first = ClassIncremental(noise(), base=50, phases=5).train(0)
    images = first.select(torch.arange(count) * (25_000 // count))
    times = []

    def note(event):
        if isinstance(event, StepTaken):
            times.append(time.perf_counter())

    learner = Learner(
        preset="cifar100-cpu",
        method="finetune",
        base_epochs=1,
        threads=threads,
        precision=precision,
        listener=note,
    )

    def train():
        times.clear()
        learner.model = None
        learner.learn(images)
        return (times[-1] - times[0]) / (len(times) - 1)

    return train


def seconds(step, steps=STEPS):
    """Return the seconds of a step."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def loop(options):
    """Print the speed of steps relative to the peak, and the overhead of the loop."""
    ways = {"float32": step_of("32"), "bf16": step_of("bf16")}
    if not options.no_compile:
        ways |= {
            "float32, compiled": step_of("32", compiled=True),
            "bf16, compiled": step_of("bf16", compiled=True),
        }
    peaks = {"float32": peak(torch.float32), "bf16": peak(torch.bfloat16)}
    loops = {
        name: in_the_loop(precision, options.threads)
        for name, precision in (("float32", "32"), ("bf16", "bf16"))
    }
    for step, _ in ways.values():
        seconds(step, 2)
    for train in loops.values():
        train()
    bare = {name: [] for name in ways}
    looped = {name: [] for name in loops}
    turns = options.turns or 8
    for turn in range(turns):
        print(f"turn {turn + 1} of {turns}", file=sys.stderr)
        for name, (step, _) in ways.items():
            bare[name].append(seconds(step))
        for name, train in loops.items():
            looped[name].append(train())
    print(
        f"ResNet-32, {BATCH} images of 32 x 32, threads: {options.threads}, torch {torch.__version__}"
    )
    print("| way | images/s | GFLOP/s | of the peak |\n|---|---:|---:|---:|")
    for name, (_, operations) in ways.items():
        each, most = statistics.median(bare[name]), peaks[name.split(",")[0]]
        print(
            f"| {name} | {BATCH / each:.0f} | {operations / each / 1e9:.0f} | {100 * operations / each / most:.0f} % |"
        )
    print(
        f"peak of a matrix product: float32 {peaks['float32'] / 1e9:.0f}, bf16 {peaks['bf16'] / 1e9:.0f} GFLOP/s"
    )
    for name, found in looped.items():
        over = statistics.median(a / b for a, b in zip(found, bare[name], strict=True)) - 1
        print(f"the loop in {name}: {100 * over:+.1f} % over the bare step (goal: under 3 %)")


def loss(options):
    """Print the times of steps with both losses, and their ratio."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    steps = {name: Step(name, CIFAR) for name in ("cosine", "geodesic")}
    compare(take_turns(steps, options.turns or 150, clock), "geodesic", "cosine")


def teacher(options):
    """Print the times of both teachers, their ratio, and how far their features differ."""
    network = build_network("resnet32", 100, head="cosine")
    images = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(5):  # give the batch norms statistics
            network(images)
    copy = deepcopy(network)
    plain = FrozenNetwork(copy.backbone, copy.head).requires_grad_(False).train(False)
    folded = frozen_copy(network)
    ways = {"unfolded": lambda: plain(images), "folded": lambda: folded(images)}
    compare(take_turns(ways, options.turns or 30), "unfolded", "folded")
    features = plain(images).pooled
    difference = (features - folded(images).pooled).abs().max() / features.abs().max()
    print(f"largest difference of the features, relative: {difference:.1e}")


def compare(times, one, other):
    """Print the median times and the ratio of one to the other with its 95 % interval."""
    for name, each in times.items():
        middle, least = (1e3 * what(each) for what in (statistics.median, min))
        print(f"{name:<10}{middle:8.1f} ms (fastest {least:.1f})")
    found = ratio(times[one], times[other])
    interval = f"95 % interval {found.low:.4f} to {found.high:.4f}, {found.pairs} pairs"
    print(f"{one} / {other}: {found.median:.4f} ({interval})")


PARTS = {"loop": loop, "loss": loss, "teacher": teacher}


def main():
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, help="default: 8, 150 and 30")
    parser.add_argument("--no-compile", action="store_true", help="compiling takes a minute or two")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    torch.set_num_threads(options.threads)
    for name in options.parts or PARTS:
        PARTS[name](options)


if __name__ == "__main__":
    main()
