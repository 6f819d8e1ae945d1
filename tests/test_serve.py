"""`geodl serve` over real HTTP on this machine: recognize, teach, change, refuse, survive."""

import importlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from PIL import Image
from tests.serving import ENDED, QUICK, TOKEN, Client, encoded, pictures, running

from geodl.classifier import IncrementalClassifier
from geodl.cli import app
from geodl.errors import ConfigError, StoreError
from geodl.locks import locked
from geodl.serve.app import create_app
from geodl.serve.batching import Predictor
from geodl.serve.jobs import Teacher
from geodl.serve.security import Limits, choose_token, has_token, is_allowed, is_loopback, names_of

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def base(tmp_path_factory, digits):
    """A model of two classes, to be copied."""
    path = tmp_path_factory.mktemp("base") / "model"
    rows = [i for label in (0, 1) for i in (digits.train.labels == label).nonzero().flatten()[:20].tolist()]
    pixels, labels = digits.train.pixels[rows], [f"digit {digits.train.labels[i]}" for i in rows]
    IncrementalClassifier(path).learn(pixels, labels, **QUICK)
    return path


@pytest.fixture
def model(base, tmp_path):
    import shutil

    return Path(shutil.copytree(base, tmp_path / "model"))


@pytest.fixture
def client(model):
    with running(model) as url, Client(url) as client:
        yield client


@pytest.fixture(scope="module")
def reader(base):
    """A client of a server that these tests do not change."""
    with running(base) as url, Client(url) as client:
        yield client


# ---------------------------------------------------------------------------------------------------------- predicting


def test_predictions_are_those_of_the_model(reader, base, digits, tmp_path):
    images = [content for label in (0, 1, 2) for content in pictures(digits, label, slice(30, 33))]
    paths = [tmp_path / f"{i}.png" for i in range(len(images))]
    for path, content in zip(paths, images, strict=True):
        path.write_bytes(content)
    expected = IncrementalClassifier(base).predict(paths, top=2)
    answer = reader.predict(*images, top=2)
    assert answer.status_code == 200, answer.text
    found = answer.json()["predictions"]
    assert [each["index"] for each in found] == list(range(9))
    assert [each["name"] for each in found] == [path.name for path in paths]
    for each, other in zip(found, expected, strict=True):
        assert [entry["label"] for entry in each["top"]] == [label for label, _ in other.top]
        assert [entry["confidence"] for entry in each["top"]] == pytest.approx(
            [value for _, value in other.top], abs=1e-5
        )
        assert each["label"] == other.label
        assert each["unknown"] is other.unknown


def test_what_cannot_be_read_is_named_and_the_rest_predicted(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    large = encoded(Image.new("1", (10_000, 10_000)))
    answer = reader.predict(b"garbage", good, b"", good[:60], large, encoded(Image.new("RGB", (2, 2)))).json()
    assert [each["index"] for each in answer["predictions"]] == [1]
    reasons = {each["name"]: each["reason"] for each in answer["skipped"]}
    assert reasons["0.png"] == "not an image"
    assert reasons["2.png"] == "the file is empty"
    assert "truncated" in reasons["3.png"]
    assert "the limit of" in reasons["4.png"]
    assert "only 2 x 2 pixels" in reasons["5.png"]


def test_names_of_files_are_shown_safely_and_never_used(reader, digits, tmp_path):
    good = pictures(digits, 0, slice(30, 31))[0]
    names = ["../../etc/passwd", "C:\\up\\x.png", "a\x1b[31m.png"]
    answer = reader.post("/api/v1/predict", files=[("images", (name, good)) for name in names]).json()
    assert [each["name"] for each in answer["predictions"]][:2] == ["passwd", "x.png"]
    assert all(each["name"].isprintable() for each in answer["predictions"])


def test_validation_images_are_shown_to_those_who_know_the_token_alone(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    (found,) = reader.predict(good, similar=True).json()["predictions"]
    assert len(found["similar"]) == 4
    values = [each["similarity"] for each in found["similar"]]
    assert values == sorted(values, reverse=True)
    assert found["similar"][0]["image"].startswith("data:image/png;base64,")
    (itself,) = reader.predict(_bytes_of(found["similar"][0]["image"]), similar=True).json()["predictions"]
    assert itself["similar"][0]["similarity"] == pytest.approx(1, abs=1e-3)
    with Client(reader.url, token=None) as stranger:
        (found,) = stranger.predict(good, similar=True).json()["predictions"]
    assert found["similar"] == []


def _bytes_of(address):
    import base64

    return base64.b64decode(address.partition(",")[2])


def test_many_predictions_at_once_are_all_right(reader, base, digits):
    images = [content for label in (0, 1) for content in pictures(digits, label, slice(30, 55))]
    right = [reader.predict(content).json()["predictions"][0]["top"] for content in images]

    def one(i):
        if i % 10 == 0:  # in between, a client that sends garbage
            return reader.predict(b"garbage").json()["skipped"][0]["reason"] == "not an image"
        top = reader.predict(images[i % 50]).json()["predictions"][0]["top"]
        same = [a["label"] for a in top] == [b["label"] for b in right[i % 50]]
        return same and np.allclose([a["confidence"] for a in top], [b["confidence"] for b in right[i % 50]], atol=1e-5)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))


class Slow(IncrementalClassifier):
    """A model that is read once it may be."""

    asked, allowed = Event(), Event()

    @property
    def stamp(self):
        self.asked.set()
        assert self.allowed.wait(60)
        return super().stamp


def test_who_no_longer_waits_spoils_no_answer_of_others(base):
    predictor, pixels = Predictor(Slow(base)), torch.zeros(3, 8, 8, dtype=torch.uint8)
    first = predictor.submit(pixels, top=1)
    assert Slow.asked.wait(60)
    others = [predictor.submit(pixels, top=1) for _ in range(3)]  # to be predicted together
    assert others[1].cancel()
    Slow.allowed.set()
    for answer in (first, others[0], others[2]):
        assert answer.result(timeout=60).label
    predictor.close()


# ------------------------------------------------------------------------------------------------------------ teaching


def test_teach_look_rename_remove_and_undo(client, digits):
    job = client.ended(client.learn({EVIL: pictures(digits, 2), "digit 3": [*pictures(digits, 3), b"garbage"]}))
    assert job["state"] == "done", job
    assert (job["images"], job["classes"]) == (25, {EVIL: 12, "digit 3": 13})
    assert job["result"]["new"] == [EVIL, "digit 3"]
    assert job["skipped"] == [{"name": "digit 3/24.png", "reason": "not an image"}]
    found = client.get("/api/v1/model").json()
    assert [each["name"] for each in found["classes"]] == ["digit 0", "digit 1", EVIL, "digit 3"]
    assert found["classes"][0]["accuracy"] is not None
    assert [step["action"] for step in client.get("/api/v1/history").json()] == ["learn", "learn"]
    label = client.predict(pictures(digits, 2)[0], top=4).json()["predictions"][0]["top"]
    assert {each["label"] for each in label} == set(client.names())
    answer = client.post("/api/v1/classes/rename", json={"old": EVIL, "new": "two"})
    assert answer.status_code == 200, answer.text
    assert client.names() == ["digit 0", "digit 1", "two", "digit 3"]
    assert client.post("/api/v1/classes/remove", json={"name": "digit 3", "for_good": False}).status_code == 200
    assert client.names() == ["digit 0", "digit 1", "two"]
    actions = [client.post("/api/v1/undo").json()["record"]["action"] for _ in range(3)]
    assert actions == ["remove", "rename", "learn"]
    assert client.names() == ["digit 0", "digit 1"]
    assert client.post("/api/v1/redo").json()["record"]["action"] == "learn"
    assert client.names() == ["digit 0", "digit 1", EVIL, "digit 3"]
    assert client.get("/api/v1/jobs").json()[0]["id"] == job["id"]


def test_the_first_teaching_makes_the_model(tmp_path, digits):
    with running(tmp_path / "new") as url, Client(url) as client:
        empty = client.get("/api/v1/model").json()
        assert (empty["classes"], empty["undo"], empty["redo"], empty["accuracy"]) == ([], 0, 0, None)
        refused = client.predict(pictures(digits, 0)[0])
        assert refused.status_code == 409
        assert not (tmp_path / "new").exists()
        job = client.ended(client.learn({str(label): pictures(digits, label) for label in (0, 1)}))
        assert job["state"] == "done", job
        assert client.names() == ["0", "1"]
        assert client.predict(pictures(digits, 0)[0]).status_code == 200
        assert client.post("/api/v1/undo").status_code == 200
        empty = client.get("/api/v1/model").json()
        assert (empty["classes"], empty["undo"], empty["redo"]) == ([], 0, 1)
        assert client.post("/api/v1/redo").status_code == 200
        assert client.names() == ["0", "1"]
    assert not (tmp_path / "new" / "teaching").exists()


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["../up"], "no folder of images could have it"),
        ([" "], "it is empty"),
        ([".hidden"], "a dot first"),
        (["a\nb"], "a control character"),
        (["a" * 256], "more than 255 characters"),
        ([], "1 images have 0 labels"),
        (["a", "b"], "1 images have 2 labels"),
    ],
)
def test_bad_labels_are_refused(client, model, digits, labels, said):
    files = [("images", ("x.png", pictures(digits, 0)[0]))]
    answer = client.post("/api/v1/learn", data={"labels": labels}, files=files)
    assert answer.status_code == 422
    assert said in answer.json()["error"]
    assert not (model / "teaching").exists()


def test_cancel_leaves_the_model_as_it_was(model, digits):
    before = _files(model)
    with running(model, options={"epochs": 5000, "threads": 1}) as url, Client(url) as client:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        running_job = client.until(lambda: (job := client.job(key))["epoch"] > 0 and job)
        assert running_job["doing"] == "learning"
        assert running_job["epochs"] == 5000
        waiting = client.learn({"digit 3": pictures(digits, 3)}).json()
        assert waiting["state"] == "waiting"
        assert client.post(f"/api/v1/jobs/{waiting['id']}/cancel").json()["state"] == "cancelled"
        for path, body in [("undo", None), ("classes/rename", {"old": "digit 0", "new": "x"})]:
            refused = client.post(f"/api/v1/{path}", json=body)
            assert (refused.status_code, "being taught" in refused.json()["error"]) == (409, True)
        assert client.predict(pictures(digits, 0)[0]).status_code == 200  # from the last complete state
        assert client.post(f"/api/v1/jobs/{key}/cancel").status_code == 200
        assert client.until(lambda: client.job(key)["state"] == "cancelled")
        again = client.post(f"/api/v1/jobs/{key}/cancel")
        assert (again.status_code, again.json()) == (409, {"error": "the job has ended already (cancelled)"})
        assert client.get("/api/v1/model").json()["unfinished"] is False
    assert _files(model) == before


def test_cancel_where_nothing_is_trained(tmp_path, digits):
    how = {"method": "analytic", "network": "resnet8", "image_size": 8, "threads": 1}
    with running(tmp_path / "new", options=how) as url, Client(url) as client:
        key = client.learn({str(label): pictures(digits, label) for label in (0, 1)}).json()["id"]
        client.until(lambda: client.job(key)["doing"] == "learning")
        assert client.post(f"/api/v1/jobs/{key}/cancel").status_code == 200
        assert client.until(lambda: (job := client.job(key))["state"] in ENDED and job)["state"] == "cancelled"
        assert client.names() == []
    assert not (tmp_path / "new" / "phases").exists()


def _files(model):
    """All of a model's files but the log and the lock."""
    kept = (path for path in model.rglob("*") if path.is_file() and path.name not in ("events.jsonl", "lock"))
    return {path.relative_to(model): path.read_bytes() for path in kept}


def test_a_server_that_is_stopped_while_it_teaches(model, digits):
    before = _files(model)
    slow = {"epochs": 5000, "threads": 1, "checkpoint_steps": 1}
    with running(model, options=slow) as url, Client(url) as client:
        keys = [client.learn({f"digit {i}": pictures(digits, i)}).json()["id"] for i in (2, 3)]
        client.until(lambda: client.job(keys[0])["epoch"] > 0)
    with running(model) as url, Client(url) as client:
        assert {job["id"]: job["state"] for job in client.get("/api/v1/jobs").json()} == dict.fromkeys(
            keys, "interrupted"
        )
        for key, unfinished in ((keys[1], True), (keys[0], False)):  # how far the first came is kept as long as it is
            assert client.post(f"/api/v1/jobs/{key}/cancel").json()["state"] == "cancelled"
            assert client.get("/api/v1/model").json()["unfinished"] is unfinished
        refused = client.post(f"/api/v1/jobs/{keys[0]}/resume")
        assert (refused.status_code, refused.json()["error"][:21]) == (409, "the job is cancelled;")
    assert _files(model) == before


def test_a_job_that_another_server_has_taken_up_is_left_to_it(model):
    folder = model / "teaching" / "job"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text('{"labels": ["x"], "names": ["x.png"], "made": "today", "source": null}')
    with running(model) as url, Client(url) as client:
        with locked(folder):
            for action, said in (("cancel", "another server has taken up the job"), ("resume", "is being written by")):
                refused = client.post(f"/api/v1/jobs/job/{action}")
                assert (refused.status_code, said in refused.json()["error"]) == (409, True)
                assert client.job("job")["state"] == "interrupted"
        assert folder.exists()
        assert client.post("/api/v1/jobs/job/cancel").json()["state"] == "cancelled"
    assert not folder.exists()


def test_what_is_being_uploaded_is_not_taken_for_the_rest_of_a_killed_server(model):
    first = Teacher(model, {}, 8)
    with first.preparing() as job:
        (job.folder / "0").write_bytes(b"the first of many images")
        second = Teacher(model, {}, 8)
        assert second.jobs == {}
        with pytest.raises(StoreError, match="a server is taking in images just now; try again in a moment"):
            IncrementalClassifier(model).remove("digit 0", for_good=True)
        assert (job.folder / "0").exists()
    assert not (model / "teaching").exists()
    assert IncrementalClassifier(model).classes == ("digit 0", "digit 1")
    for teacher in (first, second):
        teacher.close()


def test_jobs_beyond_the_limit_are_refused(model, digits):
    with running(model, options={"epochs": 5000, "threads": 1}, limits=Limits(jobs=1)) as url, Client(url) as client:
        first = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        client.until(lambda: client.job(first)["state"] == "running")
        second = client.learn({"digit 3": pictures(digits, 3)}).json()["id"]
        third = client.learn({"digit 4": pictures(digits, 4)})
        assert (third.status_code, third.json()["error"][:27]) == (429, "1 jobs are already waiting;")
        for key in (second, first):
            client.post(f"/api/v1/jobs/{key}/cancel")


def test_another_program_is_waited_for_and_its_step_is_seen(client, model, digits):
    with locked(model):
        assert client.until(lambda: _told(client)["busy"])
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        assert client.until(lambda: "another program" in client.job(key)["doing"])
        refused = client.post("/api/v1/undo")
        assert (refused.status_code, "is being written by process" in refused.json()["error"]) == (409, True)
    client.until(lambda: client.job(key)["state"] == "done")
    before = _told(client)["state"]
    IncrementalClassifier(model).rename("digit 2", "two")
    assert _told(client)["state"] != before
    assert client.names() == ["digit 0", "digit 1", "two"]
    assert "two" in [each["label"] for each in client.predict(pictures(digits, 2)[0]).json()["predictions"][0]["top"]]


def _told(client):
    """Return the first message of the event stream."""
    with client.stream("GET", "/api/v1/events") as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
    return json.loads(line.removeprefix("data: "))


def test_streams_beyond_the_limit_are_refused(model):
    with running(model, limits=Limits(streams=1)) as url, Client(url) as client:
        with client.stream("GET", "/api/v1/events") as stream:
            lines = stream.iter_lines()  # held: without it the stream would be closed
            next(lines)
            refused = client.get("/api/v1/events")
            assert (refused.status_code, refused.json()["error"][:14]) == (429, "too many pages")
        assert client.until(lambda: _answers(client))


def _answers(client):
    with client.stream("GET", "/api/v1/events") as stream:
        return stream.status_code == 200


def test_progress_is_told_as_it_happens(client, digits):
    parts = []
    with client.stream("GET", "/api/v1/events") as stream:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        for line in stream.iter_lines():
            if line.startswith("data: "):
                jobs = {job["id"]: job for job in json.loads(line.removeprefix("data: "))["jobs"]}
                parts += [jobs[key]["part"]] if key in jobs else []
                if key in jobs and jobs[key]["state"] == "done":
                    break
    assert parts[-1] == 1


def test_a_folder_on_the_server(model, digits, tmp_path):
    root = tmp_path / "images"
    for label in (2, 3):
        (root / "week2" / f"digit {label}").mkdir(parents=True)
        for i, content in enumerate(pictures(digits, label)):
            (root / "week2" / f"digit {label}" / f"{i}.png").write_bytes(content)
    (tmp_path / "secret" / "x").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "loop").symlink_to("loop")
    with running(model) as url, Client(url) as client:
        refused = client.post("/api/v1/learn/folder", json={"folder": "week2"})
        assert (refused.status_code, "--allow-folder" in refused.json()["error"]) == (403, True)
    with running(model, allow_folder=root) as url, Client(url) as client:
        for name in ("../secret", "/etc", "link", "loop", "nowhere", "a\0b"):
            assert client.post("/api/v1/learn/folder", json={"folder": name}).status_code == 404
        assert client.ended(client.post("/api/v1/learn/folder", json={"folder": "week2"}))["state"] == "done"
        assert client.names() == [f"digit {label}" for label in range(4)]


def test_the_report(client):
    page = client.get("/api/v1/export/report")
    assert page.status_code == 200, page.text
    assert page.headers["content-disposition"].startswith("attachment")
    assert "<!doctype html>" in page.text[:100].lower()


@pytest.mark.slow
def test_the_onnx_file(client):
    onnx = client.get("/api/v1/export/onnx")
    assert onnx.status_code == 200, onnx.text
    import onnxruntime

    def labels(content):
        return json.loads(onnxruntime.InferenceSession(content).get_modelmeta().custom_metadata_map["labels"])

    assert labels(onnx.content) == ["digit 0", "digit 1"]
    client.post("/api/v1/classes/rename", json={"old": "digit 1", "new": "one"})
    assert labels(client.get("/api/v1/export/onnx").content) == ["digit 0", "one"]


# ------------------------------------------------------------------------------------------------------------- refusing

CHANGES = [
    ("learn", None),
    ("learn/folder", {"folder": "x"}),
    ("undo", None),
    ("redo", None),
    ("classes/rename", {"old": "digit 0", "new": "x"}),
    ("classes/remove", {"name": "digit 0"}),
    ("jobs/x/cancel", None),
    ("jobs/x/resume", None),
]


@pytest.mark.parametrize(("path", "body"), CHANGES)
def test_changes_need_the_token(reader, path, body):
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
    ):
        answer = httpx.post(f"{reader.url}/api/v1/{path}", json=body, headers=headers)
        assert answer.status_code == 401
        assert "needs the token" in answer.json()["error"]
        assert answer.headers["www-authenticate"] == "Bearer"


def test_every_route_that_changes_is_in_the_list_above(reader):
    paths = reader.get("/openapi.json").json()["paths"]
    posts = {path.removeprefix("/api/v1/").replace("{key}", "x") for path, ways in paths.items() if "post" in ways}
    assert posts == {path for path, _ in CHANGES} | {"predict"}
    assert {way for ways in paths.values() for way in ways} == {"get", "post"}


def test_a_server_that_is_read_only_changes_nothing(model, digits):
    before = _files(model)
    with running(model, read_only=True) as url, Client(url) as client:
        for path, body in CHANGES:
            answer = client.post(f"/api/v1/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]) == (403, "this server was started with --read-only")
        assert client.get("/api/v1/model").json()["read_only"] is True
        assert client.get("/api/v1/jobs").json() == []
        assert client.predict(pictures(digits, 0)[0]).status_code == 200
    assert _files(model) == before


def test_a_model_that_nothing_could_make_is_not_served(tmp_path):
    with pytest.raises(StoreError, match=r"new: no such model; `geodl learn .*new FOLDER` makes one"):
        create_app(tmp_path / "new", token=TOKEN, read_only=True)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "192.0.2.1"},
        {"Host": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_pages_from_elsewhere_are_refused(reader, headers):
    for way, path in (("GET", "/api/v1/model"), ("POST", "/api/v1/undo"), ("POST", "/api/v1/predict")):
        answer = reader.request(way, path, headers=headers)
        assert answer.status_code == 403, (way, path)
        assert "access-control-allow-origin" not in answer.headers


def test_the_own_page_is_not(reader):
    own = {"Origin": reader.url, "Sec-Fetch-Site": "same-origin"}
    assert reader.get("/api/v1/model", headers=own).status_code == 200
    port = reader.url.rpartition(":")[2]
    assert reader.get("/api/v1/model", headers={"Host": f"localhost:{port}"}).status_code == 200
    assert reader.options("/api/v1/undo", headers=own | {"Access-Control-Request-Method": "POST"}).status_code == 405


@pytest.mark.parametrize("path", ["/", "/docs", "/static/app.js", "/api/v1/model", "/nowhere", "/openapi.json"])
def test_security_headers_are_on_everything(reader, path):
    headers = reader.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_pages_ask_for_nothing_from_elsewhere(reader):
    for path in ("/", "/docs", "/static/app.js", "/static/style.css"):
        answer = reader.get(path)
        assert answer.status_code == 200
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "innerHTML" not in answer.text
        assert "<script>" not in answer.text
        assert " style=" not in answer.text


def test_limits_are_refused_with_a_sentence(model, digits):
    good = pictures(digits, 0, slice(3))
    limits = Limits(predict_body=20_000, learn_body=20_000, predict_images=2, learn_images=2, predictions=1)
    with running(model, limits=limits) as url, Client(url) as client:
        for send in (lambda *some: client.predict(*some), lambda *some: client.learn({"x": some})):
            large = send(os.urandom(30_000))
            assert (large.status_code, large.json()["error"]) == (
                413,
                "the request is larger than the limit of 20.0 kB",
            )
            many = send(*good)
            assert (many.status_code, many.json()["error"]) == (413, "more than 2 images in one request")
        assert client.predict(*good[:2]).status_code == 200

        def endless():  # no Content-Length: the size shows only as it arrives
            head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n'
            yield head
            for _ in range(100):
                yield bytes(1000)

        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        assert client.post("/api/v1/predict", content=endless(), headers=kind).status_code == 413


def test_what_holds_no_images_is_small_also_without_the_token(reader):
    body, kind = b'"' + b"a" * 100_000 + b'"', {"Content-Type": "application/json"}
    for path in ("classes/rename", "learn/folder"):
        for content in (body, iter([body])):  # the second says nothing of its length
            large = httpx.post(f"{reader.url}/api/v1/{path}", content=content, headers=kind)
            assert (large.status_code, large.json()) == (
                413,
                {"error": "the request is larger than the limit of 64.0 kB"},
            )


def test_too_many_at_once_and_too_slow(model, digits):
    with running(model, limits=Limits(predictions=1, upload_seconds=1.0)) as url, Client(url) as client:
        slow = _half(url)
        time.sleep(0.3)
        busy = client.predict(pictures(digits, 0)[0])
        assert (busy.status_code, busy.json()["error"]) == (429, "the server is busy; try again in a moment")
        assert busy.headers["retry-after"] == "1"
        slow.settimeout(10)
        assert b"408" in slow.recv(100)
        slow.close()
        assert client.predict(pictures(digits, 0)[0]).status_code == 200


def _half(url):
    """Send half a request and wait."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /api/v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        b'Content-Length: 10000\r\n\r\n--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\nhalf'
    )
    return connection


def test_clients_that_break_off_or_send_garbage_disturb_nobody(reader, digits):
    good = pictures(digits, 0)[0]
    for _ in range(5):
        _half(reader.url).close()
        host, port = reader.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"\x00\xff garbage\r\n\r\n")
        assert reader.predict(good).status_code == 200
    for body, kind in [
        (b"", "multipart/form-data; boundary=b"),
        (b"--b\r\n", "multipart/form-data; boundary=b"),
        (b"x", "multipart/form-data"),
        (b"{}", "application/json"),
        (b"", "text/plain"),
    ]:
        answer = reader.post("/api/v1/predict", content=body, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422)
        assert set(answer.json()) == {"error"}
    assert reader.post("/api/v1/predict").json() == {
        "error": "images are needed, as multipart/form-data with fields named `images`"
    }
    assert reader.get("/api/v1/jobs/x").json() == {"error": "no such job"}
    assert reader.get("/api/v1/nowhere").json() == {"error": "Not Found"}
    assert reader.predict(good, top=0).json()["error"].startswith("top: ")
    assert reader.post("/api/v1/classes/rename", json={"old": "digit 0"}).json() == {"error": "new: Field required"}
    refused = reader.post("/api/v1/classes/rename", json={"old": "none", "new": "x"})
    assert (refused.status_code, refused.json()["error"]) == (422, "no class 'none'; the model knows digit 0, digit 1")


# -------------------------------------------------------------------------------------------------------------- tokens


def test_tokens(monkeypatch):
    monkeypatch.delenv("GEODL_TOKEN", raising=False)
    (one, fresh), (other, _) = choose_token(), choose_token()
    assert fresh
    assert one != other
    assert len(one) >= 32
    monkeypatch.setenv("GEODL_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16 printable"):
        choose_token()
    monkeypatch.setenv("GEODL_TOKEN", "sixteen-or-more-characters")
    assert choose_token() == ("sixteen-or-more-characters", False)
    assert has_token(f"Bearer {one}", one)
    for wrong in (None, "", "Bearer", "Bearer ", f"Bearer {one}x", f"bearer {one[:-1]}", one, "Bearer \u00e9"):
        assert not has_token(wrong, one)


def test_hosts():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "192.168.1.5", "pc")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip
    own = names_of("127.0.0.1")
    assert all(
        is_allowed(name, "127.0.0.1", own) for name in ("127.0.0.1:80", "localhost", "[::1]:8000", "LOCALHOST:1")
    )
    assert not any(is_allowed(name, "127.0.0.1", own) for name in ("192.168.1.5", "pc", "", "evil.example", "["))
    wide = names_of("0.0.0.0") | {"box.example"}
    assert all(is_allowed(name, "0.0.0.0", wide) for name in ("192.168.1.5:8000", "box.example", socket.gethostname()))
    assert not is_allowed("evil.example", "0.0.0.0", wide)


# ---------------------------------------------------------------------------------------------------- the command itself


class Command:
    """`geodl serve` in a process of its own."""

    def __init__(self, *words):
        environment = {key: value for key, value in os.environ.items() if key != "GEODL_TOKEN"}
        command = [sys.executable, "-m", "geodl", "serve", *words, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.said = []
        while not any(line.startswith("Ctrl-C") for line in self.said):
            line = self.process.stdout.readline()
            assert line, self.said
            self.said.append(line)
        self.process.stdout.close()
        self.url, _, self.token = self.said[0].partition("is served at ")[2].strip().partition("/#token=")


def test_a_server_that_is_killed_while_it_teaches(model, digits):
    before = _files(model)
    slow = ("--epochs", "5000", "--threads", "1")
    first = Command(str(model), *slow)
    with Client(first.url, first.token) as client:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        client.until(lambda: client.job(key)["part"] > 0)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    after = _files(model)
    assert not any(path.parts[0] == "phases" for path in set(after) - set(before))
    assert {path: after[path] for path in before} == before
    second = Command(str(model), "--epochs", "2", "--threads", "1")
    try:
        assert any("teaching 12 images of digit 2; the model is as before" in line for line in second.said)
        with Client(second.url, second.token) as client:
            assert client.names() == ["digit 0", "digit 1"]
            assert [(job["id"], job["state"]) for job in client.get("/api/v1/jobs").json()] == [(key, "interrupted")]
            assert client.post(f"/api/v1/jobs/{key}/resume").status_code == 200
            assert (
                client.until(lambda: (job := client.job(key))["state"] in ("done", "failed") and job)["state"] == "done"
            )
            assert client.names() == ["digit 0", "digit 1", "digit 2"]
        assert not (model / "teaching").exists()
    finally:
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{folder}"], "is not a directory of geodl's|no config.json|config.json"),
        (["{folder}/new", "--allow-folder", "{folder}/nowhere"], "--allow-folder .*nowhere: not a folder"),
        (["{folder}/new", "--host", "256.1.1.1"], "cannot listen on 256.1.1.1 port 8000"),
        (["{folder}/new", "--port", "70000"], "port = 70000: 0 to 65535 are allowed"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(words, said, tmp_path):
    (tmp_path / "somebody's.txt").touch()
    with pytest.raises((ConfigError, StoreError), match=said):
        serve_command([word.format(folder=tmp_path) for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's.txt"]


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ([], None, r"is served at http://127\.0\.0\.1:\d+/#token=[\w-]{32}\n"),
        ([], "from-the-environment", r"is served at http://127\.0\.0\.1:\d+/\nthe token is the value of GEODL_TOKEN"),
        (["--read-only"], None, r"is served at http://127\.0\.0\.1:\d+/\nCtrl-C"),
        (["--host", "0.0.0.0"], None, rf"http://{socket.gethostname()}:\d+/#token=[\w-]+\neverybody who reaches this"),
    ],
)
def test_the_address_that_is_printed(words, given, said, model, monkeypatch, capsys):
    class Ending:
        def __init__(self, app):
            self.app = app

        def run(self, sockets):
            self.app.state.server.close()

    monkeypatch.setattr("geodl.serve.app.server_of", Ending)
    monkeypatch.setenv("GEODL_TOKEN", given) if given else monkeypatch.delenv("GEODL_TOKEN", raising=False)
    serve_command([str(model), "--port", "0", *words])
    assert re.search(said, capsys.readouterr().out)


def serve_command(words):
    return app(["serve", *words], exit_on_error=False, print_error=False)


# ------------------------------------------------------------------------------------------------------------ the schema


@pytest.mark.slow
def test_whatever_the_schema_allows_or_forbids_is_answered_as_it_says(model):
    schemathesis = pytest.importorskip("schemathesis")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    # No schema says that there are as many labels as images, or which classes the model knows; and in a multipart request
    # everything is text, so that nothing is of a wrong type.
    checks = importlib.import_module("schemathesis.specs.openapi.checks")
    allowed, forbidden = checks.positive_data_acceptance, checks.negative_data_rejection
    with running(model, options={"epochs": 1, "threads": 1}) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        # A stream never ends, and files take seconds each.
        schema = schema.exclude(path_regex="/events|/export/")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) == 14
        for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
            if mode is schemathesis.GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue  # there is nothing that could be wrong

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=25, database=None, suppress_health_check=list(HealthCheck))
            def check(case):
                untyped = "multipart" in (case.media_type or "")
                case.call_and_validate(headers=headers, excluded_checks=[allowed, *([forbidden] if untyped else [])])

            check()
        with Client(url) as client:
            assert client.get("/api/v1/model").status_code == 200


# ----------------------------------------------------------------------------------------------------------- the document


def test_the_client_in_the_document_works(tmp_path, digits):
    text = (Path(__file__).parents[1] / "docs" / "serve.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    for label in (0, 1):
        (tmp_path / "week1" / f"digit {label}").mkdir(parents=True)
        for i, content in enumerate(pictures(digits, label)):
            (tmp_path / "week1" / f"digit {label}" / f"{i}.png").write_bytes(content)
    (tmp_path / "photo.jpg").write_bytes(pictures(digits, 0, slice(30, 31))[0])
    with running(tmp_path / "model") as url:
        environment = os.environ | {"GEODL_URL": url, "GEODL_TOKEN": TOKEN}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert re.match(r"done \d+\.\d+\nphoto.jpg (digit \d|unknown) \[\('digit \d', [\d.]+\), ", done.stdout)


def test_answers_do_not_wait_for_acknowledgments():
    """Nagle's algorithm would hold every answer back for 40 ms."""
    import socket

    from geodl.serve.app import bind

    with (
        bind("127.0.0.1") as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as here,
    ):
        assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
