"""What `make dist` built: what the archives hold, and the wheel at work in a fresh environment."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from geodl import __version__

ROOT = Path(__file__).parents[1]
DIST = os.environ.get("GEODL_DIST")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DIST, reason="GEODL_DIST is not set: `make dist` builds and sets it"),
]
NEEDED = [
    "geodl/py.typed",
    "geodl/config/presets/digits.toml",
    "geodl/data/digits.npz",
    "geodl/app/serve/templates/docs.html",
    "geodl/app/serve/static/app.js",
]


def wheel() -> Path:
    (found,) = Path(DIST).glob("*.whl")
    return found


def packaged() -> set[str]:
    """Return the files of the package in the repository, by their names in a wheel."""
    found = (ROOT / "src").rglob("geodl/**/*")
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else():
    assert wheel().name.startswith(f"geodl_cil-{__version__}-py3-none-any")
    with zipfile.ZipFile(wheel()) as archive:
        names = set(archive.namelist())
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "geodl = geodl.cli:main" in archive.read(entry).decode()
    information = {name for name in names if name.startswith(f"geodl_cil-{__version__}.dist-info/")}
    assert names - information == packaged()
    assert packaged().issuperset(NEEDED)
    assert any(name.endswith("licenses/LICENSE") for name in information)


def test_the_source_archive_builds_the_same_and_holds_no_tests_or_results():
    (path,) = Path(DIST).glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.split("/")[0] for name in names}
    assert {f"src/{name}" for name in packaged()} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= tops
    assert not tops & {"tests", "results", "studies", "benchmarks", "docs"}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    """Make an environment with the wheel, and the tested versions of what it needs, alone."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    constraints = ROOT / "constraints.txt"
    torch = re.search(r"^torch==.*$", constraints.read_text(), flags=re.M)[0]
    for wanted in (torch, str(wheel())):
        run(folder, "python", "-m", "pip", "install", "--quiet", wanted, "-c", str(constraints))
    return folder


def run(folder: Path, program: str, *arguments: str) -> str:
    places = {key: os.environ[key] for key in os.environ if not key.startswith("PYTHON")}
    places["GEODL_CACHE"] = str(folder / "cache")
    command = [folder / "env" / "bin" / program, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=places, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def draw(folder: Path) -> None:
    """Draw circles and squares, eight of each."""
    for name in ("circle", "square"):
        (folder / name).mkdir(parents=True)
        for i in range(8):
            image = Image.new("RGB", (32, 32), "white")
            shape = getattr(ImageDraw.Draw(image), "ellipse" if name == "circle" else "rectangle")
            shape([4 + i, 4, 20 + i, 20], fill=(30 * i, 0, 200))
            image.save(folder / name / f"{i}.png")


def test_the_wheel_works_in_a_fresh_environment(fresh):
    assert run(fresh, "geodl", "--version").strip() == __version__
    draw(fresh / "shapes")
    run(fresh, "geodl", "learn", "model/", "shapes/", "--epochs", "2")
    assert "circle" in run(fresh, "geodl", "predict", "model/", "shapes/circle", "--no-unknown")


def test_the_readme_s_python_works_in_a_fresh_environment(fresh):
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, flags=re.M | re.S)
    assert blocks
    run(fresh, "python", "-c", "\n".join(blocks))
