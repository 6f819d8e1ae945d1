"""The package layout and its import rules; the documents, whose commands, examples and links must work."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from tests.helpers.command import completed, geodl
from tests.helpers.folders import write_digits

import geodl as package
from geodl.app import choices
from geodl.data import load
from geodl.losses import DISTILLATIONS
from geodl.methods import METHODS
from geodl.model.classifiers import CLASSIFIERS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "geodl"

# From the bottom up: a room imports only from itself and those before it. `geodl` itself contains only the version.
ROOMS = (
    "core config store geometry nets losses data closed_form model methods learning bench app cli "
    "__main__"
).split()


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "geodl":
            found |= {
                f"geodl.{alias.name}" for alias in node.names if not alias.name.startswith("__")
            }
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
    assert not (room == "app" and "bench" in used), "app and bench never import each other"
    if room != "learning":
        assert not any("lightning" in name for name in imports(path))


def test_the_house_has_fourteen_rooms():
    names = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert names - {"__init__", "__main__", "__pycache__", "py.typed"} == {*ROOMS} - {"__main__"}


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_comprehensions_are_simple(path):
    """No comprehension inside another, and no conditional expression inside one: a loop is easier to read."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, COMPREHENSIONS):
            inside = [each for each in ast.walk(node) if each is not node]
            dense = [each for each in inside if isinstance(each, (*COMPREHENSIONS, ast.IfExp))]
            assert not dense, f"{path.name}, line {node.lineno}"


def test_no_module_compares_the_name_of_a_method_or_a_classifier():
    names = {*METHODS, *CLASSIFIERS} - {*DISTILLATIONS}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                parts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not parts & names, f"{path.relative_to(PACKAGE)}, line {node.lineno}"


STATES = {"Statistics", "KeptFeatures", "Primal", "Fitted"}


def test_only_the_closed_form_imports_its_state():
    allowed = {"closed_form", "model/classifiers", "model/estimators.py", "bench/paper/beyond.py"}
    for path in FILES:
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith(tuple(allowed)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert not STATES & {alias.name for alias in node.names}, place


def test_contributing_lists_the_rooms_in_order():
    """The table in CONTRIBUTING.md has the rooms in the order in which they may import."""
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    names = [
        name for row in table for name in re.findall(r"`(\w+)(?:\.py|/)`", row) if name != "presets"
    ]
    assert [*names, "__main__"] == ROOMS


def test_nothing_unpickles():
    for path in FILES:
        text = path.read_text()
        # Published .pth weights, through torch's tensor-only reader.
        allowed = (
            'torch.load(file, map_location="cpu", weights_only=True)'
            if path.name == "weights.py"
            else ""
        )
        assert "torch.load(" not in text.replace(allowed, "")
        assert "torch.save(" not in text
        if path.name != "cifar.py":  # its unpickler accepts only arrays
            assert "pickle" not in imports(path), path


def test_no_test_uses_a_private_name_or_another_test():
    modules = "|".join({path.stem for path in FILES})
    private = rf'setattr\(\w+, "_[a-z]|from geodl[\w.]* import .*\b_[a-z]|\b(?:{modules})\._[a-z]'
    refused = re.compile(rf"{private}|^from (?:tests\.(?:\w+\.)?)?test_", re.M)
    for path in Path(__file__).parent.rglob("*.py"):
        assert not refused.search(path.read_text()), path


def test_public_names_load_what_they_need_and_no_more():
    code = (
        "import sys, geodl\n"
        "assert dir(geodl) == sorted(geodl.__all__)\n"
        "geodl.GeodlError, geodl.__version__\n"
        "assert not {'torch', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert geodl.geometry.principal_angles and 'lightning_fabric' not in sys.modules\n"
        "from geodl import *\n"
        "assert all(name in globals() for name in geodl.__all__)\n"
    )
    completed(code=code)


def test_public_objects_have_their_public_names():
    for name in package.__all__:
        value = getattr(package, name)
        assert isinstance(value, str) or value.__name__.split(".")[-1] == name
    with pytest.raises(AttributeError, match="module 'geodl' has no attribute 'learner_'"):
        package.learner_  # noqa: B018


def blocks(document: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), flags=re.M | re.S
    )


def write_weeks(folder: Path) -> None:
    """Write the image folders that the README uses: two digits per week."""
    data = load("digits")
    for week, classes in (("week1", (0, 1)), ("week2", (2, 3))):
        write_digits(folder / week, data, classes, 12, name="{}")
    data.train.decode(0).save(folder / "photo.jpg")


def test_every_command_of_the_readme_works(tmp_path, monkeypatch):
    # As if the extra were not installed; the tutorial's test uses it.
    monkeypatch.setattr(choices, "has_pretrained", lambda: False)
    write_weeks(tmp_path)
    commands = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line]
    assert len(commands) >= 8
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "geodl"
        geodl(*arguments, cwd=tmp_path)


def test_every_python_block_works(tmp_path):
    code = [block for block in blocks("README.md", "python") if "import" in block]
    assert code
    completed(code="\n".join(code), cwd=tmp_path)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    ],
)
def test_relative_links_exist(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith(("http", "generated/")):  # pages generated by the site build
            assert ((ROOT / document).parent / target).exists(), target


def test_make_commands_exist():
    text = (ROOT / "Makefile").read_text()
    for target in ("run", "test", "test-slow", "lint"):
        assert re.search(rf"^{target}: ", text, flags=re.M)
