"""The ONNX file: the model's own predictions, for any number of images, with labels and preprocessing inside."""

import json
import sys
import warnings
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


@pytest.fixture(scope="module")
def made(tmp_path_factory, digits):
    """Train a model in two steps and export it."""
    root = tmp_path_factory.mktemp("export")
    model = IncrementalClassifier(root / "model")
    for classes in ((0, 1, 2), (3, 4)):
        rows = torch.isin(digits.train.labels[:400], torch.tensor(classes)).nonzero().flatten()
        images = digits.train.select(rows)
        names = [f"ziffer ü {label}" for label in images.labels.tolist()]
        model.learn(images.pixels, names, method="lucir", epochs=3, threads=1, precision="32")
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
        [
            [dict(each.top)[label] for label in labels]
            for each in model.predict(pixels, classifier=classifier, top=5)
        ]
    )
    assert np.abs(confidences - wanted).max() < 1e-4
    assert confidences.sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_the_folder_of_the_file_is_made_before_the_work_begins(made, monkeypatch, tmp_path):
    def traced(*args, **kwargs):
        assert (tmp_path / "new" / "folder").is_dir()
        raise TrainingError("far enough")

    monkeypatch.setattr(torch.onnx, "export", traced)
    with pytest.raises(TrainingError, match="far enough"):
        made[0].export(tmp_path / "new" / "folder" / "model.onnx")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file is a file; a directory is needed"):
        made[0].export(tmp_path / "file" / "model.onnx")


def test_the_classifiers_differ(session, digits):
    nme, cnn = session.run(["nme", "cnn"], {"pixels": digits.test.pixels[:50].numpy()})
    assert np.abs(nme - cnn).max() > 1e-3


def test_preprocessing_is_inside(made, session):
    model, _ = made
    metadata = session.get_modelmeta().custom_metadata_map
    transform = state.load(Directory(model.path)).transform
    assert json.loads(metadata["preprocessing"]) == transform.to_dict()
    assert "8" in metadata["input"]
    assert session.get_inputs()[0].type == "tensor(uint8)"


def test_no_image_is_inside(made):
    model, done = made
    content = (model.path.parent / "model.onnx").read_bytes()
    images = state.load(Directory(model.path)).model.memory.images
    assert not any(image.numpy().tobytes() in content for image in images.pixels)
    assert done["bytes"] == len(content)
    assert done["difference"] < 1e-4


class Wrong(onnxruntime.InferenceSession):
    """Another runtime, which takes one class for another, or known images for unknown ones."""

    dtype = np.float32

    def run(self, names, inputs):
        return [
            np.roll(~part if part.ndim == 1 else part, 1, axis=-1)
            if part.dtype == self.dtype
            else part
            for part in super().run(names, inputs)
        ]


class WrongOnes(Wrong):
    dtype = np.bool_


@pytest.mark.parametrize(
    ("name", "runtime", "reason"),
    [
        ("lucir", Wrong, "differs from the model"),
        ("closed form", Wrong, "differs from the model"),
        ("closed form", WrongOnes, "calls other images unknown"),
    ],
)
def test_a_file_that_differs_is_not_written(saved, monkeypatch, tmp_path, name, runtime, reason):
    model = saved(name)
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", runtime)
        with pytest.raises(TrainingError, match=reason):
            model.export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_other_endings_are_refused(made, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.onnx"):
        made[0].export(tmp_path / "model.pt")


def test_without_the_extra_one_line_says_what_to_install(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"\[onnx\]"):
        made[0].export(tmp_path / "model.onnx")


FROZEN = {"method": "analytic", "network": "convnet", "train_base": False, "expansion": 64}
LEARNERS = {
    "closed form": FROZEN | {"keep_features": True},
    "closed form, mirrored": FROZEN | {"gamma": 0.1},
    "closed form, two grids": FROZEN | {"mirror": False, "levels": ("stage3", "stage3@4")},
    "closed form, uneven grid": FROZEN | {"image_size": 12, "levels": ("stage2@4", "stage3")},
    "closed form, exemplars": FROZEN | {"exemplars": 2, "train_base": True, "epochs": 1},
    "no exemplars": {"method": "finetune", "network": "convnet", "exemplars": 0, "epochs": 1},
    "lucir": {"method": "lucir", "network": "resnet8", "exemplars": 3, "epochs": 1},
    "resized": {
        "method": "icarl",
        "network": "convnet",
        "exemplars": 3,
        "epochs": 1,
        "crop": "resized",
        "image_size": 12,
    },
}
OUTPUTS = {
    "closed form, exemplars": ["analytic", "nme", "ncm", "unknown"],
    "no exemplars": ["ncm", "cnn"],
    "lucir": ["nme", "ncm", "cnn"],
    "resized": ["nme", "ncm", "cnn"],
}


MIRRORED = (
    "closed form, mirrored",
    "closed form, uneven grid",
    "closed form, exemplars",
    "run",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, digits):
    """Make learners of digits 0 to 4, in two groups, each saved in a directory."""
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
            learner.learn(some.pixels, [f"digit {label}" for label in some.labels.tolist()])
        learner.save(path)
        return IncrementalClassifier(path)

    return make


@pytest.mark.parametrize("name", [*LEARNERS, "run"])
def test_any_learner_can_be_exported(saved, digits, tmp_path, name):
    model = saved(name)
    done = model.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(done["file"], providers=["CPUExecutionProvider"])
    outputs = [each.name for each in session.get_outputs()]
    assert outputs == OUTPUTS.get(name, ["analytic", "ncm", "unknown"])
    learner = state.load(Directory(model.path)).model
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["labels"]) == list(model.classes)
    assert json.loads(metadata["outputs"]).keys() == set(outputs)
    assert metadata["default"] == outputs[0]
    size = learner.transform.size
    pixels = resized(
        digits.test.select(range(60)), size
    ).pixels  # some of them of classes that were not learned
    for count in (1, 60):
        found = dict(
            zip(outputs, session.run(outputs, {"pixels": pixels[:count].numpy()}), strict=True)
        )
        unknown = found.pop("unknown", np.zeros(count, dtype=bool))
        for classifier, confidences in found.items():
            recognizer = learner.recognizer(classifier)
            recognizer = replace(recognizer, transform=replace(recognizer.transform, crop="pad"))
            wanted = recognizer.answers(
                ArrayImages(pixels[:count], torch.zeros(count, dtype=torch.int64))
            )
            assert np.abs(confidences - wanted.probabilities.numpy()).max() < 1e-4
            if classifier == "analytic":
                assert unknown.tolist() == wanted.unknown.tolist()
                assert float(metadata["threshold"]) == recognizer.scorer.threshold
                assert 1 / float(metadata["temperature"]) == pytest.approx(recognizer.scorer.scale)
                mirrored = json.loads(metadata["mirrored"])
                assert mirrored == recognizer.scorer.mirrors == (name in MIRRORED)
    if "unknown" in outputs:
        assert 0 < unknown.sum() < 60


def test_neither_images_nor_features_are_inside(saved, digits, tmp_path):
    model = saved("closed form")
    model.export(tmp_path / "model.onnx")
    content = (tmp_path / "model.onnx").read_bytes()
    kept = state.load(Directory(model.path)).model.default.tensors()
    rows = [row for name, block in kept.items() if name.startswith("z.") for row in block]
    assert len(rows) > 100
    assert not any(form.numpy().tobytes() in content for row in rows for form in (row, row.float()))
    assert not any(image.numpy().tobytes() in content for image in digits.train.pixels[:300])


@pytest.mark.parametrize("network", sorted(BACKBONES))
def test_every_network_can_be_exported(digits, tmp_path, network):
    learner = Learner(method="finetune", network=network, image_size=40, epochs=1, threads=1)
    learner.learn(digits.train.select(range(20)))
    assert export(learner.known, tmp_path / "model.onnx")["difference"] < 1e-4


def test_the_exporter_warns_of_nothing_and_names_no_path(saved, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved("lucir").export(tmp_path / "model.onnx")
    content = (tmp_path / "model.onnx").read_bytes()
    assert b"site-packages" not in content
    assert b".py" not in content
