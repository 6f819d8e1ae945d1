"""A model is a value: learning and changing give another one, and its tensors and record are all of it."""

import math
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.phases import ScenarioLearner

from geodl.core.errors import ConfigError, GeodlError, StoreError
from geodl.learning.saving import (
    MEMORY,
    METRICS,
    NETWORK,
    RECORD,
    SUMS,
    load_model,
    model_directory,
)
from geodl.methods import METHODS, stored_config
from geodl.model.model import Model
from geodl.store import SavedPhase

CASES = [{"method": name} | tiny.SMALL.get(name, {}) for name in METHODS] + [
    {"method": "finetune", "exemplars": 0},
    {"method": "analytic", "expansion": 32, "exemplars": 2},
    {"method": "analytic", "keep_features": True, "flip": True},
]


def learned(options: dict[str, Any]) -> ScenarioLearner:
    """Return a learner that has learned two phases."""
    return ScenarioLearner(tiny.config(**options, epochs=1)).learn_next().learn_next()


@pytest.fixture(scope="module")
def learner() -> ScenarioLearner:
    return learned({"method": "lucir"})


def scores(model: Model, images: Any) -> dict[str, torch.Tensor]:
    """Return what every classifier of a model makes of images."""
    return {name: model.recognizer(name).answers(images).scores for name in model.classifiers}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_learning_gives_another_model_and_leaves_the_old_one(learner):
    model = learner.known
    before = {name: tensor.clone() for name, tensor in model.to_tensors().items()}
    learner.learn_next()
    assert learner.known is not model
    assert same(model.to_tensors(), before)
    assert (len(model.classes), model.phases) == (3, 2)
    assert (len(learner.classes), learner.phases) == (4, 3)
    learner.model = model
    with pytest.raises(FrozenInstanceError):
        model.phases = 7  # type: ignore[misc]


def version_2(model: Model, path: Path, *, trained: bool = True) -> SavedPhase:
    """Write a model as version 0.2 named its tensors: means and the closed form in the memory."""
    names = {"ncm.means": "means", "nme.means": "exemplar_means", "analytic": "own"}
    network, memory, sums = {}, {}, {}
    for key, tensor in model.to_tensors().items():
        first, _, rest = key.partition(".")
        if first == "network":
            network[rest] = tensor
        elif first == "statistics":
            sums[rest.removeprefix("analytic.")] = tensor
        elif first == "memory":
            memory[rest] = tensor
        else:
            memory[names.get(key) or f"{names[first]}.{rest}"] = tensor
    record = model.record() | {"trained": trained}
    del record["classifiers"]
    store = model_directory(path)
    with store.lock():
        files = {NETWORK: network, MEMORY: memory, METRICS: {}, RECORD: record}
        store.commit(files | ({SUMS: sums} if sums else {}), {})
    return store.phase(0)


@pytest.mark.parametrize("options", CASES, ids=tiny.named)
def test_tensors_and_record_are_all_of_a_model_by_names_of_today_and_of_version_2(
    tmp_path, options
):
    learner = learned(options)
    model, test = learner.known, learner.scenario.test(1)
    tensors = {name: tensor.clone() for name, tensor in model.to_tensors().items()}
    config = stored_config(model.record()["config"])
    for again in (
        Model.from_tensors(config, model.record(), tensors),
        load_model(version_2(model, tmp_path / "m")),
    ):
        assert again.record() == model.record()
        assert same(again.to_tensors(), tensors)
        assert same(scores(again, test), scores(model, test))
        assert (again.left_out() is None) == (options["method"] != "analytic")


def test_a_model_of_version_2_that_was_never_trained_is_refused(learner, tmp_path):
    with pytest.raises(StoreError, match="one class"):
        load_model(version_2(learner.known, tmp_path / "m", trained=False))


def test_an_exemplar_of_no_class_is_refused(learner):
    model = learner.known
    tensors = model.to_tensors()
    tensors["memory.images.labels"] = tensors["memory.images.labels"] + 1
    with pytest.raises(ValueError, match="labelled 3 of 3"):
        Model.from_tensors(model.config, model.record(), tensors)


MISFITS = {
    "nme.means": [torch.flatten, lambda x: x[None], lambda x: torch.cat([x, x]), torch.Tensor.int],
    "analytic.clues": [lambda x: x[None], lambda x: x[1:]],
    "analytic.labels": [lambda x: x - 9, lambda x: x + 99, torch.Tensor.double],
    "analytic.validated": [torch.flatten],
    "analytic.rows": [lambda x: x + 10**6],
    "analytic.confidences": [lambda x: x[1:]],
    "analytic.head": [torch.flatten, lambda x: x[:, 1:]],
    "analytic.sizes": [torch.Tensor.double, lambda x: x + (1 << 40)],
    "analytic.numbers": [torch.zeros_like],
    "analytic.scales": [torch.Tensor.bool],
    "analytic.scale.LEVEL": [lambda x: x[:0]],
    "analytic.directions.LEVEL": [lambda x: x + math.inf],
    "network.head.alpha": [lambda x: x + math.inf],
    "network.head.scale": [lambda x: x + math.nan],
}


@pytest.mark.parametrize("method", ["lucir", "analytic"])
def test_tensors_that_do_not_fit_each_other_are_refused(method):
    model = learned(
        {"method": method} | ({"keep_features": True} if method == "analytic" else {})
    ).known
    tensors, tried = model.to_tensors(), 0
    scales = [name for name in tensors if name.startswith("analytic.scale.")]
    level = scales[-1].rpartition(".")[2] if scales else ""
    misfits = {name.replace("LEVEL", level): each for name, each in MISFITS.items()}
    for name in misfits.keys() & tensors.keys():
        for change in misfits[name]:
            changed = tensors | {name: change(tensors[name])}
            with pytest.raises((ValueError, LookupError, StoreError)):
                Model.from_tensors(model.config, model.record(), changed).network  # noqa: B018
            tried += 1
    assert tried >= 6
    if level:
        del tensors[scales[-1]]
        with pytest.raises(ValueError, match="deviations"):
            Model.from_tensors(model.config, model.record(), tensors)


def test_a_renamed_class_keeps_its_row(learner):
    model, test = learner.known, learner.scenario.test(1)
    first, old, last = model.classes
    other = model.renamed(old, "another name")
    assert (other.classes, model.classes) == ((first, "another name", last), (first, old, last))
    assert same(scores(other, test), scores(model, test))
    with pytest.raises(ConfigError, match=rf"class {old!r}.*another name"):
        other.renamed(old, "x")
    with pytest.raises(ConfigError, match=f"{first!r}"):
        model.renamed(old, first)


def test_a_removed_class_leaves_no_row_no_mean_and_no_image(learner):
    model, test = learner.known, learner.scenario.test(1)
    rest = model.without(model.classes[1])
    assert rest.classes == (model.classes[0], model.classes[2])
    assert rest.memory.per_class() == {0: 3, 1: 3}
    for name, each in scores(model, test).items():
        torch.testing.assert_close(scores(rest, test)[name], each[:, [0, 2]])
    assert len(model.classes) == model.network.head.classes == 3
    with pytest.raises(ConfigError, match="only class"):
        rest.without(rest.classes[0]).without(rest.classes[1])


def test_a_network_that_cannot_be_built_is_needed_by_predictions_alone(learner, monkeypatch):
    model = learner.known
    config = model.config.model_copy(update={"network": "timm/resnet10t"})
    tensors = model.to_tensors()
    monkeypatch.setitem(sys.modules, "timm", None)
    found = Model.from_tensors(config, model.record(), tensors)
    name = found.classes[0]
    assert found.renamed(name, "x").classes[0] == "x"
    assert found.record() == model.record() | {"config": config.identity() | {"image_size": 8}}
    assert same(found.to_tensors(), tensors)
    with pytest.raises(GeodlError, match="timm"):
        found.recognizer()


def test_only_a_classifier_of_the_model_predicts(learner):
    for wrong in ("ame", "knn", "analytic"):
        with pytest.raises(ConfigError, match=rf"{wrong}.*cnn, nme, ncm"):
            learner.known.recognizer(wrong)
    images = learner.scenario.test(1).pixels
    for name in (None, "nme"):
        expected = learner.known.recognizer("nme").predict(images).probabilities
        np.testing.assert_array_equal(
            learner.predict(images, classifier=name).probabilities, expected
        )
