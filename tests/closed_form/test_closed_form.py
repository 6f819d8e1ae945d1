"""Closed-form learning against plain numpy in float64, and against fitting again."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geodl.closed_form import primal
from geodl.closed_form.choices import choose, judged, temperature, threshold
from geodl.closed_form.dual import class_weights, kernels, solve_dual, targets_of
from geodl.closed_form.expansion import Expansion, Standardization, kept, share_out
from geodl.closed_form.primal import Statistics, solve, solve_refined
from geodl.core.errors import ConfigError, TrainingError

seeds = st.integers(0, 2**32 - 1)
gammas = st.sampled_from([1e-3, 1e-2, 0.1, 1.0])


def draw(seed, images=40, width=12, classes=4):
    """Return expanded features and labels in which every class occurs."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, images - classes)])
    centers = rng.normal(size=(classes, width))
    h = np.maximum(centers[labels] + rng.normal(size=(images, width)), 0)
    return torch.tensor(h), torch.tensor(rng.permuted(labels))


def refit(h, y, ridge, weights=None):
    """Fit a head by weighted least squares on rows stacked with the ridge: no normal equations, no Cholesky."""
    root = np.ones(len(h)) if weights is None else np.sqrt(weights)
    stacked = np.vstack([root[:, None] * h, math.sqrt(ridge) * np.eye(h.shape[1])])
    goal = np.vstack([root[:, None] * y, np.zeros((h.shape[1], y.shape[1]))])
    return np.linalg.lstsq(stacked, goal, rcond=None)[0]


def ridge_of(h, gamma, weights=None):
    squares = np.square(h).sum(1)
    return gamma * (squares if weights is None else weights * squares).sum() / h.shape[1]


def close(found, expected, tolerance=1e-8, size=0.0):
    """Compare to `tolerance` of the largest number, or of `size`."""
    found, expected = (x.numpy() if isinstance(x, torch.Tensor) else x for x in (found, expected))
    assert found.shape == expected.shape
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), size)
    )


def statistics_of(h, labels, classes=None, cuts=()):
    """Add images phase by phase, each phase knowing only the classes seen so far."""
    statistics, seen = Statistics.empty(h.shape[1]), 0
    for rows in torch.arange(len(h)).tensor_split(sorted(cuts)):
        if len(rows):
            seen = max(seen, int(labels[rows].max()) + 1)
            statistics.add(h[rows], labels[rows], seen if classes is None else classes)
    return statistics


# ---- the head, from sums


@given(seed=seeds, gamma=gammas, data=st.data())
def test_any_order_and_any_cut_into_phases_gives_the_head_of_all_at_once(seed, gamma, data):
    h, labels = draw(seed)
    order = torch.tensor(data.draw(st.permutations(range(len(h)))))
    cuts = data.draw(st.lists(st.integers(0, len(h)), max_size=6))
    y = np.eye(4)[labels.numpy()]
    expected = refit(h.numpy(), y, ridge_of(h.numpy(), gamma))
    together, phases = statistics_of(h, labels), statistics_of(h[order], labels[order], cuts=cuts)
    close(together.solve(gamma).head, expected)
    close(phases.solve(gamma).head, expected)
    close(phases.gram, together.gram, 1e-12)
    assert phases.counts.tolist() == np.bincount(labels, minlength=4).tolist()


@given(seed=seeds, ranks=st.integers(1, 4))
def test_shares_of_several_processes_add_up(seed, ranks):
    h, labels = draw(seed)
    earlier, total = statistics_of(h[:10], labels[:10]), Statistics.empty(12)
    for rows in torch.arange(10, len(h)).tensor_split(ranks):
        share = Statistics.empty(12)
        share.add(h[rows], labels[rows], 4)
        total = total + share
    whole = statistics_of(h, labels)
    for one, other in ((earlier + total, total + earlier), (earlier + total, whole)):
        close(one.gram, other.gram, 1e-12)
        close(one.sums, other.sums, 1e-12)
        assert one.counts.equal(other.counts)
    assert len(earlier.counts) <= 4  # what was there before is untouched
    close(earlier.gram, h[:10].T @ h[:10], 1e-12)


def test_the_sums_are_right_across_panels(monkeypatch):
    monkeypatch.setattr("geodl.closed_form.primal.PANEL", 5)
    h, labels = draw(3)
    statistics = statistics_of(h, labels, cuts=[7])
    close(statistics.gram, h.T @ h, 1e-13)
    close(statistics.sums.T, h.T @ targets_of(labels, 4), 1e-13)


def test_a_class_dropped_from_the_sums_leaves_its_images_as_those_of_no_class():
    h, labels = draw(5)
    y = np.eye(4)[labels.numpy()][:, [0, 2, 3]]  # rows of zeros for class 1
    before = statistics_of(h, labels)
    dropped = before.without(1)
    close(dropped.solve(0.1).head, refit(h.numpy(), y, ridge_of(h.numpy(), 0.1)))
    assert dropped.counts.tolist() == [int((labels == c).sum()) for c in (0, 2, 3)]
    close(before.without(3).without(0).sums, before.sums[1:3], 0)
    assert before.sums.shape == (4, 12)


# ---- storage


def test_stored_statistics_are_a_triangle_in_float32_and_read_back_the_same():
    h, labels = draw(6)
    statistics = statistics_of(h, labels)
    tensors = statistics.to_tensors()
    assert tensors["gram"].shape == (12 * 13 // 2,)
    types = {"gram": torch.float32, "sums": torch.float32, "counts": torch.int64}
    assert {name: x.dtype for name, x in tensors.items()} == types
    read = Statistics.from_tensors(tensors)
    close(read.gram, statistics.gram.float().double(), 0)
    close(read.sums, statistics.sums.float().double(), 0)
    again = statistics.rounded().to_tensors()
    assert all(x.equal(again[name]) for name, x in tensors.items())


def test_a_phase_added_to_stored_statistics_gives_the_bytes_of_one_that_was_never_interrupted():
    h, labels = draw(7)
    straight = statistics_of(h[:20], labels[:20]).rounded()
    stored = {name: x.clone() for name, x in straight.to_tensors().items()}
    resumed = Statistics.from_tensors(stored)
    for statistics in (straight, resumed):
        statistics.add(h[20:], labels[20:], 4)
    one, other = straight.rounded(), resumed.rounded()
    assert all(x.equal(other.to_tensors()[name]) for name, x in one.to_tensors().items())
    assert one.solve(0.01).head.equal(other.solve(0.01).head)


def test_a_model_of_4096_features_and_100_classes_is_below_45_megabytes():
    tensors = Statistics.empty(4096, classes=100).to_tensors()
    assert sum(x.nbytes for x in tensors.values()) < 36e6


def test_statistics_too_large_for_float32_are_refused():
    statistics = statistics_of(torch.full((1, 3), 1e25, dtype=torch.float64), torch.tensor([0]))
    with pytest.raises(TrainingError, match="in float32"):
        statistics.to_tensors()


def test_float32_storage_after_every_phase_keeps_the_predictions():
    rng = torch.Generator().manual_seed(0)
    centers = torch.randn(20, 64, generator=rng)
    labels = torch.arange(4000) % 20
    z = {"all": centers[labels] + 1.5 * torch.randn(4000, 64, generator=rng)}
    train, test = ({"all": z["all"][part]} for part in (slice(0, 2000), slice(2000, 4000)))
    expansion, standardization = Expansion({"all": 768}, seed=1), Standardization.of(train)
    h = expansion(standardization(train))
    exact, stored = statistics_of(h, labels[:2000]), Statistics.empty(768)
    for start in range(0, 2000, 100):
        stored.add(h[start : start + 100], labels[start : start + 100], 20)
        stored = stored.rounded()
    seen = expansion(standardization(test))
    one = (seen.double() @ exact.solve(1e-3).head).argmax(1)
    other = (seen @ stored.solve(1e-3).head.float()).argmax(1)
    assert (one == labels[2000:]).double().mean() > 0.8
    assert (one == other).double().mean() >= 0.999


# ---- dual form


@given(seed=seeds, gamma=gammas, images=st.integers(4, 40), balanced=st.booleans())
def test_dual_and_primal_form_agree(seed, gamma, images, balanced):
    h, labels = draw(seed, images)
    weights = class_weights(labels) if balanced else None
    dual = solve_dual(h @ h.T, targets_of(labels, 4), gamma, 12, weights)
    w, y = None if weights is None else weights.numpy(), np.eye(4)[labels.numpy()]
    close(dual.head(h), refit(h.numpy(), y, ridge_of(h.numpy(), gamma, w), w))
    if not balanced:
        close(dual.head(h), statistics_of(h, labels).solve(gamma).head)


def test_kernels_of_blocks_add_up_to_the_kernel_of_all():
    z = {name: torch.randn(9, 5, generator=torch.Generator().manual_seed(2)) for name in ("a", "b")}
    expansion = Expansion({"a": 30, "b": 50}, seed=3)
    h = expansion(z).double()
    parts = kernels(expansion.blocks(z), expansion.blocks(z))
    close(parts["a"] + parts["b"], h @ h.T, 1e-14)


def test_weights_give_every_class_the_same():
    labels = torch.tensor([0] * 60 + [2] * 5)
    weights = class_weights(labels)
    assert weights.mean() == pytest.approx(1)
    assert weights[labels == 0].sum() == pytest.approx(float(weights[labels == 2].sum()))


# ---- leave-one-out


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
    close(solve_dual(h @ h.T, targets, gamma, 12).leave_out(), expected, size=1)
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
        mirrored[i] = copies[i].numpy() @ refit(
            h.numpy()[others], y[others], ridge, weights[others]
        )
    dual = solve_dual(h @ h.T, torch.tensor(y), gamma, 12, torch.tensor(weights))
    close(dual.leave_out(groups), expected, size=1)
    some = torch.tensor(data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=5)))
    close(dual.leave_out_for(some, (copies @ h.T)[some]), mirrored[some.numpy()], size=1)


def test_which_images_can_be_judged():
    labels = torch.tensor([0, 1, 1, 2, 2, 2])
    assert judged(labels).tolist() == [False, True, True, True, True, True]
    # Both images of class 1 are one group: without it nothing of the class is left.
    assert judged(labels, torch.tensor([0, 1, 1, 2, 2, 3])).tolist() == [False] * 3 + [True] * 3
    one_class = torch.zeros(3, dtype=torch.int64)
    assert not judged(one_class).any(), "there is nothing else to take them for"


# ---- choices


def blocks_of(seed, images=60):
    """Return kernels of a block that knows the classes and of one that is noise."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    z = {
        "good": torch.randn(3, 8, generator=rng)[labels]
        + 0.5 * torch.randn(images, 8, generator=rng),
        "noise": torch.randn(images, 8, generator=rng),
    }
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


@pytest.mark.parametrize("true", [0.05, 0.5, 3.0])
def test_the_temperature_that_made_the_labels_is_found(true):
    rng = torch.Generator().manual_seed(12)
    scores = torch.randn(20_000, 5, generator=rng, dtype=torch.float64)
    labels = torch.multinomial((scores / true).softmax(1), 1, generator=rng).squeeze(1)
    assert temperature(scores, labels) == pytest.approx(true, rel=0.1)


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


# ---- from z to h


def test_standardization_is_that_of_numpy_by_block_and_sets_dead_coordinates_to_zero():
    rng = np.random.default_rng(13)
    z = rng.normal(size=(50, 6)) * [1, 2, 3, 1, 1e-5, 0] + 7
    found = Standardization.of({"a": torch.tensor(z), "b": torch.tensor(1e-5 * z)})
    scaled = found({"a": torch.tensor(z), "b": torch.tensor(1e-5 * z)})
    expected = (z[:, :4] - z[:, :4].mean(0)) / z[:, :4].std(0)
    for block in scaled.values():
        close(block[:, :4], expected, 1e-4)  # the mean is kept in float32
        assert not block[:, 4:].any()
    single = found({"a": torch.tensor(z).float()})
    assert single["a"].dtype == torch.float32
    assert found({"a": torch.tensor(z).half()})["a"].dtype == torch.float32


def test_standardization_is_stored_as_it_is():
    one = Standardization.of({"a": torch.randn(30, 5, generator=torch.Generator().manual_seed(14))})
    read = Standardization.from_tensors(one.to_tensors())
    assert read.mean["a"].equal(one.mean["a"])
    assert read.scale["a"].equal(one.scale["a"])


@given(total=st.integers(0, 5000), widths=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_shares_add_up_and_are_in_proportion(total, widths):
    shares = share_out(total, {str(i): width for i, width in enumerate(widths)})
    assert sum(shares.values()) == total
    for i, width in enumerate(widths):
        assert abs(shares[str(i)] - total * width / sum(widths)) <= 1


def test_the_expansion_is_the_formula_and_depends_on_the_seed_alone():
    sizes, generator = {"a": 200, "b": 100}, torch.Generator().manual_seed(9)
    z = {name: torch.randn(7, d, generator=generator) for name, d in (("a", 9), ("b", 4))}
    found = Expansion(sizes, seed=1)(z)
    for name, part in (("a", found[:, :200]), ("b", found[:, 200:])):
        width = z[name].shape[1]
        w = Expansion(sizes, seed=1).weights(name, width)
        close(part, np.maximum(z[name].numpy() @ w.numpy(), 0), 1e-6)
        assert abs(w.mean()) < 0.1
        assert abs(math.sqrt(width) * w.std() - 1) < 0.1
    assert Expansion(sizes, seed=1).width == 300
    assert found.equal(Expansion(sizes, seed=1)(z))
    assert found[:, 200:].equal(Expansion({"b": 100}, seed=1)(z))
    assert not found.equal(Expansion(sizes, seed=2)(z))
    alike = Expansion({"a": 3, "b": 3}, seed=1)
    assert not alike.weights("a", 2).equal(alike.weights("b", 2))


def test_weights_are_those_that_stored_models_were_fitted_with():
    found = Expansion({"stage3": 40}, seed=1).weights("stage3", 25)[::12, ::13]
    expected = [
        [0.06040671, 0.15036863, 0.34812254, 0.44219568],
        [-0.16894840, 0.00582358, -0.03604211, -0.16503397],
        [0.18907838, -0.40113276, -0.07881904, 0.03391238],
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_kept_features_survive_numbers_that_float16_has_not():
    z = kept({"a": torch.tensor([[1e9, -1e9, 0.1]])})["a"]
    assert z.dtype == torch.float16
    assert z.isfinite().all()


# ---- bad input


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
    z = {
        "random": z,
        "constant": torch.full_like(z, 0.1),
        "equal images": z[:1].expand(images, 20),
    }[kind]
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
    close(
        found.leave_one_out(h[:20], targets),
        exact.leave_one_out(h[:20], targets).numpy(),
        tolerance=1e-4,
    )


def test_where_refinement_does_not_converge_the_factor_is_one_of_float64(monkeypatch):
    monkeypatch.setattr(primal, "WIDE", 10)
    h, labels = draw(0, images=300, width=40)
    assert statistics_of(h, labels).solve(0.01).factor.dtype == torch.float32
    twins = torch.cat(
        [h, h + 1e-6 * torch.tensor(np.random.default_rng(0).normal(size=h.shape))], dim=1
    )
    statistics = statistics_of(twins, labels)
    assert solve_refined(statistics.gram, statistics.sums.T, 1e-11) is None
    found = statistics.solve(1e-11)
    assert found.factor.dtype == torch.float64
    assert torch.equal(found.head, solve(statistics.gram, statistics.sums.T, 1e-11).head)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan, math.inf])
def test_impossible_ridges_are_refused(gamma):
    with pytest.raises(ConfigError, match="gamma"):
        solve(torch.eye(3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64), gamma)


def test_a_singular_system_says_what_to_do():
    ones = torch.ones(50, 50, dtype=torch.float64)
    with pytest.raises(TrainingError, match="larger gamma"):
        solve(ones, ones, 1e-18)
