"""What is left of a class that is removed: its hashes go, and stay where a network was trained on its images."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.helpers.tiny import dataset, shown

from geodl.app import edits
from geodl.app import state as states
from geodl.app.classifier import IncrementalClassifier
from geodl.data import squares
from geodl.nets import build_network
from geodl.store import Directory

DATA = dataset(classes=4, train=12)


def part(*classes):
    return shown(DATA.train.select(torch.isin(DATA.train.labels, torch.tensor(classes))))


def test_in_closed_form_not_even_hashes_of_a_removed_class_are_left(tmp_path):
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(*part(0, 1, 2), network="convnet", method="analytic", pretrained=False, epochs=1)
    before = states.load(Directory(model.path))
    assert torch.equal(before.seen.sort()[0], before.ledger.keys.sort()[0])
    gone = before.ledger.keys[before.ledger.labels > 0].numpy()
    model.remove("class 1", for_good=True)
    earlier = replace(states.load(Directory(model.path)), seen=before.seen)  # of version 0.2
    model.remove("class 2")
    for name in ("class 1", "class 2"):
        earlier = edits.removed(earlier, name, again=True)
    model.remove("class 2", for_good=True)
    kept = b"".join(path.read_bytes() for path in model.path.rglob("*") if path.is_file())
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
