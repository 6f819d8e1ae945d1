"""Sums over images: any order, storage, classes that are dropped."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.ridge import close, draw, gammas, refit, ridge_of, seeds, statistics_of

from geodl.closed_form.dual import targets_of
from geodl.closed_form.expansion import Expansion, Standardization
from geodl.closed_form.primal import Statistics
from geodl.core.errors import TrainingError


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
