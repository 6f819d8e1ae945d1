"""A server over real HTTP on this machine: predictions, exports, and what its schema promises."""

import base64
import importlib
import itertools
import json
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from PIL import Image
from tests.helpers.serving import TOKEN, Client, encoded, pictures, refused, running

from geodl.app import classifier as classifiers
from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve import batching
from geodl.app.serve.batching import Predictor
from geodl.app.serve.uploads import SMALL


def test_predictions_are_those_of_the_model(reader, base, digits, tmp_path):
    images = [content for label in (0, 1, 2) for content in pictures(digits, label, slice(30, 33))]
    paths = [tmp_path / f"{i}.png" for i in range(len(images))]
    for path, content in zip(paths, images, strict=True):
        path.write_bytes(content)
    expected = IncrementalClassifier(base).predict(paths, top=2)
    answer = reader.predict(*images, top=2)
    assert answer.status_code == 200, answer.text
    found = answer.json()["predictions"]
    assert [each["index"] for each in found] == list(range(9))
    for each, path, other in zip(found, paths, expected, strict=True):
        known = other.to_json()
        confidences = [entry.pop("confidence") for entry in each["top"]]
        assert confidences == pytest.approx([e.pop("confidence") for e in known["top"]], abs=1e-5)
        for name in ("confidence", "score"):
            assert each.pop(name) == pytest.approx(known.pop(name), abs=1e-5)
        del each["index"], each["similar"]
        assert each == known | {"name": path.name}


def test_unreadable_images_are_skipped_with_a_reason(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    large, tiny = encoded(Image.new("1", (10_000, 10_000))), encoded(Image.new("RGB", (2, 2)))
    answer = reader.predict(b"garbage", good, b"", good[:60], large, tiny).json()
    assert [each["index"] for each in answer["predictions"]] == [1]
    words = ["not an image", "empty", "truncated", "limit", "2 x 2"]
    assert [each["name"] for each in answer["skipped"]] == [f"{i}.png" for i in (0, 2, 3, 4, 5)]
    for each, word in zip(answer["skipped"], words, strict=True):
        assert word in each["reason"]


def test_file_names_are_only_shown(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    names = ["../../etc/passwd", "C:\\up\\x.png", "a\x1b[31m.png"]
    files = [("images", (name, good)) for name in names]
    found = reader.post("/api/v1/predict", files=files).json()["predictions"]
    assert [each["name"] for each in found][:2] == ["passwd", "x.png"]
    assert all(each["name"].isprintable() for each in found)


def test_similar_images_need_the_token(reader, digits):
    good = pictures(digits, 0, slice(30, 31))[0]
    (found,) = reader.predict(good, similar=True).json()["predictions"]
    values = [each["similarity"] for each in found["similar"]]
    assert len(values) == 4
    assert values == sorted(values, reverse=True)
    kind, _, content = found["similar"][0]["image"].partition(",")
    assert kind == "data:image/webp;base64"
    (itself,) = reader.predict(base64.b64decode(content), similar=True).json()["predictions"]
    assert itself["similar"][0]["similarity"] == pytest.approx(1, abs=1e-3)
    with Client(reader.url, token=None) as stranger:
        assert stranger.predict(good, similar=True).json()["predictions"][0]["similar"] == []


def test_concurrent_predictions(reader, digits):
    images = [content for label in (0, 1) for content in pictures(digits, label, slice(30, 55))]

    def top(content):
        found = reader.predict(content).json()["predictions"][0]["top"]
        return {each["label"]: each["confidence"] for each in found}

    right = [top(content) for content in images]

    def one(i):
        if i % 10 == 0:  # a client that sends garbage
            return reader.predict(b"garbage").json()["skipped"][0]["reason"] == "not an image"
        found, known = top(images[i % 50]), right[i % 50]
        return list(found) == list(known) and found == pytest.approx(known, abs=1e-5)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))


class Held(IncrementalClassifier):
    """A model whose reads wait for permission."""

    asked, allowed = Event(), Event()

    def directory(self):
        self.asked.set()
        assert self.allowed.wait(60)
        return super().directory()


def test_the_queue_of_predictions(base, digits):
    """A cancelled request does not affect others, and the owner is served first."""
    predictor, seen = Predictor(Held(base)), IncrementalClassifier(base).recognizer().transform
    (content,) = pictures(digits, 0, slice(1))
    first, owner, *others = [Future() for _ in range(102)]
    done = []
    for name, answer in (("last", others[-1]), ("owner", owner)):
        answer.add_done_callback(lambda _, name=name: done.append(name))
    with ThreadPoolExecutor(1) as pool:
        predicting = pool.submit(predictor.predict, content, seen, 1, False, first)
        assert Held.asked.wait(60)
        for answer in others:  # none of them waits for the one that predicts
            predictor.predict(content, seen, 1, False, answer)
        predictor.predict(content, seen, 1, True, owner)
        assert others[1].cancel()
        Held.allowed.set()
        predicting.result(timeout=60)
    answered = [each.result(timeout=0) for each in (first, others[0], others[-1], owner)]
    assert all(each.prediction.label for each in answered)
    assert done == ["owner", "last"]


def test_the_directory_is_read_again_only_after_a_commit(model):
    class Counted(IncrementalClassifier):
        reads = 0

        def directory(self):
            self.reads += 1
            return super().directory()

    predictor = Predictor(counted := Counted(model))
    first = predictor.current()
    reads = counted.reads
    assert predictor.current() is first
    assert counted.reads == reads
    IncrementalClassifier(model).rename("digit 0", "zero")
    assert predictor.current().recognizer.classes[0] == "zero"
    other = torch.zeros(3, 40, 40, dtype=torch.uint8)
    assert predictor.current().stack([other]).pixels.shape[2:] == (first.side, first.side)


def test_a_class_that_is_removed_during_a_prediction_mixes_up_no_labels(model, monkeypatch):
    """Similar images come from the state that predicts."""
    load, other = classifiers.load, IncrementalClassifier(model)
    right = Counter(other.classes[label] for label in other.validation.labels.tolist())

    def overtaken(store):
        found = load(store)
        monkeypatch.setattr(classifiers, "load", load)
        other.remove("digit 0")
        return found

    monkeypatch.setattr(classifiers, "load", overtaken)
    now = Predictor(IncrementalClassifier(model)).current()
    found = Counter(now.recognizer.classes[label] for label in now.state.validation.labels.tolist())
    assert other.classes == ("digit 1",)
    assert found == right


def test_an_unexpected_error_while_decoding_is_answered(reader, digits, monkeypatch):
    def broken(image, transform):
        raise MemoryError

    monkeypatch.setattr(batching, "decode", broken)
    with Client(reader.url) as client:  # the server closes this connection
        refused(client.predict(*pictures(digits, 0, slice(1))), 500, "MemoryError")


def test_small_requests_stay_in_memory_and_larger_ones_go_to_files(reader, digits, monkeypatch):
    seen, decode = [], batching.decode
    monkeypatch.setattr(
        batching, "decode", lambda image, size: seen.append(image) or decode(image, size)
    )
    small, large = pictures(digits, 0, slice(1))[0], b"x" * (SMALL + 1)
    assert len(reader.predict(small, small).json()["predictions"]) == 2
    answer = reader.predict(small, large).json()
    assert (len(answer["predictions"]), len(answer["skipped"])) == (1, 1)
    assert [type(image) is bytes for image in seen] == [True, True, False, False]
    assert not any(image.exists() for image in seen[2:])


def test_the_report(reader):
    page = reader.get("/api/v1/export/report")
    assert page.status_code == 200, page.text
    assert page.headers["content-disposition"].startswith("attachment")
    assert "<!doctype html>" in page.text[:100].lower()


@pytest.mark.slow
def test_the_onnx_file(client):
    import onnxruntime

    def labels():
        content = client.get("/api/v1/export/onnx").content
        about = onnxruntime.InferenceSession(content).get_modelmeta().custom_metadata_map
        return json.loads(about["labels"])

    assert labels() == ["digit 0", "digit 1"]
    client.post("/api/v1/classes/rename", json={"old": "digit 1", "new": "one"})
    assert labels() == ["digit 0", "one"]


@pytest.mark.slow
def test_responses_follow_the_schema(model):
    schemathesis = pytest.importorskip("schemathesis")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    # No schema says that there are as many labels as images, or which classes the model knows; and in a multipart request
    # everything is text, so that nothing is of a wrong type.
    checks = importlib.import_module("schemathesis.specs.openapi.checks")
    allowed, forbidden = checks.positive_data_acceptance, checks.negative_data_rejection
    negative = schemathesis.GenerationMode.NEGATIVE
    with running(model, options={"epochs": 1, "threads": 1}) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        # A stream never ends, and files take seconds each.
        schema = schema.exclude(path_regex="/events|/export/")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) == 22
        for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
            if mode is negative and not (operation.body or operation.query):
                continue  # there is nothing that could be wrong

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=25, database=None, suppress_health_check=list(HealthCheck))
            def check(case):
                untyped = "multipart" in (case.media_type or "")
                left_out = [allowed, *([forbidden] if untyped else [])]
                case.call_and_validate(headers=headers, excluded_checks=left_out)

            check()
        with Client(url) as client:
            assert client.get("/api/v1/model").status_code == 200
