"""The Learner in Python: options, what it takes, evaluation, prediction, saving, and that a failure changes nothing."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests import tiny
from tests.phases import KeptProgress
from torch.utils.data import TensorDataset

import geodl
from geodl.classifier import IncrementalClassifier
from geodl.config import RunConfig, groups_of_options
from geodl.data import ClassIncremental
from geodl.data.images import ArrayImages, FileImages, concat
from geodl.errors import ConfigError, DataError, GeodlError, StoreError, TrainingError
from geodl.events import Event, StageStarted
from geodl.experiment import results_of, run_config, scenario_of
from geodl.learner import MODEL, Learner
from geodl.metrics import Confusion, Trajectory, confusions_of, to_metrics
from geodl.predictors import class_means, nearest_mean
from geodl.store import RunDirectory
from geodl.training import Interrupted

ABOUT_DATA = set(groups_of_options(RunConfig)["Data"])
OPTIONS = {name: value for name, value in tiny.OPTIONS.items() if name not in ABOUT_DATA}


def made(**options: Any) -> Learner:
    """Return a learner with the tiny options, some replaced."""
    return Learner(**OPTIONS | options)


@pytest.fixture(scope="module")
def scenario() -> ClassIncremental:
    return ClassIncremental(tiny.dataset(), base=2, phases=2)


@pytest.fixture(scope="module")
def learned(scenario) -> Learner:
    """Two phases of three, learned once; for tests that only look at it."""
    learner = made(distill="geodesic")
    for phase in list(scenario)[:2]:
        learner.learn(phase.train)
    return learner


def state(learner: Learner) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return all that a learner consists of: the bytes of its tensors, and its facts."""
    parts = {f"{i} {name}": tensor for i, part in enumerate(learner.tensors()) for name, tensor in part.items()}
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in parts.items()}, learner.facts()


def counts(found: dict[str, Confusion]) -> dict[str, list[list[int]]]:
    return {name: confusion.counts.tolist() for name, confusion in found.items()}


# -- options


def test_the_options_are_those_of_the_command_line():
    learner = made(method="lucir", distill="geodesic", exemplars=7, subspace_dim=9)
    assert (learner.config.distill, learner.config.exemplars, learner.config.subspace_dim) == ("geodesic", 7, 9)
    assert learner.config.margin == 0.5  # the method's own default
    assert Learner().config.hash() == Learner(method="lucir").config.hash()
    assert (learner.classes, learner.network, learner.phases) == ((), None, 0)


@pytest.mark.parametrize("name", sorted(ABOUT_DATA))
def test_options_about_where_images_come_from_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: an option about where images come from"):
        made(**{name: None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 3}, r"epoch \(option\): no such option; did you mean epochs\?"),
        ({"method": "lucirr"}, r"method = 'lucirr' \(option\)"),
        ({"distill": "geo"}, r"distill = 'geo' \(option\): none, lwf, cosine, geodesic are allowed"),
        ({"subspace_dim": 3}, r"subspace_dim \(option\): an option of the distillation geodesic"),
        ({"preset": "nope"}, "preset = 'nope'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Learner(**options)


def test_a_preset_without_what_it_says_about_data():
    learner = Learner(preset="digits", epochs=1)
    assert (learner.config.network, learner.config.epochs, learner.config.flip) == ("resnet8", 1, False)
    for name in ABOUT_DATA:
        assert getattr(learner.config, name) == RunConfig.model_fields[name].default


def test_it_is_a_public_name_that_takes_what_the_documentation_shows():
    assert geodl.Learner is Learner
    assert {"images", "labels"} <= set(inspect.signature(Learner.learn).parameters)
    assert {"images", "labels", "old"} <= set(inspect.signature(Learner.evaluate).parameters)


# -- what it takes


def test_a_scenario_in_a_notebook(scenario):
    learner = made(distill="geodesic")
    known: tuple[str, ...] = ()
    for phase in scenario:
        learner.learn(phase.train)
        known += phase.classes
        found = learner.evaluate(phase.test)
        assert learner.classes == known
        assert set(found) == {"cnn", "nme", "ncm"}
        assert all(isinstance(confusion, Confusion) and confusion.classes == known for confusion in found.values())
        assert found["nme"].images == len(phase.test)
    assert found["nme"].accuracy > 60  # guessing gives 25


def forms(images: ArrayImages) -> dict[str, tuple[Any, Any]]:
    """Return the same pictures with the same class names, handed over in several ways."""
    names = [images.names[label] for label in images.labels.tolist()]
    last = images.pixels.permute(0, 2, 3, 1)
    pairs = [(picture, name) for picture, name in zip(last.numpy(), names, strict=True)]
    return {
        "images": (images, None),
        "arrays": (last.numpy(), names),
        "tensors": (images.pixels, np.array(names)),
        "floats": (images.pixels.float() / 255, names),
        "pictures": ([images.decode(i) for i in range(len(images))], names),
        "pairs": (pairs, None),
    }


@pytest.mark.parametrize("form", ["arrays", "tensors", "floats", "pictures", "pairs"])
def test_images_arrays_and_pairs_are_learned_alike(scenario, form):
    whole, other = made(epochs=1), made(epochs=1)
    for phase in list(scenario)[:2]:
        whole.learn(phase.train)
        order = phase.train.labels.argsort(stable=True)  # classes are numbered by name, as in a folder
        images, labels = forms(phase.train.select(order))[form]
        other.learn(images, labels)
    assert sorted(other.classes) == sorted(whole.classes)
    test = scenario.test(1)
    assert other.transform == whole.transform
    assert other.memory.per_class() == whole.memory.per_class()
    images, labels = forms(test)[form]
    for learner in (whole, other):
        assert counts(learner.evaluate(images, labels)) == counts(learner.evaluate(test))


def test_numbered_labels_and_a_torch_dataset_are_the_same():
    data = tiny.dataset(3)
    arrays, pairs = made(epochs=1), made(epochs=1)
    arrays.learn(data.train.pixels, data.train.labels)
    pairs.learn(TensorDataset(data.train.pixels, data.train.labels))
    bare = made(epochs=1)
    bare.learn(data.train)  # images that have no names: their labels are
    assert arrays.classes == pairs.classes == bare.classes == ("0", "1", "2")
    assert state(arrays) == state(pairs) == state(bare)
    found = arrays.evaluate(data.test.pixels, data.test.labels)
    assert counts(found) == counts(pairs.evaluate(TensorDataset(data.test.pixels, data.test.labels)))


def test_files_are_learned_too(scenario, tmp_path):
    files = {}
    for part, images in (("train", scenario.train(0)), ("test", scenario.test(0))):
        paths = [tmp_path / f"{part}-{i}.png" for i in range(len(images))]
        for i, path in enumerate(paths):
            images.decode(i).save(path)
        files[part] = FileImages(tuple(paths), images.labels, images.names)
    learner = made(epochs=1, image_size=8, workers=0)
    learner.learn(files["train"])
    memory = made(epochs=1, image_size=8)
    memory.learn(scenario.train(0))
    assert counts(learner.evaluate(files["test"])) == counts(memory.evaluate(scenario.test(0)))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 8, 8)), None, "pairs"),
        (np.zeros((2, 8, 8)), [1], "2 images with 1 label given"),
        (np.zeros((0, 8, 8)), [], "no images"),
        (3, None, "int given"),
        (ArrayImages(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)), None, "no images"),
        ([b"no picture"], ["a"], "."),
        (ArrayImages(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, -1])), None, "label -1 given"),
    ],
)
def test_what_cannot_be_learned_is_said(images, labels, message):
    learner = made()
    with pytest.raises(GeodlError, match=message):
        learner.learn(images, labels)
    assert (learner.classes, learner.phases) == ((), 0)


# -- classes by name


def test_classes_are_known_by_their_names_and_numbered_as_they_come(scenario):
    learner = made(epochs=1)
    learner.learn(scenario.train(1))  # one class: nothing can be told apart yet
    (first,) = learner.classes
    assert learner.network is not None
    assert {found.accuracy for found in learner.evaluate(scenario.train(1)).values()} == {100.0}
    assert set(learner.predict(scenario.train(1).pixels).labels) == {first}
    learner.learn(scenario.train(0))
    assert learner.classes == (first, *scenario.classes[:2])
    found = learner.evaluate(scenario.test(1))
    assert set(found) == {"cnn", "nme", "ncm"}
    assert found["cnn"].counts.sum(dim=1).tolist() == [5, 5, 5]


@pytest.mark.parametrize("options", [{"method": "lucir"}, {"method": "analytic", "expansion": 32}], ids=str)
def test_one_class_and_then_a_second_is_the_first_training(scenario, options):
    heard: list[Event] = []
    learner = made(**options, base_epochs=3, listener=heard.append)
    data = scenario.train(0)
    learner.learn(data.select(data.labels == 0))
    kept = learner.memory.images
    assert learner.memory.per_class() == {0: 3}
    assert not [event for event in heard if isinstance(event, StageStarted)]  # there was nothing to tell apart
    learner.learn(data.select(data.labels == 1))
    assert [(event.phase, event.epochs) for event in heard if isinstance(event, StageStarted)] == [(1, 3)]
    assert learner.memory.per_class() == {0: 3, 1: 3}
    first = learner.memory.images.select(learner.memory.images.labels == 0)
    assert sorted(first.item_digests()) == sorted(kept.item_digests())  # it was trained on what was kept of the first
    learner.learn(scenario.train(1))
    assert learner.evaluate(scenario.test(1))["nme"].accuracy > 50


def test_more_images_of_a_known_class_change_no_name_and_no_number(scenario):
    learner = made()
    half = {label: scenario.train(0).select(scenario.train(0).labels == label) for label in (0, 1)}
    learner.learn(concat([half[0], half[1].select(range(4))]))
    learner.learn(half[1].select(range(4, 9)))
    assert learner.classes == scenario.classes[:2]
    assert learner.memory.per_class() == {0: 3, 1: 3}
    assert learner.network.head.classes == 2
    mixed = concat([half[1].select([0]), scenario.train(1)])  # a known class and a new one in one group
    learner.learn(mixed)
    assert learner.classes == scenario.classes[:3]
    assert learner.memory.per_class() == {0: 3, 1: 3, 2: 3}
    assert learner.phases == 3
    assert learner.evaluate(scenario.test(1))["nme"].accuracy > 60


@pytest.mark.parametrize("method", ["lucir", "finetune"])
def test_without_exemplars_it_learns_and_keeps_no_image(scenario, method):
    learner = made(method=method, exemplars=0)
    with pytest.raises(ConfigError, match="the first step needs two classes or more"):
        learner.learn(scenario.train(1))
    for phase in scenario:
        learner.learn(phase.train)
    assert learner.memory.images is None
    assert set(learner.evaluate(scenario.test(2))) == {"cnn", "ncm"}
    assert len(learner.predict(scenario.test(2).pixels)) == 20


# -- evaluation


def test_the_oracle_is_there_only_with_the_old_images(scenario, learned):
    old = concat([scenario.train(0), scenario.train(1)])
    assert "ame" not in learned.evaluate(scenario.test(1))
    found = learned.evaluate(scenario.test(1), old=old)
    assert set(found) == {"cnn", "nme", "ncm", "ame"}
    train, test = (learned.features(learned.rows_of(images)) for images in (old, scenario.test(1)))
    scores = nearest_mean(test.pooled, class_means(train.pooled, train.labels, 3))
    expected = Confusion.of(test.labels, scores.argmax(dim=1), learned.classes)
    assert found["ame"].counts.equal(expected.counts)


def test_the_oracle_may_be_told_to_look_at_a_few_images(scenario):
    learner = made(ame_images=1)
    learner.learn(scenario.train(0))
    train = scenario.train(0)
    first = train.select([int((train.labels == label).nonzero()[0]) for label in (0, 1)])
    test = scenario.test(0)
    assert counts(learner.evaluate(test, old=train))["ame"] == counts(learner.evaluate(test, old=first))["ame"]


def test_a_class_that_was_not_learned_is_named(scenario, learned):
    with pytest.raises(DataError, match=f"class {scenario.classes[3]!r} was not learned; known are"):
        learned.evaluate(scenario.test(2))
    with pytest.raises(DataError, match="'elephant' was not learned"):
        learned.evaluate(scenario.test(0).pixels, ["elephant"] * 10)


def test_nothing_can_be_asked_before_something_is_learned(scenario, tmp_path):
    for ask in (
        lambda learner: learner.predict(scenario.test(0).pixels),
        lambda learner: learner.save(tmp_path / "m"),
        lambda learner: learner.recognizer(),
    ):
        with pytest.raises(ConfigError, match="nothing was learned yet"):
            ask(made())
    with pytest.raises(GeodlError):
        made().evaluate(scenario.test(0))
    assert not (tmp_path / "m").exists()


def test_joint_training_accumulates_what_it_was_given(scenario, tmp_path):
    learner = made(method="joint", epochs=1)
    heard: list[Event] = []
    learner.listener = heard.append
    given = []
    for phase in scenario:
        learner.learn(phase.train)
        given.append(phase.train)
        assert sorted(learner.given.item_digests()) == sorted(concat(given).item_digests())
        assert [learner.classes[label] for label in learner.given.labels.tolist()] == [
            learner.given.names[label] for label in learner.given.labels.tolist()
        ]
    assert set(learner.evaluate(scenario.test(2))) >= {"cnn"}
    learner.save(tmp_path / "m")
    loaded = Learner.load(tmp_path / "m")
    assert counts(loaded.evaluate(scenario.test(2))) == counts(learner.evaluate(scenario.test(2)))
    with pytest.raises(ConfigError, match="joint training needs all earlier images: set `given`"):
        loaded.learn(scenario.train(0))
    loaded.given = learner.given
    loaded.learn(scenario.train(0))
    learner.learn(scenario.train(0))
    assert state(loaded) == state(learner)


def test_joint_training_forgets_the_images_of_a_class_that_is_removed(scenario):
    learner = made(method="joint", epochs=1)
    learner.learn(scenario.train(0))
    kept = scenario.train(0).select(scenario.train(0).labels == 1)
    learner.remove(learner.classes[0])
    assert learner.given.item_digests() == kept.item_digests()
    learner.learn(scenario.train(1))
    assert learner.given.item_digests() == [*kept.item_digests(), *scenario.train(1).item_digests()]
    assert torch.bincount(learner.given.labels).tolist() == [9, 9]


def test_joint_training_takes_the_images_of_a_first_single_class_once(scenario):
    learner, first = made(method="joint", epochs=1), scenario.train(0)
    learner.learn(first.select(first.labels == 0))
    learner.learn(first.select(first.labels == 1))
    assert torch.bincount(learner.given.labels).tolist() == [9, 9]


# -- a scenario through a learner is a run


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lucir", "distill": "geodesic", "finetune_epochs": 1},
        {"method": "bic", "correction_epochs": 3},
        {"method": "mnemonics", "outer_steps": 2},
        {"method": "icarl", "memory_budget": "total", "exemplars": 8},
        {"method": "joint"},
        {"method": "analytic", "expansion": 32},
        {"method": "analytic", "expansion": 32, "distill": "geodesic"},
        {"method": "analytic", "expansion": 32, "flip": True, "mirror_training": True},
    ],
    ids=lambda options: options["method"],
)
def test_a_scenario_in_python_is_the_run_of_the_command_line(tmp_path, options):
    config = tiny.config(**options, epochs=1, ame=True)
    data = tiny.dataset()
    store = run_config(config, out=tmp_path / "r", data=data)
    learner = made(**options, epochs=1)
    metrics, seen = [], []
    for t, phase in enumerate(scenario_of(config, data)):
        learner.learn(phase.train)
        seen.append(phase.train)
        found = learner.evaluate(phase.test, old=concat(seen))
        saved = store.load_phase(t)
        assert counts(found) == counts(confusions_of(saved.metrics))
        assert all(torch.equal(tensor, saved.model[name]) for name, tensor in learner.tensors()[0].items())
        assert all(torch.equal(tensor, saved.memory[name]) for name, tensor in learner.tensors()[1].items())
        metrics.append(to_metrics(t, found))
    ours, theirs = Trajectory.of(metrics), results_of(store)
    assert {name: each.to_dict() for name, each in ours.items()} == {
        name: each.to_dict() for name, each in theirs.items()
    }


def test_a_run_can_be_gone_on_with_as_a_learner(tmp_path):
    config = tiny.config(method="lucir", distill="geodesic")
    data = tiny.dataset()
    store = run_config(config, out=tmp_path / "r", data=data)
    learner, scenario = Learner.load(store.path), scenario_of(config, data)
    assert (learner.classes, learner.phases) == (scenario.classes, 3)
    assert counts(learner.evaluate(scenario.test(2))) == counts(confusions_of(store.load_metrics(2)))
    more = tiny.dataset(5, seed=1)
    learner.learn(ArrayImages(more.train.pixels[-9:], more.train.labels[-9:] - 4, ("a new one",)))
    assert learner.classes == (*scenario.classes, "a new one")
    with pytest.raises(StoreError, match="directory of a run"):
        learner.save(store.path)


# -- prediction


def test_predictions_are_labels_and_probabilities(scenario, learned):
    test = scenario.test(1)
    found = learned.predict(test.pixels)
    assert found.classes == learned.classes
    assert (found.labels.shape, found.probabilities.shape) == ((15,), (15, 3))
    assert found.probabilities.dtype == np.float32
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, rtol=1e-5)
    assert found.labels.tolist() == [learned.classes[i] for i in found.probabilities.argmax(axis=1)]
    assert [each.label for each in found] == found.labels.tolist()
    assert [each.confidence for each in found] == pytest.approx(found.probabilities.max(axis=1).tolist())
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


def test_an_unknown_classifier_is_refused_with_those_there_are(scenario, learned):
    for wrong in ("ame", "knn"):
        with pytest.raises(ConfigError, match=f"classifier = '{wrong}': this model has cnn, nme, ncm"):
            learned.predict(scenario.test(0).pixels, classifier=wrong)


def test_what_cannot_be_read_is_skipped_and_named(scenario, learned, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    scenario.test(0).decode(0).save(tmp_path / "good.png")
    found = learned.predict([tmp_path / "bad.png", tmp_path / "good.png"])
    assert [each.name for each in found] == [str(tmp_path / "good.png")]
    assert [name for name, _ in found.skipped] == [str(tmp_path / "bad.png")]
    assert found.probabilities.shape == (1, 3)
    with pytest.raises(DataError, match=r"bad\.png"):
        learned.predict(tmp_path / "bad.png", strict=True)


# -- saving and loading


METHODS: list[dict[str, Any]] = [
    {"method": "lucir", "distill": "geodesic"},
    {"method": "bic", "correction_epochs": 3},
    {"method": "mnemonics", "outer_steps": 2},
    {"method": "analytic", "expansion": 32, "exemplars": 2},
    {"method": "analytic", "expansion": 32, "distill": "geodesic"},
    {"method": "finetune", "exemplars": 0},
]


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options["method"])
def test_a_saved_learner_predicts_the_same_and_learns_on_to_the_same_bytes(scenario, tmp_path, options):
    learner = made(**options, epochs=1)
    for phase in list(scenario)[:2]:
        learner.learn(phase.train)
    learner.save(tmp_path / "model")
    loaded = Learner.load(tmp_path / "model")
    assert state(loaded) == state(learner)
    test = scenario.test(1)
    assert counts(loaded.evaluate(test)) == counts(learner.evaluate(test))
    np.testing.assert_array_equal(loaded.predict(test.pixels).probabilities, learner.predict(test.pixels).probabilities)
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
    files = sorted(path.suffix for path in (tmp_path / "model").rglob("*") if path.is_file())
    assert not {".pt", ".pth", ".pkl", ".bin"} & set(files)


def test_a_learner_of_one_class_is_saved_too(scenario, tmp_path):
    learner = made(epochs=1)
    learner.learn(scenario.train(1))
    learner.save(tmp_path / "model")
    loaded = Learner.load(tmp_path / "model")
    for each in (learner, loaded):
        each.learn(scenario.train(0))
    assert state(loaded) == state(learner)


def test_what_is_no_learner_is_not_loaded(tmp_path):
    with pytest.raises(StoreError):
        Learner.load(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(StoreError):
        Learner.load(tmp_path / "other")
    RunDirectory.create_or_open(tmp_path / "empty", MODEL)
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
        np.testing.assert_array_equal(
            model.predict(test.pixels, classifier=classifier).probabilities,
            learned.predict(test.pixels, classifier=classifier).probabilities,
        )
    names = [test.names[label] for label in test.labels.tolist()]
    assert model.evaluate(test.pixels, names).confusion.counts.equal(learned.evaluate(test)["nme"].counts)
    assert [known["name"] for known in model.info()["classes"]] == list(learned.classes)
    assert state(Learner.load(tmp_path / "model")) == state(learned)


def test_geodl_learn_goes_on_with_a_saved_learner_and_back(scenario, learned, tmp_path):
    learned.save(tmp_path / "model")
    model = IncrementalClassifier(tmp_path / "model")
    images = scenario.train(2)
    model.learn(images.pixels, [images.names[label] for label in images.labels.tolist()], epochs=1, threads=1)
    assert model.classes == scenario.classes
    loaded = Learner.load(tmp_path / "model")
    assert loaded.classes == scenario.classes
    np.testing.assert_array_equal(
        loaded.predict(scenario.test(2).pixels).probabilities, model.predict(scenario.test(2).pixels).probabilities
    )


# -- a failure changes nothing


@pytest.mark.parametrize("at", ["stage", "step", "epoch"])
@pytest.mark.parametrize("options", METHODS[:3], ids=lambda options: options["method"])
def test_a_learn_that_is_broken_off_leaves_the_learner_as_it_was(scenario, at, options):
    learner, whole = made(**options, epochs=1), made(**options, epochs=1)
    for each in (learner, whole):
        each.learn(scenario.train(0))
    before = state(learner)
    predictions = learner.predict(scenario.test(0).pixels).probabilities

    def hear(event: Event) -> None:
        if event.kind == at:
            raise KeyboardInterrupt

    learner.listener = hear
    with pytest.raises(KeyboardInterrupt):
        learner.learn(scenario.train(1))
    assert state(learner) == before
    np.testing.assert_array_equal(learner.predict(scenario.test(0).pixels).probabilities, predictions)
    learner.listener = lambda event: None
    for each in (learner, whole):
        each.learn(scenario.train(1))
    assert state(learner) == state(whole)


def test_a_learn_that_fails_leaves_the_learner_as_it_was(scenario):
    learner = made(lr=1e300, base_lr=0.05)
    learner.learn(scenario.train(0))
    before = state(learner)
    with pytest.raises(TrainingError, match="not finite in phase 1"):
        learner.learn(scenario.train(1))
    with pytest.raises(GeodlError):
        learner.learn([b"no picture"], ["a new class"])
    assert state(learner) == before
    assert learner.evaluate(scenario.test(0))["nme"].images == 10


def test_a_learn_that_was_stopped_goes_on_from_its_checkpoint(scenario):
    whole, progress, asked = made(distill="geodesic"), KeptProgress(), []
    learner = made(distill="geodesic", stop=lambda: asked.append(0) or len(asked) % 4 == 0)
    for images in (scenario.train(0), scenario.train(1)):
        whole.learn(images)
        progress.saved.clear()
        before = (learner.classes, learner.phases)
        for _ in range(50):
            try:
                learner.learn(images, progress=progress)
                break
            except Interrupted:
                assert (learner.classes, learner.phases) == before
    assert len(asked) > 8
    assert state(learner) == state(whole)


# -- changing


def test_a_renamed_class_keeps_its_row(scenario, learned, tmp_path):
    learned.save(tmp_path / "model")
    learner = Learner.load(tmp_path / "model")
    old = learner.classes[1]
    learner.rename(old, "another name")
    assert learner.classes == (learned.classes[0], "another name", learned.classes[2])
    before, after = (each.predict(scenario.test(1).pixels) for each in (learned, learner))
    np.testing.assert_array_equal(before.probabilities, after.probabilities)
    assert [name if name != old else "another name" for name in before.labels] == after.labels.tolist()
    with pytest.raises(ConfigError, match=f"no class {old!r}; the model knows"):
        learner.rename(old, "x")
    with pytest.raises(ConfigError, match="there is a class of that name already"):
        learner.rename("another name", learned.classes[0])


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options["method"])
def test_a_removed_class_is_never_predicted_and_can_come_back(scenario, options):
    learner = made(**options, epochs=1)
    for phase in list(scenario)[:2]:
        learner.learn(phase.train)
    gone, kept = learner.classes[0], learner.classes[1:]
    before = learner.predict(scenario.test(1).pixels).probabilities
    learner.remove(gone)
    assert learner.classes == kept
    after = learner.predict(scenario.test(1).pixels)
    assert after.probabilities.shape == (15, 2)
    assert gone not in after.labels
    rest = before[:, 1:] / before[:, 1:].sum(axis=1, keepdims=True)
    if options["method"] != "analytic":
        np.testing.assert_allclose(after.probabilities, rest, rtol=1e-4)
    with pytest.raises(DataError, match=f"{gone!r} was not learned"):
        learner.evaluate(scenario.test(1))
    with pytest.raises(ConfigError, match=f"no class {gone!r}"):
        learner.remove(gone)
    learner.learn(scenario.train(0).select(scenario.train(0).labels == 0))
    assert learner.classes == (*kept, gone)
    assert learner.evaluate(scenario.test(1))[{"analytic": "analytic"}.get(options["method"], "ncm")].images == 15


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options["method"])
def test_more_images_of_the_only_class_left_join_what_is_kept_of_it(scenario, options):
    learner = made(**options, epochs=1)
    learner.learn(scenario.train(0))
    learner.remove(learner.classes[1])
    kept, weights = learner.memory.images, learner.network.backbone.state_dict()
    first = scenario.train(0).select(scenario.train(0).labels == 0)
    more = replace(first, pixels=255 - first.pixels).select([0])
    learner.learn(more)
    assert learner.trained
    assert (learner.classes, learner.network.head.classes) == (scenario.classes[:1], 1)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.network.backbone.state_dict().items())
    if kept is not None:
        assert set(learner.memory.images.item_digests()) <= {*kept.item_digests(), *more.item_digests()}
        assert learner.memory.per_class() == {0: len(kept)}
    if options["method"] == "analytic":
        now = learner.memory.own
        assert (now["counts"] if "counts" in now else torch.bincount(now["labels"])).tolist() == [10]
    learner.learn(scenario.train(1))
    assert learner.classes == (scenario.classes[0], scenario.classes[2])


def test_joint_training_may_begin_with_one_class_and_no_exemplars(scenario):
    learner = made(method="joint", exemplars=0)
    for t in (1, 0):
        learner.learn(scenario.train(t))
    assert torch.bincount(learner.given.labels).tolist() == [9, 9, 9]
    assert set(learner.evaluate(scenario.test(1))) == {"cnn", "ncm"}


def test_the_only_class_stays(scenario):
    learner = made(epochs=1)
    learner.learn(scenario.train(1))
    with pytest.raises(ConfigError, match="the only class"):
        learner.remove(learner.classes[0])


def test_it_goes_on_with_other_options(scenario, learned):
    config = made(distill="cosine", lr=0.01, epochs=1).config
    before = state(learned)
    learner = learned.continued(config)
    assert (learner.classes, learner.phases, learner.config.lr) == (learned.classes, 2, 0.01)
    learner.learn(scenario.train(2))
    assert learner.classes == scenario.classes
    assert state(learned) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 7.0}, "scale = 7.0: this model was made with 5.0"),
        ({"network": "resnet8"}, "network = resnet8: this model was made with convnet"),
        ({"image_size": 16}, "image_size = 16: this model was made with 8"),
        ({"method": "finetune"}, "method = finetune: this model was made with lucir"),
    ],
)
def test_it_does_not_go_on_with_what_only_a_new_model_can_have(learned, options, message):
    with pytest.raises(ConfigError, match=f"{message}; another needs a new model"):
        learned.continued(made(**{"distill": "geodesic"} | options).config)
    learned.continued(made(distill="geodesic", image_size=8).config)


def test_it_does_not_go_on_with_a_distillation_that_needs_another_head(scenario):
    learner = made(method="icarl", epochs=1)
    learner.learn(scenario.train(0))
    with pytest.raises(
        ConfigError, match="distill = 'geodesic': this goes with a cosine head, and this model has a lin"
    ):
        learner.continued(made(method="icarl", distill="geodesic").config)
    assert learner.continued(made(method="icarl", distill="none").config).classes == learner.classes


def first_weights(make: Callable[[], Learner], images: ArrayImages) -> torch.Tensor:
    learner = make()
    learner.learn(images)
    return learner.network.state_dict()["head.weight"]


def test_the_seed_decides_and_nothing_else_random_does(scenario):
    torch.manual_seed(1)
    first = first_weights(lambda: made(epochs=1, seed=3), scenario.train(0))
    torch.manual_seed(2)
    again = first_weights(lambda: made(epochs=1, seed=3), scenario.train(0))
    assert torch.equal(first, again)
    assert not torch.equal(first, first_weights(lambda: made(epochs=1, seed=4), scenario.train(0)))
