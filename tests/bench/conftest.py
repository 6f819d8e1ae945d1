"""What the tests of reports share."""

import pytest
from tests.helpers.reports import make_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.getbasetemp() / "report-runs")
