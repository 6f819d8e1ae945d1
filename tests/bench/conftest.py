"""Fixtures of the tests of reports and sweeps."""

import pytest
from tests.helpers.reports import make_runs

from geodl.bench.sweep import runner


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.getbasetemp() / "report-runs")


@pytest.fixture
def fast(monkeypatch):
    """Let a sweep poll its processes without a pause."""
    monkeypatch.setattr(runner, "TURN", 0.0)
