"""Teaching over HTTP: jobs, cancelling, other programs, changes and undo."""

import json
import signal

import pytest
from tests.helpers.directories import contents
from tests.helpers.folders import write_digits
from tests.helpers.serving import ENDED, Client, Command, pictures, refused, running

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve.jobs import Job, Teacher
from geodl.app.serve.limits import Limits
from geodl.core.errors import Interrupted
from geodl.core.locks import locked
from geodl.store import Directory

EVIL = "<img src=x onerror=alert(1)>"
SLOW = {"epochs": 5000, "threads": 1}


def test_teach_rename_remove_and_undo(client, digits):
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


def test_the_first_job_creates_the_model(tmp_path, digits):
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
        ([], "1 images have 0 labels"),
        (["a", "b"], "1 images have 2 labels"),
    ],
)
def test_bad_labels_are_refused(reader, digits, labels, words):
    files = [("images", ("x.png", pictures(digits, 0)[0]))]
    refused(reader.post("/api/v1/learn", data={"labels": labels}, files=files), 422, words)
    assert reader.get("/api/v1/jobs").json() == []


def test_a_cancelled_job_leaves_the_model_as_it_was(model, digits):
    before, limits = contents(model), Limits(jobs=1)
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
    assert contents(model) == before


def test_a_job_in_closed_form_is_cancelled(tmp_path, digits):
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


def test_a_job_resumes_after_the_server_was_stopped(model, digits):
    """The jobs are lost and the model is as before; teaching the same images again resumes."""
    before, options = contents(model), SLOW | {"checkpoint_steps": 1}
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
    assert contents(model) == before


def test_a_job_waits_for_another_program(client, model, digits):
    remove = {"name": "digit 2", "for_good": True}
    with locked(model):
        assert client.until(lambda: client.event()["busy"])
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        assert client.until(lambda: "another program" in client.job(key)["doing"])
        refused(client.post("/api/v1/undo"), 409, "written by process")
        refused(client.post("/api/v1/classes/remove", json=remove), 409, "wait to be learned")
    client.until(lambda: client.job(key)["state"] == "done")
    before = client.event()["state"]
    IncrementalClassifier(model).rename("digit 2", "two")
    assert client.until(lambda: client.event()["state"] != before)
    assert client.names() == ["digit 0", "digit 1", "two"]
    top = client.predict(pictures(digits, 2)[0]).json()["predictions"][0]["top"]
    assert "two" in [each["label"] for each in top]


def test_events_report_the_progress(client, digits):
    parts = []
    with client.stream("GET", "/api/v1/events") as stream:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        for line in stream.iter_lines():
            event = json.loads(line.removeprefix("data: ") or "{}")
            jobs = [job for job in event.get("jobs", ()) if job["id"] == key]
            parts += [job["part"] for job in jobs]
            if any(job["state"] == "done" for job in jobs):
                break
    assert parts[-1] == 1


def test_a_folder_on_the_server(model, digits, tmp_path):
    root = tmp_path / "images"
    write_digits(root / "week2", digits, (2, 3), 12)
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


def test_a_server_that_is_killed_while_teaching(model, digits, tmp_path, monkeypatch):
    """The model is as before, and the next start deletes the uploads."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # no other server deletes them first
    before = contents(model)
    first = Command(str(model), "--epochs", "5000", "--threads", "1")
    with Client(first.url, first.token) as client:
        key = client.learn({"digit 2": pictures(digits, 2)}).json()["id"]
        client.until(lambda: client.job(key)["part"] > 0)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    after = contents(model)
    assert not [name for name in after.keys() - before if name.startswith(("phases", "objects"))]
    assert {name: after[name] for name in before} == before
    second = Command(str(model))
    try:
        assert any("deleted 12 uploaded images" in line for line in second.lines)
        assert not list(tmp_path.glob("geodl-serve-*/*/0"))
        with Client(second.url, second.token) as client:
            assert client.names() == ["digit 0", "digit 1"]
            assert client.get("/api/v1/jobs").json() == []
    finally:
        second.stop()


def test_a_class_is_not_removed_for_good_while_a_folder_waits_to_be_learned(model, tmp_path):
    (tmp_path / "images" / "week1" / "digit 0").mkdir(parents=True)
    remove = {"name": "digit 0", "for_good": True}
    with running(model, allow_folder=tmp_path / "images") as url, Client(url) as client:
        with locked(model):
            key = client.learn_folder("week1").json()["id"]
            answer = client.post("/api/v1/classes/remove", json=remove)
            assert (answer.status_code, "a folder waits" in answer.text) == (409, True)
            client.post(f"/api/v1/jobs/{key}/cancel")
        client.until(lambda: client.job(key)["state"] == "cancelled")
        assert client.post("/api/v1/classes/remove", json=remove).status_code == 200


def test_a_job_cancelled_before_training_keeps_the_checkpoint_of_another_program(
    model, tmp_path, monkeypatch
):
    def cancelled(*args, **kwargs):
        raise Interrupted("cancelled while it waited")

    store, teacher = Directory(model), Teacher(model, {}, 1)
    with store.lock():
        store.save_progress({}, {"key": "of another program"})
    monkeypatch.setattr(IncrementalClassifier, "learn", cancelled)
    job = teacher.add(Job(tmp_path, {}))
    job.future.result()
    teacher.close()
    assert job.facts.state == "cancelled"
    assert IncrementalClassifier(model).unfinished
