"""The registry of sources, checks of datasets, and the digits."""

from importlib import resources

import numpy as np
import pytest
import torch

from geodl.core.errors import ConfigError, DataError
from geodl.data import ArrayImages, Dataset, load, sources
from geodl.data.dataset import stratified


def test_names_of_the_sources():
    found = sources()
    known = {"digits", "folder", "cifar100", "hub", "imagenet", "imagenet-subset", "arrays"}
    assert set(found) == known
    assert all(line and "\n" not in line for line in found.values())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (["mnist"], {}, ConfigError, "data = 'mnist': allowed values are arrays, cifar100, digits"),
        (["folder", "."], {"fraction": 1}, ConfigError, "no option 'fraction', allowed: test_f"),
        (["folder"], {}, ConfigError, "data_dir: folder needs a folder of class folders"),
        (["folder", "nowhere"], {}, DataError, "nowhere: no such file or folder"),
        (["cifar100", "nowhere"], {}, DataError, "no such file or folder"),
        (["cifar100", "."], {}, DataError, "no CIFAR-100 found"),
        (["hub"], {}, ConfigError, "data_dir: hub needs the name of a dataset"),
    ],
)
def test_unknown_names_and_options(tmp_path, monkeypatch, arguments, options, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        load(*arguments, **options)


def test_a_dataset_checks_its_labels():
    images = ArrayImages(torch.zeros(2, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="labels from 0 to 2: allowed are 0 to 1"):
        Dataset("odd", images, images, ("a", "b"), "")
    with pytest.raises(DataError, match="0 training images"):
        Dataset("none", images.select([]), images, ("a", "b"), "")


def test_stratified_split():
    labels = torch.tensor([0] * 10 + [1] * 5 + [2] * 2 + [3])
    train, test = stratified(labels, "abcd", 0.2, 0)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(18))
    assert torch.bincount(labels[test], minlength=4).tolist() == [2, 1, 1, 0]
    assert test.tolist() == sorted(test.tolist())
    assert not torch.equal(test, stratified(labels, "abcd", 0.2, 1)[1])
    alone = stratified(labels[:10], "a", 0.2, 0)[1]
    assert torch.equal(alone, test[test < 10])  # other classes do not matter
    assert len(stratified(labels, "abcd", 0.0, 0)[1]) == 0
    with pytest.raises(ConfigError, match=r"test_fraction = 1\.5"):
        stratified(labels, "abcd", 1.5, 0)


def test_digits(digits):
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.classes == digits.train.names == tuple("0123456789")
    assert digits.train.pixels.shape[1:] == (3, 8, 8)
    for part in (digits.train, digits.test):
        assert torch.equal(part.pixels[:, 0], part.pixels[:, 2])
    # It identifies runs, so it must never change; scikit-learn's digits have the same.
    assert digits.fingerprint == "75ee60481dd4837f780bad01f000328f254a103ac112afd71c8ff4870870b3f0"
    assert load("digits").train.digest() == digits.train.digest()
    counts = [torch.bincount(part.labels) for part in (digits.test, digits.train)]
    assert (counts[0] / sum(counts) - 0.2).abs().max() < 0.01
    assert "10 classes, 1438 training and 359 test images" in digits.summary()
    assert "20% of each class" in digits.summary()


def test_the_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    bunch = datasets.load_digits()
    with np.load(resources.files("geodl.data") / "digits.npz") as stored:
        assert np.array_equal(stored["images"], bunch.images)
        assert np.array_equal(stored["labels"], bunch.target)


def test_omniglot(omniglot):
    assert (len(omniglot.classes), len(omniglot.train), len(omniglot.test)) == (1623, 24345, 8115)
    assert omniglot.classes[0] == "Alphabet_of_the_Magi/character01"
