"""The files that other programs read: workflows, hooks, citation, metadata. Each fits its schema and the rest of the repository."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from geodl import __version__
from geodl.core.errors import DISTRIBUTION

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.M))


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        *((path, "github-workflows") for path in WORKFLOWS),
        (ROOT / "CITATION.cff", "citation-file-format"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_file_fits_its_schema(path, schema):
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # more only where a job asks for it
    jobs = workflow["jobs"]
    for job in jobs.values():
        assert job.get("needs", "build") in jobs or "needs" not in job
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w/.-]+", step["uses"])
            words = shlex.split(step.get("run", ""))
            if words[:1] == ["make"]:
                assert TARGETS.issuperset(words[1:])


def test_every_declared_python_is_tested_on_three_systems():
    matrix = read(".github/workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert len(matrix["os"]) == 3
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert set(declared) <= set(matrix["python"])  # the others are expected to work
    assert PROJECT["requires-python"] == f">={declared[0]}"


def test_only_the_publishing_job_may_identify_itself():
    jobs = read(".github/workflows/release.yml")["jobs"]
    asked = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert asked == {"publish": {"id-token": "write"}}  # trusted publishing: no stored token
    assert "make dist" in [step.get("run") for step in jobs["build"]["steps"]]


def test_hooks_use_the_pinned_tools():
    (local,) = read(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].split()[0] for hook in local["hooks"]]
    assert [Path(entry).name for entry in entries] == ["ruff", "ruff", "mypy"]
    pinned = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^ruff==", pinned, re.M)
    assert re.search(r"^mypy==", pinned, re.M)


def test_what_the_readme_installs_is_enough_for_its_commands():
    readme, install = ((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
    needed = {"pretrained"}  # as the page of installation says, for photographs in seconds
    extras = install.partition("## Extras")[2].partition("\n## ")[0]
    for extra, purpose in re.findall(r"^\| `(\w+)` \| (.*?) \|", extras, flags=re.M):
        for command in re.findall(r"`(geodl \w+)`", purpose):
            needed |= {extra} if command in readme else set()
    assert needed == {"pretrained", "serve", "onnx"}
    for given in re.findall(r"pip install '(?:geodl-cil|\.)\[(.*?)\]'", readme):
        assert needed == set(given.split(","))


def test_one_version_and_one_name():
    assert PROJECT["name"] == DISTRIBUTION
    citation = read("CITATION.cff")
    assert citation["version"] == __version__
    assert citation["preferred-citation"]["year"] == 2021
    changes = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", changes, flags=re.M)
    assert headings[0] == "Unreleased"
    assert headings[1] == f"{__version__} - {citation['date-released']}"
