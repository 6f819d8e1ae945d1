"""`geodl serve` under load and attack, with real sockets: limits, time-outs, shares, what strangers can see."""

import asyncio
import itertools
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from unittest.mock import ANY

import h11
import pytest
from PIL import Image
from tests.helpers.pictures import noise
from tests.helpers.serving import (
    HALF,
    QUICK,
    TOKEN,
    Client,
    Command,
    connected,
    encoded,
    pictures,
    running,
)

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve import batching
from geodl.app.serve.connections import Connection
from geodl.app.serve.limits import Limits
from geodl.app.serve.uploads import SMALL
from geodl.core.tensors import tensor_file
from geodl.nets import build_network

PART = b'--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n'
FORM = {"headers": {"Content-Type": "multipart/form-data; boundary=b"}}
HEAD = b"GET /api/v1/model HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
def connect():
    """Return what sends bytes over a new connection; all are closed at the end."""
    with ExitStack() as stack:
        yield lambda url, content=HALF: stack.enter_context(connected(url, content))


def predicting(parts):
    """Return a request without the token to predict some parts."""
    body = parts + b"--b--\r\n"
    lines = [
        b"POST /api/v1/predict HTTP/1.1",
        b"Host: 127.0.0.1",
        b"Content-Length: %d" % len(body),
    ]
    lines += [b"Content-Type: multipart/form-data; boundary=b", b"", body]
    return b"\r\n".join(lines)


def closed(connection, seconds=60):
    """Return what a server answers before it closes a connection."""
    connection.settimeout(seconds)
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


# ----------------------------------------------------------------------------------------------------- connections


def test_incomplete_headers_and_garbage_with_few_files_keep_nobody_out(
    model, digits, tmp_path, connect
):
    resource = pytest.importorskip("resource")  # Windows has none
    few = (resource.RLIMIT_NOFILE, (128, 128))
    server = Command(str(model), log=tmp_path / "log", prepare=lambda: resource.setrlimit(*few))
    try:
        with Client(server.url, server.token) as owner, Client(server.url, None) as stranger:
            for content in (HEAD, b"\x00 garbage\r\n\r\n"):
                for _ in range(200):
                    connect(server.url, content)
            for client in (owner, stranger):
                assert client.get("/api/v1/model").status_code == 200
                assert client.predict(pictures(digits, 0)[0]).status_code == 200
            large = [bytes(1_100_000)] * 40  # each would be a file of its own while it arrives
            assert len(owner.predict(*large).json()["skipped"]) == 40
    finally:
        server.stop()
    log = (tmp_path / "log").read_text()
    assert "too many connections" in log
    assert "Traceback" not in log
    assert len(log.splitlines()) <= 4, log


def test_slow_clients_are_disconnected(model, connect, monkeypatch):
    dropped, drop = [], Connection.drop
    monkeypatch.setattr(Connection, "drop", lambda each: (dropped.append(each), drop(each)))
    page = b"GET /static/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    limits = Limits(header_seconds=0.5, idle_seconds=0.5)
    with running(model, limits=limits) as url, Client(url) as client:
        assert closed(connect(url, HEAD)) == b""
        second = connect(url, HEAD + b"\r\n")
        second.recv(10)
        second.sendall(HEAD)  # the next request over the same connection
        assert b"200 OK" not in closed(second)
        assert len(dropped) == 2
        deaf = connect(url, page * 1500)
        client.until(lambda: len(dropped) == 3)
        assert closed(deaf).count(b"HTTP/1.1 200") < 1500


def test_the_owner_s_connection_is_not_closed_to_make_room(model, connect):
    asking = ("GET", "/api/v1/model", None, {"Authorization": f"Bearer {TOKEN}"})
    with running(model, limits=Limits(connections=5)) as url:
        owner = HTTPConnection(url.removeprefix("http://"))  # does not connect again by itself
        owner.request(*asking)
        assert owner.getresponse().read()
        strangers = [connect(url, HEAD) for _ in range(20)]
        assert closed(strangers[0]) == b""
        owner.request(*asking)
        assert owner.getresponse().status == 200
        owner.close()


@pytest.mark.parametrize("limits", [Limits(idle_seconds=1), Limits(upload_seconds=1)])
def test_slow_uploads_get_a_408(model, connect, limits):
    with running(model, limits=limits) as url, ThreadPoolExecutor(1) as pool:
        slow = connect(url)
        answer = pool.submit(closed, slow)
        while limits.idle_seconds > 1 and not answer.done():  # sending a byte now and then
            time.sleep(0.1)
            with suppress(OSError):
                slow.sendall(b"x")
        assert b"408" in answer.result()


def test_sizes_of_requests_are_limited(model, digits):
    good = pictures(digits, 0, slice(3))
    limits = Limits(predict_body=20_000, learn_body=20_000, predict_images=2, learn_images=2)
    large = b'"' + b"a" * 100_000 + b'"'
    with running(model, limits=limits) as url, Client(url) as owner, Client(url, None) as stranger:
        for send in (owner.predict, lambda *some: owner.learn({"x": some})):
            answers = [send(os.urandom(30_000)), send(*good)]
            assert [answer.status_code for answer in answers] == [413, 413]
            assert "20.0 kB" in answers[0].json()["error"]
            assert "more than 2 images" in answers[1].json()["error"]
        assert owner.predict(*good[:2]).status_code == 200
        # also without Content-Length
        head, kind = HALF.partition(b"\r\n\r\n")[2], "multipart/form-data; boundary=b"
        bodies = [("classes/rename", large, "application/json"), ("predict", head + large, kind)]
        for (path, body, kind), wrapped in itertools.product(bodies, (bytes, lambda b: iter([b]))):
            for client in (owner, stranger):
                how = {"content": wrapped(body), "headers": {"Content-Type": kind}}
                known = client is owner or wrapped is bytes
                answer = client.post(f"/api/v1/{path}", **how)
                assert answer.status_code == (413 if known else 411)


@pytest.mark.parametrize("part", [b"--b\r\na: b\r\n\r\n\r\n", b"--b\r\n\r\n\r\n"])
def test_requests_of_very_many_parts_are_refused(model, part):
    with running(model, limits=Limits(predict_images=3)) as url, Client(url, None) as stranger:
        for number, status in ((22, 422), (23, 413)):
            content = part * number + b"--b--\r\n"
            assert stranger.post("/api/v1/predict", content=content, **FORM).status_code == status


def test_bodies_in_chunks_are_not_read_without_the_token(model, connect, monkeypatch):
    read, next_event = [], h11.Connection.next_event
    monkeypatch.setattr(
        h11.Connection, "next_event", lambda each: (read.append(each), next_event(each))[1]
    )
    head = HALF.partition(b"\r\n\r\n")[0]
    chunked = head.replace(b"Content-Length: 10000", b"Transfer-Encoding: chunked")
    many = b"1\r\nx\r\n" * 5000  # each costs as much as one of 64 kB
    with running(model) as url, Client(url) as owner:
        answer = closed(connect(url, chunked + b"\r\n\r\n" + many))
        assert b" 411 " in answer.partition(b"\r\n")[0]
        assert b"Content-Length" in answer
        assert len(read) < 20
        assert owner.get("/api/v1/model").status_code == 200


# ----------------------------------------------------------------------------------------------------------- shares


def test_incomplete_uploads_of_strangers_leave_the_owner_in(model, digits, connect):
    good = pictures(digits, 0)[0]
    limits = Limits(requests=(4, 4), connections=40)
    with running(model, limits=limits) as url, Client(url) as owner, Client(url, None) as stranger:
        held = [connect(url) for _ in range(60)]
        refused = stranger.predict(good)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert owner.predict(good).status_code == 200
        assert owner.get("/api/v1/model").status_code == 200
        for connection in held:
            connection.close()
        assert stranger.until(lambda: stranger.predict(good).status_code == 200)


def test_pictures_whose_size_takes_long_to_read_leave_the_owner_in(
    model, digits, connect, monkeypatch
):
    """A picture of 60 MB may hold millions of empty parts before its size is known."""
    begun, over = [], threading.Event()

    def measured(image):
        if image == b"slow":
            begun.append(image)
            over.wait(60)
        return 0.0

    monkeypatch.setattr(batching, "megapixels", measured)
    with running(model) as url, Client(url) as owner:
        for _ in range(40):
            connect(url, predicting(PART + b"slow\r\n"))
        try:
            owner.until(lambda: begun)
            time.sleep(0.5)  # the others wait for the same
            owner.timeout = 20
            assert owner.predict(pictures(digits, 0)[0]).status_code == 200
            assert owner.event()["state"]
        finally:
            over.set()


def test_event_streams_over_the_limit_get_a_429(model, caplog, connect):
    request = b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with running(model, limits=Limits(streams=(1, 2))) as url:
        held = [connect(url, request) for _ in range(12)]
        heads = [connection.recv(12)[-3:] for connection in held]
        assert sorted(heads) == [b"200"] * 2 + [b"429"] * 10
        with Client(url) as owner:
            assert _opens(owner)
        for connection in held:
            connection.close()
        with Client(url, None) as stranger:
            assert stranger.until(lambda: _opens(stranger))
    assert not [record for record in caplog.records if record.exc_info]


def _opens(client):
    with client.stream("GET", "/api/v1/events") as stream:
        return stream.status_code == 200


def test_megapixels_of_a_request_and_in_flight_are_limited(model, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    blank = Image.new("RGB", (1500, 1500))
    png, jpeg = encoded(blank), encoded(blank, "JPEG")
    progressive = encoded(blank, "JPEG", progressive=True)

    def slow(image, transform, decode=batching.decode):
        if len(image) == len(png):
            begun.set()
            assert may_end.wait(30)
        return decode(image, transform)

    monkeypatch.setattr(batching, "decode", slow)
    limits = Limits(megapixels=5, decoding=(5, 5))
    with running(model, limits=limits) as url, Client(url) as owner, Client(url, None) as stranger:
        refused = stranger.predict(*[png] * 3)
        assert (refused.status_code, "5 megapixels" in refused.json()["error"]) == (413, True)
        assert len(stranger.predict(*[jpeg] * 5).json()["predictions"]) == 5  # decoded reduced
        assert stranger.predict(*[progressive] * 3).status_code == 413  # which these cannot be
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(stranger.predict, png, png)
            assert begun.wait(30)
            assert stranger.predict(jpeg, jpeg).status_code == 429
            assert owner.predict(jpeg, jpeg).status_code == 200
            may_end.set()
            assert len(first.result().json()["predictions"]) == 2
        assert stranger.predict(jpeg, jpeg).status_code == 200


def test_the_work_of_a_disconnected_client_is_cancelled(model, monkeypatch, connect):
    begun = []

    def slow(image, transform):
        begun.append(image)
        time.sleep(0.2)
        return "too slow"

    monkeypatch.setattr(batching, "decode", slow)
    with running(model) as url, Client(url) as client:
        body = (PART + b"x" * (SMALL // 60) + b"\r\n") * 60
        connection = connect(url, predicting(body))
        client.until(lambda: begun)
        connection.close()
        client.until(lambda: not begun[0].parent.exists())
        assert len(begun) < 30


# ------------------------------------------------------------------------------------------------ what strangers can see


def test_strangers_see_no_paths_processes_or_hosts(model, tmp_path):
    secrets = [str(tmp_path), f" on {socket.gethostname()}", f"process {os.getpid()}"]
    (tmp_path / "images" / "empty").mkdir(parents=True)
    with (
        running(model, allow_folder=tmp_path / "images") as url,
        Client(url) as owner,
        Client(url, None) as stranger,
    ):
        taught = {"one": [encoded(Image.new("RGB", (9, 9))), b"x"]}
        job = owner.ended(owner.learn(taught))
        assert [each["name"] for each in job["skipped"]] == ["one/1.png"]
        assert stranger.job(job["id"]) == job | {"skipped": [], "error": ANY}
        job = owner.ended(owner.learn_folder("empty"))
        assert (job["state"], str(tmp_path) in job["error"]) == ("failed", True)
        answers = [stranger.get(f"/api/v1/jobs/{job['id']}"), stranger.get("/api/v1/jobs")]
        answers += [stranger.get("/api/v1/export/report"), stranger.get("/api/v1/history")]
        event = stranger.event()
        assert "shown with the token" in event["jobs"][-1]["error"]
    for path in (model / "objects").iterdir():
        path.write_bytes(b"damaged")
    with running(model) as url, Client(url) as owner, Client(url, None) as stranger:
        assert str(tmp_path) in owner.get("/api/v1/model").text
        answers += [stranger.get(f"/api/v1/{path}") for path in ("model", "classes")]
        answers.append(stranger.predict(encoded(Image.new("RGB", (20, 20)))))
    with running(tmp_path / "new") as url, Client(url, None) as stranger:
        answers += [stranger.get("/api/v1/model"), stranger.predict(b"x")]
    texts = [str(event), *(answer.text for answer in answers)]
    assert not [text for text in texts if any(secret in text for secret in secrets)]
    assert answers[-1].json() == {"error": "the model has learned nothing yet"}


def test_the_report_of_strangers_names_no_files(tmp_path, monkeypatch):
    """No file of weights with its path, and no image that looks mislabelled."""
    network = build_network("resnet8", 1, head="cosine").backbone.state_dict()
    (tmp_path / "w.safetensors").write_bytes(tensor_file(network))
    weights = {"weights": str(tmp_path / "w.safetensors"), "network": "resnet8"}
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(noise(24, 16, 16, 3), ["a", "b"] * 12, method="lucir", **weights, **QUICK)
    start, asked = asyncio.create_subprocess_exec, []

    def started(*words, **how):
        asked.extend(words)
        return start(*words, **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    with running(tmp_path / "m") as url, Client(url, None) as stranger:
        page = stranger.get("/api/v1/export/report").text
        assert "w.safetensors" in page
        assert str(tmp_path) not in page
        assert "--without-images" in asked
