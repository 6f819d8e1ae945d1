"""Predicting and evaluating."""

import numpy as np
import pytest
import torch
from tests.helpers.directories import FILES, make_model, saved
from tests.helpers.folders import write_digits
from torch.nn.functional import cosine_similarity

from geodl.app import state
from geodl.app.classifier import IncrementalClassifier
from geodl.core.errors import DataError, GeodlError
from geodl.store import Directory


def normalized(pixels, transform):
    """Give the network's input in float64."""
    mean, std = (
        torch.tensor(part).double()[:, None, None] for part in (transform.mean, transform.std)
    )
    return (pixels.double() / 255 - mean) / std


def test_models_of_other_versions_open(taught, weeks, tmp_path):
    now = saved(Directory(taught.path), 0)
    config = now.extra["config"] | {"an option of another version": 7}
    other = make_model(tmp_path / "other")
    with other.lock():
        contents = (now.model, now.memory, now.metrics, now.extra | {"config": config})
        other.commit(dict(zip(FILES, contents, strict=True)), {"action": "learn"})
    theirs = IncrementalClassifier(other.path).predict(weeks[0])
    assert np.array_equal(taught.predict(weeks[0]).probabilities, theirs.probabilities)


def test_predictions_are_those_of_the_formula(taught, weeks, digits):
    now = state.load(Directory(taught.path))
    pixels, network = digits.train.pixels[:6], now.model.network.double().eval()
    with torch.no_grad():
        output = network(normalized(pixels, now.transform))
    means = now.model.classifiers["nme"].means.double()
    cosines = cosine_similarity(output.pooled[:, None], means[None], dim=2)
    for classifier, scores in (("nme", network.head.scale * cosines), ("cnn", output.logits)):
        wanted = scores.softmax(dim=1)
        found = taught.predict(pixels, classifier=classifier, top=2)
        for each, row in zip(found, wanted, strict=True):
            named = dict(zip(now.names, row.tolist(), strict=True))
            assert dict(each.top) == pytest.approx(named, abs=1e-5)
            assert each.top[0][1] >= each.top[1][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top = 0"),
        ({"classifier": "svm"}, "classifier = 'svm'"),
        ({"images": "nowhere.png", "strict": True}, "no such file"),
    ],
)
def test_wrong_ways_to_predict_are_named(taught, weeks, options, message):
    with pytest.raises(GeodlError, match=message):
        taught.predict(**{"images": weeks[0]} | options)


def test_unknown_classes_are_skipped_in_an_evaluation(taught, weeks, tmp_path, digits):
    found = taught.evaluate(write_digits(tmp_path / "test", digits, (1, 9), 5))
    assert found.images == 5
    assert found.skipped == (("digit 9", "the model does not know this class"),)
    assert found.per_class["digit 0"] is None
    with pytest.raises(DataError, match="does not know"):
        taught.evaluate(tmp_path / "test", strict=True)
    with pytest.raises(DataError, match="no image of a class that the model knows"):
        taught.evaluate(write_digits(tmp_path / "only", digits, (9,), 5))
