"""The speed of `geodl serve` on single predictions, beside calling the model in a loop.

    python -m benchmarks.serve [--requests 200] [--rounds 5] [--clients 8] [--side 640] [--network resnet20] [--image-size 64]

Both predict the same JPEG photographs (`benchmarks.pictures`) on the same cores with the same number of threads. The server runs in a
process of its own; its clients are threads of this process with persistent connections and share the cores with it. Loop and server
take turns; each result is the median of the rounds.
"""

import argparse
import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.pictures import write_photographs
from geodl.app.classifier import IncrementalClassifier
from geodl.core.devices import available_cores
from geodl.core.text import count
from geodl.model.recognizer import Recognizer


def request_of(photo: bytes) -> bytes:
    """Return the body of a request with one image."""
    head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="photo.jpg"\r\n\r\n'
    return head + photo + b"\r\n--b--\r\n"


def ask(port: int, bodies: list[bytes]) -> list[float]:
    """Send requests one after the other over one connection and return the seconds that each took."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    seconds = []
    for body in bodies:
        began = time.perf_counter()
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        connection.request("POST", "/api/v1/predict?top=1", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        seconds.append(time.perf_counter() - began)
    connection.close()
    return seconds


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """One measurement: images/s, median and 95th percentile of the seconds per image, processor milliseconds per image."""

    rate: float
    median: float
    high: float
    busy: float


def measured(pid: int, run: Callable[[], list[float]]) -> Round:
    """Measure `run`, which returns the seconds of each image, and the processor time of a process meanwhile."""
    began, busy = time.perf_counter(), processor_seconds(pid)
    seconds = sorted(run())
    passed, count = time.perf_counter() - began, len(seconds)
    busy = 1000 * (processor_seconds(pid) - busy) / count
    return Round(count / passed, seconds[count // 2], seconds[int(0.95 * count)], busy)


def in_a_loop(recognizer: Recognizer, paths: list[Path]) -> list[float]:
    """Predict files one after the other and return the seconds that each took."""
    seconds = []
    for path in paths:
        began = time.perf_counter()
        recognizer.predict(path)
        seconds.append(time.perf_counter() - began)
    return seconds


def by_clients(port: int, bodies: list[bytes], clients: int) -> list[float]:
    """Send requests from several clients at once and return the seconds that each took."""
    parts = [bodies[i::clients] for i in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        return [seconds for part in pool.map(partial(ask, port), parts) for seconds in part]


@contextmanager
def served(model: Path) -> Iterator[tuple[int, int]]:
    """Serve a model in a child process; yield its process id and port."""
    command = [sys.executable, "-m", "geodl", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().partition("http://127.0.0.1:")[2]
            yield server.pid, int(address.partition("/")[0])
        finally:
            server.terminate()


def show(name: str, rounds: list[Round], loop: float) -> None:
    """Print the median of each result over the rounds."""
    rate, typical, high, busy = (
        median(getattr(each, figure) for each in rounds)
        for figure in ("rate", "median", "high", "busy")
    )
    spread = " to ".join(f"{edge(each.rate for each in rounds):.0f}" for edge in (min, max))
    print(
        f"{name}: {rate:.0f} images/s ({spread}), {rate / loop:.2f} of the loop, median {1000 * typical:.1f} ms, "
        f"95 % within {1000 * high:.1f} ms, {busy:.1f} ms of processor time each"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--side", type=int, default=640)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--image-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root / "photos", 40, options.side)
        model = IncrementalClassifier(root / "model")
        how = {"epochs": 1, "network": options.network, "image_size": options.image_size}
        model.learn(root / "photos", **how)
        photos = sorted((root / "photos").rglob("*.jpg"))
        paths = [photos[i % len(photos)] for i in range(options.requests)]
        bodies = [request_of(path.read_bytes()) for path in paths]
        print(
            f"JPEG of {options.side} x {options.side * 3 // 4}, {options.network}, {count(available_cores(), 'core')}"
        )
        recognizer, found = model.recognizer(), defaultdict(list)
        with served(root / "model") as (pid, port):
            in_a_loop(recognizer, paths[:5])
            by_clients(port, bodies[:5], 1)
            for _ in range(options.rounds):
                loop = partial(in_a_loop, recognizer, paths)
                found["one image a call, in a loop"].append(measured(os.getpid(), loop))
                for clients in sorted({1, 2, options.clients}):
                    asking = partial(by_clients, port, bodies, clients)
                    found[f"served to {count(clients, 'client')}"].append(measured(pid, asking))
        rate = median(each.rate for each in next(iter(found.values())))
        for name, rounds in found.items():
            show(name, rounds, rate)


if __name__ == "__main__":
    main()
