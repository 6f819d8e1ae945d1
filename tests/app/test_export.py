"""The ONNX file: the model's own predictions, for any number of images, with labels and preprocessing inside."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from geodl.app import state
from geodl.app.classifier import IncrementalClassifier
from geodl.app.export import export
from geodl.bench.experiment import run_config
from geodl.config import Layer
from geodl.core.errors import ConfigError, MissingExtraError, StoreError, TrainingError
from geodl.data.batches import resized
from geodl.data.dataset import Dataset
from geodl.data.images import ArrayImages
from geodl.learning.learner import Learner
from geodl.methods import configure
from geodl.nets import BACKBONES
from geodl.store import Directory

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

FROZEN = {"method": "analytic", "network": "convnet", "train_base": False, "expansion": 64}
RESIZED = {"network": "convnet", "epochs": 1, "crop": "resized", "image_size": 12}
LEARNERS = {
    "closed form": FROZEN | {"keep_features": True},
    "closed form, mirrored": FROZEN | {"gamma": 0.1},
    "closed form, two grids": FROZEN | {"mirror": False, "levels": ("stage3", "stage3@4")},
    "closed form, uneven grid": FROZEN | {"image_size": 12, "levels": ("stage2@4", "stage3")},
    "closed form, exemplars": FROZEN | {"exemplars": 2, "train_base": True, "epochs": 1},
    "no exemplars": {"method": "finetune", "network": "convnet", "exemplars": 0, "epochs": 1},
    "lucir": {"method": "lucir", "network": "resnet8", "exemplars": 3, "epochs": 1},
    "resized": RESIZED | {"method": "icarl", "exemplars": 3},
}
OUTPUTS = {
    "closed form, exemplars": ["analytic", "nme", "ncm", "unknown"],
    "no exemplars": ["ncm", "cnn"],
    "lucir": ["nme", "ncm", "cnn"],
    "resized": ["nme", "ncm", "cnn"],
}
MIRRORED = ("closed form, mirrored", "closed form, uneven grid", "closed form, exemplars", "run")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, digits):
    """Return what makes models of digits 0 to 4, learned in two groups."""
    root = tmp_path_factory.mktemp("saved")
    images = digits.train.select(range(300))

    def make(name):
        path = root / name
        if path.exists():
            return IncrementalClassifier(path)
        if name == "run":
            few = [part.select(part.labels < 5) for part in (images, digits.test.select(range(50)))]
            small = Dataset("digits", *few, digits.classes[:5], "small")
            options = FROZEN | {"data": "digits", "base": 3, "phases": 2, "threads": 1}
            run_config(configure([Layer("test", options)]).config, out=path, data=small)
            return IncrementalClassifier(path)
        learner = Learner(**{"analysis": False, "threads": 1, "batch_size": 32} | LEARNERS[name])
        for classes in ((0, 1, 2), (3, 4)):
            some = images.select(torch.isin(images.labels, torch.tensor(classes)))
            learner.learn(some.pixels, [f"ziffer ü {label}" for label in some.labels.tolist()])
        learner.save(path)
        return IncrementalClassifier(path)

    return make


def loaded(model):
    return state.load(Directory(model.path)).model


@pytest.mark.parametrize("name", [*LEARNERS, "run"])
def test_the_file_predicts_what_the_model_predicts(saved, digits, tmp_path, name):
    learner = loaded(saved(name))
    done = saved(name).export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(done["file"], providers=["CPUExecutionProvider"])
    outputs = [each.name for each in session.get_outputs()]
    assert outputs == OUTPUTS.get(name, ["analytic", "ncm", "unknown"])
    assert session.get_inputs()[0].type == "tensor(uint8)"
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["labels"]) == list(learner.classes)
    assert json.loads(metadata["preprocessing"]) == learner.transform.to_dict()
    assert json.loads(metadata["outputs"]).keys() == set(outputs)
    assert metadata["default"] == outputs[0]
    # some of them of classes that were not learned
    pixels = resized(digits.test.select(range(60)), learner.transform.size).pixels
    for count in (1, 60):
        answers = session.run(outputs, {"pixels": pixels[:count].numpy()})
        found = dict(zip(outputs, answers, strict=True))
        unknown = found.pop("unknown", np.zeros(count, dtype=bool))
        for classifier, confidences in found.items():
            recognizer = learner.recognizer(classifier)
            recognizer = replace(recognizer, transform=replace(recognizer.transform, crop="pad"))
            images = ArrayImages(pixels[:count], torch.zeros(count, dtype=torch.int64))
            wanted = recognizer.answers(images)
            assert np.abs(confidences - wanted.probabilities.numpy()).max() < 1e-4
            if classifier == "analytic":
                assert unknown.tolist() == wanted.unknown.tolist()
                assert float(metadata["threshold"]) == recognizer.scorer.threshold
                assert 1 / float(metadata["temperature"]) == pytest.approx(recognizer.scorer.scale)
                mirrored = json.loads(metadata["mirrored"])
                assert mirrored == recognizer.scorer.mirrors == (name in MIRRORED)
    if "unknown" in outputs:
        assert 0 < unknown.sum() < 60


@pytest.mark.parametrize("name", ["closed form", "lucir"])
def test_neither_images_nor_features_nor_paths_are_inside(saved, digits, tmp_path, name):
    done = saved(name).export(tmp_path / "model.onnx")
    content = (tmp_path / "model.onnx").read_bytes()
    assert done["bytes"] == len(content)
    assert b"site-packages" not in content
    assert b".py" not in content
    learner = loaded(saved(name))
    images = digits.train.pixels[:300] if name == "closed form" else learner.memory.images.pixels
    kept = learner.default.tensors().items()
    rows = [row for key, block in kept if key.startswith("z.") for row in block]
    assert len(rows) > 100 or name == "lucir"
    private = [*images, *rows, *(row.float() for row in rows)]
    assert not any(each.numpy().tobytes() in content for each in private)


class Wrong(onnxruntime.InferenceSession):
    """A faulty runtime, which swaps classes, or known and unknown images."""

    dtype = np.float32

    def run(self, names, inputs):
        parts = super().run(names, inputs)
        for i, part in enumerate(parts):
            if part.dtype == self.dtype:
                parts[i] = np.roll(~part if part.ndim == 1 else part, 1, axis=-1)
        return parts


class WrongUnknown(Wrong):
    dtype = np.bool_


@pytest.mark.parametrize(
    ("name", "runtime", "reason"),
    [
        ("lucir", Wrong, "differs from the model"),
        ("closed form", Wrong, "differs from the model"),
        ("closed form", WrongUnknown, "calls other images unknown"),
    ],
)
def test_a_file_that_differs_is_not_written(saved, monkeypatch, tmp_path, name, runtime, reason):
    model = saved(name)
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", runtime)
        with pytest.raises(TrainingError, match=reason):
            model.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_named_before_the_work_begins(saved, tmp_path, monkeypatch):
    model = saved("lucir")
    monkeypatch.setattr(torch.onnx, "export", None)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file is a file"):
        model.export(tmp_path / "file" / "model.onnx")
    with pytest.raises(ConfigError, match=r"must end in \.onnx"):
        model.export(tmp_path / "model.pt")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"\[onnx\]"):
        model.export(tmp_path / "model.onnx")


def test_a_file_is_replaced_only_with_force(saved, typed, tmp_path):
    file = tmp_path / "model.onnx"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        typed("export", saved("lucir").path, file)
    assert file.read_text() == "mine"
    assert "5 classes" in typed("export", saved("lucir").path, file, "--force").out
    assert file.stat().st_size > 1000


@pytest.mark.parametrize("network", sorted(BACKBONES))
def test_every_network_can_be_exported(digits, tmp_path, network):
    learner = Learner(method="finetune", network=network, image_size=40, epochs=1, threads=1)
    learner.learn(digits.train.select(range(20)))
    assert export(learner.known, tmp_path / "model.onnx")["difference"] < 1e-4
