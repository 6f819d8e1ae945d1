"""One pass of a network: features in eval mode from un-augmented images, and class means of them."""

import math

import numpy as np
import pytest
import torch
from tests.helpers.phases import changed, weights_of
from tests.helpers.plain import pictures, unit_rows
from torch import nn

from geodl.data.batches import Transform, evaluation
from geodl.model.features import class_means, features_of, nearest_mean
from geodl.nets import build_network

TRANSFORM = Transform(size=8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), padding=2)


# ---------------------------------------------------------------------------------------------------------- features


def test_features_logits_and_levels_of_one_pass_in_order_with_labels():
    images, network = (
        pictures([0, 1, 2] * 3 + [0, 1]),
        build_network("resnet8", 4, head="cosine", seed=1),
    )
    levels = network.level_names[:2]
    found = features_of(network, evaluation(images, TRANSFORM, batch_size=4), levels=levels)
    assert (found.pooled.shape, found.logits.shape) == ((11, network.width), (11, 4))
    assert found.labels.equal(images.labels)
    assert found.pooled.dtype == found.logits.dtype == torch.float32
    assert tuple(found.levels) == levels
    network.eval()
    with torch.no_grad():
        whole, maps = network.with_levels(next(evaluation(images, TRANSFORM)).images, levels)
    pairs = [(found.pooled, whole.pooled), (found.logits, whole.logits)]
    for each, expected in [*pairs, *((found.levels[name], maps[name]) for name in levels)]:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
    assert not features_of(network, evaluation(images, TRANSFORM)).levels


def test_no_images_give_no_rows():
    found = features_of(build_network("convnet", 3, head="linear"), [], levels=["stage1"])
    assert (found.pooled.shape, found.logits.shape, found.labels.shape) == ((0, 32), (0, 3), (0,))
    assert len(found.levels["stage1"]) == 0


def test_taking_features_changes_nothing_in_the_network():
    network = build_network("resnet8", 4, head="cosine", seed=1).train()
    frozen = next(m for m in network.modules() if isinstance(m, nn.BatchNorm2d)).eval()
    modes = [m.training for m in network.modules()]
    before = weights_of(network)
    features = features_of(network, evaluation(pictures([0, 1, 2, 0, 1, 2]), TRANSFORM))
    assert [m.training for m in network.modules()] == modes
    assert not frozen.training
    assert not changed(before, network.state_dict()), "batch statistics moved"
    assert not features.pooled.requires_grad
    assert not features.pooled.is_inference(), "means of these features go into parameters"


def test_the_mode_comes_back_after_an_error():
    network = build_network("convnet", 2, head="linear").train()

    def broken():
        yield from evaluation(pictures([0, 1]), TRANSFORM)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        features_of(network, broken())
    assert network.training


# ------------------------------------------------------------------------------------------------------------- means


def test_class_means_against_numpy():
    random = np.random.default_rng(1)
    features, labels = random.normal(size=(200, 7)).astype(np.float32), random.integers(0, 5, 200)
    means = class_means(torch.from_numpy(features), torch.from_numpy(labels), 5)
    rows = unit_rows(features.astype(np.float64))
    expected = unit_rows(np.stack([rows[labels == c].mean(0) for c in range(5)]))
    np.testing.assert_allclose(means.numpy(), expected, rtol=1e-6, atol=1e-7)
    assert means.dtype == torch.float32


def test_nearest_mean_is_the_cosine_and_an_unknown_class_is_never_predicted():
    random = np.random.default_rng(2)
    features = torch.from_numpy(random.normal(size=(50, 6)))
    means = torch.from_numpy(random.normal(size=(4, 6)))
    means[2] = 0
    scores = nearest_mean(features, means)
    expected = unit_rows(features.numpy()) @ unit_rows(means[[0, 1, 3]].numpy()).T
    np.testing.assert_allclose(scores[:, [0, 1, 3]].numpy(), expected, atol=1e-12)
    assert (scores[:, 2] == -math.inf).all()
    chosen = nearest_mean(-means[[0, 1, 3]], means).argmax(dim=1)
    assert 2 not in chosen
    assert nearest_mean(means[[0, 1, 3]] * 1e-20, means).argmax(dim=1).tolist() == [0, 1, 3]
    assert nearest_mean(torch.zeros(1, 6), means).argmax(dim=1).tolist() == [0]
