"""The notebooks in docs: every cell runs, in order, in one namespace."""

import json
from pathlib import Path

import matplotlib
import pytest

from geodl.app import choices
from geodl.app.classifier import IncrementalClassifier

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    """Return the code cells of a notebook, which must have format 4 and no output."""
    content = json.loads(path.read_text())
    assert content["nbformat"] == 4
    names = [cell["id"] for cell in content["cells"]]
    assert len(set(names)) == len(names)
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    return ["".join(cell["source"]) for cell in code]


@pytest.fixture
def plots():
    """Return matplotlib.pyplot with a backend that needs no screen."""
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")
    matplotlib.use(before)


def run(path: Path) -> dict:
    namespace = {}
    for number, code in enumerate(cells(path), start=1):
        exec(compile(code, f"{path.name}, code cell {number}", "exec"), namespace)
    return namespace


def test_the_quickstart(tmp_path, monkeypatch, plots, capsys):
    monkeypatch.chdir(tmp_path)
    quickstart, _ = NOTEBOOKS
    lines = [line for code in cells(quickstart) for line in code.splitlines() if line.strip()]
    assert len(lines) <= 25  # a quickstart is short
    after = run(quickstart)
    assert capsys.readouterr().out.startswith("('4', '2', '7', '6') {'cnn': ")
    (drawn,) = plots.gcf().axes
    drawn_points = {line.get_label(): len(line.get_xdata()) for line in drawn.lines}
    assert drawn_points == {"cnn": 4, "nme": 4, "ncm": 4}
    assert after["history"][-1]["nme"].accuracy > 60  # ten digits, five exemplars of each
    assert after["predictions"].probabilities.shape == (8, 10)
    names = [after["data"].classes[label] for label in after["data"].test.labels[:8]]
    assert sum(after["predictions"].labels == names) >= 4
    assert IncrementalClassifier("digits-model").classes == after["learner"].classes


@pytest.mark.skipif(not choices.has_pretrained(), reason="needs the extra pretrained")
def test_your_own_photographs(tmp_path, monkeypatch, plots):
    monkeypatch.chdir(tmp_path)
    _, own = NOTEBOOKS
    after = run(own)
    assert after["model"].classes == ("daisy", "poppy", "sunflower", "cornflower", "mallow")
    assert after["result"].accuracy > 80
    assert len(plots.get_fignums()) == 2
