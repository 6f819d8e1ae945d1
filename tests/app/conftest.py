"""Small models of digits, and servers of one."""

import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.helpers import folders
from tests.helpers.browser import until
from tests.helpers.folders import digits_of, write_digits
from tests.helpers.serving import QUICK, TOKEN, Client, running

from geodl.app.classifier import IncrementalClassifier


@pytest.fixture
def weeks(tmp_path, digits):
    """Two folders of two classes each."""
    one = write_digits(tmp_path / "week1", digits, (0, 1), 15)
    two = write_digits(tmp_path / "week2", digits, (2, 3), 15)
    return one, two


@pytest.fixture
def classifier(tmp_path):
    """A classifier that has learned nothing."""
    return IncrementalClassifier(tmp_path / "model")


@pytest.fixture(scope="session")
def first_week(tmp_path_factory, digits):
    """A model of the first week, to be copied."""
    root = tmp_path_factory.mktemp("first")
    week = write_digits(root / "week1", digits, (0, 1), 15)
    IncrementalClassifier(root / "model").learn(week, **folders.QUICK)
    return root / "model"


@pytest.fixture
def taught(first_week, tmp_path):
    """A classifier that has learned the first week."""
    return IncrementalClassifier(shutil.copytree(first_week, tmp_path / "model"))


@pytest.fixture(scope="session")
def base(tmp_path_factory, digits):
    """A model of two classes, to be copied."""
    path = tmp_path_factory.mktemp("base") / "model"
    IncrementalClassifier(path).learn(*digits_of(digits, (0, 1), 20), **QUICK)
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


@pytest.fixture
def opened(browser):
    """Return what opens the page of a server, and closes it before the server ends: nothing may have gone wrong in it."""

    @contextmanager
    def opened(url, *, token=TOKEN, **how):
        said, asked = [], []
        with browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | how)) as context:
            page = context.new_page()
            page.set_default_timeout(30_000)
            page.on(
                "console",
                lambda message: said.append(f"{message.text} {message.location.get('url', '')}"),
            )
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on(
                "dialog",
                lambda dialog: (said.append(f"a dialog: {dialog.message}"), dialog.dismiss()),
            )
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"{url}/#token={token}" if token else url)
            until(page, "document.getElementById('lead').textContent !== ''")
            yield page
        # The browser reports a refused request by itself; Undo may remove pictures that are still loading.
        gone = re.compile(r"status of 422 .*/v1/pictures/\w+$")
        assert [text for text in said if "401" not in text and not gone.search(text)] == []
        # nothing is asked for from elsewhere
        own = ("blob:http://127.0.0.1:", "data:image/", "http://127.0.0.1:")
        assert all(url.startswith(own) for url in asked)

    return opened
