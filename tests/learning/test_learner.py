"""The Learner in Python: options, what it takes, evaluation, prediction, saving, and that a failure changes nothing."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.directories import make_model
from tests.helpers.phases import changed, weights_of
from torch.utils.data import TensorDataset

from geodl.app.classifier import IncrementalClassifier
from geodl.bench.experiment import results_of, run_config, scenario_of
from geodl.config import SECTIONS, RunConfig
from geodl.core.errors import (
    ConfigError,
    DataError,
    GeodlError,
    StoreError,
    TrainingError,
)
from geodl.core.events import Event, ignore
from geodl.data import ClassIncremental
from geodl.data.images import ArrayImages, FileImages, concat
from geodl.learning.learner import Learner
from geodl.learning.saving import load_model
from geodl.model.classifiers.base import Scorer
from geodl.model.features import class_means, nearest_mean
from geodl.model.metrics import Confusion, Trajectory, confusions_of, to_metrics

ABOUT_DATA = set(SECTIONS["Data"].model_fields)
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
    """Return all that a learner consists of: the bytes of its tensors, and its record."""
    tensors = learner.known.to_tensors()
    found = {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
    return found, learner.known.record()


def counts(found: dict[str, Confusion]) -> dict[str, list[list[int]]]:
    return {name: confusion.counts.tolist() for name, confusion in found.items()}


# -- options


def test_the_options_are_those_of_the_command_line():
    given = {"method": "lucir", "exemplars": 7, "precision": "bf16", "threads": 1}
    learner = made(**given, distill="geodesic", subspace_dim=9)
    config = learner.config
    assert {name: getattr(config, name) for name in given} == given
    assert (config.distill, config["subspace_dim"]) == ("geodesic", 9)
    assert config["margin"] == 0.5  # the method's own default
    assert Learner().config.hash() == Learner(method="lucir").config.hash()
    assert (learner.model, learner.classes, learner.network, learner.phases) == (None, (), None, 0)


@pytest.mark.parametrize("name", sorted(ABOUT_DATA))
def test_options_about_where_images_come_from_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: an option about"):
        made(**{name: None})


def test_a_preset_without_what_it_says_about_data():
    config = Learner(preset="digits", epochs=1).config
    assert (config.network, config.epochs, config.flip) == ("resnet8", 1, False)
    for name in ABOUT_DATA:
        assert getattr(config, name) == RunConfig.model_fields[name].default


# -- what it takes


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
        # Classes are numbered by name, as in a folder.
        order = phase.train.labels.argsort(stable=True)
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
    bare.learn(data.train.relabel(torch.arange(3)))  # images without names: their labels are
    assert arrays.classes == pairs.classes == bare.classes == ("0", "1", "2")
    assert state(arrays) == state(pairs) == state(bare)
    pixels, labels = data.test.pixels, data.test.labels
    found = pairs.evaluate(TensorDataset(pixels, labels))
    assert counts(arrays.evaluate(pixels, labels)) == counts(found)


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


NONE = ArrayImages(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
BELOW = ArrayImages(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, -1]))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 8, 8)), None, "pairs"),
        (np.zeros((2, 8, 8)), [1], "2 images.* 1 label"),
        (np.zeros((0, 8, 8)), [], "no images"),
        (3, None, "int"),
        (NONE, None, "no images"),
        ([b"no picture"], ["a"], "."),
        (BELOW, None, "label -1"),
    ],
)
def test_what_cannot_be_learned_is_said(images, labels, message):
    learner = made()
    with pytest.raises(GeodlError, match=message):
        learner.learn(images, labels)
    assert learner.model is None


# -- classes by name


@pytest.mark.parametrize("options", [{}, {"method": "joint"}, {"method": "analytic"}], ids=str)
def test_a_first_group_of_one_class_is_refused_where_there_is_training(scenario, options):
    learner = made(**options)
    with pytest.raises(ConfigError, match="two classes"):
        learner.learn(scenario.train(1))
    assert learner.model is None


def test_classes_are_known_by_their_names_and_numbered_as_they_come(scenario):
    learner = made(epochs=1)
    learner.learn(concat([scenario.train(1), scenario.train(2)]))
    learner.learn(scenario.train(0))
    assert learner.classes == (*scenario.classes[2:], *scenario.classes[:2])
    found = learner.evaluate(scenario.test(1))
    assert found["cnn"].counts.sum(dim=1).tolist() == [5, 0, 5, 5]


def test_more_images_of_a_known_class_change_no_name_and_no_number(scenario):
    learner = made()
    half = {label: scenario.train(0).select(scenario.train(0).labels == label) for label in (0, 1)}
    learner.learn(concat([half[0], half[1].select(range(4))]))
    learner.learn(half[1].select(range(4, 9)))
    assert learner.classes == scenario.classes[:2]
    assert learner.memory.per_class() == {0: 3, 1: 3}
    assert learner.network.head.classes == 2
    # A known class and a new one in one group.
    learner.learn(concat([half[1].select([0]), scenario.train(1)]))
    assert learner.classes == scenario.classes[:3]
    assert learner.memory.per_class() == {0: 3, 1: 3, 2: 3}
    assert learner.phases == 3
    assert learner.evaluate(scenario.test(1))["nme"].accuracy > 60


@pytest.mark.parametrize("method", ["lucir", "finetune"])
def test_without_exemplars_it_learns_and_keeps_no_image(scenario, method):
    learner = made(method=method, exemplars=0)
    for phase in scenario:
        learner.learn(phase.train)
    assert learner.memory.images is None
    assert set(learner.evaluate(scenario.test(2))) == {"cnn", "ncm"}
    assert len(learner.predict(scenario.test(2).pixels)) == 20


# -- evaluation


def test_the_oracle_is_there_only_with_the_old_images(scenario, learned):
    seen = concat([scenario.train(0), scenario.train(1)])
    assert "ame" not in learned.evaluate(scenario.test(1))
    found = learned.evaluate(scenario.test(1), seen=seen)
    assert set(found) == {"cnn", "nme", "ncm", "ame"}
    train, test = (learned.features(learned.rows_of(each)) for each in (seen, scenario.test(1)))
    scores = nearest_mean(test.pooled, class_means(train.pooled, train.labels, 3))
    expected = Confusion.of(test.labels, scores.argmax(dim=1), learned.classes)
    assert found["ame"].counts.equal(expected.counts)


def test_the_oracle_may_be_told_to_look_at_a_few_images(scenario):
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


def test_joint_training_accumulates_what_it_was_given(scenario, tmp_path):
    learner, given = made(method="joint", epochs=1), []
    for phase in scenario:
        learner.learn(phase.train)
        given.append(phase.train)
        assert sorted(learner.seen.item_digests()) == sorted(concat(given).item_digests())
    learner.save(tmp_path / "m")
    loaded = Learner.load(tmp_path / "m")
    assert counts(loaded.evaluate(scenario.test(2))) == counts(learner.evaluate(scenario.test(2)))
    with pytest.raises(ConfigError, match="all earlier images"):
        loaded.learn(scenario.train(0))
    loaded.remember(concat(given))
    loaded.learn(scenario.train(0))
    learner.learn(scenario.train(0))
    assert state(loaded) == state(learner)


def test_joint_training_forgets_the_images_of_a_class_that_is_removed(scenario):
    learner, first = made(method="joint", epochs=1), scenario.train(0)
    learner.learn(concat([first, scenario.train(1)]))
    gone, renamed, kept = learner.classes
    learner.remove(gone)
    learner.rename(renamed, gone)  # a name that comes back is another class
    learner.learn(scenario.train(2))
    expected = [first.select(first.labels == 1), scenario.train(1), scenario.train(2)]
    assert learner.seen.item_digests() == concat(expected).item_digests()
    assert learner.classes == (gone, kept, scenario.classes[3])
    learner.remove(gone)
    assert learner.seen.item_digests() == concat(expected[1:]).item_digests()


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
        {"method": "analytic", "expansion": 32, "flip": True, "mirror_training": True},
    ],
    ids=tiny.named,
)
def test_a_scenario_in_python_is_the_run_of_the_command_line(tmp_path, options):
    config, data = tiny.config(**options, epochs=1, ame=True), tiny.dataset()
    store = run_config(config, out=tmp_path / "r", data=data)
    learner, metrics, seen = made(**options, epochs=1), [], []
    for t, phase in enumerate(scenario_of(config, data)):
        learner.learn(phase.train)
        seen.append(phase.train)
        found = learner.evaluate(phase.test, seen=concat(seen))
        phase = store.phase(t)
        assert counts(found) == counts(confusions_of(phase.json("metrics.json")))
        ours, theirs = learner.known.to_tensors(), load_model(phase).to_tensors()
        dropped = {name for name in ours if name.startswith("statistics.")} if t < 2 else set()
        assert theirs.keys() == ours.keys() - dropped, "only the newest phase keeps the sums"
        assert not changed(theirs, ours)
        metrics.append(to_metrics(t, found))
    both = (Trajectory.of(metrics), results_of(store))
    ours, theirs = ({name: each.to_dict() for name, each in part.items()} for part in both)
    assert ours == theirs


def test_a_run_can_be_gone_on_with_as_a_learner(tmp_path):
    config = tiny.config(method="lucir", distill="geodesic")
    data = tiny.dataset()
    store = run_config(config, out=tmp_path / "r", data=data)
    learner, scenario = Learner.load(store.path), scenario_of(config, data)
    assert (learner.classes, learner.phases) == (scenario.classes, 3)
    assert counts(learner.evaluate(scenario.test(2))) == counts(
        confusions_of(store.phase(2).json("metrics.json"))
    )
    more = tiny.dataset(5, seed=1)
    learner.learn(ArrayImages(more.train.pixels[-9:], more.train.labels[-9:] - 4, ("a new one",)))
    assert learner.classes == (*scenario.classes, "a new one")
    with pytest.raises(StoreError, match="run"):
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
    assert [each.confidence for each in found] == pytest.approx(
        found.probabilities.max(axis=1).tolist()
    )
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


# -- saving and loading


METHODS: list[dict[str, Any]] = [
    {"method": "lucir", "distill": "geodesic"},
    {"method": "bic", "correction_epochs": 3},
    {"method": "mnemonics", "outer_steps": 2},
    {"method": "analytic", "expansion": 32, "exemplars": 2},
    {"method": "analytic", "keep_features": True, "flip": True},
    {"method": "finetune", "exemplars": 0},
]


@pytest.mark.parametrize("options", METHODS, ids=tiny.named)
def test_a_saved_learner_predicts_the_same_and_learns_on_to_the_same_bytes(
    scenario, tmp_path, options
):
    learner = made(**options, epochs=1)
    for phase in list(scenario)[:2]:
        learner.learn(phase.train)
    learner.save(tmp_path / "model")
    loaded = Learner.load(tmp_path / "model")
    assert state(loaded) == state(learner)
    test = scenario.test(1)
    assert counts(loaded.evaluate(test)) == counts(learner.evaluate(test))
    np.testing.assert_array_equal(
        loaded.predict(test.pixels).probabilities, learner.predict(test.pixels).probabilities
    )
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


def test_what_is_no_learner_is_not_loaded(tmp_path):
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
        np.testing.assert_array_equal(
            model.predict(test.pixels, classifier=classifier).probabilities,
            learned.predict(test.pixels, classifier=classifier).probabilities,
        )
    names = [test.names[label] for label in test.labels.tolist()]
    assert model.evaluate(test.pixels, names).confusion.counts.equal(
        learned.evaluate(test)["nme"].counts
    )
    assert [known["name"] for known in model.info()["classes"]] == list(learned.classes)
    assert state(Learner.load(tmp_path / "model")) == state(learned)


def test_geodl_learn_goes_on_with_a_saved_learner_and_back(scenario, learned, tmp_path):
    learned.save(tmp_path / "model")
    model = IncrementalClassifier(tmp_path / "model")
    images = scenario.train(2)
    model.learn(
        images.pixels,
        [images.names[label] for label in images.labels.tolist()],
        epochs=1,
        threads=1,
    )
    assert model.classes == scenario.classes
    loaded = Learner.load(tmp_path / "model")
    assert loaded.classes == scenario.classes
    np.testing.assert_array_equal(
        loaded.predict(scenario.test(2).pixels).probabilities,
        model.predict(scenario.test(2).pixels).probabilities,
    )


# -- a failure changes nothing


@pytest.mark.parametrize("at", ["stage", "step", "epoch"])
@pytest.mark.parametrize("options", METHODS[:3], ids=tiny.named)
def test_a_learn_that_is_broken_off_leaves_the_learner_as_it_was(scenario, at, options):
    learner, whole = made(**options, epochs=1), made(**options, epochs=1)
    for each in (learner, whole):
        each.learn(scenario.train(0))
    before = state(learner)
    predictions = learner.predict(scenario.test(0).pixels).probabilities

    def hear(event: Event) -> None:
        if event.kind == at:
            raise KeyboardInterrupt

    learner.listen(hear)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(scenario.train(1))
    assert state(learner) == before
    np.testing.assert_array_equal(
        learner.predict(scenario.test(0).pixels).probabilities, predictions
    )
    learner.listen(ignore)
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


# -- changing


@pytest.mark.parametrize("options", METHODS, ids=tiny.named)
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
    with pytest.raises(DataError, match=f"{gone!r}"):
        learner.evaluate(scenario.test(1))
    with pytest.raises(ConfigError, match=f"{gone!r}"):
        learner.remove(gone)
    learner.learn(scenario.train(0).select(scenario.train(0).labels == 0))
    assert learner.classes == (*kept, gone)
    assert all(each.images == 15 for each in learner.evaluate(scenario.test(1)).values())


@pytest.mark.parametrize("options", METHODS, ids=tiny.named)
def test_more_images_of_the_only_class_left_join_what_is_kept_of_it(scenario, options):
    learner = made(**options, epochs=1)
    learner.learn(scenario.train(0))
    learner.remove(learner.classes[1])
    kept, weights = learner.memory.images, weights_of(learner.network.backbone)
    first = scenario.train(0).select(scenario.train(0).labels == 0)
    more = replace(first, pixels=255 - first.pixels).select([0])
    learner.learn(more)
    assert (learner.classes, learner.network.head.classes) == (scenario.classes[:1], 1)
    assert not changed(weights, learner.network.backbone.state_dict())
    if kept is not None:
        allowed = {*kept.item_digests(), *more.item_digests()}
        assert set(learner.memory.images.item_digests()) <= allowed
        assert learner.memory.per_class() == {0: len(kept)}
    learner.learn(scenario.train(1))
    assert learner.classes == (scenario.classes[0], scenario.classes[2])


def test_it_goes_on_with_other_options(scenario, learned):
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
def test_it_does_not_go_on_with_what_only_a_new_model_can_have(learned, options, message):
    with pytest.raises(ConfigError, match=message):
        Learner(made(**{"distill": "geodesic"} | options).config, model=learned.model)
    Learner(made(distill="geodesic", image_size=8).config, model=learned.model)


def test_it_does_not_go_on_with_a_distillation_that_needs_another_head(scenario):
    learner = made(method="icarl", epochs=1)
    learner.learn(scenario.train(0))
    with pytest.raises(ConfigError, match=r"distill = 'geodesic'.*cosine.*linear"):
        Learner(made(method="icarl", distill="geodesic").config, model=learner.model)
    other = Learner(made(method="icarl", distill="none").config, model=learner.model)
    assert other.classes == learner.classes


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


@pytest.mark.parametrize("scale", [torch.inf, torch.nan])
def test_a_scale_that_is_not_finite_is_an_error(scale):
    with pytest.raises(TrainingError, match="NaN or infinite"):
        Scorer(lambda found: found.logits, scale=scale).finite(torch.ones(2, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_accelerator_that_is_not_there_is_refused_at_once():
    with pytest.raises(ConfigError, match="no CUDA device"):
        Learner(accelerator="cuda")


@pytest.mark.parametrize("network", ["timm:nothing", "timm:resnet18", "nothing", 5])
def test_a_network_that_cannot_be_had_is_refused_at_once(monkeypatch, network):
    timm = ModuleType("timm")
    timm.is_model, timm.list_models = {"resnet18": True}.get, lambda: ["resnet18"]
    monkeypatch.setitem(sys.modules, "timm", timm if network == "timm:nothing" else None)
    with pytest.raises(GeodlError, match=r"no model|needs|allowed values"):
        Learner(network=network)
