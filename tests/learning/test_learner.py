"""The Learner in Python: its options, and that a scenario through it is a run."""

import sys
from types import ModuleType

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.learners import ABOUT_DATA, counts, made, state, taught
from tests.helpers.phases import changed

from geodl.bench.experiment import results_of, run_config, scenario_of
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, GeodlError
from geodl.data.images import concat
from geodl.learning.learner import Learner
from geodl.learning.saving import load_model
from geodl.model.metrics import Trajectory, confusions_of, to_metrics


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


@pytest.mark.parametrize("method", ["lucir", "finetune"])
def test_without_exemplars_it_learns_and_keeps_no_image(scenario, method):
    learner = taught(scenario, 3, method=method, exemplars=0)
    assert learner.memory.images is None
    assert set(learner.evaluate(scenario.test(2))) == {"cnn", "ncm"}
    assert len(learner.predict(scenario.test(2).pixels)) == 20


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
