"""How fast `geodl serve` answers single predictions, beside calling the model in a loop.

    python -m benchmarks.serve [--requests 400] [--clients 8] [--side 640] [--network resnet20] [--image-size 64]

The server runs in a process of its own, the clients are threads of this one with connections that stay open. Images are JPEG
photographs as in `benchmarks.predict`; clients and server share the cores.
"""

import argparse
import http.client
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.predict import write_photographs
from geodl.app.classifier import IncrementalClassifier


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


def measure(port: int, bodies: list[bytes], clients: int) -> tuple[float, float, float]:
    """Return requests/s, and the median and the 95th percentile of the seconds that one takes."""
    parts = [bodies[i::clients] for i in range(clients)]
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = sorted(
            second for part in pool.map(lambda part: ask(port, part), parts) for second in part
        )
    return (
        len(found) / (time.perf_counter() - began),
        found[len(found) // 2],
        found[int(0.95 * len(found))],
    )


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken so far (Linux): what other programs take does not count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--side", type=int, default=640)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--image-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root / "photos", 40, options.side)
        model = IncrementalClassifier(root / "model")
        model.learn(
            root / "photos", epochs=1, network=options.network, image_size=options.image_size
        )
        paths = sorted((root / "photos").rglob("*.jpg"))
        bodies = [request_of(paths[i % len(paths)].read_bytes()) for i in range(options.requests)]
        print(
            f"JPEG of {options.side} x {options.side * 3 // 4}, {options.network}, {os.cpu_count()} cores"
        )
        recognizer = model.recognizer()
        recognizer.predict(paths[0])
        began, busy = time.perf_counter(), processor_seconds(os.getpid())
        for i in range(options.requests):
            recognizer.predict(paths[i % len(paths)])
        loop = options.requests / (time.perf_counter() - began)
        busy = 1000 * (processor_seconds(os.getpid()) - busy) / options.requests
        print(
            f"the model in a loop, one image a call: {loop:.0f} images/s, {busy:.1f} ms of processor time each"
        )
        command = [sys.executable, "-m", "geodl", "serve", str(root / "model"), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                port = int(
                    server.stdout.readline().partition("http://127.0.0.1:")[2].partition("/")[0]
                )
                ask(port, bodies[:5])
                for clients in sorted({1, 2, options.clients}):
                    busy = processor_seconds(server.pid)
                    rate, median, high = measure(port, bodies, clients)
                    busy = 1000 * (processor_seconds(server.pid) - busy) / options.requests
                    print(
                        f"served to {clients} clients: {rate:.0f} requests/s ({rate / loop:.2f} of the loop), "
                        f"median {1000 * median:.0f} ms, 95 % within {1000 * high:.0f} ms, {busy:.1f} ms of processor time each"
                    )
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
