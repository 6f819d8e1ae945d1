"""Jobs that wait, or end before they have begun to train."""

from tests.helpers.serving import Client, running

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve.jobs import Job, Teacher
from geodl.core.errors import Interrupted
from geodl.core.locks import locked
from geodl.store import Directory


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


def test_a_job_that_did_not_begin_to_train_leaves_the_checkpoint_of_another_program(
    model, tmp_path, monkeypatch
):
    def cancelled(*given, **named):
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
