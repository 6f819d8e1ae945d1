from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import tiny

from geodl.config import RunConfig
from geodl.core.errors import ConfigError, DataError
from geodl.data import ArrayImages, ClassIncremental, Dataset
from geodl.data.scenario import class_order


def toy(classes=10, per_class=2):
    """Return a dataset whose pixels are the labels."""
    labels = torch.arange(classes).repeat(per_class)
    pixels = labels.to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2).contiguous()
    images = ArrayImages(pixels, labels)
    names = tuple(f"c{i}" for i in range(classes))
    return Dataset("toy", images, images.select(torch.arange(classes)), names, "")


def original(images):
    """Return the dataset's labels of images, read off their pixels."""
    return images.pixels[:, 0, 0, 0].tolist()


HUNDRED = [str(i) for i in range(100)]


def test_lucir_order_is_the_legacy_shuffle_and_leaves_the_global_state():
    np.random.seed(1993)
    expected = np.arange(100)
    np.random.shuffle(expected)
    assert expected[:8].tolist() == [68, 56, 78, 8, 23, 84, 90, 65]
    before = np.random.get_state()[1].copy()
    assert class_order("lucir-1993", HUNDRED) == expected.tolist()
    assert np.array_equal(np.random.get_state()[1], before)


def test_icarl_order():
    order = class_order("icarl-1993", HUNDRED)
    assert order[:10] == [87, 0, 52, 58, 44, 91, 68, 97, 51, 15]
    assert order[-5:] == [55, 54, 26, 35, 39]
    assert sorted(order) == list(range(100))
    with pytest.raises(ConfigError, match="100 classes"):
        class_order("icarl-1993", HUNDRED[:10])


def test_other_orders():
    names = ["x", "y", "z"]
    assert class_order("natural", names) == [0, 1, 2]
    assert class_order(["z", 0, "y"], names) == [2, 0, 1]
    seeds = [tuple(class_order("seed", HUNDRED[:20], seed)) for seed in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert class_order("seed", names, 1993) == class_order("lucir-1993", names)


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
        assert set(images.labels.tolist()) == set(scenario.groups[phase])
        test = scenario.test(phase)
        assert set(test.labels.tolist()) == set(range(scenario.seen(phase)))
        for part in (images, test):
            names = [scenario.classes[i] for i in part.labels.tolist()]
            assert names == [f"c{i}" for i in original(part)]


def test_a_scenario_is_iterated_phase_by_phase():
    scenario = ClassIncremental(toy(), base=4, phases=3, order=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    phases = list(scenario)
    assert len(phases) == len(scenario) == 4
    assert [phase.index for phase in phases] == [0, 1, 2, 3]
    assert [len(phase.classes) for phase in phases] == [4, 2, 2, 2]
    for t, phase in enumerate(phases):
        assert phase.train.digest() == scenario.train(t).digest()
        assert phase.test.digest() == scenario.test(t).digest()
        names = {phase.train.names[label] for label in phase.train.labels.tolist()}
        assert names == set(phase.classes)
    assert [len(phase.test) for phase in phases] == [4, 6, 8, 10]
    assert list(scenario)[2].classes == phases[2].classes  # it can be gone through again
    assert scenario[3].classes == ("c1", "c0")
    for outside in (-1, 4):
        with pytest.raises(IndexError, match="allowed are 0 to 3"):
            scenario[outside]


def test_a_class_without_training_images_is_refused():
    data = toy(4)
    data = replace(data, train=data.train.select(data.train.labels != 2))
    with pytest.raises(DataError, match="class 'c2' has no training images"):
        ClassIncremental(data, base=2, phases=2)
    assert ClassIncremental(data, groups=[["c0", "c1"], ["c3"]]).classes == ("c0", "c1", "c3")


def test_the_defaults_are_those_of_the_command_line():
    fields = RunConfig.model_fields
    defaults = {key: fields[key].default for key in ("base", "phases", "groups", "order")}
    assert ClassIncremental(toy()).groups == ClassIncremental(toy(), **defaults).groups
    assert [len(group) for group in ClassIncremental(toy()).groups] == [5, 1, 1, 1, 1, 1]
    for base in (None, 0, 4, 10):  # no phases after the first: it has all the classes
        assert len(ClassIncremental(toy(), base=base, phases=0).groups) == 1


def test_only_datasets_are_accepted():
    with pytest.raises(DataError, match="expected a Dataset"):
        ClassIncremental("digits")


def test_classes_outside_named_groups_are_left_out():
    scenario = ClassIncremental(toy(), groups=[["c3", "c1"], np.array([7]), ["c0", 2]])
    assert scenario.classes == ("c3", "c1", "c7", "c0", "c2")
    assert [len(group) for group in scenario.groups] == [2, 1, 2]
    assert sorted(original(scenario.test(2))) == [0, 1, 2, 3, 7]
    assert original(scenario.train(1)) == [7, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": 50}, "base = 50: .* 0 to 9 of the 10"),
        ({"base": 4, "phases": 4}, "phases = 4: .* 6 classes after the base are 1, 2, 3, 6"),
        ({"base": 10, "phases": 1}, "base = 10: .* 0 to 9"),
        ({"base": -1}, "base = -1"),
        ({"groups": [5, 4]}, "groups = .* sum 10"),
        ({"groups": [11, -1]}, "sizes from 1"),
        ({"groups": []}, "groups"),
        ({"groups": [5, ["c1"]]}, "groups"),
        ({"groups": [["c1"], []]}, "groups"),
        ({"groups": [np.array([3, 1]), np.array([], dtype=int)]}, "groups"),
        ({"groups": ["c1", "c2"]}, "groups"),
        ({"groups": [["c1"], ["c1"]]}, "'c1' is given twice"),
        ({"groups": [["c1"]], "order": "natural"}, "order = 'natural'"),
        ({"order": "random"}, "order = 'random': .* lucir-1993, icarl-1993, natural, seed"),
        ({"order": "seed"}, "seed = None"),
        ({"order": "natural", "seed": 3}, "seed = 3"),
        ({"order": ["c1", "cat"]}, "no class 'cat'"),
        ({"order": [0, 10]}, "no class 10"),
        ({"order": []}, "at least one class"),
    ],
)
def test_impossible_combinations(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ClassIncremental(toy(), **({"base": 5, "phases": 5} | arguments))


def test_held_out_images_are_in_no_phase():
    data = tiny.dataset(train=20)
    scenario = ClassIncremental(data, base=2, phases=2, hold_out=0.1)
    for phase in scenario:
        train, held_out = phase.train, scenario.held_out(phase.index)
        group, seen = scenario.groups[phase.index], scenario.seen(phase.index)
        assert torch.bincount(train.labels)[list(group)].tolist() == [18] * len(group)
        assert torch.bincount(held_out.labels).tolist() == [2] * seen
        new = held_out.select(held_out.labels >= group[0])
        together = torch.cat([train.pixels, new.pixels])
        everything = ClassIncremental(data, base=2, phases=2).train(phase.index).pixels
        assert len(together) == len(everything) == len(torch.unique(together, dim=0))
        assert torch.equal(torch.unique(together, dim=0), torch.unique(everything, dim=0))


def test_held_out_images_depend_on_the_seed_and_not_on_the_groups():
    data = tiny.dataset(train=20)
    cuts = [
        ({"base": 2, "phases": 2}, 0),
        ({"base": 0, "phases": 4}, 0),
        ({"base": 2, "phases": 2}, 1),
    ]
    found = [ClassIncremental(data, **cut, hold_out=0.25, split_seed=seed) for cut, seed in cuts]
    one, same, other = (each.held_out(len(each) - 1).pixels for each in found)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
