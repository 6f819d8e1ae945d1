"""The classifiers: how each is fitted, which one predicts, and one of a user's own."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.phases import ScenarioLearner
from tests.helpers.plain import Plain, pictures, unit_rows

from geodl.core.errors import ConfigError, StoreError, TrainingError
from geodl.data.batches import Transform, evaluation
from geodl.data.images import ArrayImages, Images
from geodl.learning.learner import Learner
from geodl.model.classifiers import (
    CLASSIFIERS,
    Ncm,
    Nme,
    Scorer,
    default_classifier,
    ncm,
    register,
)
from geodl.model.classifiers.ncm import drift
from geodl.model.features import Features, features_of
from geodl.model.memory import Memory
from geodl.model.model import Weights
from geodl.model.phase import Phase

TRANSFORM = Transform(size=8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), padding=2)


def phase_of(images: Images, classes: int, transform: Transform, **changes: Any) -> Phase:
    """Return a first phase whose images are all exemplars, under a plain network."""

    def features(network: Plain, some: Images, mirror: bool = False) -> Features:
        return features_of(network, evaluation(some, transform, batch_size=3, mirror=mirror))

    found = Phase(
        index=0,
        config=tiny.config(flip=True),
        transform=transform,
        network=(network := Plain(192, classes)),
        teacher=None,
        images=images,
        memory=Memory(),
        old=0,
        names=tuple(map(str, range(classes))),
        features=features,
        device=torch.device("cpu"),
        now=features(network, images),
        kept=Memory(images),
        trained=True,
    )
    return replace(found, **changes)


# ------------------------------------------------------------------------------------- exemplars


def test_mirrored_exemplars_are_flipped_not_recoloured():
    """A public version swaps RGB for BGR where it means to mirror."""
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    pixels[0, 0, :, :2] = 255  # a red bar on the left
    images = ArrayImages(pixels, torch.tensor([0]))
    white = Transform(size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    mean = Nme.fit(phase_of(images, 1, white)).means.reshape(3, 8, 8)
    assert mean[1:].abs().max() == 0, "green and blue stay dark"
    assert (mean[0, :, [0, 1, 6, 7]] > 0).all(), "bars on the left and, mirrored, on the right"
    assert mean[0, :, 2:6].abs().max() == 0
    assert mean[0].equal(mean[0].flip(1))


@pytest.mark.parametrize("flip", [True, False])
def test_exemplar_means_are_over_the_views_that_keep_the_class_each_image_once(flip):
    images = pictures([0, 1, 2, 0, 1, 2, 0])
    given = phase_of(images, 4, TRANSFORM, config=tiny.config(flip=flip))
    means = Nme.fit(given).means.double().numpy()
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (TRANSFORM.mean, TRANSFORM.std))
    inputs = (images.pixels.numpy() / 255 - mean) / std
    sides = [inputs, inputs[..., ::-1]] if flip else [inputs]
    views = unit_rows(np.concatenate([side.reshape(7, -1) for side in sides]))
    labels = np.tile(images.labels.numpy(), len(sides))
    expected = unit_rows(np.stack([views[labels == c].mean(0) for c in range(3)]))
    np.testing.assert_allclose(means[:3], expected, atol=1e-6)
    assert (means[3] == 0).all()


def test_a_class_without_exemplars_stands_by_the_mean_of_its_samples():
    images = pictures([0, 1, 1])
    given = phase_of(images, 2, TRANSFORM, kept=Memory(images.select([0])))
    found = given.fit_all([Nme, Ncm])
    assert found["nme"].means[1].equal(found["ncm"].means[1])
    assert not found["nme"].means[0].equal(found["ncm"].means[0])
    assert Nme.fit(replace(given, kept=Memory())) is None


# ----------------------------------------------------------------------------------------- drift


def drift_reference(
    means: np.ndarray, old: np.ndarray, new: np.ndarray, width: float
) -> np.ndarray:
    """Eq. 8 and 9 of semantic drift compensation, class by class and sample by sample."""
    means, old, new = unit_rows(means), unit_rows(old), unit_rows(new)
    moved = []
    for mean in means:
        weights = [math.exp(-np.sum((z - mean) ** 2) / (2 * width**2)) for z in old]
        step = sum(
            w * (after - before) for w, before, after in zip(weights, old, new, strict=True)
        ) / sum(weights)
        moved.append(mean + step)
    return unit_rows(np.stack(moved))


@pytest.mark.parametrize("pairs", [1, 100, ncm.PAIRS])
def test_drift_against_the_sums_written_out(monkeypatch, pairs):
    monkeypatch.setattr(ncm, "PAIRS", pairs)
    random = np.random.default_rng(3)
    old = random.normal(size=(40, 5))
    new, means = old + 0.3 * random.normal(size=(40, 5)), random.normal(size=(9, 5))
    for width in (0.3, 1.0):
        moved = drift(*(torch.from_numpy(a) for a in (means, old, new)), width=width)
        np.testing.assert_allclose(
            moved.numpy(), drift_reference(means, old, new, width), atol=1e-12
        )


def test_drift_follows_a_common_rotation_of_the_features():
    angle = 0.2
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
        dtype=torch.float64,
    )
    steps = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)[:-1]
    old = torch.stack([steps.cos(), steps.sin()], dim=1)
    means = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    moved = drift(means, 5 * old, 3 * old @ turn.T)
    expected = means @ turn.T
    assert (moved * expected).sum(dim=1).min() > math.cos(0.02)
    assert (means * expected).sum(dim=1).max() < math.cos(0.19), (
        "without compensation the means would be off"
    )


def test_drift_with_every_sample_many_widths_away_is_finite():
    means, old = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [-1.0, 0.1]])
    moved = drift(means, old, old + 0.05, width=0.01)
    assert moved.isfinite().all()
    assert not moved.equal(means)


def test_drift_keeps_what_cannot_move():
    means = torch.tensor([[0.6, 0.8], [0.0, 0.0]])
    old = torch.tensor([[1.0, 0.2], [0.3, 0.9]])
    assert drift(means, old, old).allclose(means)
    assert drift(means, old, old + 0.1)[1].tolist() == [0.0, 0.0], "an unknown mean stays unknown"
    assert drift(means, old[:0], old[:0]).equal(means)
    assert drift(means, old, old + 0.1).dtype == torch.float32


# ------------------------------------------------------------------------------- which and whose


def test_the_classifier_that_predicts_is_the_best_that_needs_no_old_images():
    assert [name for name, kind in CLASSIFIERS.items() if kind.oracle] == ["ame"]
    assert default_classifier(["cnn", "nme", "analytic", "ncm"]) == "analytic"
    assert default_classifier(["cnn", "nme", "ame", "ncm"]) == "nme"
    assert default_classifier(["cnn", "ame", "ncm"]) == "ncm"
    assert default_classifier(["ame", "cnn"]) == "cnn"
    assert default_classifier(["mine", "ame"]) == "ame", "better than one that is not loaded"
    assert default_classifier(["mine", "other"]) == "mine"


def test_a_class_of_which_nothing_is_known_is_never_predicted():
    learner = ScenarioLearner(tiny.config(epochs=1)).learn_next().learn_next()
    test = learner.scenario.test(1)
    some = learner.scenario.train(1)
    found = learner.evaluate(test, seen=some.select(some.labels == some.labels.max()))["ame"]
    assert found.counts.sum(0).count_nonzero() == 1


@pytest.mark.parametrize("scale", [1.0, math.inf, math.nan])
def test_scores_that_are_not_finite_are_an_error(scale):
    scorer, finite = Scorer(lambda found: found.logits, scale=scale), [1.0, -math.inf]
    refused = [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]]
    for row in refused if scale == 1 else [finite]:
        with pytest.raises(TrainingError, match="NaN or infinite"):
            scorer.finite(torch.tensor([[0.0, 1.0], row]))
    if scale == 1:
        scorer.finite(torch.tensor([finite]))  # -inf: a class without a mean


def test_only_the_classifiers_that_are_named_are_evaluated():
    learner = ScenarioLearner(tiny.config(epochs=1, classifiers=("nme",))).learn_next()
    test = learner.scenario.test(0)
    assert set(learner.evaluate(test)) == {"nme"}
    assert set(learner.known.classifiers) == {"cnn", "nme", "ncm"}, "all are fitted"
    for none in (("analytic",), ()):
        other = Learner(tiny.config(epochs=1, classifiers=none), model=learner.model)
        with pytest.raises(ConfigError, match=r"classifiers.*cnn, nme, ncm"):
            other.evaluate(test)


class Own(Ncm):
    """A user's own classifier."""

    name = "own"
    title = "own"


class Frozen(Own):
    """The same, but wrong once the network is trained further."""

    name = "frozen own"
    needs_frozen = True


@pytest.fixture
def own():
    """Register two classifiers for a while."""
    for kind in (Own, Frozen):
        assert register(kind) is kind
    yield
    for kind in (Own, Frozen):
        if kind.name in CLASSIFIERS:
            CLASSIFIERS.remove(kind.name)


@pytest.mark.parametrize("method", ["lucir", "analytic"])
def test_a_users_classifier_is_fitted_in_every_phase_saved_and_loaded(own, tmp_path, method):
    more = {"expansion": 32} if method == "analytic" else {}
    learner = ScenarioLearner(tiny.config(method=method, epochs=1, **more))
    learner.learn_next().learn_next()
    means = learner.known.classifiers["ncm"].means
    assert learner.known.classifiers["own"].means.equal(means)
    assert ("frozen own" in learner.known.classifiers) == (method == "analytic")
    assert learner.evaluate(learner.scenario.test(1))["own"].images == 15
    learner.save(tmp_path / "m")
    loaded = Learner.load(tmp_path / "m")
    assert loaded.known.classifiers["own"].means.equal(means)
    images = learner.scenario.test(1).pixels
    assert loaded.predict(images, classifier="own").probabilities.shape == (15, 3)
    loaded.remove(loaded.classes[0])
    assert loaded.known.classifiers["own"].means.equal(means[1:])


def test_a_classifier_that_is_not_installed_is_named(own, tmp_path):
    learner = ScenarioLearner(tiny.config(epochs=1)).learn_next()
    learner.save(tmp_path / "m")
    CLASSIFIERS.remove("own")
    with pytest.raises(ConfigError, match=r"'own'.*--import"):
        Learner.load(tmp_path / "m")


def test_an_error_in_a_classifiers_code_does_not_blame_the_file(own, tmp_path, monkeypatch):
    learner = ScenarioLearner(tiny.config(epochs=1)).learn_next()
    learner.save(tmp_path / "m")
    monkeypatch.setattr(Own, "from_tensors", lambda tensors, config: config.not_there)
    with pytest.raises(ConfigError, match=r"own: AttributeError: .*not_there"):
        Learner.load(tmp_path / "m")
    monkeypatch.setattr(Own, "from_tensors", lambda tensors, config: tensors["not there"])
    with pytest.raises(StoreError, match=r"damaged.*not there"):
        Learner.load(tmp_path / "m")


def test_an_error_in_a_networks_code_does_not_blame_the_file(tmp_path):
    learner = ScenarioLearner(tiny.config(epochs=1)).learn_next()
    model = replace(learner.known, weights=Weights(broken, learner.known.weights.tensors()))
    with pytest.raises(RuntimeError, match="not today"):
        model.network  # noqa: B018


def broken():
    raise RuntimeError("not today")
