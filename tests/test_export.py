"""The ONNX file: the model's own predictions, for any number of images, with labels and preprocessing inside."""

import json
import sys

import numpy as np
import pytest
import torch

from geodl.app import state
from geodl.classifier import IncrementalClassifier
from geodl.errors import ConfigError, MissingExtraError, TrainingError
from geodl.store import RunDirectory

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory, digits):
    """Train a model in two steps and export it."""
    root = tmp_path_factory.mktemp("export")
    model = IncrementalClassifier(root / "model")
    for classes in ((0, 1, 2), (3, 4)):
        rows = torch.isin(digits.train.labels[:400], torch.tensor(classes)).nonzero().flatten()
        images = digits.train.select(rows)
        names = [f"ziffer ü {label}" for label in images.labels.tolist()]
        model.learn(images.pixels, names, epochs=3, threads=1, precision="32")
    return model, model.export(root / "model.onnx")


@pytest.fixture(scope="module")
def session(made):
    return onnxruntime.InferenceSession(made[1]["file"], providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("classifier", ["nme", "cnn"])
def test_the_file_predicts_what_the_model_predicts(made, session, digits, classifier, count):
    model, _ = made
    pixels = digits.test.pixels[:count]
    labels = json.loads(session.get_modelmeta().custom_metadata_map["labels"])
    assert labels == list(model.classes)
    (confidences,) = session.run([classifier], {"pixels": pixels.numpy()})
    wanted = np.array(
        [[dict(each.top)[label] for label in labels] for each in model.predict(pixels, classifier=classifier, top=5)]
    )
    assert np.abs(confidences - wanted).max() < 1e-4
    assert confidences.sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_the_classifiers_differ(session, digits):
    nme, cnn = session.run(["nme", "cnn"], {"pixels": digits.test.pixels[:50].numpy()})
    assert np.abs(nme - cnn).max() > 1e-3


def test_preprocessing_is_inside(made, session):
    model, _ = made
    metadata = session.get_modelmeta().custom_metadata_map
    transform = state.load(RunDirectory(model.path)).transform
    assert json.loads(metadata["preprocessing"]) == transform.to_dict()
    assert "8" in metadata["input"]
    assert session.get_inputs()[0].type == "tensor(uint8)"


def test_no_image_is_inside(made):
    model, done = made
    content = (model.path.parent / "model.onnx").read_bytes()
    images = state.load(RunDirectory(model.path)).learner.memory.images
    assert not any(image.numpy().tobytes() in content for image in images.pixels)
    assert done["bytes"] == len(content)
    assert done["difference"] < 1e-4


def test_a_file_that_differs_is_not_written(made, monkeypatch, tmp_path):
    model, _ = made

    class Wrong(onnxruntime.InferenceSession):
        """Another runtime, which takes one class for another."""

        def run(self, names, inputs):
            return [np.roll(part, 1, axis=1) for part in super().run(names, inputs)]

    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", Wrong)
        with pytest.raises(TrainingError, match="differs from the model"):
            model.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_other_endings_are_refused(made, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.onnx"):
        made[0].export(tmp_path / "model.pt")


def test_without_the_extra_one_line_says_what_to_install(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'geodl\[onnx\]'"):
        made[0].export(tmp_path / "model.onnx")
