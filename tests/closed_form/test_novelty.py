"""What separates images of known classes from others: nearness, score, and the probability of being known."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from geodl.closed_form.dual import solve_dual, targets_of
from geodl.closed_form.fitted import Judgement, calibrated
from geodl.closed_form.kept_features import KeptFeatures, fit
from geodl.closed_form.novelty import (
    ALL,
    KNOWN,
    SLACKS,
    Novelty,
    cosines,
    directions,
    left_out_nearness,
    stranger_nearness,
)
from geodl.closed_form.primal import ridge_of


def features(count, centers, seed=0, noise=0.5):
    """Return features (count, d) around each of the centers (classes, d), and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(centers)).repeat_interleave(count)
    spread = torch.randn(len(labels), centers.shape[1], generator=generator)
    return (centers[labels] + noise * spread).relu(), labels


CENTERS = torch.eye(4).repeat_interleave(16, dim=1) * 2 + 0.5


@pytest.fixture(scope="module")
def learned():
    z, labels = features(60, CENTERS[:2])
    return z, labels, fit(KeptFeatures.of({"deep": z}, labels), 2, seed=0).fitted


def known(fitted, z):
    """Return the probability that images are known."""
    return fitted.novelty.known(fitted.scores({"deep": z}), fitted.novelty.near({"deep": z}))


@pytest.mark.parametrize("grouped", [False, True])
def test_an_image_is_compared_with_the_classes_without_it_or_its_group(grouped):
    z, labels = features(6, CENTERS[:3])
    groups = torch.arange(18) // (3 if grouped else 1)
    views = z + 0.1
    sums = directions(z, labels, torch.zeros(0, 64), 3)
    found = left_out_nearness(z, labels, sums, groups if grouped else None)
    copies = left_out_nearness(z, labels, sums, groups, views=views)
    for i in range(18):
        rest = groups != groups[i]
        without = directions(z[rest], labels[rest], torch.zeros(0, 64), 3)
        for view, near in ((z, found), (views, copies)):
            assert cosines(view[i : i + 1], without).max() == pytest.approx(
                float(near[i]), abs=1e-6
            )


def test_a_group_of_two_classes_takes_from_each_its_own_images():
    z, labels = features(4, CENTERS[:2])
    sums = directions(z, labels, torch.zeros(0, 64), 2)
    groups = torch.tensor([0, 1, 2, 3, 0, 5, 6, 7])
    assert torch.equal(
        left_out_nearness(z, labels, sums, groups), left_out_nearness(z, labels, sums)
    )


def test_sums_of_directions_grow_by_images_and_classes():
    z, labels = features(5, CENTERS[:3])
    first = directions(z[:7], labels[:7], torch.zeros(0, 64), 2)
    both = directions(z[7:], labels[7:], first, 3)
    assert torch.allclose(both, directions(z, labels, torch.zeros(0, 64), 3))


def test_images_move_to_another_class_or_to_none(learned):
    z, labels, fitted = learned
    rest = torch.arange(len(labels)) >= 3
    none = torch.zeros(0, 64)
    moved = fitted.novelty.moved({"deep": z[:3]}, labels[:3], -1)
    assert torch.allclose(moved.sums, directions(z[rest], labels[rest], none, 2), atol=1e-2)
    there = fitted.novelty.moved({"deep": z[:3]}, labels[:3], 1)
    other = torch.where(rest, labels, 1)
    assert torch.allclose(there.sums, directions(z, other, none, 2), atol=1e-2)


def test_two_classes_are_enough_to_know_what_is_of_neither(learned):
    _, _, fitted = learned
    others, _ = features(60, CENTERS[2:], seed=1)
    same, _ = features(60, CENTERS[:2], seed=2)
    assert fitted.threshold == KNOWN
    assert (known(fitted, others) < 0.01).all()
    assert (known(fitted, same) < KNOWN).double().mean() < 0.12
    # However large the features are, and also where there are none.
    assert (known(fitted, 1000 * others) < 0.01).all()
    assert (known(fitted, torch.zeros(3, 64)) < 0.01).all()


def test_neither_a_high_score_nor_a_class_nearby_is_enough(learned):
    _, _, fitted = learned
    novelty = fitted.novelty
    score, near = novelty.score.center, novelty.nearness.center
    for scores, nearness, is_known in (
        (score, near, True),
        (score + 100 * novelty.score.unit, near - 6 * novelty.nearness.unit, False),
        (score - 6 * novelty.score.unit, near + novelty.nearness.unit, False),
    ):
        found = novelty.known(torch.tensor([[scores, -1.0]]), torch.tensor([nearness]))
        assert bool(found >= KNOWN) == is_known


def test_one_known_image_in_twenty_is_called_unknown():
    generator = torch.Generator().manual_seed(3)
    scores, near = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    novelty = Novelty.unfitted({"deep": torch.ones(1, 64)}).fit(scores, near)
    found = novelty.known(scores.unsqueeze(1), near)
    assert int((found < KNOWN - 1e-6).sum()) == 50
    # By the normal distribution five in a thousand are likelier unknown.
    assert 1 <= int((found < 0.5).sum()) <= 15
    assert float(1 - found.mean()) < 0.02


def test_nearness_decides_alone_as_early_as_images_of_left_out_classes_ask_for():
    generator = torch.Generator().manual_seed(4)
    scores, near, low = torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    unfitted = Novelty.unfitted({"deep": torch.ones(1, 64)})
    alike = unfitted.fit(scores, near, torch.stack([scores - 2, low], dim=1))
    assert alike.slack == SLACKS[1], "nearness says nothing: it only blurs"
    far = unfitted.fit(scores, near, torch.stack([scores + 2, low - 6], dim=1))
    assert far.slack == SLACKS[0], "scores are high, but no class is near"
    assert unfitted.fit(scores, near).slack == SLACKS[0]
    assert alike.fit(scores, near).slack == SLACKS[1], "nothing tells: as before"


def test_images_whose_class_is_left_out_are_scored_as_by_a_fit_without_it():
    z, labels = features(10, CENTERS)
    products, targets = z.double() @ z.double().T, targets_of(labels, 4)
    found = solve_dual(products, targets, 0.1, 64).strangers(labels)
    ridge = ridge_of(products.diagonal().sum(), 0.1, 64)
    for label in range(4):
        rest = labels != label
        inner = products[rest][:, rest] + ridge * torch.eye(int(rest.sum()), dtype=torch.float64)
        scores = products[~rest][:, rest] @ torch.linalg.solve(inner, targets[rest])
        others = torch.arange(4) != label
        assert torch.allclose(found[~rest], scores[:, others].amax(1), atol=1e-8)
    sums = directions(z, labels, torch.zeros(0, 64), 4)
    near = stranger_nearness(z, labels, sums)
    assert near[0] == pytest.approx(float(cosines(z[:1], sums[1:]).max()), abs=1e-6)


def test_images_that_were_measured_before_stay_known(learned):
    """A class of images that are all alike, learned later, does not make the others strange."""
    z, _, fitted = learned
    scores = fitted.scores({"deep": z}).amax(1)
    near = fitted.novelty.near({"deep": z})
    later = fitted.novelty.fit(torch.full((30,), 1.0), torch.full((30,), 0.99))
    assert (later.known(scores.unsqueeze(1), near) < KNOWN).double().mean() < 0.12
    first = Novelty.unfitted({"deep": z})
    alone = first.fit(torch.full((30,), 1.0), torch.full((30,), 0.99))
    assert (alone.known(scores.unsqueeze(1), near) < KNOWN).all()


def test_what_is_not_fitted_calls_every_image_known(learned):
    z, _, fitted = learned
    unfitted = Novelty.unfitted({"shallow": z[:, :3], "deep": z})
    assert unfitted.level == "deep"
    assert not unfitted.fitted
    assert unfitted.fit(torch.empty(0), torch.empty(0)) is unfitted
    same = replace(unfitted, sums=fitted.novelty.sums)
    assert (same.known(torch.full((3, 2), -9.0), torch.zeros(3)) == 1).all()
    nobody = Judgement(torch.zeros(0).long(), torch.zeros(0, 2), torch.zeros(0))
    assert calibrated(fitted.expand, fitted.head, nobody, same)[0].threshold == -math.inf
    # Images that cannot be judged leave what is known as it is.
    assert fitted.novelty.fit(torch.empty(0), torch.empty(0)) is fitted.novelty


def test_equal_images_give_finite_probabilities():
    novelty = Novelty.unfitted({"deep": torch.ones(1, 3)})
    found = replace(novelty, sums=torch.ones(2, 3)).fit(torch.ones(4), torch.ones(4))
    assert float(found.known(torch.tensor([[1.0, 0.0]]), torch.ones(1))) == pytest.approx(KNOWN)
    assert float(found.known(torch.tensor([[0.9, 0.0]]), torch.ones(1))) == 0


def test_it_is_stored_and_read(learned):
    novelty = replace(learned[2].novelty, slack=SLACKS[1])
    tensors = novelty.to_tensors()
    again = Novelty.from_tensors(tensors)
    assert replace(again, sums=novelty.sums, measured=novelty.measured) == novelty
    assert torch.equal(again.sums, novelty.sums)
    assert torch.equal(again.measured, novelty.measured)
    assert Novelty.from_tensors({}) is None
    assert Novelty.from_tensors(Novelty.unfitted({"a": torch.ones(1, 2)}).to_tensors()).odds == ALL
    assert torch.equal(novelty.without(0).sums, novelty.sums[1:])


def test_confidence_includes_the_probability_of_being_known(learned):
    z, _, fitted = learned
    scores, near = fitted.scores({"deep": z}), fitted.novelty.near({"deep": z})
    plain = F.softmax(scores / fitted.temperature, dim=1).amax(1)
    assert torch.allclose(fitted.confidences(scores, near), plain * known(fitted, z))
    assert torch.equal(replace(fitted, novelty=None).confidences(scores, near), plain)
