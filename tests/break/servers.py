"""A server under real connections: incomplete ones, torn ones, garbage, requests of strangers, planted jobs."""

import atexit
import json
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.helpers.pictures import noise
from tests.helpers.serving import HALF, TOKEN, Client, connected, running

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve.limits import Limits
from geodl.app.serve.server import Server
from geodl.learning.saving import model_directory

from .commands import QUICK
from .damage import VALUES
from .harness import family
from .inputs import pictures

HOSTILE = (
    b"GET /api/v1/model HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /api/v1/undo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999999999\r\n\r\n",
    b"POST /api/v1/learn HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /api/v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"1\r\nx\r\n" * 5000,
    b"\x16\x03\x01\x02\x00\x01",
    b"GET / HTTP/9.9\r\n\r\n",
    HALF,
)


@contextmanager
def _serving(folder: Path, limits: Limits) -> Iterator[str]:
    model = IncrementalClassifier(folder / "model")
    model.learn(noise(12, 16, 16, 3), ["a", "b"] * 6, method="finetune", **QUICK)
    with running(folder / "model", limits=limits) as url:
        yield url


@family("server", most=20, sockets=100)
def server(draw: random.Random, folder: Path, sockets: int = 40) -> None:
    """Real connections that are incomplete, torn or garbage: the owner is still served."""
    few = Limits(connections=24, requests=(8, 4), streams=(4, 2))
    with _serving(folder, few) as url, ExitStack() as held, Client(url) as owner:
        for _ in range(sockets):
            connection: socket.socket = held.enter_context(connected(url, _hostile(draw)))
            if draw.random() < 0.3:
                connection.close()
        answer = owner.predict(pictures()[0])
        assert answer.status_code == 200, answer.text
        assert owner.get("/api/v1/model").status_code == 200


def _hostile(draw: random.Random) -> bytes:
    content = draw.choice(HOSTILE)
    if draw.random() < 0.3:
        return content[: draw.randint(1, len(content))]
    return content + draw.randbytes(draw.choice([0, 0, 50]))


# ------------------------------------------------------------------------------------------------- requests of strangers

METHODS = ("GET", "GET", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X" * 300)
BELOW = "model classes history predict undo redo nosuch export/onnx/".split()
BELOW += "classes/rename classes/remove learn learn/folder tray tray/1 tray/add tray/drop".split()
BELOW += "tray/teach jobs jobs/1 jobs/1/cancel jobs/%00 jobs/..%2f..%2fhead.json".split()
PATHS = "/ // * /docs /openapi.json /static/app.js /static/../app.py /static/%2e%2e/app.py".split()
PATHS += ["/%00", "/" + "a" * 5000, "/api/v1/predict?top=0", "/api/v1/predict?top=1e9"]
HEADERS = (
    "Host: evil.example",
    "Origin: http://evil.example",
    "Sec-Fetch-Site: cross-site",
    "Authorization: Bearer wrong",
    "Authorization: Basic \x00",
    "Content-Type: application/json",
    "Content-Type: multipart/form-data",
    "Content-Type: multipart/form-data; boundary=b",
    "Range: bytes=0-1,5-",
    "X: " + "y" * 3000,
)


@cache
def _shared() -> tuple[str, Path, str]:
    """Return the address of a server shared by all cases, the directory of its model, and its description of the model."""
    held = ExitStack()
    atexit.register(held.close)
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="geodl-break-")))
    url = held.enter_context(_serving(folder, Limits()))
    with Client(url, None) as client:
        return url, folder, client.get("/api/v1/model").text


@family("requests")
def requests(draw: random.Random, folder: Path) -> None:
    """Odd requests without the token: the answer is no server error, names no path, and nothing changes."""
    url, place, before = _shared()
    path = draw.choice(PATHS) if draw.random() < 0.3 else f"/api/v1/{draw.choice(BELOW)}"
    lines = [f"{draw.choice(METHODS)} {path} HTTP/1.1", "Connection: close"]
    lines += draw.sample(HEADERS, draw.randint(0, 3))
    if not any(line.startswith("Host") for line in lines):
        lines.append("Host: 127.0.0.1")
    body = _body(draw)
    length = len(body) if draw.random() < 0.8 else draw.choice([0, 5, 10**30, -1, "x"])
    lines.append(f"Content-Length: {length}")
    content = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
    with connected(url, content) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = _answered(connection)
    status = answer.partition(b" ")[2][:3]
    assert not answer or (status.isdigit() and status < b"500"), answer[:300]
    assert str(place).encode() not in answer, "it names a path"
    assert b"Traceback" not in answer
    with Client(url, None) as client:
        assert client.get("/api/v1/model").text == before, "the model changed"


def _body(draw: random.Random) -> bytes:
    """Return JSON, a form, or nothing of the kind."""
    value = draw.choice([*VALUES, '{"name": "a"}', '{"old": "a", "new": "b"}', '{"ids": ["../x"]}'])
    if draw.random() < 0.5:
        return value.encode("utf-8", "surrogatepass")[:50_000]
    content = draw.choice([*pictures(), b"", b"x", draw.randbytes(500)])
    name = draw.choice(["a.png", "../../a", "\x00", "a" * 900, 'a"b', "a\\b"])
    form = (
        f'--b\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n\r\n'.encode()
    )
    form += content + b"\r\n--b--\r\n"
    if draw.random() < 0.1:
        form = b"--b\r\na: b\r\n\r\n\r\n" * draw.randint(200, 2000) + form
    return form[: draw.randint(1, len(form))] if draw.random() < 0.4 else form


def _answered(connection: socket.socket) -> bytes:
    """Return the first part of an answer, empty where there is none."""
    connection.settimeout(60)
    found = b""
    with suppress(ConnectionError):
        while len(found) < 100_000 and (part := connection.recv(65536)):
            found += part
    return found


# ------------------------------------------------------------------------------------------------------- planted jobs


@family("planted jobs")
def planted_jobs(draw: random.Random, folder: Path) -> None:
    """Jobs and uploads planted in a model's directory: never learned, and deleted except behind a link."""
    outside, model = folder / "outside", folder / "model"
    model_directory(model)
    job, teaching = draw.choice(["a", "0" * 16, ".x", "..x", "job"]), model / "teaching"
    source = outside / "images" / "cat"
    source.mkdir(parents=True)
    (source / "0.png").write_bytes(pictures()[0])
    if behind := draw.random() < 0.5:
        teaching.symlink_to(outside)
    (teaching / job).mkdir(parents=True)
    facts = {"id": job, "state": draw.choice(["waiting", "running", "done"]), "classes": {"cat": 1}}
    facts |= {"source": str(source.parent), "folder": str(source.parent)}
    text = json.dumps(facts) if draw.random() < 0.7 else draw.choice(VALUES)
    (teaching / job / "job.json").write_text(text, errors="surrogatepass")
    (teaching / job / "0").write_bytes(pictures()[0])
    before = sorted(outside.rglob("*"))
    read_only = draw.random() < 0.2
    server = Server(model, TOKEN, read_only=read_only)
    try:
        assert server.jobs(True) == [], "a job was taken from the directory"
        assert server.model.version is None
        assert server.tray.listed() == []
    finally:
        server.close()
    assert sorted(outside.rglob("*")) == before, "something behind a link changed"
    assert behind or read_only or not teaching.exists(), "uploads of a killed server stay"
    assert not server.folder.exists()
