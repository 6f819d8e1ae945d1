"""Features in eval mode from un-augmented images; class means, mirrored exemplars, and the drift of stored means."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from geodl import predictors
from geodl.data.batches import Batches, Transform, evaluation
from geodl.data.images import ArrayImages
from geodl.errors import ConfigError, DataError
from geodl.nets import build_network
from geodl.nets.network import Output
from geodl.predictors import (
    Features,
    class_means,
    default_classifier,
    drift,
    exemplar_means,
    features_of,
    nearest_mean,
)

TRANSFORM = Transform(size=8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), padding=2)


class Plain(nn.Module):
    """A network whose features are the input itself, so that what went in can be read off."""

    def __init__(self, width: int, classes: int = 2) -> None:
        super().__init__()
        self.width = width
        self.head = nn.Module()
        self.head.classes = classes

    def forward(self, x: torch.Tensor) -> Output:
        flat = x.flatten(1)
        return Output(flat[:, : self.head.classes], flat, flat)

    def with_levels(self, x: torch.Tensor, levels: Sequence[str]) -> tuple[Output, dict[str, torch.Tensor]]:
        return self(x), {name: x.flatten(1) for name in levels}


def pictures(count: int, size: int = 8, seed: int = 0) -> ArrayImages:
    random = np.random.default_rng(seed)
    pixels = torch.from_numpy(random.integers(0, 256, (count, 3, size, size), dtype=np.uint8))
    return ArrayImages(pixels, torch.arange(count) % 3)


def unit_rows(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------- features


def test_features_of_a_network_in_order_with_labels():
    images, network = pictures(11), build_network("resnet8", 4, head="cosine", seed=1)
    features = features_of(network, evaluation(images, TRANSFORM, batch_size=4))
    assert (features.pooled.shape, features.logits.shape) == ((11, network.width), (11, 4))
    assert features.labels.equal(images.labels)
    assert features.pooled.dtype == features.logits.dtype == torch.float32
    network.eval()
    with torch.no_grad():
        whole = network(next(evaluation(images, TRANSFORM)).images)
    torch.testing.assert_close(features.pooled, whole.pooled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features.logits, whole.logits, rtol=1e-4, atol=1e-5)


def test_levels_come_in_the_same_pass():
    images, network = pictures(7), build_network("resnet8", 4, head="cosine", seed=1)
    plain = features_of(network, evaluation(images, TRANSFORM))
    levels = network.level_names[:2]
    found = features_of(network, evaluation(images, TRANSFORM, batch_size=3), levels=levels)
    assert (dict(plain.levels), tuple(found.levels)) == ({}, levels)
    torch.testing.assert_close(found.pooled, plain.pooled, rtol=1e-4, atol=1e-5)
    network.eval()
    with torch.no_grad():
        _, whole = network.with_levels(next(evaluation(images, TRANSFORM)).images, levels)
    for name in levels:
        torch.testing.assert_close(found.levels[name], whole[name], rtol=1e-4, atol=1e-5)
    assert features_of(network, [], levels=levels).levels[levels[0]].shape[0] == 0


def test_taking_features_changes_nothing_in_the_network():
    network = build_network("resnet8", 4, head="cosine", seed=1).train()
    frozen = next(m for m in network.modules() if isinstance(m, nn.BatchNorm2d)).eval()
    modes = [m.training for m in network.modules()]
    before = {key: value.clone() for key, value in network.state_dict().items()}
    features = features_of(network, evaluation(pictures(6), TRANSFORM))
    assert [m.training for m in network.modules()] == modes
    assert not frozen.training
    assert all(value.equal(before[key]) for key, value in network.state_dict().items()), "batch statistics moved"
    assert not features.pooled.requires_grad
    assert not features.pooled.is_inference(), "means of these features go into parameters"


def test_the_mode_comes_back_after_an_error():
    network = build_network("convnet", 2, head="linear").train()

    def broken():
        yield from evaluation(pictures(2), TRANSFORM)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        features_of(network, broken())
    assert network.training


def test_no_images_give_no_rows():
    features = features_of(build_network("convnet", 3, head="linear"), [])
    assert (features.pooled.shape, features.logits.shape, features.labels.shape) == ((0, 32), (0, 3), (0,))


def test_features_fed_by_evaluation_have_no_augmentation():
    """A public version takes exemplar features with augmentation: they would then differ from pass to pass."""
    images, network = pictures(9), Plain(192)
    first = features_of(network, evaluation(images, TRANSFORM)).pooled
    assert first.equal(features_of(network, evaluation(images, TRANSFORM, batch_size=2)).pooled)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (TRANSFORM.mean, TRANSFORM.std))
    expected = (images.pixels / 255 - mean) / std
    torch.testing.assert_close(first, expected.flatten(1), rtol=1e-5, atol=1e-5)
    batches = Batches(images, TRANSFORM, 9, seed=0)
    augmented = features_of(network, batches.epoch(0)).pooled
    assert not augmented.sort(dim=0).values.allclose(first.sort(dim=0).values), "training batches are augmented"


# ------------------------------------------------------------------------------------------------------------- means


def test_class_means_by_hand():
    # Class 0: directions (1, 0) and (0, 1), whatever the lengths -> (1, 1) / sqrt 2. Class 2: (0, -1). Class 1: nothing.
    features = torch.tensor([[3.0, 0.0], [0.0, 0.5], [0.0, -7.0]])
    means = class_means(features, torch.tensor([0, 0, 2]), 3)
    half = math.sqrt(0.5)
    torch.testing.assert_close(means, torch.tensor([[half, half], [0.0, 0.0], [0.0, -1.0]]))


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


def test_all_1623_classes_of_omniglot_have_a_mean(omniglot):
    def features(images):
        return images.pixels[:, 0].flatten(1).float()

    means = class_means(features(omniglot.train), omniglot.train.labels, 1623)
    predictions = nearest_mean(features(omniglot.test), means).argmax(dim=1)
    accuracy = (predictions == omniglot.test.labels).double().mean().item()
    assert 0.10 < accuracy < 0.9  # raw pixels; guessing gives 0.0006
    assert predictions.unique().numel() > 1000


# --------------------------------------------------------------------------------------------------------- exemplars


def both_views(images: ArrayImages, transform: Transform) -> list[Features]:
    batches = (evaluation(images, transform, batch_size=3, mirror=mirror) for mirror in (False, True))
    return [features_of(Plain(192), view) for view in batches]


def test_mirrored_exemplars_are_flipped_not_recoloured():
    """A public version swaps RGB for BGR where it means to mirror."""
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    pixels[0, 0, :, :2] = 255  # a red bar on the left
    images = ArrayImages(pixels, torch.tensor([0]))
    white = Transform(size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    mean = exemplar_means(both_views(images, white), 1).reshape(3, 8, 8)
    assert mean[1:].abs().max() == 0, "green and blue stay dark"
    assert (mean[0, :, [0, 1, 6, 7]] > 0).all(), "bars on the left and, mirrored, on the right"
    assert mean[0, :, 2:6].abs().max() == 0
    assert mean[0].equal(mean[0].flip(1))


def test_exemplar_means_are_over_both_views_each_image_once():
    images = pictures(7)
    means = exemplar_means(both_views(images, TRANSFORM), 4).double().numpy()
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (TRANSFORM.mean, TRANSFORM.std))
    inputs = (images.pixels.numpy() / 255 - mean) / std
    views = unit_rows(np.concatenate([inputs.reshape(7, -1), inputs[..., ::-1].reshape(7, -1)]))
    labels = np.tile(images.labels.numpy(), 2)
    expected = unit_rows(np.stack([views[labels == c].mean(0) for c in range(3)]))
    np.testing.assert_allclose(means[:3], expected, atol=1e-6)
    assert (means[3] == 0).all()


# ------------------------------------------------------------------------------------------------------------- drift


def drift_reference(means: np.ndarray, old: np.ndarray, new: np.ndarray, width: float) -> np.ndarray:
    """Eq. 8 and 9 of semantic drift compensation, class by class and sample by sample."""
    means, old, new = unit_rows(means), unit_rows(old), unit_rows(new)
    moved = []
    for mean in means:
        weights = [math.exp(-np.sum((z - mean) ** 2) / (2 * width**2)) for z in old]
        step = sum(w * (after - before) for w, before, after in zip(weights, old, new, strict=True)) / sum(weights)
        moved.append(mean + step)
    return unit_rows(np.stack(moved))


@pytest.mark.parametrize("pairs", [1, 100, predictors.PAIRS])
def test_drift_against_the_sums_written_out(monkeypatch, pairs):
    monkeypatch.setattr(predictors, "PAIRS", pairs)
    random = np.random.default_rng(3)
    old = random.normal(size=(40, 5))
    new, means = old + 0.3 * random.normal(size=(40, 5)), random.normal(size=(9, 5))
    for width in (0.3, 1.0):
        moved = drift(*(torch.from_numpy(a) for a in (means, old, new)), width=width)
        np.testing.assert_allclose(moved.numpy(), drift_reference(means, old, new, width), atol=1e-12)


def test_drift_follows_a_common_rotation_of_the_features():
    angle = 0.2
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    steps = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)[:-1]
    old = torch.stack([steps.cos(), steps.sin()], dim=1)
    means = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    moved = drift(means, 5 * old, 3 * old @ turn.T)
    expected = means @ turn.T
    assert (moved * expected).sum(dim=1).min() > math.cos(0.02)
    assert (means * expected).sum(dim=1).max() < math.cos(0.19), "without compensation the means would be off"


def test_only_the_samples_near_a_mean_move_it():
    means = torch.eye(2, dtype=torch.float64)
    old = torch.tensor([[1.0, 0.01], [0.01, 1.0]], dtype=torch.float64)
    new = torch.tensor([[1.0, 0.5], [0.01, 1.0]], dtype=torch.float64)
    moved = drift(means, old, new)
    assert moved[0, 1] > 0.4
    torch.testing.assert_close(moved[1], means[1], rtol=0, atol=1e-3)


def test_drift_with_every_sample_many_widths_away_is_finite():
    means, old = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [-1.0, 0.1]])
    moved = drift(means, old, old + 0.05, width=0.01)
    assert moved.isfinite().all()
    assert not moved.equal(means)


def test_drift_keeps_what_cannot_move():
    means = torch.tensor([[0.6, 0.8], [0.0, 0.0]])
    old = torch.tensor([[1.0, 0.2], [0.3, 0.9]])
    assert drift(means, old, old).allclose(means)
    assert drift(means, old, old + 0.1)[1].tolist() == [0.0, 0.0], "an unknown mean stays unknown"
    assert drift(means, old[:0], old[:0]).equal(means)
    assert drift(means, old, old + 0.1).dtype == torch.float32


def test_wrong_drifts_are_refused():
    with pytest.raises(ConfigError, match=r"drift width = 0: it must be greater than 0"):
        drift(torch.eye(2), torch.eye(2), torch.eye(2), width=0)
    with pytest.raises(DataError, match="2 old and 1 new"):
        drift(torch.eye(2), torch.eye(2), torch.eye(2)[:1])


def test_the_oracle_is_marked_as_one():
    marked = {name for name, title in predictors.CLASSIFIERS.items() if "oracle" in title}
    assert marked == {"ame"}


def test_the_classifier_that_is_shown_is_the_best_that_needs_no_old_images():
    assert default_classifier(["cnn", "nme", "analytic", "ncm"]) == "analytic"
    assert default_classifier(["cnn", "nme", "ame", "ncm"]) == "nme"
    assert default_classifier(["cnn", "ame", "ncm"]) == "ncm"
    assert default_classifier(["ame", "cnn"]) == "cnn"
