"""Models on the Hugging Face hub, against a stand-in on this machine."""

import base64
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
import torch
from tests.helpers import tiny

import geodl
from geodl.core.errors import ConfigError, MissingExtraError, StoreError
from geodl.learning.hub import card, fetched


class StandIn(BaseHTTPRequestHandler):
    """As much of the hub as an upload and a download need; `server.repos` holds the files by repository."""

    def log_message(self, *_):
        pass

    def answer(self, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer hf_secret":
            return self.send_error(401, "Unauthorized")
        if path == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repos.setdefault(name, {})
            self.server.private[name] = "private" in (
                asked.get("visibility"),
                asked.get("private") and "private",
            )
            return self.answer({"id": name, "url": f"{self.server.address}/{name}"})
        if path == ["api", "validate-yaml"]:
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(path[2:4])
        if path[4] == "preupload":
            files = [each["path"] for each in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": each, **plain} for each in files]})
        assert path[4] == "commit"
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.server.repos[name][entry["value"]["path"]] = content
            elif entry["key"] == "deletedFile":
                del self.server.repos[name][entry["value"]["path"]]
        self.server.commits += 1
        url = f"{self.server.address}/{name}/commit/{self.server.sha}"
        return self.answer({"success": True, "commitUrl": url, "commitOid": self.server.sha})

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = path[0] == "api"
        files = self.server.repos.get("/".join(path[2:4] if is_api else path[:2]))
        if files is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if is_api and "tree" in path:
            tree = [{"type": "file", "path": each, "size": len(files[each]), "oid": oid(files[each])} for each in files]  # fmt: skip
            return self.answer(tree, Content_Type="application/json")
        if is_api:
            found = {"id": "/".join(path[2:4]), "sha": self.server.sha}
            return self.answer(found | {"siblings": [{"rfilename": each} for each in files]})
        content = files["/".join(path[4:])]
        return self.answer(content, ETag=f'"{oid(content)}"', X_Repo_Commit=self.server.sha)

    do_HEAD = do_GET  # noqa: N815


class Server(ThreadingHTTPServer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.repos, self.private, self.commits = {}, {}, 0

    @property
    def sha(self):
        return f"{self.commits:040x}"


def oid(content):
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    server = Server(("127.0.0.1", 0), StandIn)
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def learner():
    data = tiny.dataset()
    made = geodl.Learner(tiny.config(exemplars=2, data_dir="/home/me/photos"))
    made.learn(data.train.pixels[:18], data.train.labels[:18])
    return made


def test_a_model_is_pushed_and_loaded(hub, learner, tmp_path):
    assert geodl.push(learner, "me/own") == f"{hub.address}/me/own"
    files = dict(hub.repos["me/own"])
    assert hub.private == {"me/own": True}
    tops = {name.split("/")[0] for name in files}
    assert tops == {"head.json", "head-copy.json", "objects", "README.md"}
    assert not any(b"/home/me" in content for content in files.values())
    again = geodl.Learner.load("hf://me/own")
    images = tiny.dataset().train.pixels[:18]
    assert again.classes == learner.classes
    scores = [each.predict(images).probabilities for each in (again, learner)]
    assert torch.equal(*map(torch.as_tensor, scores))
    assert again.memory.images is None
    assert learner.memory.images is not None

    learner.save(tmp_path / "model")
    geodl.push(tmp_path / "model", "me/own", with_images=True)
    assert len(hub.repos["me/own"]) == len(files)  # what the first one wrote is gone
    assert len(geodl.Learner.load("hf://me/own@main").memory.images) > 0


def test_the_hub_s_errors_are_one_line(hub, learner, monkeypatch):
    with pytest.raises(StoreError, match="hf://me/none: ") as error:
        geodl.Learner.load("hf://me/none")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(StoreError, match="hf://me/own: "):
        geodl.push(learner, "me/own")
    for name in ("own", "me/own/more", "me own/x", ""):
        with pytest.raises(ConfigError, match="hf://USER/NAME"):
            geodl.push(learner, name)


def test_the_model_card_names_what_the_model_is(learner):
    learner.rename(learner.classes[0], "cat [x](http://y)")
    text = card(learner.known, "me/own")
    head, body = text.removeprefix("---\n").split("\n---\n")
    assert "pipeline_tag: image-classification" in head
    assert "# own" in body
    assert 'Learner.load("hf://me/own")' in body
    assert r"- cat \[x\]\(http\:\/\/y\)" in body
    assert f"- {learner.classes[1]}" in body
    assert f"| images stored | {len(learner.memory.images)} |" in body


def test_other_paths_stay_and_the_extra_is_named(monkeypatch, tmp_path):
    assert fetched(tmp_path) == tmp_path
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"geodl-cil\[hub\]"):
        fetched("hf://me/own")
