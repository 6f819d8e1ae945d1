"""The closed form as a method and as a classifier: mirrored images, kept features, and the sums of too many."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import tiny
from torch import Tensor
from torch.nn import functional as F

from geodl.closed_form import kept_features
from geodl.closed_form.choices import temperature
from geodl.closed_form.kept_features import KeptFeatures
from geodl.closed_form.novelty import Scale
from geodl.core.errors import ConfigError, TrainingError
from geodl.data import ClassIncremental
from geodl.data.images import concat
from geodl.learning.learner import Learner
from geodl.model.classifiers import ClosedForm, fitting
from geodl.model.classifiers.fitting import Sums


def made(**options: Any) -> Learner:
    """Return a learner with the tiny options, some replaced."""
    return Learner(tiny.config(**{"method": "analytic", "expansion": 32} | options))


def closed_form(learner: Learner) -> ClosedForm:
    found = learner.known.classifiers["analytic"]
    assert isinstance(found, ClosedForm)
    return found


def sizes(learner: Learner) -> list[int]:
    """Return how many images of each class are kept, or were counted."""
    state = closed_form(learner).state
    if isinstance(state, Sums):
        return state.statistics.counts.tolist()
    return torch.bincount(state.labels).tolist()


@pytest.fixture(scope="module")
def scenario() -> ClassIncremental:
    return ClassIncremental(tiny.dataset(), base=2, phases=2)


def ridge(h: Tensor, gamma: float = 0.1) -> Tensor:
    gram = h.T @ h
    return gamma * gram.trace() / len(gram) * torch.eye(len(gram))


# -- mirrored images

MIRRORED: dict[str, Any] = {"flip": True, "mirror_training": True}


def test_the_head_is_that_of_the_mean_of_an_image_and_its_mirrored_copy(scenario):
    learner = made(**MIRRORED, gamma=0.1)
    for phase in scenario:
        learner.learn(phase.train)
    train, fitted = concat([phase.train for phase in scenario]), closed_form(learner).fitted
    views = (learner.features(train, mirror=side).levels for side in (False, True))
    h = sum(fitted.expand(view).double() for view in views) / 2
    expected = torch.linalg.solve(h.T @ h + ridge(h), h.T @ F.one_hot(train.labels).double())
    assert torch.allclose(fitted.head.double(), expected, atol=1e-4 * expected.abs().max())
    assert learner.evaluate(scenario.test(2))["analytic"].accuracy > 50


def test_temperature_and_novelty_are_of_views_averaged_as_in_prediction(scenario):
    learner, train = made(flip=True, gamma=0.1), scenario.train(0)
    learner.learn(train)
    fitted, judged = closed_form(learner).fitted, closed_form(learner).judged
    h, copies = (
        fitted.expand(learner.features(train, mirror=side).levels).double()
        for side in (False, True)
    )
    level = list(learner.features(train).levels)[-1]
    views = [
        F.normalize(learner.features(train, mirror=side).levels[level], dim=1)
        for side in (False, True)
    ]
    y, scores, near = F.one_hot(train.labels).double(), [], []
    for i in range(len(h)):
        rest = torch.arange(len(h)) != i
        means = F.normalize(y[rest].T.float() @ views[0][rest], dim=1)
        near.append(sum(float((means @ view[i]).max()) for view in views) / 2)
        head = torch.linalg.solve(h[rest].T @ h[rest] + ridge(h), h[rest].T @ y[rest])
        scores.append((h[i] + copies[i]) / 2 @ head)
    expected = torch.stack(scores)
    assert judged.predictions.equal(expected.argmax(1))
    assert fitted.temperature == pytest.approx(temperature(expected, train.labels), rel=1e-3)
    assert fitted.novelty.nearness.center == pytest.approx(
        Scale.of(torch.tensor(near).double()).center, rel=1e-5
    )
    # 5 % of 18 images are none: the least known one has just the probability that the threshold asks for.
    known = fitted.novelty.known(expected, torch.tensor(near))
    assert float(known.min()) == pytest.approx(fitted.threshold, rel=1e-3)


def test_mirrored_copies_are_left_out_of_an_evaluation_where_asked(scenario):
    learner, test = made(flip=True), scenario.test(0)
    learner.learn(scenario.train(0))
    scorer = closed_form(learner).scorer(learner.network)
    found, copies = (learner.features(test, mirror=side) for side in (False, True))
    for mirror, views in ((True, (found, copies)), (False, (found,))):
        scores = scorer(*views)
        counts = learner.evaluate(test, mirror=mirror)["analytic"].counts
        assert counts.diagonal().sum() == (scores.argmax(1) == test.labels).sum()
    assert not scorer(found).equal(scorer(found, copies))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_features": True}, "features of all images"),
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
    before = closed_form(learner)
    learner.learn(first.select(range(12)))
    again = closed_form(learner)
    assert torch.equal(again.state.labels, before.state.labels)
    assert torch.equal(again.fitted.head, before.fitted.head)
    assert len(again.judged.mistaken) == 12
    learner.learn(concat([first.select([3]), scenario.train(1)]))
    assert sizes(learner) == [9, 9, 9]
    wrong = closed_form(learner).judged.mistaken
    assert len(wrong) == 10, "of the images of this phase, also of one that was known"
    assert learner.memory.images is None


def test_mistaken_images_of_a_phase_are_in_their_order(scenario):
    learner, train = made(**KEPT), scenario.train(0)
    learner.learn(train)
    wrong = train.select([2])
    given = concat([train.select([0]), replace(wrong, labels=1 - wrong.labels), train.select([9])])
    learner.learn(given)
    assert closed_form(learner).judged.mistaken.tolist() == [False, True, False]


def test_features_of_many_levels_are_read_back_in_their_order():
    z = {f"level {i}": torch.rand(2, 1) for i in range(12)}
    data = KeptFeatures.of(z, torch.tensor([0, 1]))
    assert list(KeptFeatures.from_tensors(dict(sorted(data.to_tensors().items()))).z) == list(z)


def test_a_picture_under_another_class_is_another_image(scenario):
    learner, first = made(**KEPT), scenario.train(0)
    learner.learn(first)
    learner.learn(first.select([0]).relabel(torch.tensor([1, 1]), first.names))
    assert sizes(learner) == [9, 10]


@pytest.fixture
def few(monkeypatch):
    """Let few images be too many, so that only sums are kept of them."""
    monkeypatch.setattr(fitting, "MOST", 20)
    monkeypatch.setattr(fitting, "PART", 20)
    monkeypatch.setattr(kept_features, "EACH", 64)


def test_of_too_many_images_the_sums_are_kept_and_what_was_chosen_before_holds(
    scenario, few, monkeypatch
):
    monkeypatch.setattr(fitting, "turned_classes", lambda *_: (0,))
    learner = made(**KEPT, gamma=0.77)
    learner.learn(scenario.train(0))
    assert isinstance(closed_form(learner).state, KeptFeatures)
    for t in (1, 2):
        learner.learn(scenario.train(t))
        found = closed_form(learner)
        assert isinstance(found.state, Sums)
        assert (found.keeps, found.judged.rows) == (False, None)
        assert sizes(learner) == [9] * (t + 2)
        assert found.state.gamma != 0.77  # leave-one-out chooses from a list
        solved = found.state.statistics.solve(found.state.gamma)
        assert torch.allclose(found.fitted.head, solved.head.float())
    assert learner.evaluate(scenario.test(2))["analytic"].accuracy > 50
    judged = learner.known.judged(learner.rows_of(scenario.test(2)))
    assert judged.predictions.eq(-1).all(), "no picture is recalled"
    learner.remove(learner.classes[0])
    rest = closed_form(learner)
    assert (rest.keeps, rest.state.gamma) == (False, found.state.gamma)


def test_a_first_step_of_too_many_images_makes_no_matrix_of_all_their_pairs(
    scenario, few, monkeypatch
):
    solved, solve = [], kept_features.solve_dual

    def spy(kernel, *rest, **how):
        solved.append(len(kernel))
        return solve(kernel, *rest, **how)

    monkeypatch.setattr(kept_features, "solve_dual", spy)
    learner, train = made(**KEPT), concat([phase.train for phase in scenario])
    learner.learn(train)
    assert sum(sizes(learner)) == len(train)
    assert solved == [20]


def test_a_class_with_one_image_is_not_judged_by_the_fit_without_it(scenario):
    learner = made()
    learner.learn(concat([scenario.train(0), scenario.train(1).select([0])]))
    assert set(learner.known.left_out().counts.sum(dim=1).tolist()) == {9, 0}


def test_classes_of_one_image_each_are_judged_by_nothing(scenario):
    learner = made(**KEPT)
    learner.learn(scenario.train(0).select([0, 9]))
    judged = learner.known.judged(learner.rows_of(scenario.test(0)))
    assert judged.predictions.eq(-1).all()


@pytest.mark.parametrize("options", [{}, KEPT], ids=["sums", "features"])
def test_one_class_is_enough_for_a_network_that_is_given(scenario, options):
    learner = made(train_base=False, **options)
    learner.learn(scenario.train(1))
    assert learner.evaluate(scenario.test(1).select([10, 11]))["analytic"].accuracy == 100
    learner.learn(scenario.train(0))
    assert sizes(learner) == [9, 9, 9]
    assert "cnn" not in learner.evaluate(scenario.test(1)), "the head was not trained"


def test_nothing_is_learned_on_top_of_sums_that_are_gone(scenario):
    learner = made()
    learner.learn(scenario.train(0))
    old = {"analytic": replace(closed_form(learner), state=None)}  # as an earlier phase has it
    learner.model = replace(learner.known, classifiers=old)
    with pytest.raises(TrainingError, match="newest phase"):
        learner.learn(scenario.train(1))
    assert learner.predict(scenario.test(0).pixels).probabilities.shape == (10, 2)


def test_the_random_features_are_those_of_the_first_seed(scenario):
    learner = made(seed=3)
    learner.learn(scenario.train(0))
    with pytest.raises(ConfigError, match=r"seed = 4.*3"):
        Learner(made(seed=4).config, model=learner.model)
    Learner(made(seed=3, gamma=0.1).config, model=learner.model).learn(scenario.train(1))


# -- unknown


@pytest.mark.parametrize("keeps", [False, True])
def test_a_model_of_version_0_2_keeps_its_threshold_of_the_score(scenario, keeps):
    learner = made(keep_features=keeps)
    learner.learn(scenario.train(0))
    known = learner.known
    now = closed_form(learner)
    both = now.tensors() | now.statistics()
    names = {
        name for name in both if name in ("scales", "measured") or name.startswith("directions.")
    }
    assert len(names) == 3
    old = {name: each for name, each in both.items() if name not in names}
    old["numbers"] = torch.tensor([now.fitted.temperature, 0.3], dtype=torch.float64)
    before = ClosedForm.from_tensors(old, known.config)
    assert before.threshold() == 0.3
    learner.model = replace(known, classifiers=dict(known.classifiers) | {"analytic": before})
    for image in learner.predict(scenario.test(0)):
        assert image.unknown == (image.score < 0.3)
    probabilities = learner.predict(scenario.test(0)).probabilities
    assert probabilities.sum(axis=1) == pytest.approx(1)
    learner.learn(scenario.train(1))
    # The directions of the old images are known only where their features are kept.
    assert (closed_form(learner).fitted.novelty is not None) == keeps
    assert closed_form(learner).threshold() != 0.3


def test_sums_and_kept_features_give_the_same_directions(scenario):
    found = []
    for keeps in (False, True):
        learner = made(keep_features=keeps)
        for phase in scenario:
            learner.learn(phase.train)
        found.append(closed_form(learner).fitted.novelty)
        test = learner.predict(scenario.test(2))
        assert sum(each.unknown for each in test) < len(test) / 2
    assert found[0].level == found[1].level
    assert torch.allclose(found[0].sums, found[1].sums, atol=1e-2)
