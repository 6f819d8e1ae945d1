"""What several test files share: the data sets that a machine may or may not have."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from tests.helpers import backbones
from tests.helpers.browser import launched
from tests.helpers.hub import stand_in

from geodl.cli import app
from geodl.data import Dataset, load

settings.register_profile("geodl", deadline=None)  # no test asserts a time: machines may be busy
settings.load_profile("geodl")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of base phases of its own, not that of the user."""
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path_factory.mktemp("cache")))


def _shared(name: str) -> Path:
    """Find test data in $GEODL_DATA or in the shared folder beside the checkout; skip the test where there are none."""
    root = Path(os.environ.get("GEODL_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not (root / name).exists():
        pytest.skip(f"{name} is not in {root} (set GEODL_DATA to a folder that has it)")
    return root / name


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: what is tested is not a power failure."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def typed(capsys, monkeypatch):
    """Return what runs one command and gives what it printed; errors are raised as they are."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        capsys.readouterr()
        app([str(word) for word in words], exit_on_error=False, print_error=False)
        return capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def cifar100_dir() -> Path:
    return _shared("cifar100")


@pytest.fixture(scope="session")
def flowers() -> Path:
    return _shared("flowers20")


@pytest.fixture(scope="session")
def signs() -> Path:
    return _shared("signs12")


@pytest.fixture(scope="session")
def omniglot() -> Dataset:
    return load("arrays", _shared("omniglot28.npz"))


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load("digits")


browser = pytest.fixture(scope="session")(launched)
hub = pytest.fixture(stand_in)
timm_calls = pytest.fixture(backbones.stand_in)
