"""Undo and redo, rename, remove."""

import pytest
import torch
from tests.helpers.directories import contents, object_of
from tests.helpers.folders import QUICK, digits_of, exemplars_of

from geodl.app import state
from geodl.app.classifier import IncrementalClassifier
from geodl.app.page import owner
from geodl.cli.report import report
from geodl.core.errors import ConfigError, GeodlError, StoreError
from geodl.data import load
from geodl.learning.learner import Learner
from geodl.model.metrics import confusions_of
from geodl.store import Directory


def test_undo_and_redo_go_back_and_forth_exactly(taught, weeks):
    def now():
        scores = taught.predict(weeks[0]).probabilities.tolist()
        return Directory(taught.path).phase(-1), taught.classes, scores

    seen = [now()]
    taught.learn(weeks[1], **QUICK)
    seen.append(now())
    taught.rename("digit 0", "zero")
    seen.append(now())
    assert taught.undo() == {"action": "rename", "old": "digit 0", "new": "zero"}
    assert now() == seen[1]
    assert taught.undo()["new"] == ["digit 2", "digit 3"]
    assert now() == seen[0]
    assert [record["action"] for record in taught.info()["undone"]] == ["learn", "rename"]
    taught.undo()
    with pytest.raises(StoreError, match=r"has learned nothing yet.*redo"):
        taught.predict(weeks[0])
    with pytest.raises(StoreError, match="nothing to undo"):
        taught.undo()
    for wanted in seen:
        taught.redo()
        assert now() == wanted
    taught.undo()
    taught.rename("digit 1", "one")  # a change ends what could be restored
    with pytest.raises(StoreError, match="nothing to redo"):
        taught.redo()


def test_a_damaged_state_is_undone_for_good(taught, typed):
    taught.rename("digit 0", "zero")
    taught.learn(*digits_of(load("digits"), (2, 3), 8), **QUICK)
    file = object_of(taught.path, 2, "memory.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="goes back to the last good state"):
        IncrementalClassifier(taught.path).info()
    assert "the last state, which is damaged" in typed("undo", taught.path).out
    assert taught.classes == ("zero", "digit 1")
    with pytest.raises(StoreError, match="nothing to redo"):
        taught.redo()


def test_steps_are_described_and_dated(taught, weeks, typed):
    taught.learn(weeks[1], **QUICK)
    step = "step 2: learning digit 2, digit 3 (24 images)"
    said = typed("undo", taught.path).out
    assert said == f"undone: {step}; `geodl redo` restores it, until the next change\n"
    assert f"undone, `geodl redo` restores it: {step}" in typed("info", taught.path).out
    assert typed("redo", taught.path).out == f"restored: {step}\n"
    taught.rename("digit 0", "zero")
    taught.remove("digit 1")
    times = [record["time"] for record in taught.info()["steps"]]
    assert all(times)
    assert times == sorted(times)
    lines = typed("info", taught.path).out.splitlines()
    for words in ("renaming digit 0 to zero", "removing digit 1"):
        assert any(line.strip().startswith("20") and line.endswith(words) for line in lines)


def test_old_states_are_removed(taught):
    for number in range(5):
        taught.rename("digit 0" if number == 0 else f"zero {number - 1}", f"zero {number}")
    for _ in range(state.UNDO):
        taught.undo()
    assert taught.classes[0] == "zero 1"
    with pytest.raises(StoreError, match="no longer kept"):
        taught.undo()
    assert taught.info()["undo"] == 0


def test_rename(taught, weeks):
    taught.rename("digit 1", "eins")
    assert taught.classes == ("digit 0", "eins")
    assert {each.label for each in taught.predict(weeks[0])} <= {"digit 0", "eins"}
    assert taught.info()["classes"][1]["name"] == "eins"
    for old, new, message in (
        ("digit 1", "x", "class 'digit 1': the model knows digit 0, eins"),
        ("eins", "digit 0", "class of that name"),
        ("eins", " ", "it is empty"),
        ("eins", ".dot", "no folder of images could have it"),
        ("eins", "a/b", "no folder of images could have it"),
        ("eins", "line\nbreak", "it is not valid text"),
        ("eins", "unknown", "reserved for images unlike all classes"),
    ):
        with pytest.raises(GeodlError, match=message):
            taught.rename(old, new)
    taught.rename("eins", "ne\u0301")  # composed as the names of folders are
    assert taught.classes[1] == "n\u00e9"


def test_a_learner_that_was_saved_by_itself_is_edited(classifier, digits, typed):
    learner = Learner(method="finetune", network="convnet", epochs=1, threads=1)
    for classes in ((0, 1), (2, 3)):
        learner.learn(*digits_of(digits, classes, 8))
        learner.save(classifier.path)
    said = typed("undo", classifier.path).out
    assert said.startswith("undone: the last state that was saved; ")
    assert typed("redo", classifier.path).out == "restored: the last state that was saved\n"
    classifier.rename("digit 1", "eins")
    again = IncrementalClassifier(classifier.path)
    assert sorted(again.classes) == ["digit 0", "digit 2", "digit 3", "eins"]
    assert again.info()["accuracy"] is None


def test_a_learner_saved_in_between_shifts_no_step(taught, weeks, typed):
    Learner.load(taught.path).save(taught.path)
    assert taught.learn(weeks[1], **QUICK).step == 2
    taught.rename("digit 3", "three")
    store, facts = Directory(taught.path), taught.info()
    times = store.times("learned", "renamed")
    assert list(times) == [0, 2, 3]
    assert [record["time"] for record in facts["steps"]] == [times[2], times[3]]
    known = [(each["step"], each["learned"]) for each in facts["classes"]]
    assert known == 2 * [(1, None)] + 2 * [(2, times[2])]
    assert list(taught.evaluate(weeks[0]).per_step) == [1, 2]
    assert "4 classes, learned in 2 steps\n" in typed("info", taught.path).out
    counts = confusions_of(store.phase(2).json("metrics.json"))["nme"].counts
    learned, _ = owner(taught.path)["steps"]
    assert (learned["time"], learned["judged"]) == (times[2], counts.sum())


def test_remove(taught, weeks):
    taught.learn(weeks[1], **QUICK)
    before = state.load(Directory(taught.path))
    taught.remove("digit 1")
    after = state.load(Directory(taught.path))
    assert taught.classes == ("digit 0", "digit 2", "digit 3")
    old, new = before.model, after.model
    rows, gone = [0, 2, 3], exemplars_of(before, 1)
    assert torch.equal(new.network.head.weight, old.network.head.weight[rows])
    assert torch.equal(new.classifiers["nme"].means, old.classifiers["nme"].means[rows])
    assert not set(gone.item_digests()) & set(new.memory.images.item_digests())
    assert torch.bincount(new.memory.images.labels).tolist() == [12, 12, 12]
    assert torch.bincount(after.validation.labels).tolist() == [3, 3, 3]
    assert len(taught.info()["stored"]) == 45
    wrong = [entry for entry in before.metrics["confusions"]["nme"] if 1 not in entry[:2]]
    share = sum(c for i, j, c in wrong if i == j) / sum(c for _, _, c in wrong)
    assert taught.info()["accuracy"] == pytest.approx(100 * share)
    assert taught.undo() == {"action": "remove", "class": "digit 1"}
    assert len(taught.classes) == 4
    report([taught.path], with_images=True)
    taught.remove("digit 1", for_good=True)
    assert not (taught.path / "report.html").exists()
    kept = b"".join(contents(taught.path).values())
    assert b"digit 1/" not in kept
    assert not any(image.numpy().tobytes() in kept for image in gone.pixels)
    with pytest.raises(StoreError, match="no longer kept"):
        taught.undo()
    taught.learn(weeks[0], **QUICK)  # it may come back
    assert taught.classes == ("digit 0", "digit 2", "digit 3", "digit 1")


def test_the_last_class_stays(taught, weeks, typed):
    taught.remove("digit 0")
    out = typed("info", taught.path).out
    assert "1 class, learned in 1 step\n" in out
    assert "undo: 2 steps" in out
    assert not any(f" 1 {word}" in out for word in ("classes", "images", "steps", "parameters"))
    with pytest.raises(ConfigError, match="the only class"):
        taught.remove("digit 1")
    assert [each.label for each in taught.predict(weeks[0])] == ["digit 1"] * 30
