"""Advice: at the end of a step, and on the page of a model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geodl.app.advice import advice, mixed_up, uncertain
from geodl.app.advice import at_end_of_step as advise
from geodl.app.page import how_sure
from geodl.app.state import KnownClass
from geodl.config import Layer, RunConfig
from geodl.core.errors import install
from geodl.methods import configure
from geodl.model.classifiers import LeftOut
from geodl.model.metrics import Confusion

PHOTOS = RunConfig(image_size=64)


def confusion(*rows):
    return Confusion(torch.tensor(rows), tuple("abcdef"[: len(rows)]))


def known(*images):
    return [KnownClass(name, 1, count) for name, count in zip("abcdef", images, strict=False)]


def test_a_good_model_gets_no_advice():
    assert advise(confusion([9, 1], [0, 10]), known(200, 200), PHOTOS, [0, 1]) == []


def test_a_budget_that_leaves_no_class_an_image_is_named():
    config = RunConfig(image_size=64, exemplars=1, memory_budget="total")
    (sentence,) = advise(confusion([9, 1], [0, 10]), known(200, 200), config, [0, 1])
    assert "exemplars = 1, memory_budget = total" in sentence


def test_weak_and_mixed_up_classes_are_named():
    matrix = confusion([5, 4, 1], [0, 10, 0], [2, 2, 6])
    sentences = advise(matrix, known(200, 200, 200), PHOTOS, [0, 1, 2])
    pairs = ["Look at a and b: 4 of", "Look at c and a: 3 of", "Look at c and b: 2 of"]
    weak = "Weak classes: a (5 of 10 right), c (6 of 10 right)."
    for sentence, begin in zip(sentences, [*pairs, weak], strict=True):
        assert sentence.startswith(begin)


def test_tiny_classes_and_training_from_scratch():
    matrix = confusion([0] * 3, [0] * 3, [0] * 3)
    photos = advise(matrix, known(3, 40, 40), PHOTOS, [0, 1, 2])
    assert "Very few images: a (3)" in photos[0]
    assert "About 40 images a class are few" in photos[1]
    assert install("pretrained") in photos[1]
    assert len(advise(matrix, known(3, 40, 40), RunConfig(image_size=8), [0, 1, 2])) == 1
    foreign = RunConfig(image_size=64, network="timm:resnet18", pretrained=True)
    assert len(advise(matrix, known(3, 40, 40), foreign, [0, 1, 2])) == 1
    assert advise(matrix, known(3, 400, 400), PHOTOS, [1, 2]) == []


@pytest.mark.parametrize(
    ("adapt", "right", "images", "offered"),
    [
        ("no", 180, 200, True),
        ("auto", 180, 200, False),
        ("no", 199, 200, False),
        ("no", 90, 100, False),
    ],
)
def test_adapting_is_offered_where_many_images_are_mistaken(adapt, right, images, offered):
    options = {"method": "analytic", "network": "efficientnet-lite0", "pretrained": True}
    config = configure([Layer("test", options | {"adapt": adapt})]).config
    wrong = images - right
    found = advise(confusion([right, wrong], [wrong, right]), known(images, images), config, [0, 1])
    assert any("--adapt auto" in sentence for sentence in found) == offered


def test_pairs_are_counted_both_ways():
    first, second = mixed_up(confusion([8, 1, 1], [3, 7, 0], [0, 0, 10]))
    assert (first.names, first.wrong, first.images) == (("b", "a"), 4, 20)
    assert first.ways == (("b", "a", 3, 10), ("a", "b", 1, 10))
    assert (second.names, second.wrong, second.images) == (("a", "c"), 1, 20)
    assert second.ways == (("a", "c", 1, 10),)
    assert mixed_up(confusion([5, 0], [0, 5])) == []


def test_the_weakest_class_comes_first_and_what_is_unknown_last():
    rows = confusion([9, 1, 0], [0, 0, 0], [5, 0, 5]).weakest
    assert [(row.name, row.accuracy) for row in rows] == [("c", 50.0), ("a", 90.0), ("b", None)]


@pytest.mark.parametrize(
    ("rows", "images", "heading", "words"),
    [
        ([[400, 0, 0], [0, 400, 0], [0, 0, 400]], (50, 50, 50), None, ""),
        ([[380, 20, 0], [40, 360, 0], [0, 0, 400]], (50, 50, 50), "Look at b and a", "60 of"),
        ([[400, 0, 0], [100, 300, 0], [0, 0, 400]], (50, 50, 50), "Weak classes", "b (300 of 400"),
        ([[400, 0, 0], [0, 400, 0], [0, 0, 400]], (50, 9, 3), "Very few images", "b (9), c (3)."),
        (
            [[9, 1, 0], [0, 10, 0], [0, 0, 10]],
            (50, 50, 50),
            "The accuracy is uncertain",
            "83 % or 99 %",
        ),
        ([[5]], (50,), "Add a second class", "two classes"),
    ],
)
def test_advice_names_what_would_help(rows, images, heading, words):
    found = confusion(*rows)
    named = dict(zip(found.classes, images, strict=True))
    said = dict([*advice(found, named), *uncertain(found)])
    assert words in said[heading] if heading else said == {}


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=20, max_size=80))
def test_how_sure_counts_every_image_once(images):
    labels = torch.zeros(len(images), dtype=torch.int64)
    predictions = torch.tensor([0 if right else 1 for right, _ in images])
    confidences = torch.tensor([sure for _, sure in images], dtype=torch.float64)
    found = how_sure(LeftOut(labels, predictions, confidences))
    names, counts, accuracies, sure = zip(*found["bands"], strict=True)
    assert sum(counts) == len(images)
    right = sum(right for right, _ in images)
    assert np.dot(counts, accuracies) == pytest.approx(100 * right)
    ends = ("95 % and more", "90 to 95 %", "80 to 90 %", "60 to 80 %", "under 60 %")
    lowest = dict(zip(ends, (95, 90, 80, 60, 0), strict=True))
    assert all(value >= lowest[name] - 1e-9 for name, value in zip(names, sure, strict=True))
    apart = np.abs(np.subtract(accuracies, sure))
    assert found["apart"] * len(images) == pytest.approx(np.dot(counts, apart), abs=1e-9)


def test_where_no_confidences_are_known_none_are_shown():
    few = torch.zeros(19, dtype=torch.int64)
    assert how_sure(None) is None
    assert how_sure(LeftOut(few, few, few.double())) is None
    many = torch.zeros(50, dtype=torch.int64)
    assert how_sure(LeftOut(many, many, None)) is None
