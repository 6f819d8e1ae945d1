"""The Dockerfile: its steps hold without Docker, and with it the image is built and answers."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.helpers.serving import Client, Command

ROOT = Path(__file__).parents[2]
STEPS = re.findall(r"^([A-Z]+) (.*)$", (ROOT / "Dockerfile").read_text(), flags=re.M)


def step(name):
    """Return the last step of a kind."""
    return [words for kind, words in STEPS if kind == name][-1]


def health(url):
    """Run the health check of the image against another port."""
    command = json.loads(step("HEALTHCHECK").removeprefix("CMD "))
    program = command[2].replace("http://127.0.0.1:8000", url)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False
    ).returncode


def test_what_is_copied_and_installed_is_there():
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [
        words.split()[:-1] for kind, words in STEPS if kind == "COPY" and "--from" not in words
    ]
    for name in [name for names in copied for name in names]:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installing = next(words for kind, words in STEPS if kind == "RUN" and "pip install" in words)
    (wanted,) = re.findall(r"\[(.*?)\]", installing)
    assert set(wanted.split(",")) <= set(extras)
    assert step("USER").split(":")[0] not in ("0", "root")
    assert step("CMD").startswith(f'["{step("VOLUME")}/')


def test_its_command_serves_and_its_health_check_sees_it(tmp_path):
    assert json.loads(step("ENTRYPOINT")) == ["geodl", "serve"]
    words = json.loads(step("CMD"))
    server = Command(words[0].replace(step("VOLUME"), str(tmp_path)), *words[1:])
    port = server.url.rpartition(":")[2]
    try:
        assert health(f"http://127.0.0.1:{port}") == 0
        with Client(f"http://localhost:{port}", server.token) as client:  # as from outside
            assert client.get("/api/v1/tray").json() == []
    finally:
        server.stop()
    assert health(f"http://127.0.0.1:{port}") != 0


@pytest.mark.slow
def test_the_image_is_built_and_answers():
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker on this machine")
    text = (ROOT / "docs" / "serve.md").read_text()
    build, run = re.findall(r"^docker .*$", text, flags=re.M)
    subprocess.run(build, shell=True, cwd=ROOT, check=True)
    started = run.replace("docker run", "docker run --detach --name geodl-test").replace(
        "8000:8000", "0:8000"
    )
    environment = os.environ | {"GEODL_TOKEN": "a-token-for-the-tests-alone"}
    subprocess.run(started, shell=True, check=True, env=environment)
    try:
        check = [
            "docker",
            "exec",
            "geodl-test",
            *json.loads(step("HEALTHCHECK").removeprefix("CMD ")),
        ]
        command = "until " + " ".join(map(repr, check)) + "; do sleep 1; done"
        subprocess.run(["timeout", "60", "sh", "-c", command], check=True)
    finally:
        subprocess.run([docker, "rm", "--force", "geodl-test"], check=False)
