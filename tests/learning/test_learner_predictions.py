"""What a learner predicts and how it is evaluated."""

import numpy as np
import pytest
import torch
from tests.helpers.learners import counts, made

from geodl.core.errors import ConfigError, DataError, TrainingError
from geodl.data.images import concat
from geodl.learning.learner import Learner
from geodl.model.features import class_means, nearest_mean
from geodl.model.metrics import Confusion
from geodl.model.model import Model


def test_the_oracle_is_there_only_with_the_old_images(scenario, learned):
    seen = concat([scenario.train(0), scenario.train(1)])
    assert "ame" not in learned.evaluate(scenario.test(1))
    found = learned.evaluate(scenario.test(1), seen=seen)
    assert set(found) == {"cnn", "nme", "ncm", "ame"}
    train, test = (learned.features(learned.rows_of(each)) for each in (seen, scenario.test(1)))
    scores = nearest_mean(test.pooled, class_means(train.pooled, train.labels, 3))
    expected = Confusion.of(test.labels, scores.argmax(dim=1), learned.classes)
    assert found["ame"].counts.equal(expected.counts)


def test_the_oracle_can_be_limited_to_a_few_images(scenario):
    learner, train, test = made(ame_images=1), scenario.train(0), scenario.test(0)
    learner.learn(train)
    first = train.select([int((train.labels == label).nonzero()[0]) for label in (0, 1)])
    few, one = (counts(learner.evaluate(test, seen=each))["ame"] for each in (train, first))
    assert few == one


def test_a_class_that_was_not_learned_is_named(scenario, learned):
    with pytest.raises(DataError, match=f"{scenario.classes[3]!r}"):
        learned.evaluate(scenario.test(2))
    with pytest.raises(DataError, match="elephant"):
        learned.evaluate(scenario.test(0).pixels, ["elephant"] * 10)


def test_nothing_can_be_asked_before_something_is_learned(scenario, tmp_path):
    for ask in (
        lambda learner: learner.predict(scenario.test(0).pixels),
        lambda learner: learner.evaluate(scenario.test(0)),
        lambda learner: learner.save(tmp_path / "m"),
        lambda learner: learner.known,
    ):
        with pytest.raises(ConfigError, match="nothing was learned"):
            ask(made())
    assert not (tmp_path / "m").exists()


def test_predictions_are_labels_and_probabilities(scenario, learned):
    test = scenario.test(1)
    found = learned.predict(test.pixels)
    assert found.classes == learned.classes
    assert (found.labels.shape, found.probabilities.shape) == ((15,), (15, 3))
    assert found.probabilities.dtype == np.float32
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, rtol=1e-5)
    assert found.labels.tolist() == [learned.classes[i] for i in found.probabilities.argmax(axis=1)]
    assert [each.label for each in found] == found.labels.tolist()
    highest = found.probabilities.max(axis=1).tolist()
    assert [each.confidence for each in found] == pytest.approx(highest)
    assert (found.skipped, len(found)) == ((), 15)


@pytest.mark.parametrize("classifier", ["cnn", "nme", "ncm", None])
def test_every_classifier_predicts_what_it_is_evaluated_by(scenario, learned, classifier):
    test = learned.rows_of(scenario.test(1))
    found = learned.predict(test.pixels, classifier=classifier)
    predictions = torch.tensor([learned.classes.index(label) for label in found.labels])
    expected = learned.evaluate(scenario.test(1))[classifier or "nme"]
    assert Confusion.of(test.labels, predictions, learned.classes).counts.equal(expected.counts)


def test_several_classes_of_an_image(scenario, learned):
    found = learned.predict(scenario.test(0).decode(0), top=2)
    assert len(found[0].top) == 2
    assert found[0].top[0][1] >= found[0].top[1][1]
    assert len(learned.predict(scenario.test(0).decode(0), top=99)[0].top) == 3
    with pytest.raises(ConfigError, match="top = 0"):
        learned.predict(scenario.test(0).pixels, top=0)


def test_what_cannot_be_read_is_skipped_and_named(scenario, learned, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    scenario.test(0).decode(0).save(tmp_path / "good.png")
    found = learned.predict([tmp_path / "bad.png", tmp_path / "good.png"])
    assert [each.name for each in found] == [str(tmp_path / "good.png")]
    assert [name for name, _ in found.skipped] == [str(tmp_path / "bad.png")]
    assert found.probabilities.shape == (1, 3)
    with pytest.raises(DataError, match=r"bad\.png"):
        learned.predict(tmp_path / "bad.png", strict=True)


def test_scores_that_are_not_finite_are_an_error():
    learner = Learner(method="finetune", network="convnet", epochs=1, threads=1)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), dtype=np.uint8)
    learner.learn(pixels, ["a", "b"] * 4)
    with torch.no_grad():
        for parameter in learner.model.network.parameters():
            parameter.fill_(3e38)
    for use in (learner.predict, lambda x: learner.evaluate(x, ["a", "b"] * 4)):
        with pytest.raises(TrainingError, match="NaN or infinite"):
            use(pixels)


def test_a_device_replaces_the_configured_one(scenario, monkeypatch):
    learner, used, recognizer = made(accelerator="cpu"), [], Model.recognizer
    learner.learn(scenario.train(0))

    def asked(model, *given, **how):
        used.append(how["accelerator"])
        return recognizer(model, *given, **how)

    monkeypatch.setattr(Model, "recognizer", asked)
    for accelerator in ("auto", "cpu"):
        assert len(learner.predict(scenario.test(0).pixels, accelerator=accelerator))
    assert used == [None, "cpu"]
    with pytest.raises(ConfigError, match="accelerator"):
        learner.predict(scenario.test(0).pixels, accelerator="tpu")
