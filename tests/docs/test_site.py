"""The documentation site: every public name, command and option is described, and examples run."""

import doctest
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import geodl
from geodl.cli import app
from geodl.config import all_options

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def reference():
    """Load the generator of the pages of commands and options."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "_ext" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_is_described(reference):
    text = reference.commands()
    for name in app:
        if not name.startswith("-"):
            assert re.search(rf"^## geodl {name}\b", text, flags=re.M), name
    assert "## geodl sweep status" in text
    assert "`--threshold`" in text
    described = re.findall(r"^## geodl run$(.*?)^## ", text, flags=re.M | re.S)[0]
    assert "options.md" in described
    assert "--geodesic-weight" not in described  # options have a separate page


def test_every_argument_has_a_meaning_and_values(reference):
    rows = re.findall(r"^\| (`.+`) \| (.*) \| (.*) \| .* \|$", reference.commands(), flags=re.M)
    found = {names: (meaning, values) for names, meaning, values in rows}
    assert [names for names, (meaning, _) in found.items() if not meaning] == []
    assert found["`--length`"][1] == "paper, cpu, smoke"
    assert found["`--adapt`"][1] == "no, auto, yes"
    assert {"`RUNS`", "`--dataset`", "`CLASS`"} <= found.keys()


def test_every_option_is_described(reference):
    text = reference.options()
    for name, info in all_options().items():
        assert f"| `{name}` |" in text
        assert info.description
    assert "| `digits` |" in text


def test_every_public_name_has_a_signature_and_an_example():
    page = (DOCS / "api.md").read_text()
    sections = re.split(r"^##+ (.+)\n", page, flags=re.M)[1:]
    described = dict(zip(sections[::2], sections[1::2], strict=True))
    names = {*geodl.__all__, *geodl.geometry.__all__} - {"__version__", "geometry"}
    assert "geometry" in described
    for name in names:
        assert re.search(rf"auto\w+:: geodl\.(geometry\.)?{name}$", described[name], flags=re.M)
        assert re.search(rf"^(>>>|\.\.\.) .*\b{name}\b", described[name], flags=re.M), name


def test_every_example_of_the_reference_runs(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "api.md").read_text()
    assert "+SKIP" not in page
    text = re.sub(r"^```.*$", "", page, flags=re.M)
    example = doctest.DocTestParser().get_doctest(text, {}, "api.md", "docs/api.md", 0)
    assert example.examples
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example, out=sys.stdout.write).failed == 0


@pytest.mark.filterwarnings("ignore")  # from other packages
@pytest.mark.parametrize("name", ["csv", "wandb", "mlflow"])
def test_every_logger_logs(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "logging.md").read_text()
    (block,) = [
        each
        for each in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
        if f"import {name}\n" in each
    ]
    exec(compile(block, f"docs/logging.md, {name}", "exec"), {"__name__": "example"})
    assert (tmp_path / f"{name}-run").is_dir()
    if name == "csv":
        rows = (tmp_path / "log.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["phase", "0", "1"]


@pytest.mark.filterwarnings("ignore")  # from Lightning
def test_the_loss_in_other_loops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "lightning.md").read_text()
    alone, lightning = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    exec(compile(alone, "docs/lightning.md", "exec"), {"__name__": "example"})
    pytest.importorskip("lightning")
    exec(compile(lightning, "docs/lightning.md", "exec"), {"__name__": "example"})
