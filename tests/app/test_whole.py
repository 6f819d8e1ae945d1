"""Models that see all of each picture, on gray, not its middle square."""

import numpy as np
import pytest
from PIL import Image
from tests.helpers.pictures import noise

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve.batching import decode
from geodl.cli import app
from geodl.core.decoding import letterboxed, open_image
from geodl.core.errors import ConfigError
from geodl.core.events import Advised

HOW = {"method": "analytic", "network": "resnet8", "image_size": 32, "threads": 1, "workers": 1}


def panorama(kind, seed):
    """Draw a picture four times as wide as high, whose left end alone tells the class."""
    pixels = noise(24, 96, 3, seed=seed + 1000 * (kind == "red"))
    pixels[:, :24] = (250, 20, 20) if kind == "red" else (20, 20, 250)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for kind in ("red", "blue"):
        (root / kind).mkdir()
        for seed in range(10):
            panorama(kind, seed).save(root / kind / f"{seed}.png")
    return root


@pytest.fixture(scope="module")
def model(photos, tmp_path_factory):
    found = IncrementalClassifier(tmp_path_factory.mktemp("whole") / "model")
    found.learn(photos, whole=True, **HOW)
    return found


def test_the_longer_side_fits_and_the_rest_is_gray():
    image = panorama("red", 0)
    square = np.asarray(letterboxed(image, 32))
    assert square.shape == (32, 32, 3)
    np.testing.assert_array_equal(square[:12], 128)
    np.testing.assert_array_equal(square[20:], 128)
    part = image.resize((32, 8), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(square[12:20], np.asarray(part))
    assert letterboxed(Image.new("RGB", (1000, 1)), 8).size == (8, 8)


def test_ends_are_seen_whole_and_not_in_the_middle_square(model, photos, tmp_path):
    told = []
    middle = IncrementalClassifier(tmp_path / "middle")
    middle.learn(photos, **HOW, listener=told.append)
    said = [each.sentence for each in told if isinstance(each, Advised)]
    assert any("100 %" in sentence and "--whole" in sentence for sentence in said)
    fresh = [panorama(kind, 50 + i) for i in range(10) for kind in ("red", "blue")]
    truth = ["red", "blue"] * 10
    assert [each.label for each in model.predict(fresh, threshold=-np.inf)] == truth
    guessed = [each.label for each in middle.predict(fresh, threshold=-np.inf)]
    assert sum(a == b for a, b in zip(guessed, truth, strict=True)) < 17


def test_it_is_part_of_the_model(model, photos):
    again, told = IncrementalClassifier(model.path), []
    assert again.info()["preprocessing"]["crop"] == "whole"
    with pytest.raises(ConfigError, match="crop = pad"):
        again.learn(photos, crop="pad", again=True)
    green = [Image.fromarray(noise(24, 96, 3, seed=seed) // 2) for seed in range(5)]
    again.learn(green, ["green"] * 5, listener=told.append)
    assert not [each for each in told if isinstance(each, Advised) and "--whole" in each.sentence]
    file = photos / "red" / "3.png"
    assert again.forget(file) == 1  # known by the same square
    square = np.asarray(letterboxed(open_image(file), 32)).transpose(2, 0, 1)
    seen = decode(file, again.recognizer().transform)  # as a server does
    np.testing.assert_array_equal(seen.numpy(), square)
    again.undo()
    again.undo()


def test_an_exported_file_says_so(model, tmp_path):
    onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    model.export(tmp_path / "model.onnx")
    about = {each.key: each.value for each in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert "longer side" in about["input"]


def test_the_command_takes_it(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--whole", "--method", "analytic", "--backbone", "resnet8", "--image-size", "32"]
    app(["learn", str(tmp_path / "m"), str(photos), *words], exit_on_error=False)
    assert "all of each picture" in capsys.readouterr().out
