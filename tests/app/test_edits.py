"""Undo, rename, remove."""

import pytest
import torch
from tests.helpers.directories import contents
from tests.helpers.folders import QUICK, digits_of, exemplars_of

from geodl.app import state
from geodl.app.classifier import IncrementalClassifier
from geodl.cli.report import report
from geodl.core.errors import ConfigError, GeodlError, StoreError
from geodl.learning.learner import Learner
from geodl.store import Directory


def test_undo_goes_back_exactly(taught, weeks):
    before = Directory(taught.path).phase(-1)
    scores = [each.top for each in taught.predict(weeks[0], top=2)]
    taught.learn(weeks[1], **QUICK)
    assert taught.undo()["new"] == ["digit 2", "digit 3"]
    assert Directory(taught.path).phase(-1) == before
    assert [each.top for each in taught.predict(weeks[0], top=2)] == scores
    taught.undo()
    with pytest.raises(StoreError, match="has learned nothing yet"):
        taught.predict(weeks[0])
    with pytest.raises(StoreError, match="nothing to undo"):
        taught.undo()
    assert not taught.learn(weeks[1], **QUICK).already


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


def test_a_class_of_a_learner_that_was_saved_by_itself_is_renamed(classifier, digits):
    learner = Learner(method="finetune", network="convnet", epochs=1, threads=1)
    learner.learn(*digits_of(digits, (0, 1), 8))
    learner.save(classifier.path)
    classifier.rename("digit 1", "eins")
    again = IncrementalClassifier(classifier.path)
    assert sorted(again.classes) == ["digit 0", "eins"]
    assert again.info()["accuracy"] is None


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


def test_the_last_class_stays(taught, weeks):
    taught.remove("digit 0")
    with pytest.raises(ConfigError, match="the only class"):
        taught.remove("digit 1")
    assert [each.label for each in taught.predict(weeks[0])] == ["digit 1"] * 30
