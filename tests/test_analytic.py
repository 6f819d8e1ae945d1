"""The method `analytic`: mirrored training images, and a network that goes on learning."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny
from torch.nn import functional as F

from geodl.closed_form import Fitted, Statistics, temperature
from geodl.config import derive
from geodl.data import ClassIncremental
from geodl.data.images import concat
from geodl.errors import ConfigError, TrainingError
from geodl.learner import Learner
from geodl.methods import analytic, kept_features
from geodl.methods.kept_features import KeptFeatures


def made(**options: Any) -> Learner:
    """Return a learner with the tiny options, some replaced."""
    return Learner(tiny.config(**{"method": "analytic", "expansion": 32} | options))


@pytest.fixture(scope="module")
def scenario() -> ClassIncremental:
    return ClassIncremental(tiny.dataset(), base=2, phases=2)


# -- mirrored training images

MIRRORED: dict[str, Any] = {"flip": True, "mirror_training": True}


def test_the_head_is_that_of_the_mean_of_an_image_and_its_mirrored_copy(scenario):
    learner = made(**MIRRORED, gamma=0.1)
    for phase in scenario:
        learner.learn(phase.train)
    train = concat([phase.train for phase in scenario])
    fitted = Fitted.from_tensors(learner.memory.own, derive(learner.config.seed, "expansion"))
    views = (learner.features(train, mirror=side).levels for side in (False, True))
    h = sum(fitted.expansion(fitted.standardization(view)).double() for view in views) / 2
    gram = h.T @ h
    ridge = 0.1 * gram.trace() / len(gram)
    expected = torch.linalg.solve(gram + ridge * torch.eye(len(gram)), h.T @ F.one_hot(train.labels).double())
    assert torch.allclose(learner.memory.own["head"].double(), expected, atol=1e-4 * expected.abs().max())
    assert learner.evaluate(scenario.test(2))["analytic"].accuracy > 50


def test_temperature_and_threshold_are_of_scores_averaged_as_in_prediction(scenario):
    learner = made(flip=True, gamma=0.1)
    learner.learn(scenario.train(0))
    train, own = scenario.train(0), learner.memory.own
    fitted = learner.method.fitted(own)
    h, copies = (fitted.expand(learner.features(train, mirror=side).levels).double() for side in (False, True))
    gram = h.T @ h
    ridge, y = 0.1 * gram.trace() / len(gram) * torch.eye(len(gram)), F.one_hot(train.labels).double()
    scores = torch.stack(
        [
            (h[i] + copies[i]) / 2 @ torch.linalg.solve(h[rest].T @ h[rest] + ridge, h[rest].T @ y[rest])
            for i in range(len(h))
            for rest in [[k for k in range(len(h)) if k != i]]
        ]
    )
    assert own["validated"][:, 1].equal(scores.argmax(1))
    assert fitted.temperature == pytest.approx(temperature(scores, train.labels), rel=1e-3)
    assert fitted.threshold == pytest.approx(float(scores.amax(1).min()), rel=1e-3)  # 5 % of 18 images are none


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_features": True}, "features of all images"),
        ({"distill": "geodesic"}, "features of all images"),
        ({"mirror": False}, "needs mirror and flip"),
        ({"flip": False}, "needs mirror and flip"),
    ],
)
def test_options_that_mirrored_training_images_do_not_go_with(options, words):
    with pytest.raises(ConfigError, match=words):
        made(**MIRRORED | options)


# -- the features of all images, and the sums of too many

KEPT: dict[str, Any] = {"keep_features": True, "flip": True}


def test_an_image_that_is_given_again_counts_once(scenario):
    learner, first = made(**KEPT), scenario.train(0)
    learner.learn(first)
    before = learner.memory.own
    learner.learn(first.select(range(12)))
    assert torch.equal(learner.memory.own["labels"], before["labels"])
    assert torch.equal(learner.memory.own["head"], before["head"])
    assert learner.memory.own["last"].tolist() == list(range(12))
    learner.learn(concat([first.select([3]), scenario.train(1)]))
    assert torch.bincount(learner.memory.own["labels"]).tolist() == [9, 9, 9]
    assert learner.memory.own["last"].tolist() == [3, *range(18, 27)]


def test_features_of_many_levels_are_read_back_in_their_order():
    z = {f"level {i}": torch.rand(2, 1) for i in range(12)}
    data = KeptFeatures.of(z, torch.tensor([0, 1]))
    assert list(KeptFeatures.from_tensors(dict(sorted(data.to_tensors().items()))).z) == list(z)


def test_a_picture_under_another_class_is_another_image(scenario):
    learner, first = made(**KEPT), scenario.train(0)
    learner.learn(first)
    other = first.select([0])
    learner.learn(other.relabel(torch.tensor([1, 1]), first.names))
    assert torch.bincount(learner.memory.own["labels"]).tolist() == [9, 10]


@pytest.fixture
def few(monkeypatch):
    """Let few images be too many, so that only sums are kept of them."""
    monkeypatch.setattr(analytic, "MOST", 20)
    monkeypatch.setattr(kept_features, "EACH", 64)


def test_of_too_many_images_the_sums_are_kept_and_what_was_chosen_before_holds(scenario, few, monkeypatch):
    monkeypatch.setattr(analytic, "mirroring_keeps_classes", lambda *_: False)
    learner = made(**KEPT, gamma=0.77)
    learner.learn(scenario.train(0))
    assert {"labels", "rows"} <= learner.memory.own.keys()
    for t in (1, 2):
        learner.learn(scenario.train(t))
        own = learner.memory.own
        assert not {"labels", "rows", "last"} & own.keys()
        assert own["counts"].tolist() == [9] * (t + 2)
        assert not own["mirrors"]
        assert own["gamma"] != 0.77  # leave-one-out chooses from a list
        solved = Statistics.from_tensors(own).solve(float(own["gamma"]))
        assert torch.allclose(own["head"], solved.head.float())
    assert learner.evaluate(scenario.test(2))["analytic"].accuracy > 50
    assert learner.judged(learner.rows_of(scenario.test(2))).predictions.eq(-1).all()  # no picture is recalled
    learner.remove(learner.classes[0])
    assert not learner.memory.own["mirrors"]
    assert learner.memory.own["gamma"] == own["gamma"]


def test_a_first_step_of_too_many_images_makes_no_matrix_of_all_their_pairs(scenario, few, monkeypatch):
    sizes = []
    solve = kept_features.solve_dual
    monkeypatch.setattr(
        kept_features, "solve_dual", lambda kernel, *rest: sizes.append(len(kernel)) or solve(kernel, *rest)
    )
    learner = made(**KEPT)
    train = concat([phase.train for phase in scenario])
    learner.learn(train)
    assert learner.memory.own["counts"].sum() == len(train)
    assert sizes == [20]


def test_a_class_with_one_image_is_not_judged_by_the_fit_without_it(scenario):
    learner = made()
    train = concat([scenario.train(0), scenario.train(1).select([0])])
    learner.learn(train)
    assert set(learner.left_out().counts.sum(dim=1).tolist()) == {9, 0}


def test_classes_of_one_image_each_are_judged_by_nothing(scenario):
    learner = made(**KEPT)
    learner.learn(scenario.train(0).select([0, 9]))
    assert learner.judged(learner.rows_of(scenario.test(0))).predictions.eq(-1).all()


# -- the closed form over a network that goes on learning


LATER: dict[str, Any] = {"distill": "geodesic"}


def test_where_the_network_moves_the_features_of_old_images_are_moved_along(scenario):
    learner = made(**LATER)
    learner.learn(scenario.train(0))
    first = deepcopy(learner.network.backbone.state_dict())
    for t in (1, 2):
        learner.learn(scenario.train(t))
    assert any(not torch.equal(tensor, first[name]) for name, tensor in learner.network.backbone.state_dict().items())
    assert torch.bincount(learner.memory.own["labels"]).tolist() == [9, 9, 9, 9]
    found = learner.evaluate(scenario.test(2))
    assert set(found) == {"cnn", "nme", "ncm", "analytic"}
    assert found["analytic"].accuracy > 50


def test_features_moved_along_are_nearer_to_those_of_today_than_before(scenario):
    learner = made(**LATER)
    learner.learn(scenario.train(0))
    before = learner.memory.own
    learner.learn(scenario.train(1))
    now = learner.features(scenario.train(0)).levels
    for name in (name for name in before if name.startswith("z.")):
        stale, moved = (own[name][:18].float() - now[name.split(".", 2)[2]] for own in (before, learner.memory.own))
        assert moved.norm() < stale.norm()


@pytest.mark.parametrize(("first", "then"), [("none", "geodesic"), ("geodesic", "none")])
def test_a_network_that_stands_still_or_goes_on_learning_does_so_for_good(scenario, first, then):
    learner = made(distill=first)
    learner.learn(scenario.train(0))
    with pytest.raises(ConfigError, match=f"distill = {then}: this model was made with {first}; another needs a new"):
        learner.continued(made(distill=then).config)


def test_nothing_is_learned_on_top_of_statistics_that_are_gone(scenario):
    learner = made()
    learner.learn(scenario.train(0))
    own = {name: tensor for name, tensor in learner.memory.own.items() if not learner.method.only_to_learn(name)}
    learner.memory = replace(learner.memory, own=own)  # as an earlier phase of a run has it
    with pytest.raises(TrainingError, match="are gone"):
        learner.learn(scenario.train(1))


def test_the_random_features_are_those_of_the_first_seed(scenario):
    learner = made(seed=3)
    learner.learn(scenario.train(0))
    with pytest.raises(ConfigError, match="seed = 4: this model was made with 3; another needs a new model"):
        learner.continued(made(seed=4).config)
    learner.continued(made(seed=3).config).learn(scenario.train(1))


def test_a_class_is_removed_where_the_network_moves(scenario):
    learner = made(**LATER)
    for t in (0, 1):
        learner.learn(scenario.train(t))
    gone, *rest = learner.classes
    learner.remove(gone)
    assert learner.classes == tuple(rest)
    assert torch.bincount(learner.memory.own["labels"]).tolist() == [9, 9]
    test = scenario.test(1)
    assert learner.evaluate(test.select(test.labels > 0))["analytic"].accuracy > 50


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_base": False}, "trained in phase 0"),
        ({"keep_features": True}, "stands still"),
    ],
)
def test_options_of_a_network_that_moves_belong_together(options, words):
    with pytest.raises(ConfigError, match=words):
        made(**LATER, **options)
