"""A run as a whole: what it writes, what it keeps, what it looks at."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.directories import saved
from tests.helpers.phases import ScenarioLearner, changed

from geodl import Learner
from geodl.bench.experiment import results_of, scenario_of
from geodl.core.errors import GeodlError
from geodl.core.events import Event
from geodl.data.batches import transform_of
from geodl.data.images import ArrayImages
from geodl.methods import build
from geodl.model.classifiers.ncm import drift
from geodl.model.features import class_means
from geodl.nets import BACKBONES
from geodl.nets.resnet import ConvNet
from geodl.store import Directory


def events_of(store: Directory, kind: str) -> list[dict[str, Any]]:
    return [event for event in store.read_events() if event["kind"] == kind]


def test_every_phase_of_joint_training_has_the_schedule_of_the_base_phase():
    config = tiny.config(method="joint", epochs=2, base_epochs=7, lr=0.05, base_lr=0.3)
    schedules = [build(config).main_schedule(t) for t in range(3)]
    assert [(schedule.epochs, schedule.lr) for schedule in schedules] == [(7, 0.3)] * 3


def test_a_run_writes_what_it_promises(run, data):
    heard: list[Event] = []
    store = run(method="lucir", distill="geodesic", ame=True, listener=heard.append)
    assert store.completed() == 3
    metrics = saved(store, 2).metrics
    assert set(metrics) == {"phase", "classes", "accuracy", "confusions", "similarity"}
    assert sorted(metrics["classes"]) == sorted(data.classes)
    assert set(metrics["accuracy"]) == set(metrics["confusions"]) == {"cnn", "nme", "ame", "ncm"}
    found = results_of(store)
    assert len(found["cnn"].accuracy) == 3
    assert found["cnn"].accuracy[2] == metrics["accuracy"]["cnn"]
    kinds = [event.kind for event in heard]
    assert (kinds[0], kinds[-1]) == ("run", "done")
    assert kinds.count("phase") == kinds.count("evaluated") == 3
    recorded = {event["kind"] for event in store.read_events()}
    assert "epoch" in recorded
    assert "step" not in recorded


def test_frozen_rows_stay_bit_for_bit_and_sigma_is_carried_over(run, data):
    store = run(method="lucir")
    before, after = saved(store, 0).model, saved(store, 1).model
    assert torch.equal(before["head.weight"], after["head.weight"][:2])
    assert before["head.scale"] != 5.0
    learner = ScenarioLearner(tiny.config(method="lucir"), data)
    learned = learner.learn_next().network.head.scale.item()
    assert learner.prepare_next().network.head.scale.item() == learned == before["head.scale"]
    plain = [saved(run("p"), t).model["head.weight"] for t in (0, 1)]
    assert not torch.equal(plain[0], plain[1][:2])


def test_the_images_of_a_phase_are_read_no_more_often_than_needed(data, monkeypatch):
    learner, looked = ScenarioLearner(tiny.config(method="lucir"), data), []
    features = learner.trainer.features

    def spy(network, images, *rest, **options):
        looked.append(len(images))
        return features(network, images, *rest, **options)

    monkeypatch.setattr(learner.trainer, "features", spy)
    learner.learn_next()
    # To see that the network is sound; for herding and the class means; the exemplars, for their means.
    assert looked == [18, 18, 6]
    learner.learn_next()
    # Under the old network, for imprinting and the drift; for the angles, under the old network and
    # after each epoch, and to see that the network is sound; for herding and the means; the exemplars.
    assert looked[3:] == [9, 15, 15, 15, 15, 9, 9]


def test_every_epoch_reports_the_angles_between_the_old_and_the_new_network(run):
    store = run(method="lucir")
    found = events_of(store, "angles")
    places = [(event["phase"], event["stage"], event["epoch"]) for event in found]
    assert places == [(t, "train", e) for t in (1, 2) for e in (1, 2)]
    angles = [event["angles"] for event in found]
    assert [len(each) for each in angles] == [14, 14, 16, 16]  # 15 images, less their mean; then 18
    assert all(0 < min(each) <= max(each) <= 90 for each in angles)
    plain = run("plain", method="lucir", analysis=False)
    assert not events_of(plain, "angles")
    assert not changed(saved(plain, 2).model, saved(store, 2).model)


def test_stored_means_of_old_classes_drift_along_and_those_of_new_ones_are_taken(data):
    learner = ScenarioLearner(tiny.config(method="lucir"), data)
    old = deepcopy(learner.learn_next().network)
    stored = learner.known.classifiers["ncm"].means
    images = learner.scenario.train(1)
    means = learner.learn_next().known.classifiers["ncm"].means
    before, now = (
        learner.trainer.features(each, images, learner.transform) for each in (old, learner.network)
    )
    expected = drift(stored, before.pooled, now.pooled)
    torch.testing.assert_close(means[:2], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(means[2:], class_means(now.pooled, now.labels, 3)[2:])
    assert not torch.allclose(stored, expected, atol=1e-2)


def test_the_shorter_side_of_arrays_is_the_networks(data):
    wide = ArrayImages(torch.zeros(2, 3, 10, 30, dtype=torch.uint8), torch.tensor([0, 1]))
    tall = ArrayImages(torch.zeros(2, 3, 30, 10, dtype=torch.uint8), torch.tensor([0, 1]))
    assert [transform_of(tiny.config(), images).size for images in (wide, tall)] == [10, 10]


@pytest.mark.parametrize("tests", [0, 1])
def test_hardly_any_test_images_do_not_end_a_run(run, tests):
    few = tiny.dataset(test=1)
    few = replace(few, test=few.test.select(torch.arange(4)[4 - tests :]))
    store = run(groups=(2, 2), base=None, order="natural", data=few)
    allowed = (0.0, 100.0) if tests else (None,)
    assert store.phase(0).json("metrics.json")["accuracy"]["nme"] is None
    assert store.phase(1).json("metrics.json")["accuracy"]["nme"] in allowed
    assert results_of(store)["nme"].average in allowed


def test_a_network_that_cannot_be_built_leaves_no_directory(run, tmp_path):
    for options in ({"weights": str(tmp_path / "nothing")}, {"network": "alexnet"}):
        with pytest.raises(GeodlError):
            run(**options)
        assert not (tmp_path / "r").exists()


def test_a_run_builds_its_network_once(run):
    built: list[str] = []

    def counted() -> ConvNet:
        built.append("network")
        return ConvNet()

    BACKBONES.add("counted", counted)
    try:
        run(network="counted", phases=1)
    finally:
        BACKBONES.remove("counted")
    assert built == ["network"]


def test_held_out_images_are_evaluated_beside_the_test_images(run, data):
    plain, held = (run(f"{share}", method="lucir", hold_out=share) for share in (0, 0.3))
    assert "held_out" not in plain.phase(0).json("metrics.json")
    assert results_of(plain, held_out=True) == {}
    confusions = [
        held.phase(t).json("metrics.json")["held_out"]["confusions"]["nme"] for t in range(3)
    ]
    counts = [sum(count for *_, count in each) for each in confusions]
    assert counts == [3 * 2, 3 * 3, 3 * 4]  # three of the nine of each class
    found = results_of(held, held_out=True)
    assert found.keys() == results_of(held).keys()
    last = Learner.load(held.path)
    images = scenario_of(last.config, data).held_out(2)
    assert last.evaluate(images)["nme"].accuracy == found["nme"].accuracy[-1]
