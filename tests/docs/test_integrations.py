"""The services of docs/integrations.md, called as PhotoPrism and Label Studio document it."""

import base64
import http.server
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.helpers.folders import digits_of
from tests.helpers.serving import QUICK, pictures

from geodl.app.classifier import IncrementalClassifier

testclient = pytest.importorskip("fastapi.testclient", reason="the extra `serve` is not installed")
PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
CONFIG = """<View>
  <Image name="image" value="$photo"/>
  <Choices name="kind" toName="image"><Choice value="digit 0"/><Choice value="digit 1"/></Choices>
</View>"""


@pytest.fixture(scope="module")
def model(tmp_path_factory, digits):
    model = IncrementalClassifier(tmp_path_factory.mktemp("integrations") / "model")
    model.learn(*digits_of(digits, (0, 1), 20), **QUICK)
    return model


def client(code):
    names = {}
    exec(code, names)
    return testclient.TestClient(names["app"])


@pytest.mark.parametrize("path", ["labels", "labels/geodl/latest"])
def test_photoprism(model, digits, monkeypatch, path):
    monkeypatch.setenv("GEODL_MODEL", str(model.path))
    service = client(CODE[0])
    (content,) = pictures(digits, 0, slice(30, 31))
    asked = {
        "id": "an id",
        "model": "geodl",
        "version": "latest",
        "images": [f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"],
    }
    answer = service.post(f"/api/v1/vision/{path}", json=asked).json()
    assert answer["id"] == "an id"
    (label,) = answer["result"]["labels"]
    assert label["name"] in model.classes
    assert 0 < label["confidence"] <= 1
    page = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").decode()
    for images in ([], [3], ["AAAA"], ["data:image/jpeg;base64,A"], [page]):
        broken = service.post(f"/api/v1/vision/{path}", json=asked | {"images": images})
        assert broken.status_code == 400


@contextmanager
def studio(content):
    """Serve an image and record the requests: path and token."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization")))
            moved = self.path.startswith("/moved?")
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", seen
        server.shutdown()


def test_label_studio(model, digits, monkeypatch):
    (content,) = pictures(digits, 1, slice(30, 31))
    with studio(content) as (url, seen), studio(content) as (elsewhere, strange):
        monkeypatch.setenv("GEODL_MODEL", str(model.path))
        monkeypatch.setenv("LABEL_STUDIO_URL", url)
        monkeypatch.setenv("LABEL_STUDIO_API_KEY", "a key")
        monkeypatch.setenv("IMAGE_URLS", elsewhere)
        service = client(CODE[1])
        assert service.get("/health").json()["status"] == "UP"
        setup = {"project": "1.1", "schema": CONFIG, "hostname": url, "access_token": ""}
        version = service.post("/setup", json=setup).json()["model_version"]
        tasks = [
            {"id": 1, "data": {"photo": "/data/upload/1/digit.png"}},
            {"id": 2, "data": {"photo": f"{elsewhere}digit.png"}},
            {"id": 3, "data": {"photo": f"/moved?{elsewhere}moved.png"}},
        ]
        asked = {"tasks": tasks, "project": "1.1", "label_config": CONFIG, "params": {}}
        results = service.post("/predict", json=asked).json()["results"]
        assert seen[0] == ("/data/upload/1/digit.png", "Token a key")
        assert strange == [("/digit.png", None), ("/moved.png", None)]  # without token
    assert [each["model_version"] for each in results] == [version] * 3
    (part,) = results[0]["result"]
    assert (part["from_name"], part["to_name"], part["type"]) == ("kind", "image", "choices")
    assert part["value"]["choices"][0] in model.classes


def test_label_studio_images_come_from_allowed_hosts_only(model, digits, monkeypatch, tmp_path):
    """A task may have the URL of a local file, of a program on this machine, or of a file that is not an image."""
    (content,) = pictures(digits, 1, slice(30, 31))
    (tmp_path / "own.png").write_bytes(content)
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    with studio(page) as (url, _), studio(content) as (elsewhere, strange):
        monkeypatch.setenv("GEODL_MODEL", str(model.path))
        monkeypatch.setenv("LABEL_STUDIO_URL", url)
        monkeypatch.setenv("LABEL_STUDIO_API_KEY", "a key")
        service = client(CODE[1])
        for place in (f"{elsewhere}digit.png", (tmp_path / "own.png").as_uri(), "/page.png"):
            asked = {"tasks": [{"id": 1, "data": {"photo": place}}], "label_config": CONFIG}
            assert service.post("/predict", json=asked).status_code == 400
        assert strange == []
