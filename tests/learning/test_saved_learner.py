"""A learner that is saved, loaded, and continued by the command line or with other options."""

import pytest
from tests.helpers import tiny
from tests.helpers.directories import make_model
from tests.helpers.learners import METHODS, assert_same_predictions, counts, made, state, taught
from tests.helpers.tiny import names_of

from geodl.app.classifier import IncrementalClassifier
from geodl.bench.experiment import scenario_of
from geodl.core.errors import ConfigError, StoreError
from geodl.data.images import ArrayImages
from geodl.learning.learner import Learner
from geodl.model.metrics import confusions_of


def test_a_learner_continues_a_run(run, data):
    store = run(method="lucir", distill="geodesic")
    config = tiny.config(method="lucir", distill="geodesic")
    learner, scenario = Learner.load(store.path), scenario_of(config, data)
    assert (learner.classes, learner.phases) == (scenario.classes, 3)
    found = confusions_of(store.phase(2).json("metrics.json"))
    assert counts(learner.evaluate(scenario.test(2))) == counts(found)
    more = tiny.dataset(5, seed=1)
    learner.learn(ArrayImages(more.train.pixels[-9:], more.train.labels[-9:] - 4, ("a new one",)))
    assert learner.classes == (*scenario.classes, "a new one")
    with pytest.raises(StoreError, match="run"):
        learner.save(store.path)


@pytest.mark.parametrize("options", METHODS, ids=tiny.named)
def test_a_saved_learner_predicts_the_same_and_continues_to_the_same_bytes(
    scenario, tmp_path, options
):
    learner = taught(scenario, **options, epochs=1)
    learner.save(tmp_path / "model")
    loaded = Learner.load(tmp_path / "model")
    assert state(loaded) == state(learner)
    test = scenario.test(1)
    assert counts(loaded.evaluate(test)) == counts(learner.evaluate(test))
    assert_same_predictions(loaded, learner, test.pixels)
    for each in (learner, loaded):
        each.learn(scenario.train(2))
    assert state(loaded) == state(learner)
    assert counts(loaded.evaluate(scenario.test(2))) == counts(learner.evaluate(scenario.test(2)))


def test_saving_again_adds_a_state_and_loading_takes_the_last(scenario, tmp_path):
    learner = made(epochs=1)
    for count, phase in enumerate(list(scenario)[:2], 1):
        learner.learn(phase.train)
        learner.save(tmp_path / "model")
        assert Learner.load(tmp_path / "model").phases == count
    assert Learner.load(tmp_path / "model", phase=0).phases == 1
    files = sorted(path.suffix for path in (tmp_path / "model").rglob("*") if path.is_file())
    assert not {".pt", ".pth", ".pkl", ".bin"} & set(files)


def test_other_directories_are_not_loaded(tmp_path):
    with pytest.raises(StoreError):
        Learner.load(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(StoreError):
        Learner.load(tmp_path / "other")
    make_model(tmp_path / "empty")
    with pytest.raises(StoreError, match="nothing was learned yet"):
        Learner.load(tmp_path / "empty")
    learner = made(epochs=1)
    learner.learn(tiny.dataset().train)
    with pytest.raises(StoreError):
        learner.save(tmp_path / "other")
    assert (tmp_path / "other" / "mine.txt").read_text() == "mine"


def test_geodl_predict_opens_a_saved_learner(scenario, learned, tmp_path):
    learned.save(tmp_path / "model")
    model = IncrementalClassifier(tmp_path / "model")
    test = scenario.test(1)
    assert model.classes == learned.classes
    for classifier in (None, "cnn", "ncm"):
        assert_same_predictions(model, learned, test.pixels, classifier=classifier)
    found = model.evaluate(test.pixels, names_of(test)).confusion
    assert found.counts.equal(learned.evaluate(test)["nme"].counts)
    assert [known["name"] for known in model.info()["classes"]] == list(learned.classes)
    assert state(Learner.load(tmp_path / "model")) == state(learned)


def test_geodl_learn_continues_a_saved_learner_and_back(scenario, learned, tmp_path):
    learned.save(tmp_path / "model")
    model = IncrementalClassifier(tmp_path / "model")
    images = scenario.train(2)
    model.learn(images.pixels, names_of(images), epochs=1, threads=1)
    assert model.classes == scenario.classes
    loaded = Learner.load(tmp_path / "model")
    assert loaded.classes == scenario.classes
    assert_same_predictions(loaded, model, scenario.test(2).pixels)


def test_it_continues_with_other_options(scenario, learned):
    config = made(distill="cosine", lr=0.01, epochs=1).config
    before = state(learned)
    learner = Learner(config, model=learned.model)
    assert (learner.classes, learner.phases, learner.config.lr) == (learned.classes, 2, 0.01)
    learner.learn(scenario.train(2))
    assert learner.classes == scenario.classes
    assert (learner.known.config, state(learned)) == (config, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 7.0}, r"scale = 7\.0.*5\.0"),
        ({"network": "resnet8"}, "network = resnet8.*convnet"),
        ({"image_size": 16}, "image_size = 16.*8"),
        ({"method": "finetune"}, "method = finetune.*lucir"),
    ],
)
def test_options_of_a_new_model_cannot_be_changed(learned, options, message):
    with pytest.raises(ConfigError, match=message):
        Learner(made(**{"distill": "geodesic"} | options).config, model=learned.model)
    Learner(made(distill="geodesic", image_size=8).config, model=learned.model)


def test_a_distillation_that_needs_another_head_is_refused(scenario):
    learner = made(method="icarl", epochs=1)
    learner.learn(scenario.train(0))
    with pytest.raises(ConfigError, match=r"distill = 'geodesic'.*cosine.*linear"):
        Learner(made(method="icarl", distill="geodesic").config, model=learner.model)
    other = Learner(made(method="icarl", distill="none").config, model=learner.model)
    assert other.classes == learner.classes
