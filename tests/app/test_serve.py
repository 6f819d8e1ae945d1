"""`geodl serve` over real HTTP on this machine: recognize, teach, change, refuse, survive."""

import base64
import importlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from PIL import Image
from tests.helpers.serving import ENDED, TOKEN, Client, Command, encoded, pictures, running

from geodl.app import serve
from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve import batching
from geodl.app.serve.batching import Predictor
from geodl.app.serve.connections import bind
from geodl.app.serve.limits import Limits
from geodl.app.serve.security import choose_token, has_token, is_allowed, is_loopback, names_of
from geodl.app.serve.server import Server
from geodl.app.serve.uploads import SMALL
from geodl.cli import app
from geodl.core.errors import ConfigError, StoreError
from geodl.core.locks import locked
from geodl.store import Directory

EVIL = "<img src=x onerror=alert(1)>"
SLOW = {"epochs": 5000, "threads": 1}


def refused(answer, status, *words):
    """Check that a request was refused with a sentence that has some words in it."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert all(word in answer.json()["error"] for word in words), answer.text


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
    for each, path, other in zip(found, paths, expected, strict=True):
        known = other.to_json()
        confidences = [entry.pop("confidence") for entry in each["top"]]
        assert confidences == pytest.approx([e.pop("confidence") for e in known["top"]], abs=1e-5)
        for name in ("confidence", "score"):
            assert each.pop(name) == pytest.approx(known.pop(name), abs=1e-5)
        del each["index"], each["similar"]
        assert each == known | {"name": path.name}


def test_what_cannot_be_read_is_named_and_the_rest_predicted(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    large, tiny = encoded(Image.new("1", (10_000, 10_000))), encoded(Image.new("RGB", (2, 2)))
    answer = reader.predict(b"garbage", good, b"", good[:60], large, tiny).json()
    assert [each["index"] for each in answer["predictions"]] == [1]
    words = ["not an image", "empty", "truncated", "limit", "2 x 2"]
    assert [each["name"] for each in answer["skipped"]] == [f"{i}.png" for i in (0, 2, 3, 4, 5)]
    for each, word in zip(answer["skipped"], words, strict=True):
        assert word in each["reason"]


def test_names_of_files_are_shown_safely_and_never_used(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    names = ["../../etc/passwd", "C:\\up\\x.png", "a\x1b[31m.png"]
    files = [("images", (name, good)) for name in names]
    found = reader.post("/api/v1/predict", files=files).json()["predictions"]
    assert [each["name"] for each in found][:2] == ["passwd", "x.png"]
    assert all(each["name"].isprintable() for each in found)


def test_validation_images_are_shown_to_those_who_know_the_token_alone(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    (found,) = reader.predict(good, similar=True).json()["predictions"]
    values = [each["similarity"] for each in found["similar"]]
    assert len(values) == 4
    assert values == sorted(values, reverse=True)
    kind, _, content = found["similar"][0]["image"].partition(",")
    assert kind == "data:image/png;base64"
    (itself,) = reader.predict(base64.b64decode(content), similar=True).json()["predictions"]
    assert itself["similar"][0]["similarity"] == pytest.approx(1, abs=1e-3)
    with Client(reader.url, token=None) as stranger:
        assert stranger.predict(good, similar=True).json()["predictions"][0]["similar"] == []


def test_many_predictions_at_once_are_all_right(reader, digits):
    images = [content for label in (0, 1) for content in pictures(digits, label, slice(30, 55))]

    def top(content):
        found = reader.predict(content).json()["predictions"][0]["top"]
        return {each["label"]: each["confidence"] for each in found}

    right = [top(content) for content in images]

    def one(i):
        if i % 10 == 0:  # in between, a client that sends garbage
            return reader.predict(b"garbage").json()["skipped"][0]["reason"] == "not an image"
        found, known = top(images[i % 50]), right[i % 50]
        return list(found) == list(known) and np.allclose(
            *map(list, map(dict.values, (found, known))), atol=1e-5
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))


class Held(IncrementalClassifier):
    """A model that is read once it may be."""

    asked, allowed = Event(), Event()

    @property
    def version(self):
        self.asked.set()
        assert self.allowed.wait(60)
        return super().version


def test_the_queue_of_predictions(base, digits):
    """Who no longer waits spoils no answer of others, and those who come first are served first."""
    predictor, seen = Predictor(Held(base)), IncrementalClassifier(base).recognizer().transform
    (content,) = pictures(digits, 0, slice(1))
    first, owner, *others = [Future() for _ in range(102)]
    done = []
    for name, answer in (("last", others[-1]), ("owner", owner)):
        answer.add_done_callback(lambda _, name=name: done.append(name))
    with ThreadPoolExecutor(1) as pool:
        predicting = pool.submit(predictor.predict, content, seen, 1, False, first)
        assert Held.asked.wait(60)
        for answer in others:  # none of them waits for the one that predicts
            predictor.predict(content, seen, 1, False, answer)
        predictor.predict(content, seen, 1, True, owner)
        assert others[1].cancel()
        Held.allowed.set()
        predicting.result(timeout=60)
    answered = [each.result(timeout=0) for each in (first, others[0], others[-1], owner)]
    assert all(each.prediction.label for each in answered)
    assert done == ["owner", "last"]


def test_the_directory_is_read_again_only_after_a_commit(model):
    class Counted(IncrementalClassifier):
        reads = 0

        @property
        def version(self):
            self.reads += 1
            return super().version

    predictor = Predictor(counted := Counted(model))
    first = predictor.current()
    reads = counted.reads
    assert predictor.current() is first
    assert counted.reads == reads
    IncrementalClassifier(model).rename("digit 0", "zero")
    assert predictor.current().recognizer.classes[0] == "zero"
    other = torch.zeros(3, 40, 40, dtype=torch.uint8)
    assert predictor.current().stack([other]).pixels.shape[2:] == (first.side, first.side)


def test_an_unexpected_error_while_decoding_is_answered(reader, digits, monkeypatch):
    def broken(image, seen):
        raise MemoryError

    monkeypatch.setattr(batching, "decode", broken)
    refused(reader.predict(*pictures(digits, 0, slice(1))), 500, "MemoryError")


def test_small_requests_stay_in_memory_and_larger_ones_are_written(reader, digits, monkeypatch):
    seen, decode = [], batching.decode
    monkeypatch.setattr(
        batching, "decode", lambda image, size: seen.append(image) or decode(image, size)
    )
    small, large = pictures(digits, 0, slice(1))[0], b"x" * (SMALL + 1)
    assert len(reader.predict(small, small).json()["predictions"]) == 2
    answer = reader.predict(small, large).json()
    assert (len(answer["predictions"]), len(answer["skipped"])) == (1, 1)
    assert [type(image) is bytes for image in seen] == [True, True, False, False]
    assert not any(image.exists() for image in seen[2:])


# ------------------------------------------------------------------------------------------------------------ teaching


def test_teach_look_rename_remove_and_undo(client, digits):
    images = {EVIL: pictures(digits, 2), "digit 3": [*pictures(digits, 3), b"garbage"]}
    job = client.ended(client.learn(images))
    assert job["state"] == "done", job
    assert (job["images"], job["classes"]) == (25, {EVIL: 12, "digit 3": 13})
    assert job["result"]["new"] == [EVIL, "digit 3"]
    assert job["skipped"] == [{"name": "digit 3/24.png", "reason": "not an image"}]
    known = ["digit 0", "digit 1", EVIL, "digit 3"]
    assert client.names() == known
    assert client.get("/api/v1/model").json()["classes"][0]["accuracy"] is not None
    assert [step["action"] for step in client.get("/api/v1/history").json()] == ["learn", "learn"]
    top = client.predict(pictures(digits, 2)[0], top=4).json()["predictions"][0]["top"]
    assert {each["label"] for each in top} == set(known)
    answer = client.post("/api/v1/classes/rename", json={"old": EVIL, "new": "two"})
    assert [each["name"] for each in answer.json()["classes"]] == [*known[:2], "two", "digit 3"]
    answer = client.post("/api/v1/classes/remove", json={"name": "digit 3", "for_good": False})
    assert [each["name"] for each in answer.json()["classes"]] == [*known[:2], "two"]
    actions = [client.post("/api/v1/undo").json()["record"]["action"] for _ in range(3)]
    assert actions == ["remove", "rename", "learn"]
    assert client.names() == known[:2]
    assert client.post("/api/v1/redo").json()["record"]["action"] == "learn"
    assert client.names() == known
    assert client.get("/api/v1/jobs").json()[0]["id"] == job["id"]


def test_the_first_teaching_makes_the_model(tmp_path, digits):
    def figures():
        found = client.get("/api/v1/model").json()
        return found["classes"], found["undo"], found["redo"], found["accuracy"]

    with running(tmp_path / "new") as url, Client(url) as client:
        assert figures() == ([], 0, 0, None)
        refused(client.predict(pictures(digits, 0)[0]), 409, "nothing")
        assert not (tmp_path / "new").exists()
        job = client.ended(client.learn({str(label): pictures(digits, label) for label in (0, 1)}))
        assert job["state"] == "done", job
        assert client.names() == ["0", "1"]
        assert client.predict(pictures(digits, 0)[0]).status_code == 200
        assert client.post("/api/v1/undo").status_code == 200
        assert figures() == ([], 0, 1, None)
        assert client.post("/api/v1/redo").status_code == 200
        assert client.names() == ["0", "1"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["../up"], "no folder"),
        ([" "], "empty"),
        ([".hidden"], "a dot first"),
        (["a\nb"], "control character"),
        (["a" * 256], "255"),
        ([], "1 images have 0 labels"),
        (["a", "b"], "1 images have 2 labels"),
    ],
)
def test_bad_labels_are_refused(reader, digits, labels, words):
    files = [("images", ("x.png", pictures(digits, 0)[0]))]
    refused(reader.post("/api/v1/learn", data={"labels": labels}, files=files), 422, words)
    assert reader.get("/api/v1/jobs").json() == []


def test_cancel_leaves_the_model_as_it_was(model, digits):
    before, limits = _files(model), Limits(jobs=1)
    with running(model, options=SLOW, limits=limits) as url, Client(url) as client:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        job = client.until(lambda: (job := client.job(key))["epoch"] > 0 and job)
        assert (job["doing"], job["epochs"]) == ("learning", 5000)
        waiting = client.learn({"digit 3": pictures(digits, 3)}).json()
        assert waiting["state"] == "waiting"
        refused(client.learn({"digit 4": pictures(digits, 4)}), 429, "1 jobs wait")
        assert client.post(f"/api/v1/jobs/{waiting['id']}/cancel").json()["state"] == "cancelled"
        rename = {"old": "digit 0", "new": "x"}
        refused(client.post("/api/v1/undo"), 409, "being taught")
        refused(client.post("/api/v1/classes/rename", json=rename), 409, "being taught")
        # from the last complete state
        assert client.predict(pictures(digits, 0)[0]).status_code == 200
        assert client.post(f"/api/v1/jobs/{key}/cancel").status_code == 200
        assert client.until(lambda: client.job(key)["state"] == "cancelled")
        refused(client.post(f"/api/v1/jobs/{key}/cancel"), 409, "ended", "cancelled")
        assert client.get("/api/v1/model").json()["unfinished"] is False
    assert _files(model) == before


def test_cancel_where_nothing_is_trained(tmp_path, digits):
    how = {"method": "analytic", "network": "resnet8", "image_size": 8, "threads": 1}
    with running(tmp_path / "new", options=how) as url, Client(url) as client:
        key = client.learn({str(label): pictures(digits, label) for label in (0, 1)}).json()["id"]
        client.until(lambda: client.job(key)["doing"] == "learning")
        assert client.post(f"/api/v1/jobs/{key}/cancel").status_code == 200
        job = client.until(lambda: (job := client.job(key))["state"] in ENDED and job)
        assert job["state"] == "cancelled"
        assert client.names() == []
    assert Directory(tmp_path / "new").completed() == 0
    assert not (tmp_path / "new" / "progress").exists()


def _files(model):
    """All of a model's files but the log and the lock."""
    files = [path for path in model.rglob("*") if path.is_file()]
    kept = [path for path in files if path.name not in ("events.jsonl", "lock")]
    return {path.relative_to(model): path.read_bytes() for path in kept}


def test_a_server_that_is_stopped_while_it_teaches(model, digits):
    """Its jobs are gone, the model is as before, and teaching the same images again resumes."""
    before, options = _files(model), SLOW | {"checkpoint_steps": 1}
    with running(model, options=options) as url, Client(url) as client:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        client.learn({"digit 3": pictures(digits, 3)})
        client.until(lambda: client.job(key)["epoch"] > 2)
    with running(model, options=options) as url, Client(url) as client:
        assert client.get("/api/v1/jobs").json() == []
        assert client.get("/api/v1/model").json()["unfinished"] is True
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        assert client.until(lambda: client.job(key)["epoch"]) > 1
        client.post(f"/api/v1/jobs/{key}/cancel")
        client.until(lambda: client.job(key)["state"] == "cancelled")
    assert _files(model) == before


def test_jobs_and_uploads_are_not_taken_from_the_directory(model, digits, tmp_path):
    """What others put there is neither learned nor, behind a link, touched."""
    planted = json.dumps({"labels": [], "names": [], "made": "today", "source": str(tmp_path)})
    elsewhere = tmp_path / "elsewhere"
    for place in (elsewhere, model / "teaching"):
        (place / "x").mkdir(parents=True)
        (place / "x" / "job.json").write_text(planted)
        (place / "x" / "0").write_bytes(b"a picture")
    with running(model) as url, Client(url) as client:  # of version 0.2: dropped
        assert client.get("/api/v1/jobs").json() == []
        assert not (model / "teaching").exists()
    (model / "teaching").symlink_to(elsewhere)
    with running(model) as url, Client(url) as client:
        assert client.ended(client.learn({"digit 2": pictures(digits, 2)}))["state"] == "done"
    assert sorted(path.name for path in elsewhere.rglob("*")) == ["0", "job.json", "x"]


def test_another_program_is_waited_for_and_its_step_is_seen(client, model, digits):
    remove = {"name": "digit 2", "for_good": True}
    with locked(model):
        assert client.until(lambda: client.told()["busy"])
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        assert client.until(lambda: "another program" in client.job(key)["doing"])
        refused(client.post("/api/v1/undo"), 409, "written by process")
        refused(client.post("/api/v1/classes/remove", json=remove), 409, "wait to be learned")
    client.until(lambda: client.job(key)["state"] == "done")
    before = client.told()["state"]
    IncrementalClassifier(model).rename("digit 2", "two")
    assert client.until(lambda: client.told()["state"] != before)
    assert client.names() == ["digit 0", "digit 1", "two"]
    top = client.predict(pictures(digits, 2)[0]).json()["predictions"][0]["top"]
    assert "two" in [each["label"] for each in top]


def test_progress_is_told_as_it_happens(client, digits):
    parts = []
    with client.stream("GET", "/api/v1/events") as stream:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        for line in stream.iter_lines():
            told = json.loads(line.removeprefix("data: ") or "{}")
            jobs = [job for job in told.get("jobs", ()) if job["id"] == key]
            parts += [job["part"] for job in jobs]
            if any(job["state"] == "done" for job in jobs):
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
        refused(client.learn_folder("week2"), 403, "--allow-folder")
    with running(model, allow_folder=root) as url, Client(url) as client:
        for name in ("../secret", "/etc", "link", "loop", "nowhere", "a\0b"):
            refused(client.learn_folder(name), 404)
        assert client.ended(client.learn_folder("week2"))["state"] == "done"
        assert client.names() == [f"digit {label}" for label in range(4)]


def test_the_report(reader):
    page = reader.get("/api/v1/export/report")
    assert page.status_code == 200, page.text
    assert page.headers["content-disposition"].startswith("attachment")
    assert "<!doctype html>" in page.text[:100].lower()


@pytest.mark.slow
def test_the_onnx_file(client):
    import onnxruntime

    def labels():
        content = client.get("/api/v1/export/onnx").content
        about = onnxruntime.InferenceSession(content).get_modelmeta().custom_metadata_map
        return json.loads(about["labels"])

    assert labels() == ["digit 0", "digit 1"]
    client.post("/api/v1/classes/rename", json={"old": "digit 1", "new": "one"})
    assert labels() == ["digit 0", "one"]


# ------------------------------------------------------------------------------------------------------------- refusing

CHANGES = {
    "learn": None,
    "learn/folder": {"folder": "x"},
    "undo": None,
    "redo": None,
    "classes/rename": {"old": "digit 0", "new": "x"},
    "classes/remove": {"name": "digit 0"},
    "jobs/x/cancel": None,
    "pictures/move": {"ids": ["x"], "label": "x"},
    "pictures/forget": {"ids": ["x"]},
    "tray/add": None,
    "tray/drop": {"label": "x"},
    "tray/teach": None,
}


def test_changes_need_the_token(reader):
    wrong = ("", "Bearer wrong", f"Basic {TOKEN}", TOKEN)
    for (path, body), header in itertools.product(CHANGES.items(), wrong):
        headers = {"Authorization": header}
        answer = httpx.post(f"{reader.url}/api/v1/{path}", json=body, headers=headers)
        refused(answer, 401, "token")
        assert answer.headers["www-authenticate"] == "Bearer"
    paths = reader.get("/openapi.json").json()["paths"]
    posts = [path for path, ways in paths.items() if "post" in ways]
    names = {path.removeprefix("/api/v1/").replace("{key}", "x") for path in posts}
    assert names == {*CHANGES, "predict"}
    assert {way for ways in paths.values() for way in ways} == {"get", "post"}


def test_a_server_that_is_read_only_changes_nothing(model, digits, tmp_path):
    before = _files(model)
    with running(model, read_only=True) as url, Client(url) as client:
        for path, body in CHANGES.items():
            refused(client.post(f"/api/v1/{path}", json=body), 403, "--read-only")
        assert client.get("/api/v1/model").json()["read_only"] is True
        assert client.get("/api/v1/jobs").json() == []
        assert client.predict(pictures(digits, 0)[0]).status_code == 200
    assert _files(model) == before
    with pytest.raises(StoreError, match="no such model"):  # nothing could make it
        Server(tmp_path / "new", TOKEN, read_only=True)


FOREIGN = ["https://evil.example", "null", "http://127.0.0.1:1"]
HOSTS = ["evil.example", "127.0.0.1.evil.example", "192.0.2.1", ""]


@pytest.mark.parametrize(
    "headers",
    [
        *({"Origin": origin} for origin in FOREIGN),
        *({"Host": host} for host in HOSTS),
        *({"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")),
    ],
)
def test_pages_from_elsewhere_are_refused(reader, headers):
    for way, path in (("GET", "model"), ("POST", "undo"), ("POST", "predict")):
        answer = reader.request(way, f"/api/v1/{path}", headers=headers)
        refused(answer, 403)
        assert "access-control-allow-origin" not in answer.headers


def test_the_own_page_is_not(reader):
    own = {"Origin": reader.url, "Sec-Fetch-Site": "same-origin"}
    assert reader.get("/api/v1/model", headers=own).status_code == 200
    port = reader.url.rpartition(":")[2]
    assert reader.get("/api/v1/model", headers={"Host": f"localhost:{port}"}).status_code == 200
    asks = own | {"Access-Control-Request-Method": "POST"}
    assert reader.options("/api/v1/undo", headers=asks).status_code == 405


STATIC = sorted(path.name for path in Path(serve.__file__).with_name("static").iterdir())


def test_a_proxy_with_https(base):
    """As Caddy and Tailscale pass requests on: under the name that the browser used, the page being one of https."""
    headers = {"Host": "flowers.example.org", "Origin": "https://flowers.example.org"}
    named = running(base, allow_hosts=("flowers.example.org",))
    with named as url, Client(url) as client:
        assert client.get("/api/v1/tray", headers=headers).status_code == 200
        headers["Host"] = "other.example.org"
        assert client.get("/api/v1/tray", headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/", "/docs", *(f"/static/{name}" for name in STATIC)])
def test_pages_ask_for_nothing_from_elsewhere(reader, path):
    answer = reader.get(path)
    assert answer.status_code == 200
    assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    for word in ("innerHTML", "<script>", " style="):
        assert word not in answer.text


@pytest.mark.parametrize("path", ["/", "/docs", "/static/app.js", "/api/v1/model", "/nowhere"])
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


def test_requests_that_are_no_good(reader, digits):
    kind = "multipart/form-data"
    bodies = [(b"", f"{kind}; boundary=b"), (b"--b\r\n", f"{kind}; boundary=b"), (b"x", kind)]
    for body, kind in [*bodies, (b"{}", "application/json"), (b"", "text/plain")]:
        answer = reader.post("/api/v1/predict", content=body, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422)
        assert set(answer.json()) == {"error"}
    refused(reader.post("/api/v1/predict"), 422, "images are needed")
    refused(reader.get("/api/v1/jobs/x"), 404, "no such job")
    refused(reader.get("/api/v1/nowhere"), 404)
    refused(reader.predict(pictures(digits, 0)[0], top=0), 422, "top: ")
    refused(reader.post("/api/v1/classes/rename", json={"old": "digit 0"}), 422, "new: ")
    unknown = reader.post("/api/v1/classes/rename", json={"old": "none", "new": "x"})
    refused(unknown, 422, "'none'", "digit 0, digit 1")


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
    wrong = ["", "Bearer", "Bearer ", f"Bearer {one}x", f"bearer {one[:-1]}", one, "Bearer \u00e9"]
    assert not any(has_token(each, one) for each in [None, *wrong])


def test_hosts():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "pc")))
    own, wide = names_of("127.0.0.1"), names_of("0.0.0.0") | {"box.example"}
    for name in ("127.0.0.1:80", "localhost", "[::1]:8000", "LOCALHOST:1"):
        assert is_allowed(name, "127.0.0.1", own)
    for name in ("192.168.1.5", "pc", "", "evil.example", "["):
        assert not is_allowed(name, "127.0.0.1", own)
    for name in ("192.168.1.5:8000", "box.example", socket.gethostname()):
        assert is_allowed(name, "0.0.0.0", wide)
    assert not is_allowed("evil.example", "0.0.0.0", wide)


# ---------------------------------------------------------------------------------------------------- the command itself


def test_a_server_that_is_killed_while_it_teaches(model, digits):
    """The model is as before, and the next start drops what was uploaded."""
    before = _files(model)
    first = Command(str(model), "--epochs", "5000", "--threads", "1")
    with Client(first.url, first.token) as client:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        client.until(lambda: client.job(key)["part"] > 0)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    after = _files(model)
    assert not any(path.parts[0] in ("phases", "objects") for path in set(after) - set(before))
    assert {path: after[path] for path in before} == before
    second = Command(str(model))
    try:
        assert any("dropped 12 uploaded images" in line for line in second.said)
        assert not list(Path(tempfile.gettempdir()).glob("geodl-serve-*/*/0"))
        with Client(second.url, second.token) as client:
            assert client.names() == ["digit 0", "digit 1"]
            assert client.get("/api/v1/jobs").json() == []
    finally:
        second.stop()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{folder}"], "is not a geodl directory|no head.json"),
        (["{folder}/new", "--allow-folder", "{folder}/nowhere"], "--allow-folder .*nowhere"),
        (["{folder}/new", "--host", "256.1.1.1"], "256.1.1.1 port 8000"),
        (["{folder}/new", "--port", "70000"], "port = 70000: 0 to 65535"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(words, said, tmp_path):
    (tmp_path / "somebody's.txt").touch()
    with pytest.raises((ConfigError, StoreError), match=said):
        serve_command([word.format(folder=tmp_path) for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's.txt"]


ADDRESS = r"is served at http://127\.0\.0\.1:\d+/"
EVERYWHERE = rf"http://{socket.gethostname()}:\d+/#token=[\w-]+\neverybody who reaches this"


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ([], None, rf"{ADDRESS}#token=[\w-]{{32}}\n"),
        ([], "from-the-environment", rf"{ADDRESS}\nthe token is the value of GEODL_TOKEN"),
        (["--read-only"], None, rf"{ADDRESS}\nCtrl-C"),
        (["--host", "0.0.0.0"], None, EVERYWHERE),
    ],
)
def test_the_address_that_is_printed(words, given, said, model, monkeypatch, capsys):
    class Ending:
        def __init__(self, app):
            self.app = app

        def run(self, sockets):
            self.app.state.server.close()

    monkeypatch.setattr("geodl.app.serve.connections.server_of", Ending)
    monkeypatch.setenv("GEODL_TOKEN", given or "")
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
    negative = schemathesis.GenerationMode.NEGATIVE
    with running(model, options={"epochs": 1, "threads": 1}) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        # A stream never ends, and files take seconds each.
        schema = schema.exclude(path_regex="/events|/export/")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) == 22
        for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
            if mode is negative and not (operation.body or operation.query):
                continue  # there is nothing that could be wrong

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=25, database=None, suppress_health_check=list(HealthCheck))
            def check(case):
                untyped = "multipart" in (case.media_type or "")
                left_out = [allowed, *([forbidden] if untyped else [])]
                case.call_and_validate(headers=headers, excluded_checks=left_out)

            check()
        with Client(url) as client:
            assert client.get("/api/v1/model").status_code == 200


# ----------------------------------------------------------------------------------------------------------- the document


def test_the_client_in_the_document_works(tmp_path, digits):
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    for label in (0, 1):
        (tmp_path / "week1" / f"digit {label}").mkdir(parents=True)
        for i, content in enumerate(pictures(digits, label)):
            (tmp_path / "week1" / f"digit {label}" / f"{i}.png").write_bytes(content)
    (tmp_path / "photo.jpg").write_bytes(pictures(digits, 0, slice(30, 31))[0])
    with running(tmp_path / "model") as url:
        how = {"env": os.environ | {"GEODL_URL": url, "GEODL_TOKEN": TOKEN}, "cwd": tmp_path}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, **how)
    assert done.returncode == 0, done.stderr
    said = r"done \d+\.\d+\nphoto.jpg (digit \d|unknown) \[\('digit \d', [\d.]+\), "
    assert re.match(said, done.stdout)


def test_answers_do_not_wait_for_acknowledgments():
    """Nagle's algorithm would hold every answer back for 40 ms."""
    with bind("127.0.0.1") as listening:
        address = listening.getsockname()
        with socket.create_connection(address), listening.accept()[0] as here:
            assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
