"""The documented code that uses an exported file predicts the same as the model."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from geodl import IncrementalClassifier

pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "own-images.md"


def recipe(whole):
    """Return the page's onnxruntime example as a script that takes the model and the images as arguments."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if "onnxruntime" in block)
    if whole:
        (square,) = (block for block in blocks if 'Image.new("RGB"' in block)
        center = re.compile(r"    box = .*# the center\n", re.DOTALL)
        assert center.search(found)
        found = center.sub(lambda _: textwrap.indent(square, "    "), found)
    arguments = {
        '"trained.onnx"': "sys.argv[1]",
        'sorted(Path("test/digit 3").iterdir())': "sys.argv[2:]",
    }
    for written, argument in arguments.items():
        assert written in found
        found = found.replace(written, argument)
    return "import sys\n" + found


def drawn(folder, sizes=((700, 500), (90, 160), (1500, 1400))):
    """Write noisy pictures of two classes, as JPEG and PNG files of several sizes."""
    generator = np.random.default_rng(0)
    for label, color in (("red", (200, 60, 40)), ("blue", (40, 60, 200))):
        (folder / label).mkdir(parents=True)
        for number, (width, height) in enumerate(sizes * 2):
            coarse = generator.integers(-60, 60, (9, 9, 3)) + np.array(color)
            small = Image.fromarray(coarse.clip(0, 255).astype(np.uint8))
            ending = "png" if number % 2 else "jpg"
            small.resize((width, height)).save(folder / label / f"{number}.{ending}")
    return folder


def compare(model, files, folder, whole=False):
    """Return the files with another class, and the largest difference of confidences."""
    model.export(folder / "model.onnx")
    (folder / "use.py").write_text(recipe(whole))
    command = [sys.executable, str(folder / "use.py"), str(folder / "model.onnx"), *map(str, files)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wanted = [dict(each.top) for each in model.predict(files, top=len(model.classes))]
    other, worst = [], 0.0
    for path, line, top in zip(files, printed.splitlines(), wanted, strict=True):
        label, confidence = line.removeprefix(f"{path} ").rsplit(" ", 1)
        if label != max(top, key=lambda each: top[each]):
            other.append(path)
        worst = max(worst, abs(float(confidence) - top[label]))
    return other, worst


@pytest.mark.parametrize("whole", [False, True])
def test_the_recipe_predicts_the_same_as_the_model(tmp_path, whole):
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(drawn(tmp_path / "pictures"), threads=1, whole=whole)
    files = sorted((tmp_path / "pictures").rglob("*.*"))
    other, worst = compare(model, files, tmp_path, whole)
    assert not other
    assert worst < 1e-4


@pytest.mark.slow
def test_the_recipe_on_photographs(tmp_path, flowers):
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(flowers / "week1")
    files = sorted((flowers / "test").rglob("*.jpg"))[:400:4]
    other, worst = compare(model, files, tmp_path)
    assert len(files) == 100
    assert not other
    assert worst < 1e-4
