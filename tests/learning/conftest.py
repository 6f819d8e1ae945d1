"""Tiny runs and learners, for the tests of how learning goes."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers import tiny
from tests.helpers.learners import taught

from geodl.bench.experiment import run_config
from geodl.data import ClassIncremental, Dataset
from geodl.learning.learner import Learner
from geodl.store import Directory

HOW = ("data", "cache", "listener", "stop", "fresh", "allow_environment_change")
"""What `run_config` takes beside the configuration."""


@pytest.fixture(scope="session")
def data() -> Dataset:
    return tiny.dataset()


@pytest.fixture
def run(tmp_path, data) -> Callable[..., Directory]:
    """Return what runs the tiny options, some replaced, in a directory."""

    def go(name: str = "r", **options: Any) -> Directory:
        how = {"data": data} | {key: options.pop(key) for key in HOW if key in options}
        config = tiny.config(**{"method": "finetune"} | options)
        return run_config(config, out=tmp_path / name, **how)

    return go


@pytest.fixture(scope="session")
def scenario(data) -> ClassIncremental:
    return ClassIncremental(data, base=2, phases=2)


@pytest.fixture(scope="session")
def learned(scenario) -> Learner:
    """Two phases of three, learned once; for tests that only look at it."""
    return taught(scenario, distill="geodesic")
