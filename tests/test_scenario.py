from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geodl.data import ArrayImages, ClassIncremental, Dataset
from geodl.data.scenario import class_order
from geodl.errors import ConfigError, DataError


def toy(classes=10, per_class=2):
    """Each image's pixels tell its class in the dataset."""
    labels = torch.arange(classes).repeat(per_class)
    pixels = labels.to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2).contiguous()
    images = ArrayImages(pixels, labels)
    return Dataset("toy", images, images.select(torch.arange(classes)), tuple(f"c{i}" for i in range(classes)), "")


def original(images):
    """Return the dataset's labels of images, read off their pixels."""
    return images.pixels[:, 0, 0, 0].tolist()


def test_lucir_order():
    order = class_order("lucir-1993", [str(i) for i in range(100)])
    assert order[:8] == [68, 56, 78, 8, 23, 84, 90, 65]
    assert sorted(order) == list(range(100))


def test_lucir_order_is_the_legacy_shuffle_and_leaves_the_global_state():
    np.random.seed(1993)
    expected = np.arange(17)
    np.random.shuffle(expected)
    before = np.random.get_state()[1].copy()
    assert class_order("lucir-1993", [str(i) for i in range(17)]) == expected.tolist()
    assert np.array_equal(np.random.get_state()[1], before)


def test_icarl_order():
    order = class_order("icarl-1993", [str(i) for i in range(100)])
    assert order[:10] == [87, 0, 52, 58, 44, 91, 68, 97, 51, 15]
    assert order[-5:] == [55, 54, 26, 35, 39]
    assert sorted(order) == list(range(100))
    with pytest.raises(ConfigError, match="100 classes, the dataset has 10"):
        class_order("icarl-1993", [str(i) for i in range(10)])


def test_other_orders():
    names = ["x", "y", "z"]
    assert class_order("natural", names) == [0, 1, 2]
    assert class_order(["z", 0, "y"], names) == [2, 0, 1]
    seeds = [tuple(class_order("seed", [str(i) for i in range(20)], seed)) for seed in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert class_order("seed", names, 1993) == class_order("lucir-1993", names)


def test_labels_are_positions_in_the_learning_order():
    scenario = ClassIncremental(toy(), base=4, phases=3, order=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert scenario.groups == ((0, 1, 2, 3), (4, 5), (6, 7), (8, 9))
    assert scenario.classes == ("c9", "c8", "c7", "c6", "c5", "c4", "c3", "c2", "c1", "c0")
    assert scenario.train(1).labels.tolist() == [5, 4, 5, 4]
    assert original(scenario.train(1)) == [4, 5, 4, 5]
    assert sorted(scenario.test(1).labels.tolist()) == [0, 1, 2, 3, 4, 5]
    assert [scenario.seen(phase) for phase in range(4)] == [4, 6, 8, 10]


@given(count=st.integers(1, 40), seed=st.integers(0, 5), data=st.data())
def test_groups_partition_the_images(count, seed, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=6))) if count > 1 else []
    sizes = np.diff([0, *cuts, count]).tolist()
    toys = toy(count)
    scenario = ClassIncremental(toys, groups=sizes, order="seed", seed=seed)
    assert [len(group) for group in scenario.groups] == sizes
    assert sum(scenario.groups, ()) == tuple(range(count))
    together = [label for phase in range(len(sizes)) for label in original(scenario.train(phase))]
    assert sorted(together) == sorted(original(toys.train))
    for phase in range(len(sizes)):
        images = scenario.train(phase)
        assert [scenario.classes[i] for i in images.labels.tolist()] == [f"c{i}" for i in original(images)]
        assert set(images.labels.tolist()) == set(scenario.groups[phase])
        test = scenario.test(phase)
        assert set(test.labels.tolist()) == set(range(scenario.seen(phase)))
        assert [scenario.classes[i] for i in test.labels.tolist()] == [f"c{i}" for i in original(test)]


def test_a_scenario_is_iterated_phase_by_phase():
    scenario = ClassIncremental(toy(), base=4, phases=3, order="natural")
    phases = list(scenario)
    assert len(phases) == len(scenario) == 4
    assert [phase.index for phase in phases] == [0, 1, 2, 3]
    assert [phase.classes for phase in phases] == [("c0", "c1", "c2", "c3"), ("c4", "c5"), ("c6", "c7"), ("c8", "c9")]
    for t, phase in enumerate(phases):
        assert phase.train.digest() == scenario.train(t).digest()
        assert phase.test.digest() == scenario.test(t).digest()
        assert {phase.train.names[label] for label in phase.train.labels.tolist()} == set(phase.classes)
    assert [len(phase.test) for phase in phases] == [4, 6, 8, 10]
    assert list(scenario)[2].classes == phases[2].classes  # it can be gone through again
    assert scenario[3].classes == ("c8", "c9")
    for outside in (-1, 4):
        with pytest.raises(IndexError, match="0 to 3 allowed"):
            scenario[outside]


def test_no_base_phase():
    scenario = ClassIncremental(toy(), base=0, phases=5)
    assert [len(group) for group in scenario.groups] == [2] * 5
    assert scenario.seen(0) == 2


def test_a_class_without_training_images_is_refused():
    data = toy(4)
    data = replace(data, train=data.train.select(data.train.labels != 2))
    with pytest.raises(DataError, match="class 'c2' has no training images"):
        ClassIncremental(data, base=2, phases=2)
    assert ClassIncremental(data, groups=[["c0", "c1"], ["c3"]]).classes == ("c0", "c1", "c3")


def test_groups_may_be_arrays():
    groups = ClassIncremental(toy(4), groups=[np.array([3, 1]), np.array([0])])
    assert groups.classes == ("c3", "c1", "c0")
    with pytest.raises(ConfigError, match="groups"):
        ClassIncremental(toy(4), groups=[np.array([3, 1]), np.array([], dtype=int)])


def test_one_class_a_phase_and_only_a_base():
    assert [len(group) for group in ClassIncremental(toy(), base=5, phases=5).groups] == [5, 1, 1, 1, 1, 1]
    alone = ClassIncremental(toy(), base=10, phases=0)
    assert len(alone.groups) == 1


def test_named_groups_leave_the_others_out():
    scenario = ClassIncremental(toy(), groups=[["c3", "c1"], [7], ["c0", 2]])
    assert scenario.classes == ("c3", "c1", "c7", "c0", "c2")
    assert [len(group) for group in scenario.groups] == [2, 1, 2]
    assert sorted(original(scenario.test(2))) == [0, 1, 2, 3, 7]
    assert original(scenario.train(1)) == [7, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": 50}, "base: 50 given, 0 to 10 allowed"),
        ({"base": 4, "phases": 4}, "phases: 4 given, allowed for the 6 classes after the base: 1, 2, 3, 6"),
        ({"base": 0, "phases": 0}, "phases: 0"),
        ({"base": 10, "phases": 1}, "phases: 1 given, allowed for the 0 classes after the base: 0"),
        ({"base": -1}, "base: -1"),
        ({"base": None}, "both are needed"),
        ({"groups": [5, 4]}, r"sum 9\); allowed: sizes of at least 1 with sum 10"),
        ({"groups": [11, -1]}, "sizes of at least 1"),
        ({"groups": []}, "groups"),
        ({"groups": [5, ["c1"]]}, "groups"),
        ({"groups": [["c1"], []]}, "groups"),
        ({"groups": ["c1", "c2"]}, "groups"),
        ({"groups": [["c1"], ["c1"]]}, "'c1' is given twice"),
        ({"groups": [["c1"]], "order": "natural"}, "order: 'natural'"),
        ({"order": "random"}, "order: 'random' given, allowed: lucir-1993, icarl-1993, natural, seed"),
        ({"order": "seed"}, "seed: None"),
        ({"order": "natural", "seed": 3}, "seed: 3"),
        ({"order": ["c1", "cat"]}, "no class 'cat'"),
        ({"order": [0, 10]}, "no class 10"),
        ({"order": []}, "no classes given"),
    ],
)
def test_impossible_combinations(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ClassIncremental(toy(), **({"base": 5, "phases": 5} | arguments))


def test_phases_out_of_range():
    scenario = ClassIncremental(toy(), base=5, phases=5)
    for phase in (-1, 6):
        with pytest.raises(IndexError, match="0 to 5 allowed"):
            scenario.train(phase)
