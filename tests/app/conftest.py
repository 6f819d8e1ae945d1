"""A small model of two digits, and servers of it."""

import shutil
from pathlib import Path

import pytest
from tests.helpers.serving import QUICK, Client, running

from geodl.app.classifier import IncrementalClassifier


@pytest.fixture(scope="session")
def base(tmp_path_factory, digits):
    """A model of two classes, to be copied."""
    path = tmp_path_factory.mktemp("base") / "model"
    rows = [(digits.train.labels == label).nonzero().flatten()[:20] for label in (0, 1)]
    labels = [f"digit {label}" for label in (0, 1) for _ in range(20)]
    pixels = digits.train.pixels[[int(i) for part in rows for i in part]]
    IncrementalClassifier(path).learn(pixels, labels, **QUICK)
    return path


@pytest.fixture
def model(base, tmp_path):
    return Path(shutil.copytree(base, tmp_path / "model"))


@pytest.fixture
def client(model):
    with running(model) as url, Client(url) as client:
        yield client


@pytest.fixture(scope="session")
def reader(base):
    """A client of a server that the tests do not change."""
    with running(base) as url, Client(url) as client:
        yield client
