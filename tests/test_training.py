"""The loop: schedules, resume, caching, stopping, and what a phase prepares."""

import os
import shutil
import subprocess
import sys
import types
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.phases import KeptProgress, ScenarioLearner

from geodl import files
from geodl.cache import Cache
from geodl.config import RunConfig, option
from geodl.data.batches import transform_of
from geodl.data.images import ArrayImages
from geodl.errors import ConfigError, GeodlError, MissingExtraError, StoreError, TrainingError
from geodl.events import BaseCached, EpochEnded, Event, PhaseStarted, StepTaken
from geodl.experiment import results_of, run_config
from geodl.methods import METHODS, Method, Schedule, Stage, build
from geodl.metrics import confusions_of
from geodl.nets import build_network
from geodl.predictors import class_means, drift
from geodl.ranks import Ranks
from geodl.store import RunDirectory
from geodl.training import Interrupted, loop, stages

RESULTS = ("model.safetensors", "memory.safetensors", "metrics.json")


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all that must be identical between a broken and an unbroken run."""
    found = sorted((directory / "phases").glob("*/*"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in found if path.name in RESULTS}


@pytest.fixture(scope="module")
def data():
    return tiny.dataset()


# -- schedules


def test_step_schedule_changes_exactly_at_the_milestones():
    schedule = Schedule(epochs=160, lr=0.1, milestones=(0.5, 0.75), decay=0.1)
    rates = [schedule.lr_at(epoch, step, 10) for epoch in range(160) for step in range(10)]
    assert rates[0] == 0.1  # not stepped before the first epoch
    assert rates[: 80 * 10] == [0.1] * 800
    assert rates[80 * 10] == pytest.approx(0.01)
    assert rates[119 * 10 + 9] == pytest.approx(0.01)
    assert rates[120 * 10] == pytest.approx(0.001)


def test_joint_training_starts_anew_in_every_phase_and_has_the_time_for_it():
    config = tiny.config(method="joint", epochs=2, base_epochs=7, lr=0.05, base_lr=0.3)
    schedules = [build(config).main_schedule(t) for t in range(3)]
    assert [(schedule.epochs, schedule.lr) for schedule in schedules] == [(7, 0.3)] * 3


def test_onecycle_rises_to_the_peak_and_falls_to_almost_nothing():
    schedule = Schedule(epochs=4, lr=0.2, kind="onecycle")
    rates = [schedule.lr_at(epoch, step, 25) for epoch in range(4) for step in range(25)]
    peak = rates.index(max(rates))
    assert peak == 25
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(0.2, rel=1e-3)
    assert rates[-1] < 1e-3 * 0.2


# -- a run as a whole


def test_a_run_writes_what_it_promises(tmp_path, data):
    heard: list[Event] = []
    config = tiny.config(method="lucir", distill="geodesic", ame=True)
    store = run_config(config, out=tmp_path / "r", data=data, listener=heard.append)
    assert store.completed() == 3
    metrics = store.load_phase(2).metrics
    assert set(metrics) == {"phase", "classes", "accuracy", "confusions", "similarity"}
    assert sorted(metrics["classes"]) == sorted(data.classes)
    assert set(metrics["accuracy"]) == set(metrics["confusions"]) == {"cnn", "nme", "ame", "ncm"}
    found = results_of(store)
    assert len(found["cnn"].accuracy) == 3
    assert found["cnn"].accuracy[2] == metrics["accuracy"]["cnn"]
    kinds = [event.kind for event in heard]
    assert kinds[0] == "run"
    assert kinds[-1] == "done"
    assert kinds.count("phase") == kinds.count("evaluated") == 3
    recorded = [event["kind"] for event in store.read_events()]
    assert "epoch" in recorded
    assert "step" not in recorded


def test_the_oracle_is_evaluated_only_where_it_is_asked_for(tmp_path, data):
    plain = run_config(tiny.config(method="lucir"), out=tmp_path / "plain", data=data).load_phase(2)
    asked = run_config(tiny.config(method="lucir", ame=True), out=tmp_path / "asked", data=data).load_phase(2)
    assert set(plain.metrics["confusions"]) == {"cnn", "nme", "ncm"}
    assert set(asked.metrics["confusions"]) == {"cnn", "nme", "ncm", "ame"}
    assert all(torch.equal(tensor, asked.model[name]) for name, tensor in plain.model.items())
    few = tiny.config(method="lucir", ame=True, ame_images=1)
    assert "ame" in run_config(few, out=tmp_path / "few", data=data).load_metrics(2)["confusions"]


def test_confusions_count_every_test_image_once(tmp_path, data):
    store = run_config(tiny.config(method="finetune"), out=tmp_path / "r", data=data)
    for t in range(3):
        metrics = store.load_phase(t).metrics
        seen = len(metrics["classes"])
        for name, confusion in confusions_of(metrics).items():
            assert confusion.counts.sum(dim=1).tolist() == [5] * seen
            assert confusion.to_json() == metrics["confusions"][name]


def test_the_seed_changes_the_result_and_nothing_else_does(tmp_path, data):
    def weights(name: str, seed: int) -> torch.Tensor:
        torch.manual_seed(hash(name) % 1000)  # the global state must not matter
        store = run_config(
            tiny.config(method="finetune", seed=seed, phases=0, base=None), out=tmp_path / name, data=data
        )
        return store.load_phase(0).model["head.weight"]

    first, again, other = weights("a", 1), weights("b", 1), weights("c", 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_frozen_rows_stay_bit_for_bit_and_sigma_is_carried_over(tmp_path, data):
    store = run_config(tiny.config(method="lucir"), out=tmp_path / "r", data=data)
    before, after = store.load_phase(0).model, store.load_phase(1).model
    assert torch.equal(before["head.weight"], after["head.weight"][:2])
    assert before["head.scale"] != 5.0
    learner = ScenarioLearner(tiny.config(method="lucir"), data)
    learned = learner.learn_next().network.head.scale.item()
    assert learner.prepare_next().network.head.scale.item() == learned == before["head.scale"]
    plain = run_config(tiny.config(method="finetune"), out=tmp_path / "p", data=data)
    assert not torch.equal(plain.load_phase(0).model["head.weight"], plain.load_phase(1).model["head.weight"][:2])


def test_the_images_of_a_phase_are_looked_at_no_more_than_needed(data, monkeypatch):
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
    # Under the old network, for imprinting and the drift; for the angles, under the old network and after each epoch, and to
    # see that the network is sound; for herding and the means; the exemplars.
    assert looked[3:] == [9, 15, 15, 15, 15, 9, 9]


def test_every_epoch_tells_the_angles_between_the_old_and_the_new_network(tmp_path, data):
    store = run_config(tiny.config(method="lucir"), out=tmp_path / "r", data=data)
    found = [event for event in store.read_events() if event["kind"] == "angles"]
    assert [(event["phase"], event["stage"], event["epoch"]) for event in found] == [
        (t, "train", e) for t in (1, 2) for e in (1, 2)
    ]
    angles = [event["angles"] for event in found]
    assert [len(each) for each in angles] == [14, 14, 16, 16]  # 15 images, less their mean; then 18
    assert all(0 < min(each) <= max(each) <= 90 for each in angles)
    plain = run_config(tiny.config(method="lucir", analysis=False), out=tmp_path / "plain", data=data)
    assert not any(event["kind"] == "angles" for event in plain.read_events())
    assert torch.equal(plain.load_phase(2).model["head.weight"], store.load_phase(2).model["head.weight"])


def test_stored_means_of_old_classes_drift_along_and_those_of_new_ones_are_taken(data):
    learner = ScenarioLearner(tiny.config(method="lucir"), data)
    old, stored = deepcopy(learner.learn_next().network), learner.memory.means
    images = learner.scenario.train(1)
    learner.learn_next()
    before, now = (learner.trainer.features(each, images, learner.transform) for each in (old, learner.network))
    expected = drift(stored, before.pooled, now.pooled)
    torch.testing.assert_close(learner.memory.means[:2], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(learner.memory.means[2:], class_means(now.pooled, now.labels, 3)[2:])
    assert not torch.allclose(stored, expected, atol=1e-2)


def test_memory_keeps_the_quota_of_every_class(tmp_path, data):
    store = run_config(tiny.config(method="finetune", exemplars=3), out=tmp_path / "r", data=data)
    labels = store.load_phase(2).memory["images.labels"]
    assert torch.bincount(labels).tolist() == [3, 3, 3, 3]
    total = run_config(
        tiny.config(method="finetune", exemplars=9, memory_budget="total"), out=tmp_path / "t", data=data
    )
    assert [torch.bincount(total.load_phase(t).memory["images.labels"]).tolist() for t in range(3)] == [
        [4, 4],
        [3, 3, 3],
        [2, 2, 2, 2],
    ]


def test_without_exemplars_it_still_learns_and_stored_means_predict(tmp_path, data):
    store = run_config(tiny.config(method="lucir", exemplars=0), out=tmp_path / "r", data=data)
    assert set(results_of(store)) == {"cnn", "ncm"}
    assert not any(name.startswith("images.") for name in store.load_phase(2).memory)


def test_joint_training_starts_anew_with_everything(tmp_path, data):
    heard: list[Event] = []
    store = run_config(tiny.config(method="joint"), out=tmp_path / "r", data=data, listener=heard.append)
    assert [event.images for event in heard if isinstance(event, PhaseStarted)] == [18, 27, 36]
    steps = [event["steps"] for event in store.read_events() if event["kind"] == "stage"]
    assert steps == [3, 4, 5]  # of 8 images each


def test_a_class_order_and_groups_of_one(tmp_path, data):
    store = run_config(
        tiny.config(method="lucir", distill="geodesic", groups=(1, 1, 2), base=None, order="natural"),
        out=tmp_path / "r",
        data=data,
    )
    assert results_of(store)["cnn"].to_dict()["groups"] == [["class 0"], ["class 1"], ["class 2", "class 3"]]


@pytest.mark.parametrize("flip", [True, False])
def test_nearest_means_see_mirrored_exemplars_only_where_mirroring_keeps_the_class(data, flip):
    learner = ScenarioLearner(tiny.config(method="finetune", epochs=1, flip=flip), data).learn_next()
    exemplars, means = learner.memory.images, learner.memory.exemplar_means

    def pooled(mirror: bool) -> torch.Tensor:
        return learner.trainer.features(learner.network, exemplars, learner.transform, mirror=mirror).pooled

    views = [pooled(mirror) for mirror in ((False, True) if flip else (False,))]
    torch.testing.assert_close(means, class_means(torch.cat(views), exemplars.labels.repeat(len(views)), 2))
    assert flip == (not torch.allclose(means, class_means(views[0], exemplars.labels, 2)))


@pytest.mark.parametrize("norm_decay", [True, False])
def test_weight_decay_spares_norms_biases_and_scales_where_asked(norm_decay):
    network = build_network("resnet8", 3, head="cosine")
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = Schedule(1, lr=0.5, weight_decay=0.1, norm_decay=norm_decay).optimizer(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, after in network.named_parameters():
        spared = not norm_decay and ("bn" in name or "downsample.1" in name or name == "head.scale")
        torch.testing.assert_close(after, before[name] * (1.0 if spared else 0.95), msg=name)


# -- continuing


def test_a_complete_run_is_not_computed_again(tmp_path, data):
    config = tiny.config(method="finetune")
    run_config(config, out=tmp_path / "r", data=data)
    heard: list[Event] = []
    run_config(config, out=tmp_path / "r", data=data, listener=heard.append)
    assert [event.kind for event in heard] == ["run", "done"]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("lucir", {"distill": "geodesic", "finetune_epochs": 2}),
        ("bic", {"correction_epochs": 4}),
        ("mnemonics", {"outer_steps": 3}),
        ("finetune", {"norm_decay": False, "nesterov": True}),
    ],
)
def test_stopped_after_any_step_it_goes_on_to_the_same_bytes(tmp_path, data, method, more):
    config = tiny.config(method=method, epochs=1, **more)
    run_config(config, out=tmp_path / "whole", data=data)
    for every in (1, 4):
        directory = tmp_path / f"every-{every}"
        heard: list[Event] = []
        for _ in range(200):
            steps = 0

            def stop(every: int = every) -> bool:
                nonlocal steps
                steps += 1
                return steps >= every

            try:
                run_config(config, out=directory, data=data, stop=stop, listener=heard.append)
                break
            except Interrupted:
                continue
        assert contents(directory) == contents(tmp_path / "whole")
        ends = [event for event in heard if isinstance(event, EpochEnded)]
        assert all(event.parts for event in ends)  # none without a step, also where the last one was the place to stop
        assert len({(event.phase, event.stage, event.epoch) for event in ends}) == len(ends)


class CrashError(Exception):
    """Power is cut."""


def test_a_fault_at_every_write_leaves_a_run_that_goes_on_to_the_same_bytes(tmp_path, data, monkeypatch):
    config = tiny.config(method="bic", epochs=1, phases=1, base=2, groups=None, correction_epochs=2, checkpoint_steps=2)
    data = tiny.dataset(3)
    run_config(config, out=tmp_path / "whole", data=data)
    points = 0

    def count(step: str, path: Path) -> None:
        nonlocal points
        points += 1

    monkeypatch.setattr(files, "crash_point", count)
    run_config(config, out=tmp_path / "counted", data=data)
    assert points > 20
    for point in range(0, points, max(1, points // 15)):  # every kind of write is met by one point or another
        left = point

        def crash(step: str, path: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError

        directory = tmp_path / f"crash-{point}"
        monkeypatch.setattr(files, "crash_point", crash)
        with pytest.raises(CrashError):
            run_config(config, out=directory, data=data)
        monkeypatch.setattr(files, "crash_point", lambda step, path: None)
        run_config(config, out=directory, data=data)
        assert contents(directory) == contents(tmp_path / "whole"), f"crash point {point}"


def test_other_weights_under_the_same_name_are_another_run(tmp_path, data):
    config = tiny.config(method="finetune", weights=str(tmp_path / "weights.safetensors"))
    for seed in (1, 2):
        convnet = build_network("convnet", 2, head="cosine", seed=seed).backbone
        save_file({name: t.contiguous() for name, t in convnet.state_dict().items()}, config.weights)
        if seed == 1:
            run_config(config, out=tmp_path / "r", data=data)
    with pytest.raises(StoreError, match="weights_sha256"):
        run_config(config, out=tmp_path / "r", data=data)


def test_the_shorter_side_of_arrays_is_the_networks(data):
    wide = ArrayImages(torch.zeros(2, 3, 10, 30, dtype=torch.uint8), torch.tensor([0, 1]))
    tall = ArrayImages(torch.zeros(2, 3, 30, 10, dtype=torch.uint8), torch.tensor([0, 1]))
    assert [transform_of(tiny.config(), images).size for images in (wide, tall)] == [10, 10]


def test_another_configuration_is_refused_by_name(tmp_path, data):
    run_config(tiny.config(method="finetune", phases=0, base=None), out=tmp_path / "r", data=data)
    with pytest.raises(StoreError, match=r"lr is 0\.05 there and 0\.07 now"):
        run_config(tiny.config(method="finetune", phases=0, base=None, lr=0.07), out=tmp_path / "r", data=data)
    run_config(tiny.config(method="finetune", phases=0, base=None, lr=0.07), out=tmp_path / "r", data=data, fresh=True)


def test_threads_are_kept_and_another_number_is_refused(tmp_path, data):
    config = tiny.config(method="finetune", phases=0, base=None)
    run_config(config, out=tmp_path / "r", data=data)
    with pytest.raises(StoreError, match="threads is 1 there and 2 now"):
        run_config(config.model_copy(update={"threads": 2}), out=tmp_path / "r", data=data)
    torch.set_num_threads(2)
    run_config(config.model_copy(update={"threads": None}), out=tmp_path / "r", data=data)
    assert torch.get_num_threads() == 1  # restored from the run
    run_config(config.model_copy(update={"threads": 2}), out=tmp_path / "r", data=data, allow_environment_change=True)
    torch.set_num_threads(1)


def test_other_data_are_refused(tmp_path, data):
    config = tiny.config(method="finetune", phases=0, base=None)
    run_config(config, out=tmp_path / "r", data=data)
    with pytest.raises(StoreError, match="fingerprint"):
        run_config(config, out=tmp_path / "r", data=tiny.dataset(seed=5))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_place(tmp_path, data):
    config = tiny.config(method="finetune", lr=1e30, epochs=3, checkpoint_steps=1, scale=1e4)
    with pytest.raises(
        TrainingError, match=r"not finite in phase \d, stage train, epoch \d, step \d.*last good checkpoint"
    ):
        run_config(config, out=tmp_path / "r", data=data)
    checkpoint = RunDirectory(tmp_path / "r").load_progress()
    assert checkpoint is not None
    assert all(tensor.isfinite().all() for name, tensor in checkpoint[0].items() if name.startswith("network."))


def test_weights_that_a_step_breaks_reach_no_checkpoint(tmp_path, data):
    # The loss of the first step is finite, its step is not: the next loss would be the first to tell.
    config = tiny.config(method="finetune", lr=1e300, epochs=3, checkpoint_steps=1)
    with pytest.raises(
        TrainingError, match=r"not finite in phase 0, stage train, epoch 1, step 1 \(the weights after .*the start of"
    ):
        run_config(config, out=tmp_path / "r", data=data)
    assert RunDirectory(tmp_path / "r").load_progress() is None


def bad_stage(learner: ScenarioLearner, bad: int, epochs: int = 2) -> tuple[Any, Stage]:
    """Return a phase and a stage of it, of 5 steps an epoch, whose loss is NaN at one of its steps, counted from 1."""
    phase, steps = learner.prepare_next(), iter(range(1, 1000))
    stage = next(learner.method.stages(phase))
    plain = stage.loss

    def loss(module, batch):
        parts = plain(module, batch)
        return parts | {"own": parts["ce"] * (torch.nan if next(steps) == bad else 0.0)}

    return phase, replace(
        stage, loss=loss, steps=5, batches=phase.batches(phase.images, "train", 3), schedule=Schedule(epochs, 0.01)
    )


@pytest.mark.parametrize("read", [1, 4, 100])
@pytest.mark.parametrize(("bad", "place", "good"), [(3, (1, 3), (1, 2)), (5, (1, 5), (1, 4)), (8, (2, 3), (2, 1))])
def test_the_first_loss_that_is_not_finite_is_named_however_rarely_losses_are_read(data, read, bad, place, good):
    learner, progress = ScenarioLearner(tiny.config(method="finetune", checkpoint_steps=2), data), KeptProgress()
    learner.trainer.read_steps = read
    phase, stage = bad_stage(learner, bad)
    with pytest.raises(TrainingError) as caught:
        learner.trainer.run(phase, stage, progress=progress)
    assert f"epoch {place[0]}, step {place[1]} (ce = " in str(caught.value)
    assert "own = nan" in str(caught.value)
    assert f"the last good checkpoint is epoch {good[0]}, step {good[1]}:" in str(caught.value)
    assert progress.saved
    assert all(tensor.isfinite().all() for tensors, _ in progress.saved for tensor in tensors.values())


def test_on_devices_that_are_waited_for_losses_are_read_once_in_a_while(data):
    found = []
    for read in (1, 2):
        heard: list[Event] = []
        learner = ScenarioLearner(tiny.config(method="finetune"), data)
        assert learner.trainer.read_steps == 1  # here, on a CPU, nothing is waited for
        learner.trainer.read_steps, learner.trainer.listener = read, heard.append
        phase, stage = bad_stage(learner, 0)
        learner.run(phase, stage)
        found.append((phase.network.state_dict(), heard))
    (weights, every), (same, some) = found
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    steps = [[(e.epoch, e.step) for e in events if isinstance(e, StepTaken)] for events in (every, some)]
    assert steps == [[(e, s) for e in (0, 1) for s in told] for told in ((1, 2, 3, 4, 5), (2, 4, 5))]
    losses = [[e.parts for e in events if isinstance(e, EpochEnded)] for events in (every, some)]
    assert losses[0] == losses[1]


def test_features_that_are_not_finite_name_the_place_too(tmp_path, data):
    config = tiny.config(method="lucir", distill="geodesic", base_lr=0.05, lr=1e30, checkpoint_steps=1)
    with pytest.raises(
        TrainingError, match=r"not finite in phase 1, stage train, epoch \d, step \d.*last good checkpoint"
    ):
        run_config(config, out=tmp_path / "r", data=data)


def test_a_network_broken_by_the_last_step_is_neither_kept_nor_shared(tmp_path, data):
    # No loss is computed after the only step of the phase: what the network gives must be looked at.
    config = tiny.config(method="finetune", epochs=1, batch_size=64, lr=1e38)
    cache = Cache(tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"not finite in phase 0, stage train, epoch 1, step 1 .*the start of"):
            run_config(config, out=tmp_path / "r", data=data, cache=cache)
    assert not cache.size()
    assert RunDirectory(tmp_path / "r").load_progress() is None


@pytest.mark.parametrize("tests", [0, 1])
def test_hardly_any_test_images_do_not_end_a_run(tmp_path, tests):
    data = tiny.dataset(test=1)
    data = replace(data, test=data.test.select(torch.arange(4)[4 - tests :]))
    store = run_config(
        tiny.config(method="finetune", groups=(1, 3), base=None, order="natural"), out=tmp_path / "r", data=data
    )
    assert store.load_metrics(0)["accuracy"]["nme"] is None
    assert store.load_metrics(1)["accuracy"]["nme"] in ((0.0, 100.0) if tests else (None,))
    assert results_of(store)["nme"].average in ((0.0, 100.0) if tests else (None,))


def test_a_network_that_cannot_be_built_leaves_no_directory(tmp_path, data):
    for options in ({"weights": str(tmp_path / "nothing")}, {"network": "alexnet"}):
        with pytest.raises(GeodlError):
            run_config(tiny.config(method="finetune", **options), out=tmp_path / "r", data=data)
        assert not (tmp_path / "r").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_said_in_one_line(tmp_path, data):
    with pytest.raises(ConfigError, match="accelerator = 'cuda': torch finds no CUDA device here"):
        run_config(tiny.config(method="finetune", accelerator="cuda"), out=tmp_path / "r", data=data)


def test_no_phases_means_all_the_classes_whatever_the_base(tmp_path, data):
    store = run_config(tiny.config(method="joint", phases=0, base=2), out=tmp_path / "r", data=data)
    assert len(store.load_metrics(0)["classes"]) == 4


def test_a_short_step_schedule_begins_at_the_full_rate():
    for epochs in (1, 2, 3):
        assert Schedule(epochs, 0.1, milestones=(0.5, 0.75)).lr_at(0, 0, 5) == 0.1
    assert [Schedule(100, 1.0, milestones=(0.55,)).lr_at(epoch, 0, 5) for epoch in (54, 55)] == [1.0, 0.1]
    assert [Schedule(70, 1.0, milestones=(0.7,)).lr_at(epoch, 0, 5) for epoch in (48, 49)] == [1.0, 0.1]


# -- the shared base phase


def base_key(data, base: str = "data", method: type[Method] | None = None, **options: Any) -> str:
    config = tiny.config(**{"method": "finetune"} | options)
    made = method(config) if method else build(config)
    machine = ("cpu", 1, config.precision)
    return stages.base_key(made, transform_of(config, data.train), base, 2, machine)


def test_a_method_of_ones_own_does_not_get_another_s_base_phase(data):
    class Own(Method):
        name = "own"

    assert base_key(data, method=Own) != base_key(data)


def test_a_base_phase_of_a_loss_of_ones_own_is_that_of_its_options_and_its_code(data):
    class Config(RunConfig):
        strength: float = option(1.0, "Method", "Weight of the loss.")

    def first() -> type[Method]:
        class Own(Method):
            pass

        return Own

    def second() -> type[Method]:
        class Own(Method):
            def trains(self, phase: int) -> bool:
                return True

        return Own

    def key(method: type[Method], strength: float) -> str:
        method.Config = Config
        config = Config(**tiny.config(method="finetune").model_dump(), strength=strength)
        return stages.base_key(method(config), transform_of(config, data.train), "data", 2, ("cpu", 1, "32"))

    assert key(first(), 1.0) == key(first(), 1.0)
    assert len({key(first(), 1.0), key(first(), 2.0), key(second(), 1.0)}) == 3


def test_the_key_of_a_base_phase_covers_all_that_moves_its_numbers(tmp_path, data, monkeypatch):
    weights = tmp_path / "weights.safetensors"
    convnet = build_network("convnet", 2, head="cosine").backbone
    save_file({name: t.contiguous() for name, t in convnet.state_dict().items()}, weights)
    changes = [
        *({"network": "resnet8"}, {"label_smoothing": 0.1}, {"clip_norm": 0.1}, {"precision": "bf16"}),
        *({"compile": True}, {"momentum": 0.8}, {"weight_decay": 0.1}, {"schedule": "onecycle"}, {"flip": True}),
        *({"jitter": 0.2}, {"image_size": 6}, {"weights": str(weights)}, {"base": "other data"}),
    ]
    keys = [base_key(data), *(base_key(data, **change) for change in changes)]
    save_file({name: t + 1 for name, t in load_file(weights).items()}, weights)
    keys.append(base_key(data, weights=str(weights)))
    for target, name, value in (
        (stages, "VERSION", 0),
        (torch, "__version__", "2.0"),
        (torch, "get_num_threads", lambda: 77),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.append(base_key(data))
    assert len(set(keys)) == len(keys)
    assert (
        base_key(data, exemplars=1, geodesic_weight=2.0, distill="geodesic") == keys[0]
    )  # nothing of these is in phase 0


def test_a_base_phase_that_began_elsewhere_is_not_shared(tmp_path, data):
    cache, steps = Cache(tmp_path / "cache"), []
    config = tiny.config(method="finetune", checkpoint_steps=1)
    with pytest.raises(Interrupted):
        run_config(config, out=tmp_path / "r", data=data, stop=lambda: bool(steps.append(0)) or len(steps) > 2)
    _, state = RunDirectory(tmp_path / "r").load_progress()
    assert state["base"] is None  # as it is where the cache is off, or where another machine's key is not ours
    run_config(config, out=tmp_path / "r", data=data, cache=cache)
    assert not cache.size()


def test_methods_share_a_base_phase_and_get_the_same_bytes_as_without(tmp_path, data):
    cache = Cache(tmp_path / "cache")
    heard: list[Event] = []
    run_config(tiny.config(method="finetune"), out=tmp_path / "a", data=data, cache=cache, listener=heard.append)
    assert not any(isinstance(event, BaseCached) for event in heard)
    run_config(tiny.config(method="lucir"), out=tmp_path / "b", data=data, cache=cache, listener=heard.append)
    assert [event.phase for event in heard if isinstance(event, BaseCached)] == [0]
    run_config(tiny.config(method="lucir"), out=tmp_path / "c", data=data, cache=None)
    assert contents(tmp_path / "b") == contents(tmp_path / "c")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"epochs": 3},
        {"lr": 0.06},
        {"scale": 4.0},
        {"padding": 0},
        {"batch_size": 9},
        {"method": "lwf"},
        {"method": "bic"},
        {"order": "natural"},
    ],
)
def test_a_base_phase_is_shared_only_by_equals(tmp_path, data, change):
    cache = Cache(tmp_path / "cache")
    run_config(tiny.config(method="finetune", phases=2), out=tmp_path / "a", data=data, cache=cache)
    heard: list[Event] = []
    options = {"method": "finetune", "correction_epochs": 1} | change
    if options["method"] != "bic":
        options.pop("correction_epochs")
    run_config(tiny.config(**options), out=tmp_path / "b", data=data, cache=cache, listener=heard.append)
    assert not any(isinstance(event, BaseCached) for event in heard)


# -- options of the loop


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5},
        {"label_smoothing": 0.1},
        {"schedule": "onecycle"},
        {"jitter": 0.25},
        {"nesterov": True},
        {"norm_decay": False},
    ],
)
def test_options_change_the_result_and_keep_it_finite(tmp_path, data, options):
    plain = run_config(tiny.config(method="lucir", distill="geodesic"), out=tmp_path / "plain", data=data)
    other = run_config(tiny.config(method="lucir", distill="geodesic", **options), out=tmp_path / "other", data=data)
    a, b = plain.load_phase(2).model["head.weight"], other.load_phase(2).model["head.weight"]
    assert b.isfinite().all()
    assert not torch.equal(a, b)


def test_bf16_trains_to_finite_weights_and_asks_the_teacher_in_bf16(tmp_path):
    # In a process of its own, without AMX: on some virtual machines that advertise it, its instructions end the process.
    script = (
        "from tests import tiny; from geodl.experiment import run_config; from pathlib import Path; import sys, torch\n"
        "from geodl.nets.network import FrozenNetwork\n"
        "forward, low = FrozenNetwork.forward, []\n"
        "FrozenNetwork.forward = lambda self, x: low.append(torch.is_autocast_enabled('cpu')) or forward(self, x)\n"
        "config = tiny.config(method='lucir', distill='geodesic', precision='bf16')\n"
        "store = run_config(config, out=Path(sys.argv[1]), data=tiny.dataset())\n"
        "assert all(t.isfinite().all() for t in store.load_phase(2).model.values() if t.is_floating_point())\n"
        "assert low and all(low)\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "r")], env=environment, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_training_gives_the_same_network(tmp_path, data):
    plain = run_config(tiny.config(method="lucir", distill="geodesic"), out=tmp_path / "plain", data=data)
    compiled = run_config(
        tiny.config(method="lucir", distill="geodesic", compile=True), out=tmp_path / "compiled", data=data
    )
    for name, tensor in plain.load_phase(2).model.items():
        torch.testing.assert_close(compiled.load_phase(2).model[name], tensor, atol=1e-4, rtol=0)


def test_of_several_processes_one_that_fails_by_itself_does_not_blame_another(tmp_path, data, monkeypatch):
    def failing(error: Exception) -> str:
        def lock(store: RunDirectory) -> None:
            raise error

        monkeypatch.setattr(RunDirectory, "lock", lock)
        with pytest.raises((RuntimeError, TrainingError)) as caught:
            run_config(tiny.config(method="finetune"), out=tmp_path / "r", data=data)
        return f"{caught.type.__name__}: {caught.value}"

    assert failing(RuntimeError("a reason")) == "RuntimeError: a reason"
    monkeypatch.setattr(loop, "Ranks", lambda rank, world: Ranks(0, 2))
    monkeypatch.setattr(Ranks, "group", None)
    gone = "another process of this run has ended; the same command continues"
    assert failing(RuntimeError("connection\nclosed")) == f"TrainingError: {gone} (connection closed)"
    assert failing(torch.cuda.OutOfMemoryError("out of memory")) == "OutOfMemoryError: out of memory"


def test_tensorboard_gets_losses_and_accuracies(tmp_path, data, monkeypatch):
    drawn: list[str] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path / "r" / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert isinstance(value, float)
            drawn.append(name)

        def close(self) -> None:
            drawn.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    run_config(tiny.config(method="lucir", tensorboard=True), out=tmp_path / "r", data=data)
    assert {"phase 0 train/ce", "phase 1 train/distill", "phase 2 train/margin", "accuracy/cnn", "accuracy/nme"} <= set(
        drawn
    )
    assert drawn[-1] == "closed"
    shutil.rmtree(tmp_path / "r")
    drawn.clear()
    untested = replace(data, test=data.test.select([]))
    run_config(tiny.config(method="lucir", tensorboard=True), out=tmp_path / "r", data=untested)
    assert "phase 2 train/margin" in drawn
    assert not [name for name in drawn if name.startswith("accuracy")]


def test_tensorboard_without_the_extra_says_what_to_install(tmp_path, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'geodl\[tensorboard\]'"):
        run_config(tiny.config(method="lucir", tensorboard=True), out=tmp_path / "r", data=data)


def test_every_method_is_registered_with_its_words():
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert method.paper
        assert method.Config.model_fields["method"].default == name
