"""Directories for several tests."""

import pytest
from tests.helpers.directories import commit, make_model, save_progress


@pytest.fixture
def model(tmp_path):
    """Make a model of three steps with one begun."""
    store = make_model(tmp_path / "model")
    with store.lock():
        for _ in range(3):
            commit(store)
        save_progress(store, 1)
    return store
