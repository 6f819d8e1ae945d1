"""The rooms and what they may import; and the documents, whose commands and examples must work."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.test_cli import geodl

from geodl.data import load
from geodl.losses import global_mean

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "geodl"

# From the ground up: a room imports from itself and from those before it. `geodl` itself holds the version alone.
ROOMS = (
    "errors config devices geometry losses nets data memory predictors metrics analysis files cache store methods training "
    "experiment report reproduce own classifier cli __main__"
).split()


def imports(path: Path) -> set[str]:
    """Name the modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "geodl":
            found |= {f"geodl.{alias.name}" for alias in node.names if not alias.name.startswith("__")}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = ROOMS[: ROOMS.index(room) + 1]
    used = {name.split(".")[1] for name in imports(path) if name.startswith("geodl.")}
    assert used <= set(allowed), f"{room} imports {sorted(used - set(allowed))} from above"
    if room != "training":
        assert not any("lightning" in name for name in imports(path))


def test_nothing_unpickles():
    for path in FILES:
        text = path.read_text()
        calls = re.findall(r"torch\.load\([^)]*\)?", text)
        if path == PACKAGE / "nets" / "weights.py":  # tensors alone, and refuses a torch that could be tricked
            assert len(calls) == 1
            assert "weights_only=True" in calls[0]
        else:
            assert not calls, path
        assert "torch.save(" not in text
        if path.name != "cifar.py":  # its unpickler admits arrays alone
            assert "pickle" not in imports(path), path


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), flags=re.M | re.S)


def write_weeks(folder: Path) -> None:
    """Make the folders of images that the README speaks of: two digits a week."""
    data = load("digits").train
    for week, classes in (("week1", (0, 1)), ("week2", (2, 3))):
        for label in classes:
            (folder / week / str(label)).mkdir(parents=True)
            for i in (data.labels == label).nonzero().squeeze(1)[:12].tolist():
                data.decode(i).save(folder / week / str(label) / f"{i}.png")
    data.decode(0).save(folder / "photo.jpg")


def test_every_command_of_the_readme_works(tmp_path, monkeypatch):
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "cache"))
    write_weeks(tmp_path)
    commands = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line]
    assert len(commands) >= 8
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "geodl"
        geodl(*arguments, cwd=tmp_path)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_python_block_works(document):
    code = [block for block in blocks(document, "python") if "import" in block]
    assert code
    for block in code:
        subprocess.run([sys.executable, "-c", block], check=True, timeout=120)


def test_the_distillation_that_contributing_adds_is_one():
    (branch,) = [block for block in blocks("CONTRIBUTING.md", "python") if block.startswith("if config.distill")]
    function = "def add(config, phase):\n" + "".join(f"    {line}\n" for line in branch.splitlines())
    names: dict[str, Any] = {"global_mean": global_mean}
    exec(function, names)
    config = SimpleNamespace(distill="euclidean", euclidean_weight=0.5)
    loss = names["add"](config, SimpleNamespace(shard=SimpleNamespace(group=None)))
    student, teacher = (SimpleNamespace(pooled=torch.full((2, 3), value)) for value in (1.0, 3.0))
    assert loss(student, teacher) == 0.5 * 12


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), target


def test_make_commands_exist():
    text = (ROOT / "Makefile").read_text()
    for target in ("run", "test", "test-slow", "lint"):
        assert re.search(rf"^{target}: ", text, flags=re.M)
