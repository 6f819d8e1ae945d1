"""What closed-form learning chooses by leave-one-out: blocks, gamma, temperature, threshold."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.ridge import seeds

from geodl.closed_form.choices import choose, judged, temperature, threshold
from geodl.closed_form.dual import class_weights, kernels, targets_of
from geodl.closed_form.expansion import Expansion
from geodl.core.errors import ConfigError


def test_which_images_can_be_judged():
    labels = torch.tensor([0, 1, 1, 2, 2, 2])
    assert judged(labels).tolist() == [False, True, True, True, True, True]
    # Both images of class 1 are one group: without it nothing of the class is left.
    assert judged(labels, torch.tensor([0, 1, 1, 2, 2, 3])).tolist() == [False] * 3 + [True] * 3
    one_class = torch.zeros(3, dtype=torch.int64)
    assert not judged(one_class).any(), "there is nothing else to take them for"


def blocks_of(seed, images=60):
    """Return kernels of a block that knows the classes and of one that is noise."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    centers = torch.randn(3, 8, generator=rng)[labels]
    z = {name: torch.randn(images, 8, generator=rng) for name in ("good", "noise")}
    z["good"] = centers + 0.5 * z["good"]
    h = Expansion({"good": 40, "noise": 40}, seed=1).blocks(z)
    return kernels(h, h), labels


SUBSETS = [("noise",), ("good", "noise"), ("good",)]


WIDTHS = {"good": 40, "noise": 40}


def judge(products, labels, names, gamma, weights, groups):
    """Fit without each image's group in turn; return accuracy and likelihood on the images that can be judged."""
    kernel = sum(products[name] for name in names)
    w = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights
    ridge = gamma * (w * kernel.diagonal()).sum() / (40 * len(names))
    scores, answers, worth = [], [], []
    for i, label in enumerate(labels):
        stay = groups != groups[i]
        if label in labels[stay]:
            system = kernel[stay][:, stay] + ridge * torch.diag(1 / w[stay])
            fit = torch.linalg.solve(system, targets_of(labels, 3)[stay])
            scores.append(kernel[i, stay] @ fit)
            answers.append(label)
            worth.append(w[i])
    scores, answers, worth = torch.stack(scores), torch.stack(answers), torch.stack(worth)
    accuracy = ((scores.argmax(1) == answers) * worth).sum() / worth.sum()
    loss = torch.nn.functional.cross_entropy(scores / temperature(scores, answers), answers)
    return round(accuracy.item(), 9), -loss.item()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_choice_is_that_of_fitting_without_each_image(seed, balanced, grouped):
    products, labels = blocks_of(seed, 24)
    # Unequal classes, and images that are hard.
    labels[labels == 2] = torch.tensor([2, 2, 2, 0, 0, 1, 1, 0])
    weights = class_weights(labels) if balanced else None
    groups = torch.arange(24) // (6 if grouped else 1)
    if grouped:
        groups[labels == 2] = 100  # nothing is left of this class
    found = {
        (names, gamma): judge(products, labels, names, gamma, weights, groups)
        for names in SUBSETS
        for gamma in (0.01, 0.1, 1.0)
    }
    options = {"balanced": balanced, "groups": groups if grouped else None}
    choice = choose(products, WIDTHS, labels, SUBSETS, gammas=(0.01, 0.1, 1.0), **options)
    best, judged = max(found.values())[0], 24 - (int((groups == 100).sum()) if grouped else 0)
    error = math.sqrt(best * (1 - best) / judged)
    near = best - error - 1e-9
    good = {each: loss for each, (accuracy, loss) in found.items() if accuracy >= near}
    assert (choice.blocks, choice.gamma) == max(good, key=good.get)


def test_without_an_image_to_judge_the_first_set_and_the_middle_gamma_are_taken():
    products, _ = blocks_of(11, images=3)
    choice = choose(products, WIDTHS, torch.arange(3), SUBSETS[1:])
    assert (choice.blocks, choice.gamma) == (("good", "noise"), 3e-2)


@given(seed=seeds)
def test_no_other_temperature_is_likelier(seed):
    rng = np.random.default_rng(seed)
    labels = torch.tensor(rng.integers(0, 4, 30))
    better = 0.8 * targets_of(labels, 4)  # than chance
    scores = torch.tensor(rng.normal(size=(30, 4))) + better

    def loss(t):
        smooth = (1 - 1 / 32) * targets_of(labels, 4) + 1 / 32 / 4
        return torch.nn.functional.cross_entropy(scores / t, smooth).item()

    best = temperature(scores, labels)
    others = [loss(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2)]
    assert loss(best) <= min(others) + 1e-9


def test_temperatures_of_scores_that_are_always_right_or_all_equal_are_finite():
    scores, labels = torch.eye(3, dtype=torch.float64).repeat(10, 1), torch.arange(3).repeat(10)
    assert 0.05 < temperature(scores, labels) < 0.5
    assert temperature(torch.zeros(6, 3), torch.arange(6) % 3) == 1.0
    assert temperature(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) == 1.0


@given(values=st.lists(st.integers(0, 5), min_size=1, max_size=50), rate=st.floats(0, 0.99))
def test_at_most_the_given_share_of_known_images_is_called_unknown(values, rate):
    confidences = torch.tensor(values, dtype=torch.float64)
    found = threshold(confidences, rate)
    assert (confidences < found).sum() <= rate * len(values)
    higher = [v for v in values if v > found]
    # The largest that is allowed.
    assert not higher or (confidences < min(higher)).sum() > math.floor(rate * len(values))


def test_thresholds_without_images_or_with_impossible_rates():
    assert threshold(torch.zeros(0), 0.05) == -math.inf
    with pytest.raises(ConfigError, match="rate"):
        threshold(torch.ones(3), 1.0)
