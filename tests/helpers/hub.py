"""A stand-in for the Hugging Face hub, on this machine."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest


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


def stand_in(tmp_path, monkeypatch):
    """Run a stand-in that huggingface_hub uses in place of the hub."""
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
