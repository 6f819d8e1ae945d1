"""Class names, labels, odd arrays and wrong arguments."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.helpers.tiny import dataset, shown

from geodl.app.classifier import IncrementalClassifier
from geodl.config import all_options
from geodl.core.errors import ConfigError, DataError, GeodlError
from geodl.data import Batches, Transform, evaluation, load
from geodl.data.arrays import as_pixels
from geodl.data.intake import as_images, take
from geodl.data.names import LONGEST, class_name, fault, numbered, plain_labels
from geodl.learning.learner import Learner

BAD = {
    "": "it is empty",
    "  ": "it is empty",
    "a\nb": "not valid text",
    "\x1b[31m": "not valid text",
    "half \ud800": "not valid text",
    "x" * (LONGEST + 1): "has 256 characters, 255 are allowed",
}
DATA = dataset(classes=2, train=6)
PIXELS, _ = shown(DATA.train)
QUICK = {"network": "convnet", "epochs": 1, "threads": 1}


def labels(*names):
    return [names[label] for label in DATA.train.labels.tolist()]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_name_is_refused_wherever_it_comes_from(tmp_path, name):
    model = IncrementalClassifier(tmp_path / "model")
    named = labels("good", name)
    for call in (
        lambda: model.learn(PIXELS, named, **QUICK),
        lambda: model.learn(PIXELS, DATA.train.labels, classes=["good", name], **QUICK),
        lambda: Learner(**QUICK).learn(DATA.train.relabel(torch.arange(2), ("good", name))),
        lambda: load("arrays", x_train=PIXELS, y_train=named),
    ):
        with pytest.raises(DataError, match=BAD[name]):
            call()
    assert not model.path.exists()
    model.learn(PIXELS, labels("a", "b"), **QUICK)
    for change in (model.rename, Learner.load(model.path).rename):
        with pytest.raises(GeodlError, match=BAD[name]):
            change("a", name)
    assert model.classes == ("a", "b")


@pytest.mark.parametrize(
    ("labels", "classes", "rows", "names"),
    [
        ([3, 10, 3], None, [0, 1, 0], ("3", "10")),
        ([1.0, 0, 2.0], None, [1, 0, 2], ("0", "1", "2")),  # 1.0 is 1
        ([0.5, -1, 0.25], None, [2, 0, 1], ("-1", "0.25", "0.5")),  # numbers by their values
        (["a10", "a9", "B"], None, [1, 0, 2], ("a9", "a10", "B")),  # texts in natural order
        (["ne\u0301", "n\u00e9"], None, [0, 0], ("n\u00e9",)),  # two forms of one character
        (["0", 0, 0.0, np.float32(0), np.int8(0)], None, [0] * 5, ("0",)),
        ([1, 0.0, True], ["b", "a"], [1, 0, 1], ("b", "a")),  # whole numbers are positions
        (["a", "b"], ["b", "a"], [1, 0], ("b", "a")),
        ([[1], [0]], None, [1, 0], ("0", "1")),
        (torch.tensor([[1.0], [0.0]]), None, [1, 0], ("0", "1")),
        (np.array(["x", "y"]), None, [0, 1], ("x", "y")),
        ([2.5, 1], ["2.5", "1"], [0, 1], ("2.5", "1")),
    ],
)
def test_labels_of_all_types_are_numbered_by_one_rule(labels, classes, rows, names):
    found, known = numbered(plain_labels(labels), classes)
    assert (found.tolist(), known) == (rows, names)
    assert found.dtype == torch.int64


@given(st.text())
def test_accepted_names_are_printable_and_stable(text):
    try:
        name = class_name(text)
    except DataError:
        return
    assert fault(name) is None
    assert class_name(name) == name
    assert "\n" not in name
    name.encode()


@pytest.mark.parametrize(
    "label",
    [None, b"cat", float("nan"), ["a", "b"], 10**5000],
    ids=lambda each: type(each).__name__,
)
def test_labels_that_are_not_names_are_refused(label):
    named = labels("a", "b")
    named[3] = label
    with pytest.raises(DataError) as caught:
        take(PIXELS, named)
    assert str(caught.value).isprintable()


def test_names_that_do_not_fit_the_labels_are_refused():
    numbers = DATA.train.labels
    with pytest.raises(DataError, match="two classes are called 'a'"):
        take(PIXELS, numbers, ["a", "a"])
    with pytest.raises(DataError, match="label 1 has no name: 1 class name given"):
        take(PIXELS, numbers, ["a"])
    for names in ("ab", torch.tensor(2), np.array("a")):
        with pytest.raises(DataError, match="expected a list of class names"):
            take(PIXELS, numbers, names)
    with pytest.raises(DataError, match="label 'c' is not one of the classes given"):
        take(PIXELS, labels("a", "c"), ["a", "b"])
    with pytest.raises(DataError, match="label 1 has no name"):
        Learner(**QUICK).learn(DATA.train.relabel(torch.arange(2), ("a",)))


# ------------------------------------------------------------------------------------------------------------- arrays


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, about kinds that are prototypes or going
    QUANTIZED = torch.quantize_per_tensor(torch.zeros(2, 3, 8, 8), 0.1, 0, torch.quint8)
    NESTED = torch.nested.nested_tensor(
        [torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)], layout=torch.strided
    )
ODD = {
    "no height": torch.zeros(2, 3, 0, 8),
    "complex": torch.zeros(2, 3, 8, 8, dtype=torch.complex64),
    "bool": torch.zeros(2, 3, 8, 8, dtype=torch.bool),
    "sparse": torch.zeros(2, 3, 8, 8).to_sparse(),
    "meta": torch.zeros(2, 3, 8, 8, device="meta"),
    "quantized": QUANTIZED,
    "nested": NESTED,
    "objects": np.array([[[None]]], dtype=object),
    "texts": np.array([[["a"]]]),
    "huge": torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 3, 10**5, 10**5),
    "no axes": np.float64(3),
    "five axes": np.zeros((1, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_arrays_are_refused(kind):
    for call in (
        lambda: as_pixels(ODD[kind]),
        lambda: as_images(ODD[kind]),
        lambda: take(ODD[kind], ["a", "b"]),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "kind", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.int8]
)
def test_other_kinds_of_numbers_are_read(kind):
    one = 255 if kind.is_floating_point else 1
    assert as_pixels(torch.ones(2, 3, 8, 8).to(kind)).max() == one


def test_containers_of_geodl_are_accepted_unchanged():
    assert as_images(DATA.train)[0] is DATA.train
    found = take(DATA.train)
    assert (found.classes, len(found.names)) == (DATA.classes, len(DATA.train))
    assert torch.equal(found.images.labels, DATA.train.labels)
    with pytest.raises(DataError, match="got ndarray"):
        next(evaluation(PIXELS, Transform(8, (0, 0, 0), (1, 1, 1))))
    with pytest.raises(DataError, match="got ndarray"):
        Batches(PIXELS, Transform(8, (0, 0, 0), (1, 1, 1)), 2, 0)


def test_lists_of_odd_things_are_refused(tmp_path):
    picture = Image.new("RGB", (8, 8))
    picture.save(tmp_path / "a.png")
    closed = Image.open(tmp_path / "a.png")
    closed.close()
    for odd in ([5], [None], [[1, 2], [3]], [closed], [{}], 5, None, object(), {1: 2}):
        with pytest.raises(DataError) as caught:
            as_images(odd)
        assert str(caught.value).isprintable()


class Broken:
    def __len__(self):
        return 3

    def __getitem__(self, i):
        raise RuntimeError("two\nlines")


def test_a_failing_dataset_is_named():
    with pytest.raises(DataError, match="the Broken cannot be read as a dataset"):
        take(Broken())
    with pytest.raises(DataError, match="the dict cannot be read as a dataset"):
        take({"a": 1})


# ---------------------------------------------------------------------------------------------------------- arguments


def test_wrong_arguments_are_refused(tmp_path):
    for path in (5, b"model", "a\0b"):
        with pytest.raises(ConfigError, match="model: expected a path, got"):
            IncrementalClassifier(path)
    model = IncrementalClassifier(tmp_path / "model")
    with pytest.raises(ConfigError, match="listener: "):
        model.learn(PIXELS, DATA.train.labels, listener=5)
    model.learn(PIXELS, DATA.train.labels, **QUICK)
    wrong = {"top": (0, "x", 1.5), "workers": (-1, 10**6), "threshold": ("x",)}
    for key, values in (wrong | {"accelerator": ("tpu", 5), "classifier": (5,)}).items():
        for value in values:
            with pytest.raises(ConfigError, match=f"{key} = "):
                model.predict(PIXELS, **{key: value})
    with pytest.raises(ConfigError, match="data_dir: expected a file or folder"):
        load("folder", 5)
    with pytest.raises(ConfigError, match=r"data = .*allowed values"):
        load(5)


def test_every_integer_option_has_an_upper_bound():
    """The limit is in the message; the shapes of lists have none."""
    options = all_options()
    whole = [name for name, info in options.items() if info.annotation in (int, int | None)]
    assert {"padding", "image_size", "epochs", "batch_size", "exemplars", "workers"} <= set(whole)
    for name in whole:
        limits = options[name].metadata
        assert any(hasattr(each, "le") or hasattr(each, "lt") for each in limits), name
