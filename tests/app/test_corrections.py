"""Images and classes that are removed, relabelled, forgotten: as if they had never been learned so."""

import numpy as np
import pytest
import torch
from tests.helpers.pictures import noise
from tests.helpers.shapes import QUICK, SHAPES, pictures

from geodl import IncrementalClassifier, Learner
from geodl.app.choices import has_pretrained
from geodl.cli import app
from geodl.core.errors import ConfigError, DataError, StoreError

pytestmark = pytest.mark.skipif(
    not has_pretrained(), reason="the extra `pretrained` is not installed"
)


def test_what_can_be_brought_back_is_named_where_nothing_is_left(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(*pictures(SHAPES[:2], 6), **QUICK)
    model.undo()
    with pytest.raises(StoreError, match="redo"):
        model.info()


def test_the_pictures_that_are_kept_to_show_are_those_that_were_mistaken(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(*pictures(SHAPES[:1], 4), **QUICK)
    # two classes that nobody can tell apart
    model.learn(noise(30, 64, 64, 3), ["a", "b"] * 15, **QUICK, exemplars=3)
    judged = Learner.load(tmp_path / "m").known.judged(model.validation)
    assert torch.bincount(judged.labels).tolist() == [4, 3, 3]
    assert (judged.predictions != judged.labels)[judged.labels > 0].all()


def test_the_order_of_the_steps_leaves_no_trace(tmp_path):
    """Kept features: one step with all classes, or two, give the same predictions."""
    a, b = IncrementalClassifier(tmp_path / "a"), IncrementalClassifier(tmp_path / "b")
    first, second = pictures(SHAPES[:2], 8), pictures(SHAPES[2:], 8, seed=1)
    a.learn(*first, **QUICK, precision="32")
    a.learn(*second, **QUICK, precision="32")
    b.learn(np.concatenate([first[0], second[0]]), first[1] + second[1], **QUICK, precision="32")
    test = pictures(SHAPES, 5, seed=5)[0]
    rows = [b.classes.index(name) for name in a.classes]
    found, expected = (each.predict(test).probabilities for each in (a, b))
    np.testing.assert_allclose(found, expected[:, rows], atol=2e-3)


@pytest.mark.parametrize("gone", ["cross", "disc"])  # of the last step, of the first one
def test_removing_a_class_is_never_having_had_it(tmp_path, gone):
    with_it, without = IncrementalClassifier(tmp_path / "a"), IncrementalClassifier(tmp_path / "b")
    for step in (SHAPES[:3], SHAPES[3:]) if gone == "disc" else (SHAPES[:3],):
        images, labels = pictures(step, 8)
        with_it.learn(images, labels, **QUICK, precision="32")
        rest = [i for i, label in enumerate(labels) if label != gone]
        without.learn(images[rest], [labels[i] for i in rest], **QUICK, precision="32")
    assert with_it.remove(gone) == ""
    test = pictures(SHAPES, 5, seed=5)[0]
    found, expected = (each.predict(test).probabilities for each in (with_it, without))
    np.testing.assert_allclose(found, expected, atol=2e-3)
    for key in ("accuracy", "confusions"):
        assert with_it.info()[key] == without.info()[key]


def scores(model: IncrementalClassifier, rows: slice = slice(None)) -> np.ndarray:
    recognizer = Learner.load(model.path).known.recognizer()
    return recognizer.predict(pictures(SHAPES, 5, seed=5)[0]).probabilities[:, rows]


def test_a_relabelled_image_was_learned_rightly_from_the_start(tmp_path):
    wrong, right = IncrementalClassifier(tmp_path / "a"), IncrementalClassifier(tmp_path / "b")
    images, labels = pictures(SHAPES[:2], 8)
    wrong.learn(images, ["square", *labels[1:]], **QUICK, precision="32")
    right.learn(images, labels, **QUICK, precision="32")
    before = scores(wrong)
    order = [wrong.classes.index(name) for name in right.classes]
    assert np.abs(before[:, order] - scores(right)).max() > 1e-3
    wrong.relabel(images[:1], "disc")
    np.testing.assert_allclose(scores(wrong)[:, order], scores(right), atol=1e-6)
    for key in ("accuracy", "stored_images"):
        assert wrong.info()[key] == right.info()[key]
    assert [each["images"] for each in wrong.info()["classes"]] == [8, 8]
    assert "disc" in {each["class"] for each in wrong.info()["stored"]}
    assert wrong.info()["steps"][-1]["time"]
    with pytest.raises(ConfigError, match="already"):
        wrong.relabel(images[:1], "disc")
    wrong.undo()
    np.testing.assert_array_equal(scores(wrong), before)


def test_a_forgotten_image_was_never_learned(tmp_path, capsys):
    model, never = IncrementalClassifier(tmp_path / "a"), IncrementalClassifier(tmp_path / "b")
    images, labels = pictures(SHAPES[:2], 8)
    model.learn(images, labels, **QUICK, precision="32")
    never.learn(images[2:], labels[2:], **QUICK, precision="32")
    before, stored = scores(model), model.info()["stored"]
    assert "disc/image 0" in {each["from"] for each in stored}
    app(["forget", str(model.path), "disc/image 0", "disc/image 1"])
    assert "2 images forgotten" in capsys.readouterr().out
    np.testing.assert_allclose(scores(model), scores(never), atol=1e-6)
    assert model.info()["features"]["images"] == 14
    assert len(model.info()["stored"]) == len(stored) - 2
    with pytest.raises(DataError, match="never learned"):
        model.forget(images[:1])
    with pytest.raises(ConfigError, match="no image left"):
        model.forget(images[2:8])
    app(["undo", str(model.path)])
    assert "forgetting 2 images" in capsys.readouterr().out
    np.testing.assert_array_equal(scores(model), before)
