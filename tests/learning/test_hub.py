"""Models on the Hugging Face hub, against a stand-in on this machine."""

import sys

import pytest
import torch
from tests.helpers import tiny

import geodl
from geodl.config import plugins
from geodl.core.errors import ConfigError, MissingExtraError, StoreError
from geodl.learning.hub import card, fetched


@pytest.fixture
def learner():
    data = tiny.dataset()
    made = geodl.Learner(tiny.config(exemplars=2, data_dir="/home/me/photos"))
    made.learn(data.train.pixels[:18], data.train.labels[:18])
    return made


def test_a_model_is_pushed_and_loaded(hub, learner, tmp_path):
    assert geodl.push(learner, "me/own") == f"{hub.address}/me/own"
    files = dict(hub.repos["me/own"])
    assert hub.private == {"me/own": True}
    tops = {name.split("/")[0] for name in files}
    assert tops == {"head.json", "head-copy.json", "objects", "README.md"}
    assert not any(b"/home/me" in content for content in files.values())
    again = geodl.Learner.load("hf://me/own")
    images = tiny.dataset().train.pixels[:18]
    assert again.classes == learner.classes
    scores = [each.predict(images).probabilities for each in (again, learner)]
    assert torch.equal(*map(torch.as_tensor, scores))
    assert again.memory.images is None
    assert learner.memory.images is not None

    learner.save(tmp_path / "model")
    geodl.push(tmp_path / "model", "me/own", with_images=True)
    assert len(hub.repos["me/own"]) == len(files)  # what the first one wrote is gone
    assert len(geodl.Learner.load("hf://me/own@main").memory.images) > 0


def test_of_imported_files_the_names_alone_are_pushed(hub, learner, monkeypatch):
    monkeypatch.setattr(plugins, "IMPORTED", ["/home/me/my_part.py", "package.parts"])
    geodl.push(learner, "me/own")
    assert not any(b"/home/me" in content for content in hub.repos["me/own"].values())
    assert any(b'"my_part.py"' in content for content in hub.repos["me/own"].values())


def test_the_hub_s_errors_are_one_line(hub, learner, monkeypatch):
    with pytest.raises(StoreError, match="hf://me/none: ") as error:
        geodl.Learner.load("hf://me/none")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(StoreError, match="hf://me/own: "):
        geodl.push(learner, "me/own")
    for name in ("own", "me/own/more", "me own/x", ""):
        with pytest.raises(ConfigError, match="hf://USER/NAME"):
            geodl.push(learner, name)


def test_the_model_card_names_what_the_model_is(learner):
    learner.rename(learner.classes[0], "cat [x](http://y)")
    text = card(learner.known, "me/own")
    head, body = text.removeprefix("---\n").split("\n---\n")
    assert "pipeline_tag: image-classification" in head
    assert "# own" in body
    assert 'Learner.load("hf://me/own")' in body
    assert r"- cat \[x\]\(http\:\/\/y\)" in body
    assert f"- {learner.classes[1]}" in body
    assert f"| images stored | {len(learner.memory.images)} |" in body


def test_other_paths_stay_and_the_extra_is_named(monkeypatch, tmp_path):
    assert fetched(tmp_path) == tmp_path
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"geodl-cil\[hub\]"):
        fetched("hf://me/own")
