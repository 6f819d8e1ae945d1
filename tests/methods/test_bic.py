"""BiC: the weights of its two losses, what is held out, and a correction that moves two numbers and nothing else."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.directories import saved
from tests.helpers.phases import (
    ScenarioLearner,
    bare_phase,
    batch_of,
    changed,
    cross_entropy,
    divergence,
    log_softmax,
    output,
    parts_of,
    weights_of,
)

from geodl.bench.experiment import run_config, scenario_of
from geodl.data.batches import Batch, evaluation, transform_of
from geodl.data.images import FileImages
from geodl.learning.learner import Learner
from geodl.methods import Phase, Stage, build
from geodl.model.metrics import confusions_of
from geodl.nets import frozen_copy

STUDENT = [[2.0, -1.0, 0.5, 0.3], [0.1, 0.4, -0.3, 1.2], [1.5, 1.0, -2.0, 0.0]]
TEACHER = [[1.0, -0.5, 0.2], [0.3, 0.8, -0.1], [0.9, 1.4, -1.0]]
LABELS = [0, 3, 1]


def config(**options):
    return tiny.config(**{"method": "bic", "epochs": 1, "correction_epochs": 20} | options)


def ce_of(stage: Stage, batch: Batch) -> float:
    """Return the cross-entropy that a stage minimizes."""
    return float(parts_of(stage.loss(stage.module, batch))["ce"].detach())


def held_logits(phase: Phase, *, raw: bool = False) -> tuple[np.ndarray, list[int]]:
    """Return logits in eval mode, as they are or before any correction, and labels of what is held out."""
    network = deepcopy(phase.network).eval()
    (whole,) = evaluation(phase.memory.held, phase.transform)
    with torch.no_grad():
        head = network.head.raw if raw else network.head
        logits = head(network.features(whole.images)).double().numpy()
    return logits, whole.labels.tolist()


# -- the first stage


@pytest.mark.parametrize(
    ("old", "new", "options", "share"),
    [
        (3, 1, {}, 3 / 4),
        (3, 0, {}, 3 / 4),  # all classes come back: their rows still learn
        (0, 4, {}, None),
        (3, 1, {"distill": "none"}, None),
    ],
)
def test_lambda_is_the_share_of_the_old_classes_where_something_is_distilled(
    old, new, options, share
):
    rows = [row[: old + new] for row in STUDENT]
    labels = [label % (old + new) for label in LABELS]
    phase = bare_phase(config(**options), old, new)
    asked = output(TEACHER) if old else None
    parts = parts_of(build(phase.config).loss(phase, batch_of(labels), output(rows), asked))
    expected = {"ce": (1 - (share or 0)) * cross_entropy(rows, labels)}
    if share:
        expected["distill"] = share * divergence([row[:3] for row in rows], TEACHER)
    assert {name: float(each) for name, each in parts.items()} == pytest.approx(expected, rel=1e-5)


# -- what is held out


@pytest.mark.parametrize(
    ("quota", "held"), [(0, 0), (1, 0), (2, 1), (5, 1), (20, 2), (50, 5), (100, 10)]
)
def test_a_tenth_is_held_out_and_something_is_left(quota, held):
    assert build(config()).held_out(quota) == held


def test_a_total_budget_holds_out_as_many_of_every_class():
    learner = ScenarioLearner(
        config(exemplars=80, memory_budget="total"), tiny.dataset(4, train=50)
    )
    for count in (4, 3, 2):  # a tenth of 80 / 2, 80 / 3 and 80 / 4 each
        phase = learner.prepare_next()
        assert set(torch.bincount(phase.memory.held.labels).tolist()) == {count}
        learner.learn_next()


def test_held_out_images_come_when_a_class_does_and_are_never_trained_on():
    learner = ScenarioLearner(config(exemplars=20), tiny.dataset(4, train=25))
    held: set[str] = set()
    for new in (2, 1, 1):
        before = set(held)
        phase = learner.prepare_next()
        held |= set(phase.memory.held.item_digests())
        assert len(held) == len(before) + 2 * new  # two of each class that is new, base classes too
        stages = list(learner.method.stages(phase))
        assert [stage.name for stage in stages] == ["train", "correct"][: 1 + (phase.index > 0)]
        assert not held & set(stages[0].batches.images.item_digests())
        memory = learner.learn_next().memory
        assert set(memory.held.item_digests()) == held
        assert not held & set(memory.images.item_digests())
        assert set(memory.per_class().values()) == {18}  # the budget counts what is held out


# -- the correction


@pytest.mark.parametrize("l2", [0.0, 0.1, 0.7])
def test_the_correction_minimises_cross_entropy_of_logits_not_of_probabilities(l2):
    phase, stage = ScenarioLearner(config(correction_l2=l2)).at_stage(1)
    batch = next(iter(stage.batches.epoch(0)))
    with torch.no_grad():
        stage.module.alpha.fill_(0.6)
        stage.module.beta.fill_(-0.4)
    losses = parts_of(stage.loss(stage.module, batch))
    parts = {name: each.item() for name, each in losses.items()}
    logits = held_logits(phase)[0][batch.indices.numpy()]
    logits[:, 2:] = 0.6 * logits[:, 2:] - 0.4
    labels = batch.labels.tolist()
    assert parts["ce"] == pytest.approx(cross_entropy(logits, labels), rel=1e-4)
    assert parts["l2"] == pytest.approx(l2 * 0.16, rel=1e-4)
    assert abs(parts["ce"] - cross_entropy(np.exp(log_softmax(logits)), labels)) > 1e-3


def test_the_correction_is_the_minimum_that_a_search_finds():
    learner = ScenarioLearner(
        config(correction_epochs=200, exemplars=10, epochs=3, batch_size=64),
        tiny.dataset(4, train=30),
    )
    phase, stage = learner.at_stage(1)
    learner.run(phase, stage, 1)
    raw, labels = held_logits(phase, raw=True)

    def objective(alpha: float, beta: float) -> float:
        logits = raw.copy()
        logits[:, 2:] = alpha * raw[:, 2:] + beta
        return cross_entropy(logits, labels) + 0.1 * (alpha - 1) ** 2

    alpha, beta = float(phase.network.head.alpha[2]), float(phase.network.head.beta[2])
    found = objective(alpha, beta)
    assert (alpha, beta) != (1.0, 0.0)
    assert found < objective(1.0, 0.0)
    around = [
        objective(alpha + da, beta + db) for da in (-0.05, 0, 0.05) for db in (-0.05, 0, 0.05)
    ]
    assert found <= min(around) + 1e-4


def test_the_correction_moves_two_numbers_and_nothing_else():
    # resnet8 has batch statistics that could move.
    learner = ScenarioLearner(config(network="resnet8", correction_epochs=3))
    phase, stage = learner.at_stage(1)
    before = weights_of(phase.network)
    assert any("running_mean" in name for name in before)
    assert [name for name, _ in stage.module.named_parameters()] == ["alpha", "beta"]
    # Before its first step the logits are those that prediction would see, in eval mode.
    batch = next(iter(stage.batches.epoch(0)))
    logits = held_logits(phase)[0][batch.indices.numpy()]
    assert ce_of(stage, batch) == pytest.approx(cross_entropy(logits, batch.labels), rel=1e-5)
    modes, plain = [], stage.loss
    stage.loss = lambda *given: modes.append(phase.network.training) or plain(*given)
    learner.run(phase, stage, 1)
    after = phase.network.state_dict()
    assert changed(before, after) == {"head.alpha", "head.beta"}
    assert set(modes) == {False}
    assert after["head.alpha"][:2].tolist() == [1.0, 1.0]
    assert after["head.beta"][:2].tolist() == [0.0, 0.0]


def test_older_classes_keep_the_pairs_they_have():
    learner = ScenarioLearner(config())
    phase, stage = learner.at_stage(1, learned=2)
    second = learner.network.head
    pair = float(second.alpha[2]), float(second.beta[2])
    assert pair != (1.0, 0.0)
    # The loss sees the older class's logits with their pair.
    batch = next(iter(stage.batches.epoch(0)))
    raw = held_logits(phase, raw=True)[0][batch.indices.numpy()]
    raw[:, 2] = pair[0] * raw[:, 2] + pair[1]
    expected = cross_entropy(raw, batch.labels.tolist())
    assert ce_of(stage, batch) == pytest.approx(expected, rel=1e-4)
    learner.run(phase, stage, 1)
    head = phase.network.head
    assert (float(head.alpha[2]), float(head.beta[2])) == pair
    assert (float(head.alpha[3]), float(head.beta[3])) not in (pair, (1.0, 0.0))


def test_finishing_twice_is_finishing_once_and_a_rebuilt_stage_is_the_same():
    learner = ScenarioLearner(config())
    phase, stage = learner.at_stage(1)
    learner.run(phase, stage, 1)
    once = weights_of(phase.network.head)
    stage.finish()
    assert not changed(once, phase.network.head.state_dict())
    *_, again = learner.method.stages(phase)  # built on the corrected network, as after a kill
    again.module.load_state_dict(stage.module.state_dict())
    batch = next(iter(stage.batches.epoch(0)))
    assert ce_of(again, batch) == ce_of(stage, batch)
    again.finish()
    assert not changed(once, phase.network.head.state_dict())


@pytest.mark.parametrize("options", [{"exemplars": 1}, {"exemplars": 0}, {"correction_epochs": 0}])
def test_without_held_out_images_there_is_no_correction(options):
    learner = ScenarioLearner(config(**options))
    for _ in range(3):
        phase = learner.prepare_next()
        assert [stage.name for stage in learner.method.stages(phase)] == ["train"]
        learner.learn_next()
    assert learner.network.head.alpha.tolist() == [1.0] * 4


def test_the_schedule_is_the_published_one():
    schedule = ScenarioLearner(config(correction_epochs=200)).at_stage(1)[1].schedule
    rates = [schedule.lr_at(epoch, 0, 1) for epoch in range(200)]
    changes = [epoch for epoch in range(1, 200) if rates[epoch] != rates[epoch - 1]]
    assert changes == [60, 120, 160, 180]
    assert (rates[0], rates[60], schedule.weight_decay) == (0.1, pytest.approx(0.01), 0)


def test_held_out_files_are_decoded_once_not_in_every_epoch(monkeypatch):
    learner = ScenarioLearner(config())
    phase, _ = learner.at_stage(1)
    held = phase.memory.held
    files = FileImages(tuple(held.encoded(i) for i in range(len(held))), held.labels)
    phase.memory = replace(phase.memory, held=files)
    *_, stage = learner.method.stages(phase)
    assert stage.name == "correct"

    def refuse(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(FileImages, "decode", refuse)
    monkeypatch.setattr("geodl.data.images.open_image", refuse)
    learner.run(phase, stage, 1)


# -- who sees the correction


def test_predictions_and_the_next_teacher_use_corrected_logits(tmp_path):
    # Few images of old classes and many of the new ones: the bias is large.
    options = config(
        exemplars=2, epochs=6, correction_epochs=60, lr=0.05, distill="none", phases=1, base=3
    )
    data = tiny.dataset(6, train=40)
    store = run_config(options, out=tmp_path / "r", data=data)
    last = saved(store, 1)
    network = Learner.load(store.path).network
    assert network.head.alpha[3:].unique().tolist() != [1.0]
    scenario = scenario_of(options, data)
    (batch,) = evaluation(scenario.test(1), transform_of(options, data.train))
    with torch.no_grad():
        raw = network.head.raw(network.features(batch.images)).numpy()
        taught = frozen_copy(network)(batch.images).logits.numpy()
    corrected = last.model["head.alpha"].numpy() * raw + last.model["head.beta"].numpy()
    counted = confusions_of(last.metrics)["cnn"].counts.numpy()

    def confusion(logits: np.ndarray) -> np.ndarray:
        matrix = np.zeros((6, 6), dtype=np.int64)
        np.add.at(matrix, (batch.labels.numpy(), logits.argmax(axis=1)), 1)
        return matrix

    np.testing.assert_array_equal(counted, confusion(corrected))
    assert (counted != confusion(raw)).any()  # uncorrected logits would have predicted otherwise
    np.testing.assert_allclose(taught, corrected, rtol=1e-4, atol=1e-5)
    old = batch.labels.numpy() < 3
    assert (corrected.argmax(1) == batch.labels.numpy())[old].mean() > (
        raw.argmax(1) == batch.labels.numpy()
    )[old].mean()
