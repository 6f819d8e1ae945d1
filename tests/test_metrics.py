"""Metrics against numbers worked out by hand."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geodl.errors import DataError
from geodl.metrics import Trajectory, confusion

# Four classes, learned as {a, b}, {c}, {d}; ten test images of each class, five of d.
# Phase 0: a 10/10, b 8/10                      -> A_0 = 18/20 = 90
# Phase 1: a 6/10, b 9/10, c 9/10               -> A_1 = 24/30 = 80
# Phase 2: a 5/10, b 7/10, c 3/10, d 5/5        -> A_2 = 20/35 = 57.142857...
WORKED = [
    [[10, 0, 0, 0], [2, 8, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    [[6, 1, 3, 0], [0, 9, 1, 0], [1, 0, 9, 0], [0, 0, 0, 0]],
    [[5, 1, 1, 3], [0, 7, 1, 2], [2, 0, 3, 5], [0, 0, 0, 5]],
]
GROUPS = [[0, 1], [2], [3]]
NAMES = ["ant", "bee", "cow", "dog"]


def worked(phases: int = 3) -> Trajectory:
    return Trajectory(GROUPS, [torch.tensor(m) for m in WORKED[:phases]], NAMES)


def test_worked_example_by_hand():
    run = worked()
    assert run.accuracy == [90.0, 80.0, 100 * 20 / 35]
    assert run.average == (80 + 100 * 20 / 35) / 2  # phase 0 excluded
    assert run.average_incremental == pytest.approx((90 + 80 + 100 * 20 / 35) / 3, abs=1e-12)
    # Groups: {a, b} 18/20, 15/20, 12/20; {c} 9/10, 3/10; {d} 5/5.
    nan = math.nan
    expected = [[90.0, 75.0, 60.0], [nan, 90.0, 30.0], [nan, nan, 100.0]]
    torch.testing.assert_close(torch.tensor(run.matrix), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    assert run.forgetting == 30.0  # base classes: 90 - 60
    assert run.mean_forgetting == 45.0  # (90 - 60 + 90 - 30) / 2
    assert run.backward_transfer == -45.0  # (60 - 90 + 30 - 90) / 2
    assert run.per_class == [50.0, 70.0, 30.0, 100.0]


def test_mean_forgetting_counts_from_the_best_phase_not_the_first():
    # One class a phase; class 0 scores 5, then 8, then 6 of 10; class 1 scores 4, then 7 (it gains).
    run = Trajectory(
        [[0], [1], [2]],
        [
            torch.tensor([[5, 5, 0], [0, 0, 0], [0, 0, 0]]),
            torch.tensor([[8, 2, 0], [6, 4, 0], [0, 0, 0]]),
            torch.tensor([[6, 2, 2], [2, 7, 1], [0, 0, 10]]),
        ],
        "xyz",
    )
    assert run.mean_forgetting == (80 - 60 + 40 - 70) / 2
    assert run.backward_transfer == (60 - 50 + 70 - 40) / 2
    assert run.forgetting == 50 - 60


@pytest.mark.parametrize("sizes", [(50, 10, 10), (7, 3, 1, 4), (1, 1, 1), (2, 25)])
def test_forgetting_is_over_the_base_group_whatever_its_size(sizes):
    """A public version takes groups of 10 classes whatever the groups are."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    groups = [list(range(s, s + n)) for s, n in zip(starts, sizes, strict=True)]
    classes = sum(sizes)
    confusions = []
    for phase in range(len(sizes)):
        counts = torch.zeros(classes, classes, dtype=torch.int64)
        for g, group in enumerate(groups[: phase + 1]):
            right = 10 - (phase - g) if g == 0 else 10  # only the base group forgets, one image of ten a phase
            for c in group:
                counts[c, c] = right
                counts[c, groups[phase][0]] += 10 - right
        confusions.append(counts)
    run = Trajectory(groups, confusions, [str(c) for c in range(classes)])
    phases = len(sizes) - 1
    assert run.forgetting == pytest.approx(10.0 * phases, abs=1e-12)
    assert run.mean_forgetting == pytest.approx(10.0, abs=1e-12)  # the mean over the groups before the last
    assert [len(row) for row in run.matrix] == [phases + 1] * (phases + 1)
    lost = 10.0 * sizes[0] * phases / classes
    assert run.accuracy[-1] == pytest.approx(100 - lost, abs=1e-12)


def test_accuracy_counts_images_not_classes():
    run = Trajectory([[0, 1]], [torch.tensor([[90, 0], [10, 0]])], "ab")
    assert run.accuracy == [90.0]
    assert run.per_class == [100.0, 0.0]


def test_only_the_base_phase_has_accuracy_but_no_averages():
    run = worked(1)
    assert run.accuracy == [90.0]
    assert run.matrix == [[90.0]]
    for name in ("average", "average_incremental", "forgetting", "mean_forgetting", "backward_transfer"):
        assert getattr(run, name) is None, name
    assert run.to_dict()["groups"] == [["ant", "bee"]]


def test_a_run_in_progress_reports_the_phases_done():
    run = worked(2)
    assert (run.average, run.forgetting, run.mean_forgetting) == (80.0, 15.0, 15.0)
    assert run.to_dict()["groups"] == [["ant", "bee"], ["cow"]]
    assert list(run.to_dict()["per_class"]) == ["ant", "bee", "cow"]


def test_confusions_may_grow_with_the_head():
    grown = [torch.tensor(m)[:n, :n] for m, n in zip(WORKED, (2, 3, 4), strict=True)]
    assert Trajectory(GROUPS, grown, NAMES).to_dict() == worked().to_dict()


def test_to_dict_is_strict_json_with_class_names():
    content = json.loads(json.dumps(worked().to_dict(), allow_nan=False))
    assert content["matrix"][1] == [None, 90.0, 30.0]
    assert content["per_class"] == {"ant": 50.0, "bee": 70.0, "cow": 30.0, "dog": 100.0}
    assert content["groups"] == [["ant", "bee"], ["cow"], ["dog"]]
    assert content["forgetting"] == 30.0


def test_a_group_without_test_images_is_left_out_of_the_means():
    empty = [torch.tensor(m) for m in WORKED]
    for counts in empty:
        counts[2] = 0
    run = Trajectory(GROUPS, empty, NAMES)
    assert run.mean_forgetting == 30.0
    assert json.dumps(run.to_dict(), allow_nan=False)
    assert run.to_dict()["per_class"]["cow"] is None


def test_groups_need_not_be_in_ascending_order():
    run = Trajectory([[3], [0, 2]], [torch.eye(4, dtype=torch.int64)] * 2, NAMES)
    assert run.to_dict()["groups"] == [["dog"], ["ant", "cow"]]
    assert run.accuracy == [100.0, 100.0]
    assert list(run.to_dict()["per_class"]) == ["ant", "cow", "dog"]


def test_impossible_trajectories_are_refused():
    with pytest.raises(DataError, match="4 phases evaluated: allowed are 1 to 3"):
        Trajectory(GROUPS, [torch.eye(4)] * 4, NAMES)
    with pytest.raises(DataError, match="0 phases"):
        Trajectory(GROUPS, [], NAMES)
    with pytest.raises(DataError, match="phase 1 lacks class 2"):
        Trajectory(GROUPS, [torch.eye(2), torch.eye(2)], NAMES)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_confusion_counts_pairs(pairs):
    labels = torch.tensor([p[0] for p in pairs], dtype=torch.int64)
    predictions = torch.tensor([p[1] for p in pairs], dtype=torch.int64)
    counts = confusion(labels, predictions, 5)
    assert counts.shape == (5, 5)
    assert counts.dtype == torch.int64
    for i in range(5):
        for j in range(5):
            assert counts[i, j] == pairs.count((i, j))


@pytest.mark.parametrize(("labels", "predictions", "message"), [([0, 3], [0, 0], "labels"), ([0], [-1], "predictions")])
def test_confusion_refuses_classes_out_of_range(labels, predictions, message):
    with pytest.raises(DataError, match=f"{message} from .* allowed are 0 to 2"):
        confusion(torch.tensor(labels), torch.tensor(predictions), 3)
