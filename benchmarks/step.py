"""How near the training loop is to what the processor can do: images a second in float32, bf16 and compiled, and the loop around them.

Run with `python -m benchmarks.step [--threads 1] [--turns 8] [--no-compile]`. Ways take turns. Beside each stands the share of the
processor's own peak, that of a plain matrix product in the same precision, that the arithmetic of the step makes use of. The last line
compares the loop (batches, augmentation, meters, checks) with bare steps on one batch in memory. Aim: under 3 % more.
"""

import argparse
import statistics
import sys
import time

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.phase import noise
from geodl import ClassIncremental, Learner
from geodl.core.events import StepTaken
from geodl.nets import build_network

BATCH, STEPS = 128, 4


def peak(dtype):
    """Return the operations a second of a matrix product."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    times = []
    for _ in range(6):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(times)


def step_of(precision, *, compiled=False):
    """Return a function that takes one step on a batch in memory, and the operations that it needs."""
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
    images = (
        ClassIncremental(noise(), base=50, phases=5)
        .train(0)
        .select(torch.arange(count) * (25_000 // count))
    )
    times = []
    learner = Learner(
        preset="cifar100-cpu",
        method="finetune",
        base_epochs=1,
        threads=threads,
        precision=precision,
        listener=lambda event: (
            times.append(time.perf_counter()) if isinstance(event, StepTaken) else None
        ),
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


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true", help="compiling takes a minute or two")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
    for loop in loops.values():
        loop()
    bare = {name: [] for name in ways}
    looped = {name: [] for name in loops}
    for turn in range(options.turns):
        print(f"turn {turn + 1} of {options.turns}", file=sys.stderr)
        for name, (step, _) in ways.items():
            bare[name].append(seconds(step))
        for name, loop in loops.items():
            looped[name].append(loop())
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
        print(f"the loop in {name}: {100 * over:+.1f} % over the bare step (aim: under 3 %)")


if __name__ == "__main__":
    main()
