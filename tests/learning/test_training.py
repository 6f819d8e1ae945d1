"""The loop: schedules, resume, caching, stopping, and what a phase prepares."""

import math
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import tiny
from tests.helpers.directories import saved
from tests.helpers.phases import KeptProgress, ScenarioLearner, changed, parts_of
from tests.helpers.runs import result_files

from geodl import Learner
from geodl.bench.experiment import results_of, run_config, scenario_of
from geodl.config import Options
from geodl.core.cache import Cache
from geodl.core.errors import (
    GeodlError,
    Interrupted,
    MissingExtraError,
    StoreError,
    TrainingError,
)
from geodl.core.events import BaseCached, EpochEnded, Event, PhaseStarted, StepTaken
from geodl.core.ranks import Ranks
from geodl.core.tensors import part
from geodl.data.batches import transform_of
from geodl.data.images import ArrayImages
from geodl.learning import loop, shared_base
from geodl.learning.loop import StageRun
from geodl.learning.saving import load_model
from geodl.methods import Losses, Method, Phase, Schedule, Stage, build
from geodl.model.classifiers.ncm import drift
from geodl.model.features import class_means
from geodl.model.metrics import confusions_of
from geodl.nets import BACKBONES, build_network
from geodl.nets.resnet import ConvNet
from geodl.store import Directory

ROOT = Path(__file__).parents[2]
HOW = ("data", "cache", "listener", "stop", "fresh", "allow_environment_change")
"""What `run_config` takes beside the configuration."""
ONE = {"method": "finetune", "phases": 0, "base": None}
"""Options of a run of one phase."""
Run = Callable[..., Directory]


@pytest.fixture(scope="module")
def data():
    return tiny.dataset()


@pytest.fixture
def run(tmp_path, data) -> Run:
    """Return what runs the tiny options, some replaced, in a directory."""

    def go(name: str = "r", **options: Any) -> Directory:
        how = {"data": data} | {key: options.pop(key) for key in HOW if key in options}
        config = tiny.config(**{"method": "finetune"} | options)
        return run_config(config, out=tmp_path / name, **how)

    return go


def events_of(store: Directory, kind: str) -> list[dict[str, Any]]:
    return [event for event in store.read_events() if event["kind"] == kind]


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


def test_cosine_starts_at_the_rate_and_falls_along_half_a_cosine():
    schedule = Schedule(epochs=4, lr=0.5, kind="cosine")
    rates = [schedule.lr_at(epoch, step, 25) for epoch in range(4) for step in range(25)]
    halves = torch.arange(100, dtype=torch.float64) + 0.5
    assert rates == pytest.approx((0.5 * (halves * math.pi / 200).cos().square()).tolist())


# -- a run as a whole


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


def test_the_oracle_is_evaluated_only_where_it_is_asked_for(run):
    plain = saved(run("plain", method="lucir"), 2)
    asked = saved(run("asked", method="lucir", ame=True), 2)
    assert set(plain.metrics["confusions"]) == {"cnn", "nme", "ncm"}
    assert set(asked.metrics["confusions"]) == {"cnn", "nme", "ncm", "ame"}
    assert not changed(plain.model, asked.model)


def test_confusions_count_every_test_image_once(run):
    store = run()
    for t in range(3):
        metrics = saved(store, t).metrics
        seen = len(metrics["classes"])
        for name, confusion in confusions_of(metrics).items():
            assert confusion.counts.sum(dim=1).tolist() == [5] * seen
            assert confusion.to_json() == metrics["confusions"][name]


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
    # Under the old network, for imprinting and the drift; for the angles, under the old network and
    # after each epoch, and to see that the network is sound; for herding and the means; the exemplars.
    assert looked[3:] == [9, 15, 15, 15, 15, 9, 9]


def test_every_epoch_tells_the_angles_between_the_old_and_the_new_network(run):
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


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"exemplars": 3}, [3, 3, 3]),
        ({"exemplars": 9, "memory_budget": "total"}, [4, 3, 2]),
        ({"exemplars": 0}, []),
    ],
)
def test_memory_keeps_the_quota_of_every_class(run, options, kept):
    store = run(**options)
    counts = [load_model(store.phase(t)).memory.per_class() for t in range(3)]
    assert counts == [dict.fromkeys(range(t + 2), kept[t]) if kept else {} for t in range(3)]
    assert set(results_of(store)) == {"cnn", "ncm", *(["nme"] if kept else [])}


def test_joint_training_starts_anew_with_everything(run):
    heard: list[Event] = []
    store = run(method="joint", listener=heard.append)
    assert [event.images for event in heard if isinstance(event, PhaseStarted)] == [18, 27, 36]
    steps = [event["steps"] for event in events_of(store, "stage")]
    assert steps == [3, 4, 5]  # of 8 images each


@pytest.mark.parametrize("norm_decay", [True, False])
def test_weight_decay_spares_norms_biases_and_scales_where_asked(norm_decay):
    network = build_network("resnet8", 3, head="cosine")
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = Schedule(1, lr=0.5, weight_decay=0.1, norm_decay=norm_decay).optimizer(
        network.parameters()
    )
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, after in network.named_parameters():
        spared = not norm_decay and ("bn" in name or "downsample.1" in name or name == "head.scale")
        torch.testing.assert_close(after, before[name] * (1.0 if spared else 0.95), msg=name)


# -- continuing


def test_a_complete_run_is_not_computed_again(run):
    run()
    heard: list[Event] = []
    run(listener=heard.append)
    assert [event.kind for event in heard] == ["run", "done"]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("lucir", {"distill": "geodesic", "finetune_epochs": 2}),
        ("bic", {"correction_epochs": 4}),
        ("mnemonics", {"outer_steps": 3}),
        ("finetune", {"norm_decay": False, "nesterov": True}),
        ("lucir", {"optimizer": "adamw", "lr": 0.001}),
    ],
)
def test_stopped_after_any_step_it_goes_on_to_the_same_bytes(tmp_path, run, method, more):
    options = {"method": method, "epochs": 1} | more
    run("whole", **options)
    for every in (1, 4):
        heard: list[Event] = []
        for _ in range(200):
            steps = iter([*[False] * (every - 1), True])
            with suppress(Interrupted):
                run(
                    f"{every}", **options, stop=lambda left=steps: next(left), listener=heard.append
                )
                break
        assert result_files(tmp_path / f"{every}") == result_files(tmp_path / "whole")
        ends = [event for event in heard if isinstance(event, EpochEnded)]
        # None without a step, also where the last one was the place to stop.
        assert all(event.parts for event in ends)
        assert len({(event.phase, event.stage, event.epoch) for event in ends}) == len(ends)


def test_a_checkpoint_of_version_2_resumes_with_its_momenta(tmp_path, run):
    options = {"method": "finetune", "epochs": 2, "phases": 1}
    run("whole", **options)
    left = iter([*[False] * 5, True])
    with pytest.raises(Interrupted):
        run("again", **options, stop=lambda: next(left))
    store = Directory(tmp_path / "again")
    tensors, state = store.load_progress()
    momenta = part(tensors, "optimizer")
    assert {name.partition(".")[2] for name in momenta} == {"momentum_buffer"}
    old = {f"momentum.{name.partition('.')[0]}": each for name, each in momenta.items()}
    old |= {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}
    del state["optimizer"]
    with store.lock():
        store.save_progress(old, state)
    run("again", **options)
    assert result_files(tmp_path / "again") == result_files(tmp_path / "whole")


def test_other_weights_under_the_same_name_are_another_run(tmp_path, run):
    weights = tmp_path / "weights.safetensors"
    for seed in (1, 2):
        convnet = build_network("convnet", 2, head="cosine", seed=seed).backbone
        save_file({name: t.contiguous() for name, t in convnet.state_dict().items()}, weights)
        if seed == 1:
            run(weights=str(weights))
    with pytest.raises(StoreError, match="weights_sha256"):
        run(weights=str(weights))


def test_the_shorter_side_of_arrays_is_the_networks(data):
    wide = ArrayImages(torch.zeros(2, 3, 10, 30, dtype=torch.uint8), torch.tensor([0, 1]))
    tall = ArrayImages(torch.zeros(2, 3, 30, 10, dtype=torch.uint8), torch.tensor([0, 1]))
    assert [transform_of(tiny.config(), images).size for images in (wide, tall)] == [10, 10]


def test_threads_are_kept_and_another_number_is_refused(run):
    run(**ONE)
    with pytest.raises(StoreError, match=r"threads .*1.*2"):
        run(**ONE, threads=2)
    torch.set_num_threads(2)
    run(**ONE, threads=None)
    assert torch.get_num_threads() == 1  # restored from the run
    run(**ONE, threads=2, allow_environment_change=True)
    torch.set_num_threads(1)


def test_other_data_are_refused(run):
    run(**ONE)
    with pytest.raises(StoreError, match="fingerprint"):
        run(**ONE, data=tiny.dataset(seed=5))


def test_weights_that_a_step_breaks_reach_no_checkpoint(run, tmp_path):
    # The loss of the first step is finite, its step is not: the next loss would be the first to tell.
    with pytest.raises(TrainingError, match=r"epoch 1, step 1 \(the weights after .*the start of"):
        run(lr=1e300, epochs=3, checkpoint_steps=1)
    assert Directory(tmp_path / "r").load_progress() is None


def test_a_last_step_after_which_features_overflow_ends_the_training(run, tmp_path):
    # Loss and weights are finite: only the network's output tells.
    with pytest.raises(TrainingError, match=r"the network's output after that step"):
        run(lr=1e25, epochs=1, batch_size=1000, phases=0, base=None)
    assert not Directory(tmp_path / "r").completed()


def bad_stage(learner: ScenarioLearner, bad: int, epochs: int = 2) -> tuple[Phase, Stage]:
    """Return a phase and a stage of 5 steps an epoch whose loss is NaN at one of its steps, from 1."""
    phase, steps = learner.prepare_next(), iter(range(1, 1000))
    stage = next(learner.method.stages(phase))
    plain = stage.loss

    def loss(module: torch.nn.Module, batch: Any) -> Losses:
        parts = parts_of(plain(module, batch))
        yield from parts.items()
        yield "own", parts["ce"] * (torch.nan if next(steps) == bad else 0.0)

    return phase, replace(
        stage,
        loss=loss,
        steps=5,
        batches=phase.batches(phase.images, "train", 3),
        schedule=Schedule(epochs, 0.01),
    )


@pytest.mark.parametrize("read", [1, 4, 100])
@pytest.mark.parametrize(
    ("bad", "place", "good"), [(3, (1, 3), (1, 2)), (5, (1, 5), (1, 4)), (8, (2, 3), (2, 1))]
)
def test_the_first_loss_that_is_not_finite_is_named_however_rarely_losses_are_read(
    data, read, bad, place, good
):
    learner = ScenarioLearner(tiny.config(method="finetune", checkpoint_steps=2), data)
    learner.trainer.read_steps, progress = read, KeptProgress()
    phase, stage = bad_stage(learner, bad)
    with pytest.raises(TrainingError) as caught:
        StageRun(learner.trainer, phase, stage, progress=progress).through()
    assert f"epoch {place[0]}, step {place[1]} (ce = " in str(caught.value)
    assert "own = nan" in str(caught.value)
    assert f"checkpoint is epoch {good[0]}, step {good[1]}:" in str(caught.value)
    assert progress.saved
    saved = [tensor for tensors, _ in progress.saved for tensor in tensors.values()]
    assert all(tensor.isfinite().all() for tensor in saved)


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
    assert not changed(weights, same)
    steps = [
        [(e.epoch, e.step) for e in events if isinstance(e, StepTaken)] for events in (every, some)
    ]
    assert steps == [
        [(e, s) for e in (0, 1) for s in told] for told in ((1, 2, 3, 4, 5), (2, 4, 5))
    ]
    losses = [[e.parts for e in events if isinstance(e, EpochEnded)] for events in (every, some)]
    assert losses[0] == losses[1]


def test_features_that_are_not_finite_name_the_place_too(run):
    options = {"distill": "geodesic", "base_lr": 0.05, "lr": 1e30, "checkpoint_steps": 1}
    place = r"not finite in phase 1, stage train, epoch \d, step \d.*last good checkpoint"
    with pytest.raises(TrainingError, match=place):
        run(method="lucir", **options)


def test_a_network_broken_by_the_last_step_is_neither_kept_nor_shared(run, tmp_path):
    # No loss is computed after the only step of the phase: what the network gives must be looked at.
    cache = Cache(tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"epoch 1, step 1 .*the start of"):
            run(epochs=1, batch_size=64, lr=1e38, cache=cache)
    assert not cache.size()
    assert Directory(tmp_path / "r").load_progress() is None


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


def test_no_phases_means_all_the_classes_whatever_the_base(run):
    assert len(run(method="joint", phases=0, base=2).phase(0).json("metrics.json")["classes"]) == 4


def test_a_short_step_schedule_begins_at_the_full_rate():
    for epochs in (1, 2, 3):
        assert Schedule(epochs, 0.1, milestones=(0.5, 0.75)).lr_at(0, 0, 5) == 0.1
    for epochs, milestone, last in ((100, 0.55, 54), (70, 0.7, 48)):
        schedule = Schedule(epochs, 1.0, milestones=(milestone,))
        assert [schedule.lr_at(epoch, 0, 5) for epoch in (last, last + 1)] == [1.0, 0.1]


# -- the shared base phase


def base_key(data, base: str = "data", **options: Any) -> str:
    config = tiny.config(**{"method": "finetune"} | options)
    machine = ("cpu", 1, config.precision)
    return shared_base.base_key(build(config), transform_of(config, data.train), base, 2, machine)


def test_a_base_phase_of_a_loss_of_ones_own_is_that_of_its_options_and_its_code(data):
    class Strength(Options):
        strength: float = 1.0
        """Weight of the loss."""

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
        method.Options = Strength
        config = tiny.config(method="finetune").model_copy(
            update={"parts": {"method own": Strength(strength=strength)}}
        )
        return shared_base.base_key(
            method(config), transform_of(config, data.train), "data", 2, ("cpu", 1, "32")
        )

    assert key(first(), 1.0) == key(first(), 1.0)
    assert len({base_key(data), key(first(), 1.0), key(first(), 2.0), key(second(), 1.0)}) == 4


def test_the_key_of_a_base_phase_covers_all_that_moves_its_numbers(tmp_path, data, monkeypatch):
    weights = tmp_path / "weights.safetensors"
    convnet = build_network("convnet", 2, head="cosine").backbone
    save_file({name: t.contiguous() for name, t in convnet.state_dict().items()}, weights)
    changes = [
        {"method": "lwf"},
        {"method": "bic"},
        {"network": "resnet8"},
        {"scale": 4.0},
        {"seed": 2},
        {"epochs": 3},
        {"lr": 0.06},
        {"batch_size": 9},
        {"padding": 0},
        {"label_smoothing": 0.1},
        {"clip_norm": 0.1},
        {"precision": "bf16"},
        {"compile": True},
        {"momentum": 0.8},
        {"weight_decay": 0.1},
        {"schedule": "onecycle"},
        {"flip": True},
        {"jitter": 0.2},
        {"image_size": 6},
        {"weights": str(weights)},
        {"base": "other data"},
    ]
    keys = [base_key(data), *(base_key(data, **change) for change in changes)]
    save_file({name: t + 1 for name, t in load_file(weights).items()}, weights)
    keys.append(base_key(data, weights=str(weights)))
    for target, name, value in (
        (shared_base, "VERSION", 0),
        (torch, "__version__", "2.0"),
        (torch, "get_num_threads", lambda: 77),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.append(base_key(data))
    assert len(set(keys)) == len(keys)
    # Nothing of these is in phase 0.
    assert base_key(data, exemplars=1, geodesic_weight=2.0, distill="geodesic") == keys[0]


def test_a_base_phase_that_began_elsewhere_is_not_shared(run, tmp_path):
    cache, steps = Cache(tmp_path / "cache"), iter(range(100))
    with pytest.raises(Interrupted):
        run(checkpoint_steps=1, stop=lambda: next(steps) > 1)
    _, state = Directory(tmp_path / "r").load_progress()
    # As it is where the cache is off, or where another machine's key is not ours.
    assert state["base"] is None
    run(checkpoint_steps=1, cache=cache)
    assert not cache.size()


def test_methods_share_a_base_phase_and_get_the_same_bytes_as_without(run, tmp_path):
    cache = Cache(tmp_path / "cache")
    heard: list[Event] = []
    run("a", cache=cache, listener=heard.append)
    assert not any(isinstance(event, BaseCached) for event in heard)
    run("b", method="lucir", cache=cache, listener=heard.append)
    assert [event.phase for event in heard if isinstance(event, BaseCached)] == [0]
    run("c", method="lucir", cache=None)
    assert result_files(tmp_path / "b") == result_files(tmp_path / "c")


@pytest.mark.parametrize("change", [{"order": "natural"}, {"hold_out": 0.3}])
def test_a_base_phase_is_shared_only_on_the_same_images(run, tmp_path, change):
    cache, heard = Cache(tmp_path / "cache"), []
    run("a", cache=cache)
    run("b", **change, cache=cache, listener=heard.append)
    assert not any(isinstance(event, BaseCached) for event in heard)


# -- options of the loop


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5},
        {"label_smoothing": 0.1},
        {"schedule": "onecycle"},
        {"schedule": "cosine"},
        {"weight_factor": "new/old"},
        {"geodesic_features": "pooled"},
        {"freeze_old_rows": False},
        {"hold_out": 0.3},
        {"jitter": 0.25},
        {"nesterov": True},
        {"norm_decay": False},
    ],
)
def test_options_change_the_result_and_keep_it_finite(run, options):
    given = {"method": "lucir", "distill": "geodesic"}
    plain, other = run("plain", **given), run("other", **given | options)
    a, b = (saved(each, 2).model["head.weight"] for each in (plain, other))
    assert b.isfinite().all()
    assert not torch.equal(a, b)


def test_bf16_trains_to_finite_weights_and_asks_the_teacher_in_bf16(tmp_path):
    # In a process of its own, without AMX: on some virtual machines that advertise it, its instructions end the process.
    script = (
        "from tests.helpers import tiny; from geodl.bench.experiment import run_config; from pathlib import Path; import sys, torch\n"
        "from geodl.nets.network import FrozenNetwork\n"
        "forward, low = FrozenNetwork.forward, []\n"
        "FrozenNetwork.forward = lambda self, x: low.append(torch.is_autocast_enabled('cpu')) or forward(self, x)\n"
        "config = tiny.config(method='lucir', distill='geodesic', precision='bf16')\n"
        "store = run_config(config, out=Path(sys.argv[1]), data=tiny.dataset())\n"
        'assert all(t.isfinite().all() for t in store.phase(2).tensors("model.safetensors").values() if t.is_floating_point())\n'
        "assert low and all(low)\n"
    )
    environment = os.environ | {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "r")],
        env=environment,
        check=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_training_gives_the_same_network(run):
    given = {"method": "lucir", "distill": "geodesic"}
    plain, compiled = run("plain", **given), run("compiled", **given, compile=True)
    for name, tensor in saved(plain, 2).model.items():
        torch.testing.assert_close(saved(compiled, 2).model[name], tensor, atol=1e-4, rtol=0)


def test_of_several_processes_one_that_fails_by_itself_does_not_blame_another(run, monkeypatch):
    def failing(error: Exception) -> str:
        def lock(store: Directory) -> None:
            raise error

        monkeypatch.setattr(Directory, "lock", lock)
        with pytest.raises((RuntimeError, TrainingError)) as caught:
            run()
        return f"{caught.type.__name__}: {caught.value}"

    assert failing(RuntimeError("a reason")) == "RuntimeError: a reason"
    monkeypatch.setattr(loop, "Ranks", lambda *_: Ranks(0, 2))
    monkeypatch.setattr(Ranks, "group", None)
    blamed = failing(RuntimeError("connection\nclosed"))
    assert blamed.startswith("TrainingError: another process of this run has ended")
    assert blamed.endswith("(connection closed)")
    full = torch.cuda.OutOfMemoryError("out of memory")
    assert failing(full) == "OutOfMemoryError: out of memory"


def test_tensorboard_gets_losses_and_accuracies(run, tmp_path, data, monkeypatch):
    drawn: list[str] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path / "r" / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert isinstance(value, float)
            drawn.append(name)

        def close(self) -> None:
            drawn.append("closed")

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter)
    )
    run(method="lucir", tensorboard=True)
    parts = {"phase 0 train/ce", "phase 1 train/distill", "phase 2 train/margin"}
    assert parts | {"accuracy/cnn", "accuracy/nme"} <= set(drawn)
    assert drawn[-1] == "closed"
    shutil.rmtree(tmp_path / "r")
    drawn.clear()
    untested = replace(data, test=data.test.select([]))
    run(method="lucir", tensorboard=True, data=untested)
    assert "phase 2 train/margin" in drawn
    assert not [name for name in drawn if name.startswith("accuracy")]


def test_tensorboard_without_the_extra_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*tensorboard"):
        run(method="lucir", tensorboard=True)
