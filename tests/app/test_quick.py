"""Photographs are predicted without torch by what the first prediction converted, and as the model itself predicts them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers.command import completed, geodl
from tests.helpers.pictures import drawing

from geodl import IncrementalClassifier
from geodl.app import export, quick
from geodl.app.choices import has_pretrained
from geodl.core.cache import CONVERTED, Cache
from geodl.core.content import signed
from geodl.core.errors import StoreError

pytestmark = pytest.mark.skipif(
    not has_pretrained(), reason="the extra `pretrained` is not installed"
)

LOADS_NO = ("torch", "lightning_fabric", "pydantic", "matplotlib", "onnx")
SCRIPT = f"""
import sys
from geodl.cli import main
try: main()
except SystemExit: pass
print([name for name in {LOADS_NO} if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Files of three kinds, some of them wide."""
    root = tmp_path_factory.mktemp("photographs")
    for kind in ("disc", "square", "stripes"):
        for seed in range(6):
            path = root / kind / f"{seed}.jpg"
            path.parent.mkdir(exist_ok=True)
            drawing(kind, seed, size=(90 + 40 * (seed % 2), 70)).save(path)
    return root


@pytest.fixture(scope="module")
def shapes(photographs, tmp_path_factory):
    """A model that averages over mirrored copies."""
    path = tmp_path_factory.mktemp("models") / "shapes"
    IncrementalClassifier(path).learn(photographs, image_size=64)
    return path


@pytest.fixture
def model(shapes, tmp_path):
    return Path(shutil.copytree(shapes, tmp_path / "shapes"))


@pytest.fixture
def files(photographs):
    return sorted(photographs.rglob("*.jpg"))[::2]


@pytest.fixture
def alone(monkeypatch):
    """Return what stops the model itself from predicting."""

    def refused(*arguments, **options):
        raise AssertionError("predicted by torch")

    return lambda: monkeypatch.setattr(IncrementalClassifier, "predict", refused)


def entries():
    """Return the converted models in the cache."""
    return list(Cache().root.glob(f"entries/*{CONVERTED}"))


def agree(found, wanted):
    assert found.classes == wanted.classes
    assert [each.name for each in found] == [each.name for each in wanted]
    assert [each.label for each in found] == [each.label for each in wanted]
    np.testing.assert_allclose(found.probabilities, wanted.probabilities, rtol=0, atol=1e-4)
    for each, other in zip(found, wanted, strict=True):
        assert [name for name, _ in each.top] == [name for name, _ in other.top]
        assert each.score == pytest.approx(other.score, abs=1e-4)


def test_the_second_command_loads_no_framework(model, files):
    words = ["predict", str(model), *map(str, files), "--top", "2", "--json"]
    answers = []
    for loaded in ("torch", None):
        done = completed(*words, code=SCRIPT)
        modules = done.stderr.splitlines()[-1]
        assert loaded in modules if loaded else modules == "[]"
        answers.append(json.loads(done.stdout)["predictions"])
    for one, other in zip(*answers, strict=True):
        assert (one["label"], one["unknown"]) == (other["label"], other["unknown"])
        for first, second in zip(one["top"], other["top"], strict=True):
            assert first["label"] == second["label"]
            assert first["confidence"] == pytest.approx(second["confidence"], abs=1e-4)


TRAINED = {"method": "lucir", "epochs": 1, "image_size": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"whole": True},
        {"flip": False},
        TRAINED | {"network": "resnet8"},
        TRAINED | {"network": "convnet"},
    ],
)
def test_answers_are_those_of_the_model(photographs, files, tmp_path, alone, options):
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(photographs, **{"image_size": 64} | options)
    wanted = [model.predict(files, top=3), model.predict(files, top=1, threshold=1.1)]
    quick.predict(model.path, files)
    alone()
    agree(quick.predict(model.path, files, top=3), wanted[0])
    agree(quick.predict(model.path, files, threshold=1.1), wanted[1])
    assert {each.label for each in wanted[1]} == {"unknown"}


def test_another_state_is_converted_again(model, files, alone):
    quick.predict(model, files)
    IncrementalClassifier(model).rename("disc", "moon")
    assert "moon" in quick.predict(model, files).labels
    IncrementalClassifier(model).undo()
    alone()
    assert "disc" in quick.predict(model, files).labels


def test_a_change_while_a_model_is_converted_is_not_taken_for_what_it_was(
    model, files, monkeypatch
):
    predict = IncrementalClassifier.predict

    def overtaken(self, *arguments, **options):
        found = predict(self, *arguments, **options)
        IncrementalClassifier(model).rename("disc", "moon")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(IncrementalClassifier, "predict", overtaken)
        assert "disc" in quick.predict(model, files).labels
    assert not entries()
    IncrementalClassifier(model).undo()
    assert "disc" in quick.predict(model, files).labels


def test_a_strangers_model_with_the_same_ids_answers_for_itself_alone(model, files, tmp_path):
    stranger = Path(shutil.copytree(model, tmp_path / "stranger"))
    IncrementalClassifier(stranger).rename("disc", "moon")
    head, own = (json.loads((path / "head.json").read_text()) for path in (stranger, model))
    head["phases"][-1]["id"] = own["phases"][-1]["id"]
    content = {key: value for key, value in head.items() if key != "sha256"}
    (stranger / "head.json").write_text(json.dumps(signed(content)))
    assert "moon" in quick.predict(stranger, files).labels
    assert "disc" in quick.predict(model, files).labels


def test_what_it_does_not_know_the_model_predicts(model, files, photographs, tmp_path):
    """Folders, another classifier, and files that are no images."""
    quick.predict(model, files)
    assert len(quick.predict(model, [photographs])) == 18
    assert quick.predict(model, files, classifier="ncm").probabilities.sum() == pytest.approx(9)
    bad = tmp_path / "text.jpg"
    bad.write_text("no image")
    dot = tmp_path / "dot.png"
    Image.new("RGB", (1, 1)).save(dot)
    for other in (bad, dot):
        found = quick.predict(model, [files[0], other])
        assert len(found) == len(found.skipped) == 1
    assert "not an image" in geodl("predict", str(model), str(files[0]), str(bad)).stderr
    assert "top" in geodl("predict", str(model), str(files[0]), "--top", "0", status=2).stderr


@pytest.mark.parametrize("reason", ["another square", "a difference", "a plug-in"])
def test_what_cannot_be_converted_is_tried_once(files, photographs, tmp_path, monkeypatch, reason):
    model, tries = IncrementalClassifier(tmp_path / "m"), []
    crop = "resized" if reason == "another square" else "pad"
    model.learn(photographs, **TRAINED, network="resnet8", crop=crop)
    if reason == "a difference":
        monkeypatch.setattr(export, "TOLERANCE", -1.0)
    if reason == "a plug-in":
        monkeypatch.setattr(type(model.state().model.default), "__module__", "own")
    keep = export.keep_converted
    monkeypatch.setattr(
        export, "keep_converted", lambda *given: (tries.append(given), keep(*given))
    )
    wanted = model.predict(files)
    for _ in range(2):
        agree(quick.predict(model.path, files), wanted)
    assert len(tries) == 1
    (entry,) = entries()
    assert Cache().read(entry.name) == b""


def flip(path):
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damage_is_found_in_the_cache_and_in_the_model(model, files):
    wanted = quick.predict(model, files)
    (entry,) = entries()
    flip(entry)
    agree(quick.predict(model, files), wanted)
    Cache().write(entry.name, b"of a later version")
    agree(quick.predict(model, files), wanted)
    flip(max((model / "objects").iterdir(), key=lambda path: path.stat().st_size))
    with pytest.raises(StoreError, match="damaged"):
        quick.predict(model, files)


def test_few_are_kept_and_none_of_a_class_removed_for_good(model, files):
    for i in range(10):
        Cache().write(f"{i}{CONVERTED}", b"older")
    quick.predict(model, files)
    assert len(entries()) == export.KEPT
    IncrementalClassifier(model).remove("disc", for_good=True)
    assert not entries()


def test_a_cache_that_cannot_be_written_is_no_error(model, files, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "file"))
    assert len(quick.predict(model, files)) == len(files)
    assert not caplog.records
