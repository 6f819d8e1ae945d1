"""Pre-trained features and the closed form: what `learn` does with photographs where the extra is installed."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from geodl import IncrementalClassifier, Learner
from geodl.app.before import step_seconds
from geodl.app.choices import has_pretrained
from geodl.closed_form import kept_features
from geodl.core.errors import ConfigError, DataError, StoreError
from geodl.core.events import Advised, OptionsChosen, TimeEstimated
from geodl.data import squares
from geodl.learning.reading import FeatureReader
from geodl.model.classifiers import fitting

pytestmark = pytest.mark.skipif(
    not has_pretrained(), reason="the extra `pretrained` is not installed"
)

SHAPES = ("disc", "square", "cross", "ring")
QUICK = {"image_size": 64}


def mirrors(path) -> bool:
    """Return whether a model averages over mirrored copies."""
    return Learner.load(path).known.recognizer().scorer.mirrors


def picture(shape: str, rng: np.random.Generator, size: int = 64) -> np.ndarray:
    """Draw a shape of random size, place and color on noise: uint8 (size, size, 3)."""
    y, x = np.mgrid[:size, :size]
    cy, cx, r = rng.uniform(24, 40), rng.uniform(24, 40), rng.uniform(10, 16)
    dy, dx = np.abs(y - cy), np.abs(x - cx)
    inside = {
        "disc": dy**2 + dx**2 < r**2,
        "square": np.maximum(dy, dx) < r,
        "cross": (np.minimum(dy, dx) < r / 3) & (np.maximum(dy, dx) < r),
        "ring": np.abs(np.sqrt(dy**2 + dx**2) - r) < r / 4,
        "left": (dy < r / 5) & (dx < r)
        | ((x - cx + r) < r) & ((x - cx + r) > 0) & (dy < (x - cx + r)),
    }
    if shape == "right":
        return picture("left", rng, size)[:, ::-1]
    image = rng.integers(0, 80, (size, size, 3))
    image[inside[shape]] = rng.integers(120, 255, 3)
    return image.astype(np.uint8)


def pictures(shapes: tuple[str, ...], count: int, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    return np.stack([picture(s, rng) for s in shapes for _ in range(count)]), [
        s for s in shapes for _ in range(count)
    ]


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


def test_features_are_float32_whatever_the_precision_of_training(tmp_path):
    images = pictures(SHAPES[:2], 6)
    found = []
    for precision in ("32", "bf16"):
        model = IncrementalClassifier(tmp_path / precision)
        model.learn(*images, **QUICK, precision=precision)
        found.append(model.predict(images[0]).probabilities)
    np.testing.assert_array_equal(*found)


def test_a_model_in_closed_form_speaks_of_no_validation_images(taught, capsys):
    from geodl.cli import app

    app(["info", str(taught[0].path)], exit_on_error=False, print_error=False)
    out = capsys.readouterr().out
    assert "validation" not in out
    assert re.search(r"^disc +1 .* 14 +10 +\d+\.0 %$", out, re.M)
    assert re.search(r"stored images: 40, .* \(to show, not to learn from\)", out)
    assert "stored features: of 56 images" in out


def test_what_can_be_brought_back_is_named_where_nothing_is_left(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(*pictures(SHAPES[:2], 6), **QUICK)
    model.undo()
    with pytest.raises(StoreError, match="redo"):
        model.info()


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
    done = model.learn(*pictures(SHAPES[:2], 8), **QUICK, exemplars=0)
    again = model.learn(*pictures(SHAPES[2:3], 8, seed=1), **QUICK)
    assert (done.stored_images, again.stored_images) == (0, 0)
    assert again.accuracy is not None
    memory = Learner.load(tmp_path / "m").memory
    assert memory.images is None
    assert not any(tensor.dtype == torch.uint8 for tensor in memory.to_tensors().values())


def test_a_folder_that_has_grown_brings_what_is_new(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    images, labels = pictures(SHAPES[:2], 15)
    model.learn(images[:-1], labels[:-1], **QUICK)
    again = model.learn(images, labels, **QUICK)
    assert again.judged == 30
    assert again.stored_features == 30


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


def test_the_pictures_that_are_kept_to_show_are_those_that_were_mistaken(tmp_path):
    noise = np.random.default_rng(0).integers(
        0, 255, (30, 64, 64, 3), dtype=np.uint8
    )  # two classes that nobody can tell apart
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(*pictures(SHAPES[:1], 4), **QUICK)
    model.learn(noise, ["a", "b"] * 15, **QUICK, exemplars=3)
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
    np.testing.assert_allclose(
        a.predict(test).probabilities, b.predict(test).probabilities[:, rows], atol=2e-3
    )


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
    np.testing.assert_allclose(
        with_it.predict(test).probabilities, without.predict(test).probabilities, atol=2e-3
    )
    measured = [
        (model.info()["accuracy"], model.info()["confusions"]) for model in (with_it, without)
    ]
    assert measured[0] == measured[1]


def scores(model: IncrementalClassifier, rows: slice = slice(None)) -> np.ndarray:
    return (
        Learner.load(model.path)
        .known.recognizer()
        .predict(pictures(SHAPES, 5, seed=5)[0])
        .probabilities[:, rows]
    )


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
    from geodl.cli import app

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


def test_left_and_right_arrows_are_told_apart_and_ordinary_pictures_are_mirrored(taught, tmp_path):
    model = IncrementalClassifier(tmp_path / "arrows")
    done = model.learn(*pictures(("left", "right"), 16), **QUICK)
    assert [
        warning
        for warning in done.warnings
        if warning.startswith("Mirrored images of ") and "left" in warning
    ]
    assert not [warning for step in taught[1] for warning in step.warnings if "irror" in warning]
    assert not mirrors(tmp_path / "arrows")
    assert model.evaluate(*pictures(("left", "right"), 12, seed=7)).accuracy > 85
    assert mirrors(taught[0].path)


def test_a_network_is_not_trained_on_mirrored_arrows(tmp_path):
    model, heard = IncrementalClassifier(tmp_path / "m"), []
    training = {
        "method": "lucir",
        "epochs": 1,
        "network": "convnet",
        "image_size": 16,
        "listener": heard.append,
    }
    model.learn(*pictures(("disc", "ring"), 12), **training)
    model.learn(*pictures(("left", "right"), 16), **training)
    found = [
        choice[1:]
        for event in heard
        if isinstance(event, OptionsChosen)
        for choice in event.choices
        if choice[0] == "--flip"
    ]
    assert [value for value, _ in found] == ["yes", "no"]
    assert "mirrored ones are predicted as another class" in found[1][1]


def test_flipping_can_be_set_at_any_step(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(*pictures(SHAPES[:2], 6), **QUICK)
    model.learn(*pictures(SHAPES[2:3], 6, seed=1), **QUICK, flip=False)
    assert not mirrors(tmp_path / "m")


def test_pictures_unlike_all_classes_are_called_unknown(tmp_path):
    """A model of discs and crosses, asked about rings and squares: their largest scores are lower."""
    model = IncrementalClassifier(tmp_path / "m")
    model.learn(*pictures(("disc", "cross"), 14), **QUICK)
    learner = Learner.load(tmp_path / "m")
    found = model.predict(pictures(("disc", "cross"), 12, seed=5)[0])
    assert sum(each.unknown for each in found) <= 6
    assert {each.label for each in found if each.unknown} <= {"unknown"}
    scorer = learner.known.recognizer().scorer
    rejecting = replace(learner.known.recognizer(), scorer=replace(scorer, threshold=2.0))
    assert {each.label for each in rejecting.predict(pictures(("ring",), 3)[0])} == {"unknown"}


def test_few_images_and_one_class_at_a_time(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    for i, shape in enumerate(SHAPES):
        done = model.learn(*pictures((shape,), 3, seed=i), **QUICK)
        assert done.classes == SHAPES[: i + 1]
        # Of one class nothing can be judged: neither how good the model is nor which images are unlike it.
        facts = model.info()
        assert [facts["threshold"] is None, facts["accuracy"] is None] == [i == 0] * 2
    assert model.evaluate(*pictures(SHAPES, 4, seed=9)).images == 16


def test_classes_of_60_and_of_5_images(tmp_path):
    model = IncrementalClassifier(tmp_path / "m")
    many, few = pictures(("disc",), 60), pictures(("cross",), 5, seed=1)
    model.learn(np.concatenate([many[0], few[0]]), many[1] + few[1], **QUICK)
    assert model.evaluate(*pictures(("disc", "cross"), 10, seed=2)).per_class["cross"] >= 80


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


def test_a_parent_folder_is_refused_with_the_right_suggestion(tmp_path):
    from PIL import Image

    for seed, name in enumerate(("test/disc/a.png", "week1/disc/a.png", "week2/ring/b.png")):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True)
        Image.fromarray(picture(path.parent.name, np.random.default_rng(seed))).save(path)
    with pytest.raises(DataError, match="week1"):
        IncrementalClassifier(tmp_path / "m").learn(tmp_path / "photos")
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_flowers(flowers, tmp_path):
    """Three steps of real photographs: needed 95 %."""
    model = IncrementalClassifier(tmp_path / "flowers")
    for week in ("week1", "week2", "week3"):
        model.learn(flowers / week)
    assert model.evaluate(flowers / "test").accuracy > 95


def test_how_long_it_takes_is_told_first_and_asked_where_it_is_long(tmp_path, monkeypatch):
    heard, asked = [], []
    x, y = pictures(("disc", "square"), 6)
    monkeypatch.setattr("geodl.app.before.LONG", 0.0)
    with pytest.raises(ConfigError, match="not confirmed: nothing was learned"):
        IncrementalClassifier(tmp_path / "m").learn(
            x, y, **QUICK, listener=heard.append, confirm=asked.append
        )
    (told,) = [event.seconds for event in heard if isinstance(event, TimeEstimated)]
    assert asked == [told]
    assert told > 0
    assert not (tmp_path / "m").exists()


def test_the_estimate_grows_with_the_images(tmp_path):
    config = Learner(
        method="analytic", network="efficientnet-lite0", image_size=64, threads=1
    ).config
    few, many = (step_seconds(config, count, 2) for count in (10, 10_000))
    assert 0 < few < many
