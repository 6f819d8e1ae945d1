"""What a classifier learns from: folders, arrays, datasets, pictures in memory; and what is no input."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from tests.helpers.directories import contents
from tests.helpers.folders import QUICK, rows_of, write_digits
from tests.helpers.pictures import noise

from geodl.app import preparing, state
from geodl.app.classifier import IncrementalClassifier
from geodl.core.errors import ConfigError, DataError, GeodlError
from geodl.data import intake as intakes
from geodl.data import squares
from geodl.store import Directory


def test_one_class_alone_is_not_trained(classifier, tmp_path, digits):
    with pytest.raises(ConfigError, match="two classes"):
        classifier.learn(write_digits(tmp_path / "a", digits, (7,), 10), **QUICK)
    assert not classifier.path.exists()


def test_one_image_in_each_class(classifier, tmp_path, digits):
    result = classifier.learn(write_digits(tmp_path / "a", digits, (0, 1), 1), **QUICK)
    assert result.accuracy is None
    assert any("digit 0 (1)" in sentence for sentence in result.warnings)
    assert len(classifier.predict(tmp_path / "a")) == 2


def test_arrays_and_datasets_learn_as_folders_do(tmp_path, taught, digits):
    rows = [*rows_of(digits.train, 0, 15), *rows_of(digits.train, 1, 15)]
    pixels = digits.train.pixels[rows].permute(0, 2, 3, 1).numpy()
    labels = [f"digit {label}" for label in digits.train.labels[rows].tolist()]

    class Pairs(torch.utils.data.Dataset):
        classes = ("digit 0", "digit 1")

        def __len__(self):
            return len(rows)

        def __getitem__(self, i):
            return digits.train.decode(rows[i]), np.int64(digits.train.labels[rows[i]])

    # the order of the files in a folder is that of their numbers, and so is that of the rows
    folder = state.load(Directory(taught.path))
    several = (list(pixels), np.array(labels)[:, None])
    for name, given in {"array": (pixels, labels), "dataset": (Pairs(),), "list": several}.items():
        model = IncrementalClassifier(tmp_path / name)
        model.learn(*given, **QUICK)
        other = state.load(Directory(model.path))
        assert other.names == folder.names
        assert torch.equal(other.model.network.head.weight, folder.model.network.head.weight)
        means = [each.model.classifiers["nme"].means for each in (other, folder)]
        assert torch.equal(*means)
    assert taught.evaluate(pixels, labels).images == 30
    found = (model.predict(pixels[:3]), taught.predict([digits.train.decode(i) for i in rows[:3]]))
    assert [each.label for each in found[0]] == [each.label for each in found[1]]


def test_pictures_in_memory_are_seen_as_files_are(taught, tmp_path):
    pixels = noise(20, 30, 3)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for name, picture, options in (
        ("turned.jpg", Image.fromarray(pixels), {"exif": turned}),
        ("printed.jpg", Image.fromarray(pixels).convert("CMYK"), {}),
        ("deep.tif", Image.fromarray(np.float32(pixels[..., 0] / 255)), {}),
    ):
        picture.save(tmp_path / name, **options)
        (file,) = taught.predict(tmp_path / name)
        (memory,) = taught.predict(Image.open(tmp_path / name))
        assert memory.top == file.top
    sizes = [pixels, pixels[:10], torch.from_numpy(pixels).permute(2, 0, 1)]
    assert len(taught.predict(sizes)) == 3
    for one in (pixels, torch.from_numpy(pixels).permute(2, 0, 1)):
        with pytest.raises(DataError, match="may be one color image or"):
            taught.predict(one)


@pytest.mark.parametrize(
    ("source", "labels", "message"),
    [
        (np.zeros((2, 8, 8), np.uint8), [1], "2 images with 1 label"),
        ([1, 2], None, r"a dataset of \(image, label\) pairs"),
        (7, None, "expected a folder, .*got int"),
        (np.zeros((0, 8, 8), np.uint8), [], "no images given"),
        ("nowhere", None, "nowhere: not a folder"),
        ("nowhere", [1], "labels: not allowed with nowhere"),
    ],
)
def test_what_cannot_be_learned_is_named(classifier, source, labels, message):
    with pytest.raises(DataError, match=message):
        classifier.learn(source, labels, **QUICK)
    assert not classifier.path.exists()


def test_a_network_that_does_not_exist_is_named_before_any_image_is_read(
    classifier, weeks, tmp_path, monkeypatch
):
    heard = []
    monkeypatch.setitem(sys.modules, "timm", None)
    weights = {"weights": tmp_path / "nothing.safetensors"}
    for options in ({"network": "resnet99"}, {"network": "timm:resnet18"}, weights):
        with pytest.raises(GeodlError, match=r"resnet99|\[timm\]|nothing\.safetensors"):
            classifier.learn(weeks[0], listener=heard.append, **QUICK, **options)
    assert heard == []
    assert not classifier.path.exists()


def test_files_that_do_not_fit_in_memory_give_the_same_model(taught, weeks, tmp_path, monkeypatch):
    taught.learn(weeks[1], **QUICK)
    monkeypatch.setattr(squares, "IN_MEMORY", 0)
    other = IncrementalClassifier(tmp_path / "other")
    for week in weeks:
        other.learn(week, **QUICK)
    assert contents(other.path) == contents(taught.path)


def test_a_thousand_classes(classifier):
    pixels, names = noise(1000, 4, 4), [f"class {i}" for i in range(1000)]
    result = classifier.learn(pixels, names, epochs=1, threads=1, network="convnet")
    assert len(result.classes) == 1000
    assert result.classes[10] == "class 10"
    assert any("and 992 more" in sentence for sentence in result.warnings)
    assert len(classifier.predict(pixels[:5], top=3)[0].top) == 3


def test_model_and_images_stay_apart(weeks, tmp_path):
    for path in (weeks[0], weeks[0] / "model", tmp_path):
        with pytest.raises(ConfigError, match="one is inside the other"):
            IncrementalClassifier(path).learn(weeks[0], **QUICK)
    (tmp_path / "loop").symlink_to("loop")  # a circle of links
    with pytest.raises(DataError, match="loop"):
        IncrementalClassifier(tmp_path / "model").learn(tmp_path / "loop", **QUICK)
    with pytest.raises(GeodlError, match="loop"):
        IncrementalClassifier(tmp_path / "loop").learn(weeks[0], **QUICK)


def test_color_pictures_are_mirrored_and_grey_ones_are_not(tmp_path):
    given = ("grey", noise(8, 8, 8), False), ("color", noise(8, 8, 8, 3), True)
    for name, pixels, flip in given:
        model = IncrementalClassifier(tmp_path / name)
        model.learn(pixels, [0, 1] * 4, network="convnet", **QUICK)
        transform = state.load(Directory(model.path)).transform
        assert transform.flip is flip
        assert transform.mean == pytest.approx([pixels.mean() / 255] * 3, abs=0.03)


def test_steps_are_prepared_without_contradictions(weeks):
    intake = intakes.take(weeks[0])
    decoded = squares.decode(intake, 8, 1)
    first, *_, last = decoded.digests
    twice = replace(decoded, digests=(first, first, last, *decoded.digests[3:]))
    ready = preparing.prepare(intake, twice, None, 1)
    assert len(ready.images) == 27
    assert ready.problems == (
        (intake.names[1], f"the same picture as {intake.names[0]}"),
        (intake.names[2], f"the same picture as {intake.names[-1]} in another class"),
        (intake.names[-1], f"the same picture as {intake.names[2]} in another class"),
    )
