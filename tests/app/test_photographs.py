"""Pre-trained features and the closed form: what `learn` does with photographs where the extra is installed."""

import itertools
import re
import sys

import numpy as np
import pytest
import torch
from tests.helpers.shapes import QUICK, SHAPES, pictures

from geodl import IncrementalClassifier, Learner
from geodl.app.choices import has_pretrained
from geodl.app.estimates import step_seconds, timed
from geodl.cli import app
from geodl.closed_form import kept_features
from geodl.core.errors import ConfigError
from geodl.core.events import Advised, ImagesRead, OptionsChosen, TimeEstimated
from geodl.data import squares
from geodl.learning.reading import FeatureReader
from geodl.model.classifiers import fitting

pytestmark = pytest.mark.skipif(
    not has_pretrained(), reason="the extra `pretrained` is not installed"
)


def mirrors(path) -> bool:
    """Return whether a model averages over mirrored copies."""
    return Learner.load(path).known.recognizer().scorer.mirrors


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """Two steps of two classes each."""
    model = IncrementalClassifier(tmp_path_factory.mktemp("models") / "shapes")
    steps = [model.learn(*pictures(SHAPES[i : i + 2], 14, seed=i), **QUICK) for i in (0, 2)]
    return model, steps


def test_the_default_is_the_closed_form_on_frozen_features_and_it_is_good(taught):
    model, steps = taught
    assert model.info()["network"] == "efficientnet-lite0"
    assert steps[-1].left_out
    assert steps[-1].judged == 56
    low, high = steps[-1].interval
    assert low < steps[-1].accuracy <= high
    found = model.evaluate(*pictures(SHAPES, 10, seed=9))
    assert found.accuracy > 85
    assert len(model.predict(pictures(("disc",), 3)[0]).probabilities[0]) == 4


def test_a_model_in_closed_form_speaks_of_no_validation_images(taught, capsys):
    app(["info", str(taught[0].path)], exit_on_error=False, print_error=False)
    out = capsys.readouterr().out
    assert "validation" not in out
    assert re.search(r"^disc +1 .* 14 +10 +\d+\.0 %$", out, re.M)
    assert re.search(r"stored images: 40, .* \(to show, not to learn from\)", out)
    assert "stored features: of 56 images" in out


def test_a_step_says_what_it_chose(tmp_path):
    heard = []
    IncrementalClassifier(tmp_path / "m").learn(*pictures(SHAPES[:2], 6), listener=heard.append)
    (chosen,) = [event for event in heard if isinstance(event, OptionsChosen)]
    assert [choice[:2] for choice in chosen.choices] == [
        ("--method", "analytic"),
        ("--backbone", "efficientnet-lite0"),
        ("--image-size", "128 x 128 pixels"),
        ("--exemplars", "10"),
    ]
    assert not [event for event in heard if isinstance(event, Advised)]


def test_no_picture_is_stored_with_exemplars_0(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    images, labels = pictures(SHAPES[:2], 8)
    # features are float32 whatever the precision of training
    done = model.learn(images[:-1], labels[:-1], **QUICK, exemplars=0, precision="bf16")
    again = model.learn(images, labels, **QUICK)  # a folder that has grown brings what is new
    assert (done.stored_images, again.stored_images) == (0, 0)
    assert (again.judged, again.stored_features) == (16, 16)
    memory = Learner.load(tmp_path / "m").memory
    assert memory.images is None
    assert not any(tensor.dtype == torch.uint8 for tensor in memory.to_tensors().values())
    other = IncrementalClassifier(tmp_path / "other")
    other.learn(images[:-1], labels[:-1], **QUICK, precision="32")
    model.undo()
    np.testing.assert_array_equal(
        model.predict(images).probabilities, other.predict(images).probabilities
    )


def test_a_model_of_very_many_images_is_learned_further(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "MOST", 10)
    monkeypatch.setattr(kept_features, "EACH", 64)
    model = IncrementalClassifier(tmp_path / "m")
    steps = [model.learn(*pictures(SHAPES[i : i + 2], 6, seed=i), **QUICK) for i in (0, 2)]
    done = steps[-1]
    assert sum("keeps sums" in each for step in steps for each in step.warnings) == 1
    assert model.info()["features"]["sums"]
    assert done.judged == done.stored_features == 24, "all classes are judged by a sample"
    assert None not in done.per_class.values()
    assert done.accuracy > 50
    model.remove("ring")
    assert model.info()["accuracy"] is not None


def test_features_are_taken_as_images_are_read_and_nothing_else_is_computed(tmp_path, monkeypatch):
    one, other = (IncrementalClassifier(tmp_path / name) for name in ("a", "b"))
    images = pictures(SHAPES[:2], 5)
    one.learn(*images, **QUICK)
    # No training framework, no colors that nobody uses, no list of all images.
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    monkeypatch.setattr(squares, "_ColorMeter", lambda: None)
    monkeypatch.setattr(squares, "IN_MEMORY", 0)
    most = []
    add = FeatureReader.add
    monkeypatch.setattr(FeatureReader, "add", lambda *a: (most.append(len(a[1])), add(*a)))
    monkeypatch.setattr(squares, "BATCH", 4)
    other.learn(*images, **QUICK)
    assert most == [4, 4, 2]
    first, second = (Learner.load(each.path).known.to_tensors() for each in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-4, atol=1e-4)


def test_left_and_right_arrows_are_told_apart_and_ordinary_pictures_are_mirrored(taught, tmp_path):
    model = IncrementalClassifier(tmp_path / "arrows")
    done = model.learn(*pictures(("left", "right"), 16), **QUICK)
    warned = [each for each in done.warnings if each.startswith("Mirrored images of ")]
    assert "left" in " ".join(warned)
    assert not [warning for step in taught[1] for warning in step.warnings if "irror" in warning]
    assert not mirrors(tmp_path / "arrows")
    assert model.evaluate(*pictures(("left", "right"), 12, seed=7)).accuracy > 85
    assert mirrors(taught[0].path)


def test_a_network_is_not_trained_on_mirrored_arrows(tmp_path):
    model, heard = IncrementalClassifier(tmp_path / "m"), []
    training = {"method": "lucir", "epochs": 1, "network": "convnet", "image_size": 16}
    training["listener"] = heard.append
    model.learn(*pictures(("disc", "ring"), 12), **training)
    model.learn(*pictures(("left", "right"), 16), **training)
    chosen = [event.choices for event in heard if isinstance(event, OptionsChosen)]
    found = [choice for choice in itertools.chain(*chosen) if choice[0] == "--flip"]
    assert [value for _, value, _ in found] == ["yes", "no"]
    assert "mirrored ones are predicted as another class" in found[1][2]


def test_pictures_unlike_all_classes_are_called_unknown(tmp_path):
    """A model of discs and crosses, shown more of them."""
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(*pictures(("disc", "cross"), 14), **QUICK)
    found = model.predict(pictures(("disc", "cross"), 12, seed=5)[0])
    assert sum(each.unknown for each in found) <= 6
    assert {each.label for each in found if each.unknown} <= {"unknown"}
    model.learn(*pictures(SHAPES[2:3], 6, seed=1), **QUICK, flip=False)  # at any step
    assert not mirrors(tmp_path / "m")


def test_few_images_and_one_class_at_a_time(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    for i, shape in enumerate(SHAPES[:3]):
        done = model.learn(*pictures((shape,), 60 if i == 1 else 4, seed=i), **QUICK)
        assert done.classes == SHAPES[: i + 1]
        # Of one class nothing can be judged: neither how good the model is nor which images are unlike it.
        facts = model.info()
        assert [facts["threshold"] is None, facts["accuracy"] is None] == [i == 0] * 2
    per_class = model.evaluate(*pictures(SHAPES[:3], 10, seed=9)).per_class
    assert min(per_class.values()) >= 80  # whatever the numbers of images


def test_a_model_in_closed_form_cannot_be_trained_later(taught):
    with pytest.raises(ConfigError, match="made with analytic"):
        taught[0].learn(*pictures(("left",), 4), **QUICK, method="lucir")
    with pytest.raises(ConfigError, match="adapt = yes: this model was made with no"):
        taught[0].learn(*pictures(("left",), 4), **QUICK, adapt="yes")


@pytest.mark.slow
def test_a_network_is_adapted_to_the_first_step_where_that_is_asked(tmp_path):
    model, heard = IncrementalClassifier(tmp_path / "m"), []
    done = model.learn(*pictures(SHAPES[:2], 10), **QUICK, adapt="yes", listener=heard.append)
    (chosen,) = [event for event in heard if isinstance(event, OptionsChosen)]
    (why,) = [why for option, _, why in chosen.choices if option == "--method"]
    assert "adapted to the first images and then frozen" in why
    assert done.judged == 4  # the others were trained on
    assert any("is adapted to the images of the first step" in each for each in done.warnings)
    frozen = backbone(model)
    done = model.learn(*pictures(SHAPES[2:], 6), **QUICK)
    assert done.judged == 16
    assert backbone(model).keys() == frozen.keys()
    for name, tensor in backbone(model).items():
        assert torch.equal(tensor, frozen[name]), name


def backbone(model):
    """Return the backbone of a model by name."""
    return dict(Learner.load(model.path).known.network.backbone.state_dict())


@pytest.mark.slow
def test_flowers(flowers, tmp_path):
    """Three steps of real photographs: needed 95 %."""
    model = IncrementalClassifier(tmp_path / "flowers")
    for week in ("week1", "week2", "week3"):
        model.learn(flowers / week)
    assert model.evaluate(flowers / "test").accuracy > 95


def test_how_long_it_takes_is_told_early_and_asked_where_it_is_long(tmp_path, monkeypatch):
    """By what is read, large photographs decoded included: no network is built for an estimate."""
    heard, asked = [], []
    x, y = pictures(("disc", "square"), 6)
    monkeypatch.setattr("geodl.app.step.LONG", 0.0)
    monkeypatch.setattr("geodl.app.estimates.LOOK", 0.0)
    monkeypatch.setattr("geodl.data.squares.BATCH", 4)
    monkeypatch.setattr("geodl.learning.timing.build_network", None)
    how = {"listener": heard.append, "confirm": asked.append}
    with pytest.raises(ConfigError, match="not confirmed: nothing was learned"):
        IncrementalClassifier(tmp_path / "m").learn(x, y, **QUICK, **how)
    (told,) = [event.seconds for event in heard if isinstance(event, TimeEstimated)]
    assert asked == [told]
    assert told > 0
    assert [event.done for event in heard if isinstance(event, ImagesRead)] == [4]
    assert not (tmp_path / "m").exists()


def test_the_time_is_estimated_once_from_what_is_read():
    told, times = [], iter([0.0, 1.0, 4.0, 9.0])
    read = timed(1000, told.append, lambda: next(times))
    for done in (100, 200, 300):
        read(done)
    assert told == [20.0]


def test_the_estimate_grows_with_the_images(tmp_path):
    options = {"method": "analytic", "network": "efficientnet-lite0", "image_size": 64}
    options |= {"pretrained": True, "adapt": "yes"}
    config = Learner(**options, threads=1).config
    few, many = (step_seconds(config, count, 2) for count in (10, 10_000))
    assert 0 < few < many
