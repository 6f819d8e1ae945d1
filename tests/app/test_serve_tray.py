"""Images collected for teaching: one class each, a quota, expiry, and how jobs use them."""

import os
import tempfile
from types import SimpleNamespace

import pytest
from tests.helpers.serving import Client, pictures, running

from geodl.app.serve.limits import Limits
from geodl.app.serve.tray import Tray
from geodl.app.serve.uploads import Upload


def add(client, images):
    return client.learn(images, path="tray/add", name="same.png")


def tray(client):
    return client.get("/api/v1/tray").json()


def teach(client):
    return client.ended(client.post("/api/v1/tray/teach"))


def test_images_are_collected_moved_shown_and_dropped(client, digits):
    first, second = pictures(digits, 2, slice(2))
    found = add(client, {"two": [first, second, first]}).json()
    assert found[0] == found[2] != found[1]
    assert len(tray(client)) == 2
    assert len({each["name"] for each in found}) == 2  # unique names
    version = client.event()["tray"]
    (moved,) = add(client, {"three": [first]}).json()
    assert client.until(lambda: client.event()["tray"] != version)
    assert moved["id"] == found[0]["id"]
    assert [each["label"] for each in tray(client)] == ["three", "two"]
    shown = client.get(f"/api/v1/tray/{moved['id']}").json()["image"]
    assert shown.startswith("data:image/webp;base64,")
    assert client.get("/api/v1/tray/nothing").status_code == 404
    assert len(client.post("/api/v1/tray/drop", json={"ids": [moved["id"]]}).json()) == 1
    assert client.post("/api/v1/tray/drop", json={"label": "two"}).json() == []
    assert client.post("/api/v1/tray/teach").status_code == 409


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return the collected files."""
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private"))
    return lambda: list(tmp_path.glob("private/geodl-serve-*/*/*"))


def test_learned_images_leave_the_tray_and_broken_ones_stay(model, digits, files):
    with running(model) as url, Client(url) as client:
        add(client, {"two": [*pictures(digits, 2), b"garbage"]})
        assert len(files()) == 13
        job = teach(client)
        assert job["state"] == "done"
        assert client.until(lambda: client.event()["state"] == job["version"])
        (left,) = tray(client)
        assert (left["flaw"], left["job"], len(files())) == ("not an image", None, 1)
        assert client.get(f"/api/v1/tray/{left['id']}").json()["image"] == ""
        assert teach(client)["state"] == "failed"  # nothing in it can be used
        assert len(tray(client)) == 1
        remove = {"name": "two", "for_good": True}
        assert client.post("/api/v1/classes/remove", json=remove).status_code == 200
        assert (tray(client), files()) == ([], [])  # no image of it is left anywhere


def test_a_cancelled_job_returns_its_images(model, digits, files):
    with running(model, options={"epochs": 5000, "threads": 1}) as url, Client(url) as client:
        add(client, {"two": pictures(digits, 2)})
        key = client.post("/api/v1/tray/teach").json()["id"]
        client.until(lambda: client.job(key)["epoch"] > 0)
        client.post("/api/v1/tray/drop", json={"label": "two"})  # not while they are taught
        assert {each["job"] for each in tray(client)} == {key}
        client.post(f"/api/v1/jobs/{key}/cancel")
        client.until(lambda: client.job(key)["state"] == "cancelled")
        assert [each["job"] for each in tray(client)] == [None] * 12
        assert len(files()) == 12


@pytest.mark.parametrize("limits", [Limits(learn_images=2), Limits(tray_bytes=1000)])
def test_the_quota(model, limits, files):
    some = [os.urandom(400) for _ in range(3)]
    with running(model, limits=limits) as url, Client(url) as client:
        assert add(client, {"two": some[:1]}).status_code == 200
        assert add(client, {"three": [some[0], some[1]]}).status_code == 200  # one of them is here
        answer = add(client, {"two": some[2:]})
        assert answer.status_code == 413
        assert "collected" in answer.json()["error"]
        assert len(files()) == len(tray(client)) == 2


def test_images_expire(model, digits, files):
    with running(model, limits=Limits(tray_seconds=0.1)) as url, Client(url) as client:
        add(client, {"two": pictures(digits, 2)})
        client.until(lambda: not tray(client))
        assert files() == []


def test_images_do_not_expire_while_they_are_taught(tmp_path):
    upload = Upload(tmp_path / "upload", 1)
    upload.folder.mkdir()
    (upload.folder / "0").write_bytes(b"an image")
    upload.images, upload.names, upload.labels = [upload.folder / "0"], ["a.png"], ["two"]
    tray = Tray(Limits(tray_seconds=-1))
    tray.add(upload)
    job = tray.teach(SimpleNamespace(add=lambda job: job))
    version = tray.version
    tray.expire()
    assert (tray.version, len(tray.listed())) == (version, 1)  # no event for the page
    job.ended(job, "failed")
    tray.expire()
    assert (tray.version > version, tray.listed()) == (True, [])


def test_a_failed_removal_keeps_the_collected_images(model, digits, files):
    remove = {"name": "two", "for_good": True}
    with running(model) as url, Client(url) as client:
        add(client, {"two": pictures(digits, 2)})
        assert client.post("/api/v1/classes/remove", json=remove).status_code == 422
        assert len(tray(client)) == len(files()) == 12
