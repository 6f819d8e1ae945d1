"""The install command in errors about missing extras."""

from pathlib import Path

from geodl.core.errors import DISTRIBUTION, MissingExtraError, install

SOURCE = Path(__file__).parents[2] / "src"


def test_a_missing_extra_names_the_command_that_installs_it():
    assert install("timm") == "pip install 'geodl-cil[timm]'"
    assert str(MissingExtraError("onnx", "export")).endswith(install("onnx"))


def test_one_place_makes_the_command():
    found = [path for path in SOURCE.rglob("*.py") if "pip install" in path.read_text()]
    assert found == [SOURCE / "geodl" / "core" / "errors.py"]
    assert DISTRIBUTION != "geodl"  # another project's
