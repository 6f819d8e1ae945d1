"""A server in a thread of this process, or in a process of its own; its clients; digits as PNG files."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.helpers.command import started
from tests.helpers.folders import rows_of
from tests.helpers.pictures import encode as encoded

from geodl.app.serve.app import create_app
from geodl.app.serve.connections import bind, server_of
from geodl.app.serve.server import Server

TOKEN = "a-token-for-the-tests-alone"
QUICK = {"epochs": 2, "threads": 1}
ENDED = ("done", "cancelled", "failed")


class Client(httpx.Client):
    """An HTTP client with the token, which can wait for jobs."""

    def __init__(self, url, token=TOKEN):
        super().__init__(
            base_url=url,
            timeout=60,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # Before the server closes it, after five seconds.
            limits=httpx.Limits(keepalive_expiry=1),
        )
        self.url = url

    def predict(self, *contents, **query):
        files = [("images", (f"{i}.png", content)) for i, content in enumerate(contents)]
        return self.post("/api/v1/predict", files=files, params=query)

    def learn(self, images, path="learn", name="{}.png"):
        """Teach {class: [contents]}, or collect them for teaching: path = tray/add."""
        pairs = [(label, content) for label, contents in images.items() for content in contents]
        files = [("images", (name.format(i), content)) for i, (_, content) in enumerate(pairs)]
        labels = [label for label, _ in pairs]
        return self.post(f"/api/v1/{path}", data={"labels": labels}, files=files)

    def learn_folder(self, name):
        return self.post("/api/v1/learn/folder", json={"folder": name})

    def event(self):
        """Return the first event of the stream."""
        with self.stream("GET", "/api/v1/events") as stream:
            return json.loads(next(stream.iter_lines()).removeprefix("data: "))

    def job(self, key):
        return self.get(f"/api/v1/jobs/{key}").json()

    def ended(self, answer, seconds=60):
        assert answer.status_code == 202, answer.text
        return self.until(
            lambda: (job := self.job(answer.json()["id"]))["state"] in ENDED and job, seconds
        )

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.02)
        raise AssertionError("timed out")

    def names(self):
        return [known["name"] for known in self.get("/api/v1/classes").json()]


@contextmanager
def running(model, **options):
    """Serve a model; yield the address."""
    app = create_app(Server(model, TOKEN, **({"options": QUICK} | options)))
    server, listening = server_of(app), bind("127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive()


class Command:
    """`geodl serve` in a process of its own; log: a file for its standard error; prepare: called before it starts."""

    def __init__(self, *words, log=os.devnull, prepare=None):
        options = {"environment": {"GEODL_TOKEN": ""}, "preexec_fn": prepare}
        with Path(log).open("w") as errors:
            self.process = started("serve", *words, "--port", "0", stderr=errors, **options)
        self.lines = []
        while not any(line.startswith("Press Ctrl-C") for line in self.lines):
            line = self.process.stdout.readline()
            assert line, self.lines
            self.lines.append(line)
        self.process.stdout.close()
        address = self.lines[0].partition("is served at ")[2].strip()
        self.url, _, self.token = address.partition("/#token=")

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 0


def refused(answer, status, *words):
    """Check that a request was refused with a sentence that contains some words."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert all(word in answer.json()["error"] for word in words), answer.text


HALF = (
    b"POST /api/v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10000\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    b'--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\nhalf'
)
"""An incomplete request."""


def connected(url, content):
    """Return a new connection that has sent some bytes."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(content)
    return connection


def pictures(digits, label, some=slice(12)):
    """Return digits as PNG files."""
    rows = rows_of(digits.train, label, len(digits.train))[some]
    return [encoded(digits.train.decode(i)) for i in rows]
