"""`geodl serve`: what it prints and refuses to serve; the client in the documentation."""

import re
import socket
from pathlib import Path

import pytest
from tests.helpers.command import completed
from tests.helpers.folders import write_digits
from tests.helpers.serving import TOKEN, pictures, running

from geodl.app.serve.connections import bind
from geodl.cli import app
from geodl.core.errors import ConfigError, StoreError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{folder}"], "is not a geodl directory|no head.json"),
        (["{folder}/new", "--allow-folder", "{folder}/nowhere"], "--allow-folder .*nowhere"),
        (["{folder}/new", "--host", "256.1.1.1"], "256.1.1.1 port 8000"),
        (["{folder}/new", "--port", "70000"], "port = 70000: allowed values are 0 to 65535"),
    ],
)
def test_bad_arguments(words, said, tmp_path):
    (tmp_path / "somebody's.txt").touch()
    with pytest.raises((ConfigError, StoreError), match=said):
        serve_command([word.format(folder=tmp_path) for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's.txt"]


ADDRESS = r"is served at http://127\.0\.0\.1:\d+/"
EVERYWHERE = rf"http://{socket.gethostname()}:\d+/#token=[\w-]+\neverybody who reaches this"


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ([], None, rf"{ADDRESS}#token=[\w-]{{32}}\n"),
        ([], "from-the-environment", rf"{ADDRESS}\nthe token is the value of GEODL_TOKEN"),
        (["--read-only"], None, rf"{ADDRESS}\nPress Ctrl-C"),
        (["--host", "0.0.0.0"], None, EVERYWHERE),
    ],
)
def test_the_address_that_is_printed(words, given, said, model, monkeypatch, capsys):
    class Ending:
        def __init__(self, app):
            self.app = app

        def run(self, sockets):
            self.app.state.server.close()

    monkeypatch.setattr("geodl.app.serve.connections.server_of", Ending)
    monkeypatch.setenv("GEODL_TOKEN", given or "")
    serve_command([str(model), "--port", "0", *words])
    assert re.search(said, capsys.readouterr().out)


def serve_command(words):
    return app(["serve", *words], exit_on_error=False, print_error=False)


def test_the_client_in_the_documentation(tmp_path, digits):
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    write_digits(tmp_path / "week1", digits, (0, 1), 12)
    (tmp_path / "photo.jpg").write_bytes(pictures(digits, 0, slice(30, 31))[0])
    with running(tmp_path / "model") as url:
        environment = {"GEODL_URL": url, "GEODL_TOKEN": TOKEN}
        done = completed(code=code, environment=environment, cwd=tmp_path)
    said = r"done \d+\.\d+\nphoto.jpg (digit \d|unknown) \[\('digit \d', [\d.]+\), "
    assert re.match(said, done.stdout)


def test_answers_do_not_wait_for_acknowledgments():
    """Nagle's algorithm would hold every answer back for 40 ms."""
    with bind("127.0.0.1") as listening:
        address = listening.getsockname()
        with socket.create_connection(address), listening.accept()[0] as here:
            assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
