"""What a learner takes: arrays, tensors, pictures, files, pairs; and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.learners import counts, made, state
from tests.helpers.tiny import shown
from torch.utils.data import TensorDataset

from geodl.core.errors import ConfigError, GeodlError
from geodl.data.images import ArrayImages, concat


def forms(images: ArrayImages) -> dict[str, tuple[Any, Any]]:
    """Return the same pictures with the same class names, handed over in several ways."""
    last, names = shown(images)
    pairs = list(zip(last, names, strict=True))
    return {
        "images": (images, None),
        "arrays": (last, names),
        "tensors": (images.pixels, np.array(names)),
        "floats": (images.pixels.float() / 255, names),
        "pictures": ([images.decode(i) for i in range(len(images))], names),
        "pairs": (pairs, None),
    }


@pytest.mark.parametrize("form", ["arrays", "tensors", "floats", "pictures", "pairs"])
def test_images_arrays_and_pairs_are_learned_alike(scenario, form):
    whole, other = made(epochs=1), made(epochs=1)
    for phase in list(scenario)[:2]:
        whole.learn(phase.train)
        # Classes are numbered by name, as in a folder.
        order = phase.train.labels.argsort(stable=True)
        images, labels = forms(phase.train.select(order))[form]
        other.learn(images, labels)
    assert sorted(other.classes) == sorted(whole.classes)
    test = scenario.test(1)
    assert other.transform == whole.transform
    assert other.memory.per_class() == whole.memory.per_class()
    images, labels = forms(test)[form]
    for learner in (whole, other):
        assert counts(learner.evaluate(images, labels)) == counts(learner.evaluate(test))


def test_numbered_labels_and_a_torch_dataset_are_the_same():
    data = tiny.dataset(3)
    arrays, pairs = made(epochs=1), made(epochs=1)
    arrays.learn(data.train.pixels, data.train.labels)
    pairs.learn(TensorDataset(data.train.pixels, data.train.labels))
    bare = made(epochs=1)
    bare.learn(data.train.relabel(torch.arange(3)))  # images without names: their labels are
    assert arrays.classes == pairs.classes == bare.classes == ("0", "1", "2")
    assert state(arrays) == state(pairs) == state(bare)
    pixels, labels = data.test.pixels, data.test.labels
    found = pairs.evaluate(TensorDataset(pixels, labels))
    assert counts(arrays.evaluate(pixels, labels)) == counts(found)


NONE = ArrayImages(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))


BELOW = ArrayImages(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, -1]))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 8, 8)), None, "pairs"),
        (np.zeros((2, 8, 8)), [1], "2 images.* 1 label"),
        (np.zeros((0, 8, 8)), [], "no images"),
        (3, None, "int"),
        (NONE, None, "no images"),
        ([b"no picture"], ["a"], "."),
        (BELOW, None, "label -1"),
    ],
)
def test_invalid_images_and_labels_are_refused(images, labels, message):
    learner = made()
    with pytest.raises(GeodlError, match=message):
        learner.learn(images, labels)
    assert learner.model is None


@pytest.mark.parametrize("options", [{}, {"method": "joint"}, {"method": "analytic"}], ids=str)
def test_a_first_group_of_one_class_is_refused_where_there_is_training(scenario, options):
    learner = made(**options)
    with pytest.raises(ConfigError, match="two classes"):
        learner.learn(scenario.train(1))
    assert learner.model is None


def test_classes_are_known_by_their_names_and_numbered_as_they_come(scenario):
    learner = made(epochs=1)
    learner.learn(concat([scenario.train(1), scenario.train(2)]))
    learner.learn(scenario.train(0))
    assert learner.classes == (*scenario.classes[2:], *scenario.classes[:2])
    found = learner.evaluate(scenario.test(1))
    assert found["cnn"].counts.sum(dim=1).tolist() == [5, 0, 5, 5]


def test_more_images_of_a_known_class_change_no_name_and_no_number(scenario):
    learner = made()
    half = {label: scenario.train(0).select(scenario.train(0).labels == label) for label in (0, 1)}
    learner.learn(concat([half[0], half[1].select(range(4))]))
    learner.learn(half[1].select(range(4, 9)))
    assert learner.classes == scenario.classes[:2]
    assert learner.memory.per_class() == {0: 3, 1: 3}
    assert learner.network.head.classes == 2
    # A known class and a new one in one group.
    learner.learn(concat([half[1].select([0]), scenario.train(1)]))
    assert learner.classes == scenario.classes[:3]
    assert learner.memory.per_class() == {0: 3, 1: 3, 2: 3}
    assert learner.phases == 3
    assert learner.evaluate(scenario.test(1))["nme"].accuracy > 60
