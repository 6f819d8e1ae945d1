"""The closed form against plain numpy in float64, and against fitting again: heads, and what is left out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.ridge import close, draw, gammas, refit, ridge_of, seeds, statistics_of

from geodl.closed_form import primal
from geodl.closed_form.dual import class_weights, kernels, solve_dual, targets_of
from geodl.closed_form.expansion import Expansion, Standardization
from geodl.closed_form.primal import solve, solve_refined
from geodl.core.errors import ConfigError, TrainingError


@given(seed=seeds, gamma=gammas, images=st.integers(4, 40), balanced=st.booleans())
def test_dual_and_primal_form_agree(seed, gamma, images, balanced):
    h, labels = draw(seed, images)
    weights = class_weights(labels) if balanced else None
    dual = solve_dual(h @ h.T, targets_of(labels, 4), gamma, 12, weights)
    w, y = None if weights is None else weights.numpy(), np.eye(4)[labels.numpy()]
    close(dual.head(h), refit(h.numpy(), y, ridge_of(h.numpy(), gamma, w), w))
    if not balanced:
        close(dual.head(h), statistics_of(h, labels).solve(gamma).head)


def test_weights_give_every_class_the_same():
    labels = torch.tensor([0] * 60 + [2] * 5)
    weights = class_weights(labels)
    assert weights.mean() == pytest.approx(1)
    assert weights[labels == 0].sum() == pytest.approx(float(weights[labels == 2].sum()))


@given(seed=seeds, gamma=gammas, images=st.integers(4, 30))
def test_leave_one_out_equals_fitting_without_the_image(seed, gamma, images):
    h, labels = draw(seed, images)
    y, ridge, copies = np.eye(4)[labels.numpy()], ridge_of(h.numpy(), gamma), h.flip(1)
    heads = [refit(np.delete(h.numpy(), i, 0), np.delete(y, i, 0), ridge) for i in range(images)]
    expected, mirrored = (
        np.stack([row @ head for row, head in zip(rows.numpy(), heads, strict=True)])
        for rows in (h, copies)
    )
    primal, targets = statistics_of(h, labels).solve(gamma), torch.tensor(y)
    close(primal.leave_one_out(h, targets), expected, size=1)
    close(primal.leave_one_out(h, targets, copies), mirrored, size=1)
    both = (expected + mirrored) / 2
    close(primal.leave_one_out(h, targets, (h + copies) / 2), both, size=1)


@given(seed=seeds, gamma=gammas, balanced=st.booleans(), data=st.data())
def test_leaving_out_equals_fitting_without_a_group_or_without_an_image_for_its_copy(
    seed, gamma, balanced, data
):
    h, labels = draw(seed, 20)
    copies = h.flip(1)  # of each image, the same mirror
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=20, max_size=20)))
    weights = class_weights(labels).numpy() if balanced else np.ones(20)
    y, ridge = np.eye(4)[labels.numpy()], ridge_of(h.numpy(), gamma, weights)
    expected, mirrored = np.zeros((20, 4)), np.zeros((20, 4))
    for i in range(20):
        stay, others = (groups != groups[i]).numpy(), np.arange(20) != i
        expected[i] = h[i].numpy() @ refit(h.numpy()[stay], y[stay], ridge, weights[stay])
        rest = refit(h.numpy()[others], y[others], ridge, weights[others])
        mirrored[i] = copies[i].numpy() @ rest
    dual = solve_dual(h @ h.T, torch.tensor(y), gamma, 12, torch.tensor(weights))
    close(dual.leave_out(groups), expected, size=1)
    some = torch.tensor(data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=5)))
    close(dual.leave_out_for(some, (copies @ h.T)[some]), mirrored[some.numpy()], size=1)


def test_features_that_are_not_finite_are_refused_and_nothing_is_lost():
    h, labels = draw(15)
    statistics = statistics_of(h, labels)
    before = statistics.to_tensors()
    for bad in (math.nan, math.inf):
        broken = h.clone()
        broken[3, 2] = bad
        with pytest.raises(TrainingError, match="NaN or infinite"):
            statistics.add(broken, labels, 5)
        with pytest.raises(TrainingError, match="NaN or infinite"):
            solve_dual(broken @ broken.T, targets_of(labels, 4), 0.1, 12)
        with pytest.raises(TrainingError, match="NaN or infinite"):
            Standardization.of({"a": broken})
    assert all(x.equal(before[name]) for name, x in statistics.to_tensors().items())


@pytest.mark.parametrize(("images", "classes"), [(1, 1), (2, 1), (5, 2), (8, 8)])
@pytest.mark.parametrize("kind", ["random", "constant", "equal images"])
def test_few_images_and_features_without_spread_give_a_finite_head(images, classes, kind):
    z = torch.randn(images, 20, generator=torch.Generator().manual_seed(16))
    equal = {"constant": torch.full_like(z, 0.1), "equal images": z[:1].expand(images, 20)}
    z = equal.get(kind, z)
    labels = torch.arange(images) % classes
    standardization, expansion = Standardization.of({"a": z}), Expansion({"a": 64}, seed=1)
    h = expansion(standardization({"a": z}))
    primal = statistics_of(h, labels).solve(0.01)
    dual = solve_dual(kernels({"a": h}, {"a": h})["a"], targets_of(labels, classes), 0.01, 64)
    assert h.isfinite().all()
    assert primal.head.shape == (64, classes)
    close(dual.head(h), primal.head)
    assert dual.leave_out().isfinite().all()
    assert primal.leave_one_out(h, targets_of(labels, classes)).isfinite().all()
    if kind == "random" and images > 1:
        assert (h.double() @ primal.head).argmax(1).equal(labels)


@settings(max_examples=30)
@given(seed=seeds)
def test_dead_and_repeated_features_are_no_obstacle(seed):
    h, labels = draw(seed)
    wide = torch.cat([h, h, torch.zeros_like(h), torch.ones_like(h)], 1)
    expected = refit(wide.numpy(), np.eye(4)[labels.numpy()], ridge_of(wide.numpy(), 1e-3))
    close(statistics_of(wide, labels).solve(1e-3).head, expected)


@given(seed=seeds, gamma=gammas)
def test_a_float32_factor_refined_in_float64_gives_the_head_of_float64(seed, gamma):
    h, labels = draw(seed, images=300, width=60)
    statistics = statistics_of(h, labels)
    found, exact = solve_refined(statistics.gram, statistics.sums.T, gamma), statistics.solve(gamma)
    assert found.factor.dtype == torch.float32
    close(found.head, refit(h.numpy(), targets_of(labels, 4).numpy(), ridge_of(h.numpy(), gamma)))
    targets = targets_of(labels[:20], 4)
    left_out = [each.leave_one_out(h[:20], targets) for each in (found, exact)]
    close(*left_out, tolerance=1e-4)


def test_where_refinement_does_not_converge_the_factor_is_one_of_float64(monkeypatch):
    monkeypatch.setattr(primal, "WIDE", 10)
    h, labels = draw(0, images=300, width=40)
    assert statistics_of(h, labels).solve(0.01).factor.dtype == torch.float32
    noise = 1e-6 * torch.tensor(np.random.default_rng(0).normal(size=h.shape))
    statistics = statistics_of(torch.cat([h, h + noise], dim=1), labels)
    assert solve_refined(statistics.gram, statistics.sums.T, 1e-11) is None
    found = statistics.solve(1e-11)
    assert found.factor.dtype == torch.float64
    assert torch.equal(found.head, solve(statistics.gram, statistics.sums.T, 1e-11).head)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan, math.inf])
def test_impossible_ridges_are_refused(gamma):
    with pytest.raises(ConfigError, match="gamma"):
        solve(torch.eye(3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64), gamma)


def test_the_error_of_a_singular_system_names_the_remedy():
    ones = torch.ones(50, 50, dtype=torch.float64)
    with pytest.raises(TrainingError, match="larger gamma"):
        solve(ones, ones, 1e-18)
