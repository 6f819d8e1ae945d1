"""Classes of very unequal size, and fits to sums that a sample of whole series judges."""

from dataclasses import replace

import pytest
import torch

from geodl.closed_form.dual import class_weights, dual_of, solve_dual, targets_of
from geodl.closed_form.kept_features import KeptFeatures
from geodl.closed_form.offsets import class_offsets, unequal
from geodl.closed_form.random_features import RandomFeatures
from geodl.closed_form.sampled import judge_by_sample, moved_within, sample_of


def draw(counts, seed=0, spread=1.0, width=40):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    centers = torch.randn(len(counts), width, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(len(labels), width, generator=generator)
    return centers[labels] + spread * noise, labels


def right(scores, labels) -> float:
    each = [(scores[labels == c].argmax(1) == c).double().mean() for c in labels.unique()]
    return float(torch.stack(each).mean())


def test_more_images_of_some_classes_cost_the_others_little():
    """As with few images and many features: the scores of small classes are shrunk most."""
    how = {"spread": 4.0, "width": 600}
    test, truth = draw([100] * 4, seed=7, **how)

    def balanced(counts, corrected):
        h, labels = draw(counts, **how)
        h = h.relu()
        dual = solve_dual(
            (h @ h.T).double(), targets_of(labels, 4), 1.0, 600, class_weights(labels)
        )
        scores = test.relu().double() @ dual.head(h)
        offsets = class_offsets(dual.leave_out(), labels, torch.bincount(labels))
        return right(scores + offsets if corrected else scores, truth)

    few, many = balanced([6] * 4, False), balanced([200, 200, 6, 6], True)
    assert balanced([200, 200, 6, 6], False) < few - 0.05, "otherwise nothing is tested"
    assert many > few - 0.01


def test_classes_of_about_one_size_are_left_as_they_are():
    assert not unequal(torch.tensor([5, 15, 0]))
    assert unequal(torch.tensor([5, 16]))
    scores, labels = torch.rand(20, 2).double(), torch.arange(20) % 2
    assert class_offsets(scores, labels, torch.tensor([10, 10])) is None
    assert class_offsets(scores[:0], labels[:0], torch.tensor([10, 90])) is None


def test_a_class_that_cannot_be_judged_has_the_offset_of_one_of_its_size():
    labels = torch.tensor([0] * 40 + [1] * 5)
    scores = torch.rand(45, 3).double()
    scores[:40, 0] += 0.5
    offsets = class_offsets(scores, labels, torch.tensor([40, 5, 1]))
    assert offsets[1] == offsets[2] != offsets[0]
    assert offsets.isfinite().all()


@pytest.fixture
def summed():
    """Sums over three classes in series, and the images."""
    z, labels = draw([40, 40, 9])
    clues = torch.full((len(labels), 5), -1)
    clues[:, 0] = torch.arange(len(labels)) // 4
    data = KeptFeatures.of({"top": z}, labels, clues)
    expand = RandomFeatures.of(data.z, 64, 0)
    return expand.sums([data.z], labels, 3), data, expand


def test_leaving_series_out_of_sums_equals_fitting_without_them(summed):
    statistics, data, expand = summed
    h = expand(data.z).double()
    targets, groups = targets_of(data.labels, 3), data.clues[:, 0]
    scores = dual_of(statistics.solve(0.1), h, targets).leave_out(groups)
    ridge = 0.1 * h.square().sum() / 64
    for series in groups.unique():
        stay = groups != series
        gram = h[stay].T @ h[stay] + ridge * torch.eye(64)
        head = torch.linalg.solve(gram, h[stay].T @ targets[stay])
        torch.testing.assert_close(scores[~stay], h[~stay] @ head, atol=1e-6, rtol=0)


def test_a_sample_has_whole_series_and_judges_all_classes(summed, monkeypatch):
    statistics, data, expand = summed
    monkeypatch.setattr("geodl.closed_form.sampled.TOTAL", 36)
    monkeypatch.setattr("geodl.closed_form.sampled.LEAST", 12)
    first = sample_of(data.select(data.labels < 2), expand, 2, None)
    both = sample_of(data, expand, 3, first)
    assert torch.equal(both.labels[: len(first.labels)], first.labels), "what was kept stays"
    assert (torch.bincount(both.labels) <= 20).all()
    for label in range(3):
        sizes = torch.unique(both.clues[both.labels == label, 0], return_counts=True)[1]
        whole = torch.unique(data.clues[data.labels == label, 0], return_counts=True)[1]
        assert len(sizes) > 1
        assert set(sizes.tolist()) <= set(whole.tolist())
    solved = statistics.solve(0.1)
    judged = judge_by_sample(solved, statistics.counts, both, expand)
    assert torch.equal(judged.labels, both.labels)
    assert judged.offsets is not None
    assert right(judged.scores, both.labels) > 0.8


def test_images_are_moved_within_a_sample_and_each_takes_one_place(summed):
    _, data, _ = summed
    twin = data.select(torch.tensor([0, 0])).z["top"]
    twin[1, 0] += 0.001
    twins = KeptFeatures.of({"top": twin}, torch.tensor([0, 0]))
    sample = twins + data.select(torch.tensor([5, 50, 85]))
    assert moved_within(sample, twins, -1).labels.tolist() == [0, 1, 2]
    moved = moved_within(sample, sample.select(torch.tensor([2])), 1)
    assert moved.labels.tolist() == [0, 0, 1, 1, 2]
    assert moved.clues[2, 0] != moved.clues[0, 0], "a series is of one class"
    unknown = KeptFeatures.of({"top": data.z["top"][[5]] + 1}, torch.tensor([0]))
    assert torch.equal(moved_within(sample, unknown, -1).labels, sample.labels)


def test_a_sample_that_lost_a_class_takes_later_images_of_it(summed):
    _, data, expand = summed
    before = sample_of(data, expand, 3)
    for gone in ([0], [0, 1, 2]):
        left = before.select(~torch.isin(before.labels, torch.tensor(gone)))
        again = sample_of(data, expand, 3, left)
        assert torch.equal(torch.bincount(again.labels), torch.bincount(before.labels))


def test_images_that_a_network_was_adapted_to_stay_marked_in_a_sample(summed):
    _, data, expand = summed
    marked = replace(data, adapted=torch.arange(len(data.labels)) % 5 > 0)
    found = sample_of(marked, expand, 3)
    for label in range(3):
        part = found.select(found.labels == label)
        assert part.adapted.sum() == marked.select(marked.labels == label).adapted.sum()
    assert (data.select(found.labels < 0) + marked).adapted.sum() == marked.adapted.sum()
    assert not (data + data).adapted.any()
