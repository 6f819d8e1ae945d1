"""What a server refuses: requests without the token, of foreign pages, changes if it is read-only, malformed requests."""

import itertools
import socket
from pathlib import Path

import httpx
import pytest
from tests.helpers.directories import contents
from tests.helpers.serving import TOKEN, Client, pictures, refused, running

from geodl.app import serve
from geodl.app.serve.security import choose_token, has_token, is_allowed, is_loopback, names_of
from geodl.app.serve.server import Server
from geodl.core.errors import ConfigError, StoreError

OPEN = "predict jobs jobs/x model classes history events export/onnx export/report".split()
"""What needs no token."""


def protected(client):
    """Return every operation that needs the token: (method, path)."""
    paths = client.get("/openapi.json").json()["paths"]
    found = []
    for path, methods in paths.items():
        assert set(methods) <= {"get", "post"}
        example = path.replace("{key}", "x")
        if example.removeprefix("/api/v1/") not in OPEN:
            found += [(method, example) for method in methods]
    assert len(found) == 16
    return found


def test_changes_and_stored_images_need_the_token(reader):
    wrong = ("", "Bearer wrong", f"Basic {TOKEN}", TOKEN)
    for (method, path), header in itertools.product(protected(reader), wrong):
        answer = httpx.request(method, reader.url + path, headers={"Authorization": header})
        refused(answer, 401, "token")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_read_only_server_changes_nothing(model, digits, tmp_path):
    before = contents(model)
    with running(model, read_only=True) as url, Client(url) as client:
        for method, path in protected(client):
            refused(client.request(method, path), 403, "--read-only")
        assert client.get("/api/v1/model").json()["read_only"] is True
        assert client.get("/api/v1/jobs").json() == []
        assert client.predict(pictures(digits, 0)[0]).status_code == 200
    assert contents(model) == before
    with pytest.raises(StoreError, match="no such model"):  # nothing could create it
        Server(tmp_path / "new", TOKEN, read_only=True)


FOREIGN = [
    *({"Origin": origin} for origin in ("https://evil.example", "null", "http://127.0.0.1:1")),
    *({"Host": host} for host in ("evil.example", "127.0.0.1.evil.example", "192.0.2.1", "")),
    *({"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")),
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_foreign_pages_are_refused(reader, headers):
    for method, path in (("GET", "model"), ("POST", "undo"), ("POST", "predict")):
        answer = reader.request(method, f"/api/v1/{path}", headers=headers)
        refused(answer, 403)
        assert "access-control-allow-origin" not in answer.headers


def test_the_server_s_own_page_is_allowed(reader):
    own = {"Origin": reader.url, "Sec-Fetch-Site": "same-origin"}
    assert reader.get("/api/v1/model", headers=own).status_code == 200
    port = reader.url.rpartition(":")[2]
    assert reader.get("/api/v1/model", headers={"Host": f"localhost:{port}"}).status_code == 200
    preflight = own | {"Access-Control-Request-Method": "POST"}
    assert reader.options("/api/v1/undo", headers=preflight).status_code == 405


STATIC = sorted(path.name for path in Path(serve.__file__).with_name("static").iterdir())


def test_a_proxy_with_https(base):
    """Caddy and Tailscale keep the host name that the browser used, and the page is served over https."""
    headers = {"Host": "flowers.example.org", "Origin": "https://flowers.example.org"}
    named = running(base, allow_hosts=("flowers.example.org",))
    with named as url, Client(url) as client:
        assert client.get("/api/v1/tray", headers=headers).status_code == 200
        headers["Host"] = "other.example.org"
        assert client.get("/api/v1/tray", headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/", "/docs", *(f"/static/{name}" for name in STATIC)])
def test_pages_load_nothing_from_other_hosts(reader, path):
    answer = reader.get(path)
    assert answer.status_code == 200
    assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    for word in ("innerHTML", "<script>", " style="):
        assert word not in answer.text


@pytest.mark.parametrize("path", ["/", "/docs", "/static/app.js", "/api/v1/model", "/nowhere"])
def test_security_headers(reader, path):
    headers = reader.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_malformed_requests(reader, digits):
    kind = "multipart/form-data"
    bodies = [(b"", f"{kind}; boundary=b"), (b"--b\r\n", f"{kind}; boundary=b"), (b"x", kind)]
    for body, kind in [*bodies, (b"{}", "application/json"), (b"", "text/plain")]:
        answer = reader.post("/api/v1/predict", content=body, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422)
        assert set(answer.json()) == {"error"}
    refused(reader.post("/api/v1/predict"), 422, "images are needed")
    refused(reader.get("/api/v1/jobs/x"), 404, "no such job")
    refused(reader.get("/api/v1/nowhere"), 404)
    refused(reader.predict(pictures(digits, 0)[0], top=0), 422, "top: ")
    refused(reader.post("/api/v1/classes/rename", json={"old": "digit 0"}), 422, "new: ")
    unknown = reader.post("/api/v1/classes/rename", json={"old": "none", "new": "x"})
    refused(unknown, 422, "'none'", "digit 0, digit 1")


def test_tokens(monkeypatch):
    monkeypatch.delenv("GEODL_TOKEN", raising=False)
    (one, fresh), (other, _) = choose_token(), choose_token()
    assert fresh
    assert one != other
    assert len(one) >= 32
    monkeypatch.setenv("GEODL_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16 printable"):
        choose_token()
    monkeypatch.setenv("GEODL_TOKEN", "sixteen-or-more-characters")
    assert choose_token() == ("sixteen-or-more-characters", False)
    assert has_token(f"Bearer {one}", one)
    wrong = ["", "Bearer", "Bearer ", f"Bearer {one}x", f"bearer {one[:-1]}", one, "Bearer \u00e9"]
    assert not any(has_token(each, one) for each in [None, *wrong])


def test_hosts():
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "pc")))
    own, wide = names_of("127.0.0.1"), names_of("0.0.0.0") | {"box.example"}
    for name in ("127.0.0.1:80", "localhost", "[::1]:8000", "LOCALHOST:1"):
        assert is_allowed(name, "127.0.0.1", own)
    for name in ("192.168.1.5", "pc", "", "evil.example", "["):
        assert not is_allowed(name, "127.0.0.1", own)
    for name in ("192.168.1.5:8000", "box.example", socket.gethostname()):
        assert is_allowed(name, "0.0.0.0", wide)
    assert not is_allowed("evil.example", "0.0.0.0", wide)
