"""Metrics against numbers worked out by hand."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from geodl.core.errors import DataError
from geodl.model.metrics import Confusion, Trajectory, confusions_of, finite, to_metrics

# Four classes, learned as {a, b}, {c}, {d}; ten test images of each class, five of d.
# Phase 0: a 10/10, b 8/10                      -> A_0 = 18/20 = 90
# Phase 1: a 6/10, b 9/10, c 9/10               -> A_1 = 24/30 = 80
# Phase 2: a 5/10, b 7/10, c 3/10, d 5/5        -> A_2 = 20/35 = 57.142857...
WORKED = [
    [[10, 0, 0, 0], [2, 8, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    [[6, 1, 3, 0], [0, 9, 1, 0], [1, 0, 9, 0], [0, 0, 0, 0]],
    [[5, 1, 1, 3], [0, 7, 1, 2], [2, 0, 3, 5], [0, 0, 0, 5]],
]
SIZES = (2, 3, 4)
NAMES = ["ant", "bee", "cow", "dog"]


def counted(counts, names=NAMES) -> Confusion:
    return Confusion(torch.as_tensor(counts), tuple(names))


def cut(counts, size: int, names=NAMES) -> Confusion:
    """Return the confusion of a phase that knows so many classes."""
    return counted(torch.as_tensor(counts)[:size, :size], list(names)[:size])


def worked(phases: int = 3) -> Trajectory:
    return Trajectory([cut(m, size) for m, size in zip(WORKED[:phases], SIZES, strict=False)])


def test_worked_example_by_hand():
    run = worked()
    assert run.accuracy == [90.0, 80.0, 100 * 20 / 35]
    assert run.average == (80 + 100 * 20 / 35) / 2  # phase 0 excluded
    assert run.average_incremental == pytest.approx((90 + 80 + 100 * 20 / 35) / 3, abs=1e-12)
    # Groups: {a, b} 18/20, 15/20, 12/20; {c} 9/10, 3/10; {d} 5/5.
    nan = math.nan
    expected = [[90.0, 75.0, 60.0], [nan, 90.0, 30.0], [nan, nan, 100.0]]
    torch.testing.assert_close(
        torch.tensor(run.matrix), torch.tensor(expected), rtol=0, atol=0, equal_nan=True
    )
    assert run.forgetting == 30.0  # base classes: 90 - 60
    assert run.mean_forgetting == 45.0  # (90 - 60 + 90 - 30) / 2
    assert run.backward_transfer == -45.0  # (60 - 90 + 30 - 90) / 2
    assert list(run.per_class.values()) == [50.0, 70.0, 30.0, 100.0]
    assert run.final == run.accuracy[-1]


def test_mean_forgetting_counts_from_the_best_phase_not_the_first():
    # x scores 5, then 8, then 6 of 10; y scores 4, then 7 (it gains); w has no test images.
    run = Trajectory(
        [
            counted([[5, 5], [0, 0]], "xw"),
            counted([[8, 0, 2], [0, 0, 0], [6, 0, 4]], "xwy"),
            counted([[6, 0, 2, 2], [0, 0, 0, 0], [2, 0, 7, 1], [0, 0, 0, 10]], "xwyz"),
        ],
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
            right = 10 - phase if g == 0 else 10  # only the base group forgets, one image a phase
            for c in group:
                counts[c, c] = right
                counts[c, groups[phase][0]] += 10 - right
        confusions.append(cut(counts, groups[phase][-1] + 1, map(str, range(classes))))
    run = Trajectory(confusions)
    phases = len(sizes) - 1
    assert run.forgetting == pytest.approx(10.0 * phases, abs=1e-12)
    assert run.mean_forgetting == pytest.approx(10.0, abs=1e-12), "over groups before the last"
    assert [len(row) for row in run.matrix] == [phases + 1] * (phases + 1)
    lost = 10.0 * sizes[0] * phases / classes
    assert run.accuracy[-1] == pytest.approx(100 - lost, abs=1e-12)


def test_only_the_base_phase_has_accuracy_but_no_averages():
    run = worked(1)
    assert run.accuracy == [90.0]
    assert run.matrix == [[90.0]]
    for name in "average average_incremental forgetting mean_forgetting backward_transfer".split():
        assert getattr(run, name) is None, name
    assert run.to_dict()["groups"] == [["ant", "bee"]]


def test_a_run_in_progress_reports_the_phases_done():
    run = worked(2)
    assert (run.average, run.forgetting, run.mean_forgetting) == (80.0, 15.0, 15.0)
    assert run.to_dict()["groups"] == [["ant", "bee"], ["cow"]]
    assert list(run.to_dict()["per_class"]) == ["ant", "bee", "cow"]


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
    run = Trajectory([cut(*each) for each in zip(empty, SIZES, strict=True)])
    assert run.mean_forgetting == 30.0
    assert json.dumps(run.to_dict(), allow_nan=False)
    assert run.to_dict()["per_class"]["cow"] is None


def test_impossible_trajectories_are_refused():
    with pytest.raises(DataError, match="one or more"):
        Trajectory([])
    with pytest.raises(DataError, match=r"4, 2"):
        Trajectory([cut(torch.eye(4), size) for size in (4, 2)])


# -- one confusion


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_confusion_counts_pairs_and_survives_json(pairs):
    labels, predictions = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    found = Confusion.of(labels, predictions, "abcde")
    assert found.counts.dtype == torch.int64
    assert found.counts.tolist() == [[pairs.count((i, j)) for j in range(5)] for i in range(5)]
    assert found.images == len(pairs)
    right = sum(i == j for i, j in pairs)
    expected = pytest.approx(100 * right / len(pairs), abs=1e-12) if pairs else None
    assert finite(found.accuracy) == expected
    entries = json.loads(json.dumps(found.to_json()))
    assert all(count for _, _, count in entries)
    again = Confusion.from_json(entries, found.classes)
    assert again.counts.equal(found.counts)
    assert again.classes == found.classes


@pytest.mark.parametrize(
    ("labels", "predictions", "message"), [([0, 3], [0, 0], "labels"), ([0], [-1], "predictions")]
)
def test_confusion_refuses_classes_out_of_range(labels, predictions, message):
    with pytest.raises(DataError, match=f"{message} .*0 to 2"):
        Confusion.of(torch.tensor(labels), torch.tensor(predictions), "abc")


def test_accuracies_of_one_confusion_by_hand():
    found = counted(WORKED[2])
    assert found.rate([0, 3]) == 100 * 10 / 15
    assert math.isnan(found.rate([]))
    first = counted(WORKED[0])
    assert math.isnan(first.per_class["dog"])
    assert math.isnan(counted(torch.zeros(2, 2, dtype=torch.int64), "ab").accuracy)


@given(st.integers(1, 500), st.data())
def test_the_interval_of_an_accuracy_is_wilsons(images, data):
    right = data.draw(st.integers(0, images))
    low, high = counted([[right, images - right], [0, 0]], "ab").interval
    expected = binomtest(right, images).proportion_ci(confidence_level=0.95, method="wilson")
    assert (low, high) == pytest.approx((100 * expected.low, 100 * expected.high), abs=2e-3)
    assert counted([[0, 0], [0, 0]], "ab").interval == (0.0, 100.0)


def test_mistakes_come_most_frequent_first():
    found = counted(WORKED[2])
    everything = [(2, 3, 5), (0, 3, 3), (1, 3, 2), (2, 0, 2), (0, 1, 1), (0, 2, 1), (1, 2, 1)]
    assert found.mistakes() == everything
    assert found.mistakes(2) == everything[:2]
    assert found.counts.tolist() == WORKED[2]  # the diagonal is still there


def test_a_removed_class_takes_its_row_and_its_column_along():
    rest = counted(WORKED[2]).without(2)
    assert rest.classes == ("ant", "bee", "dog")
    assert rest.counts.tolist() == [[5, 1, 3], [0, 7, 2], [0, 0, 5]]


# -- metrics.json


def test_metrics_hold_figures_and_names_alone_and_give_the_trajectories_back():
    grown = list(worked().confusions)
    metrics = []
    for t, each in enumerate(grown):
        found = to_metrics(t, {"cnn": each, "ame": each} if t else {"cnn": each})
        metrics.append(json.loads(json.dumps(found, allow_nan=False)))
    assert set(metrics[1]) == {"phase", "classes", "accuracy", "confusions"}
    assert (metrics[1]["phase"], metrics[1]["classes"]) == (1, ["ant", "bee", "cow"])
    assert metrics[1]["accuracy"] == {"cnn": 80.0, "ame": 80.0}
    assert confusions_of(metrics[1])["cnn"].counts.tolist() == [[6, 1, 3], [0, 9, 1], [1, 0, 9]]
    found = Trajectory.of(metrics)
    assert list(found) == ["cnn"]  # the other one is not there from the first phase on
    assert found["cnn"].to_dict() == worked().to_dict()
    assert Trajectory.of([]) == {}


def test_without_images_there_is_no_accuracy_but_a_file():
    empty = counted(torch.zeros(1, 1, dtype=torch.int64), ["ant"])
    found = to_metrics(0, {"cnn": empty}, similarity={"cka": 1.0})
    assert found["accuracy"] == {"cnn": None}
    assert found["similarity"] == {"cka": 1.0}
    assert json.dumps(found, allow_nan=False)


def test_figures_of_images_in_series_rest_on_the_series():
    labels, guessed = torch.tensor([0] * 8 + [1] * 4), torch.tensor([0] * 4 + [1] * 8)
    series = torch.tensor([0] * 4 + [5] * 4 + [3, 4, 8, 9])
    single = Confusion.of(labels, guessed, ("a", "b"))
    found = single.in_series(labels, series, torch.tensor([0.25] * 4 + [0.0] * 8))
    assert (found.series.tolist(), found.units, found.images) == ([2, 4], 6, 12)
    assert found.per_class == {"a": 62.5, "b": 100.0}
    assert found.accuracy == pytest.approx(100 * 9 / 12)
    assert found.balanced == pytest.approx(81.25)
    assert single.balanced == pytest.approx(75)
    low, high = found.interval
    assert low < single.interval[0] < single.interval[1] < high, "six cases, not twelve"
    assert confusions_of(to_metrics(1, {"analytic": found}))["analytic"].interval == (low, high)
    rest = found.without(0)
    assert (rest.units, rest.accuracy) == (4, 100.0)


@pytest.mark.parametrize(
    ("counts", "numbers", "gains"),
    [
        ([[0, 0, 3]], [5, 1e308], [0.0, 0.0]),
        ([[0, 0, 3]], [5, -1], [0.0, 0.0]),
        ([[0, 0, 3]], [5], [0.0, 0.0]),
        ([[0, 0, 3]], [5, 1], [0.0]),
        ([[0, 0, -3]], [5, 1], [0.0, 0.0]),
    ],
)
def test_figures_that_do_not_fit_each_other_are_refused(counts, numbers, gains):
    series = {"a": {"numbers": numbers, "gains": gains}}
    with pytest.raises(ValueError, match=r"numbers|number of series|gains|count"):
        confusions_of({"classes": ["x", "y"], "confusions": {"a": counts}, "series": series})


def test_names_of_classes_are_text():
    with pytest.raises(ValueError, match="no text"):
        confusions_of({"classes": ["x", {}], "confusions": {"a": [[0, 0, 3]]}})
