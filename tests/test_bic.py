"""BiC: the weights of its two losses, what is held out, and a correction that moves two numbers and nothing else."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import tiny
from tests.phases import ScenarioLearner, batch_of, cross_entropy, divergence, log_softmax, output
from torch import nn

from geodl.data.batches import evaluation, transform_of
from geodl.data.images import FileImages
from geodl.experiment import run_config, scenario_of
from geodl.learner import Learner
from geodl.methods import METHODS, Phase
from geodl.methods.bic import Correction
from geodl.metrics import confusions_of
from geodl.nets import frozen_copy

STUDENT = [[2.0, -1.0, 0.5, 0.3], [0.1, 0.4, -0.3, 1.2], [1.5, 1.0, -2.0, 0.0]]
TEACHER = [[1.0, -0.5, 0.2], [0.3, 0.8, -0.1], [0.9, 1.4, -1.0]]
LABELS = [0, 3, 1]


def config(**options):
    return tiny.config(**{"method": "bic", "epochs": 1, "correction_epochs": 20} | options)


def at_correction(learner: ScenarioLearner) -> tuple[Phase, object]:
    """Go to the second phase's correction; give the phase and the stage."""
    learner.learn_next()
    phase = learner.prepare_next()
    stages = learner.method.stages(phase)
    learner.run(phase, next(stages))
    return phase, next(stages)


# -- the first stage


def test_lambda_is_the_share_of_the_old_classes():
    phase = Phase(1, config(), None, None, object(), None, None, 3, 1, None, torch.device("cpu"))  # type: ignore[arg-type]
    method = METHODS["bic"](phase.config)
    parts = method.losses(phase, batch_of(LABELS), output(STUDENT), output(TEACHER), method.distillation(phase))
    assert {name: float(value) for name, value in parts.items()} == {
        "ce": pytest.approx(1 / 4 * cross_entropy(STUDENT, LABELS), rel=1e-5),
        "distill": pytest.approx(3 / 4 * divergence([row[:3] for row in STUDENT], TEACHER), rel=1e-5),
    }


def test_classes_that_come_back_are_learned_where_no_class_is_new():
    phase = Phase(1, config(), None, None, object(), None, None, 3, 0, None, torch.device("cpu"))  # type: ignore[arg-type]
    method = METHODS["bic"](phase.config)
    student, labels = [row[:3] for row in STUDENT], [0, 2, 1]
    parts = method.losses(phase, batch_of(labels), output(student), output(TEACHER), method.distillation(phase))
    assert float(parts["ce"]) == pytest.approx(1 / 4 * cross_entropy(student, labels), rel=1e-5)


def test_cross_entropy_has_its_full_weight_where_nothing_is_distilled():
    for old, options in ((0, {}), (3, {"distill": "none"})):
        teacher = object() if old else None
        phase = Phase(1, config(**options), None, None, teacher, None, None, old, 4 - old, None, torch.device("cpu"))  # type: ignore[arg-type]
        method = METHODS["bic"](phase.config)
        parts = method.losses(phase, batch_of(LABELS), output(STUDENT), None, method.distillation(phase))
        assert set(parts) == {"ce"}
        assert float(parts["ce"]) == pytest.approx(cross_entropy(STUDENT, LABELS), rel=1e-6)


# -- what is held out


@pytest.mark.parametrize(("quota", "held"), [(0, 0), (1, 0), (2, 1), (5, 1), (20, 2), (50, 5), (100, 10)])
def test_a_tenth_is_held_out_and_something_is_left(quota, held):
    assert METHODS["bic"](config()).held_out(quota) == held


def test_a_total_budget_holds_out_as_many_of_every_class():
    learner = ScenarioLearner(config(exemplars=80, memory_budget="total"), tiny.dataset(4, train=50))
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
        for stage in learner.method.stages(phase):
            if stage.name == "train":
                assert not held & set(stage.batches.images.item_digests())
        memory = learner.learn_next().memory
        assert set(memory.held.item_digests()) == held
        assert not held & set(memory.images.item_digests())
        assert set(memory.per_class().values()) == {18}  # the budget counts what is held out


# -- the correction


def test_the_correction_by_hand():
    correction = Correction(2)
    with torch.no_grad():
        correction.alpha.fill_(0.5)
        correction.beta.fill_(-1.0)
    logits = torch.tensor([[3.0, 1.0, 4.0, -2.0]])
    assert correction(logits).tolist() == [[3.0, 1.0, 1.0, -2.0]]


@pytest.mark.parametrize("l2", [0.0, 0.1, 0.7])
def test_the_correction_minimises_cross_entropy_of_logits_not_of_probabilities(l2):
    learner = ScenarioLearner(config(correction_l2=l2))
    phase, stage = at_correction(learner)
    batch = next(iter(stage.batches.epoch(0)))
    with torch.no_grad():
        stage.module.alpha.fill_(0.6)
        stage.module.beta.fill_(-0.4)
    parts = {name: float(value.detach()) for name, value in stage.loss(stage.module, batch).items()}
    phase.network.eval()
    (whole,) = evaluation(phase.memory.held, phase.transform)
    with torch.no_grad():
        logits = phase.network(whole.images).logits.double().numpy()
    logits[:, 2:] = 0.6 * logits[:, 2:] - 0.4
    rows = batch.indices.numpy()
    assert parts["ce"] == pytest.approx(cross_entropy(logits[rows], batch.labels.tolist()), rel=1e-4)
    assert parts["l2"] == pytest.approx(l2 * 0.16, rel=1e-4)
    probabilities = np.exp(log_softmax(logits[rows]))
    assert abs(parts["ce"] - cross_entropy(probabilities, batch.labels.tolist())) > 1e-3


def test_the_correction_is_the_minimum_that_a_search_finds():
    learner = ScenarioLearner(
        config(correction_epochs=200, exemplars=10, epochs=3, batch_size=64), tiny.dataset(4, train=30)
    )
    phase, stage = at_correction(learner)
    learner.run(phase, stage, 1)
    phase.network.eval()
    (whole,) = evaluation(phase.memory.held, phase.transform)
    with torch.no_grad():
        raw = phase.network.head.raw(phase.network.features(whole.images)).double().numpy()

    def objective(alpha: float, beta: float) -> float:
        logits = raw.copy()
        logits[:, 2:] = alpha * raw[:, 2:] + beta
        return cross_entropy(logits, whole.labels.tolist()) + 0.1 * (alpha - 1) ** 2

    alpha, beta = float(phase.network.head.alpha[2]), float(phase.network.head.beta[2])
    found = objective(alpha, beta)
    assert (alpha, beta) != (1.0, 0.0)
    assert found < objective(1.0, 0.0)
    around = [objective(alpha + da, beta + db) for da in (-0.05, 0, 0.05) for db in (-0.05, 0, 0.05)]
    assert found <= min(around) + 1e-4


def test_the_correction_moves_two_numbers_and_nothing_else():
    learner = ScenarioLearner(
        config(network="resnet8", correction_epochs=3)
    )  # resnet8 has batch statistics that could move
    learner.learn_next()
    phase = learner.prepare_next()
    stages = learner.method.stages(phase)
    learner.run(phase, next(stages))
    before = {name: tensor.clone() for name, tensor in phase.network.state_dict().items()}
    assert any("running_mean" in name for name in before)
    stage = next(stages)
    assert [name for name, _ in stage.module.named_parameters()] == ["alpha", "beta"]
    # It starts from the logits in eval mode: before its first step they are those that prediction would see.
    batch = next(iter(stage.batches.epoch(0)))
    (whole,) = evaluation(phase.memory.held, phase.transform)
    with torch.no_grad():
        logits = deepcopy(phase.network).eval()(whole.images).logits[batch.indices]
        assert float(stage.loss(stage.module, batch)["ce"]) == pytest.approx(
            cross_entropy(logits, batch.labels), rel=1e-5
        )
    modes: list[bool] = []
    plain = stage.loss

    def loss(module: nn.Module, batch):
        modes.append(phase.network.training)
        return plain(module, batch)

    stage.loss = loss
    learner.run(phase, stage, 1)
    after = phase.network.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.alpha", "head.beta"}
    assert modes
    assert not any(modes)
    assert after["head.alpha"][:2].tolist() == [1.0, 1.0]
    assert after["head.beta"][:2].tolist() == [0.0, 0.0]


def test_older_classes_keep_the_pairs_they_have():
    learner = ScenarioLearner(config())
    learner.learn_next()
    second = learner.learn_next().network.head
    pair = float(second.alpha[2]), float(second.beta[2])
    assert pair != (1.0, 0.0)
    phase = learner.prepare_next()
    stages = learner.method.stages(phase)
    learner.run(phase, next(stages))
    stage = next(stages)
    # The loss sees the older class's logits with their pair.
    phase.network.eval()
    (whole,) = evaluation(phase.memory.held, phase.transform)
    batch = next(iter(stage.batches.epoch(0)))
    with torch.no_grad():
        raw = phase.network.head.raw(phase.network.features(whole.images)).double().numpy()
    raw[:, 2] = pair[0] * raw[:, 2] + pair[1]
    expected = cross_entropy(raw[batch.indices.numpy()], batch.labels.tolist())
    assert float(stage.loss(stage.module, batch)["ce"].detach()) == pytest.approx(expected, rel=1e-4)
    learner.run(phase, stage, 1)
    head = phase.network.head
    assert (float(head.alpha[2]), float(head.beta[2])) == pair
    assert (float(head.alpha[3]), float(head.beta[3])) not in (pair, (1.0, 0.0))


def test_finishing_twice_is_finishing_once_and_a_rebuilt_stage_is_the_same():
    learner = ScenarioLearner(config())
    phase, stage = at_correction(learner)
    learner.run(phase, stage, 1)
    once = phase.network.head.alpha.clone(), phase.network.head.beta.clone()
    stage.finish()
    assert torch.equal(phase.network.head.alpha, once[0])
    *_, again = learner.method.stages(phase)  # built on the corrected network, as after a kill
    again.module.load_state_dict(stage.module.state_dict())
    batch = next(iter(stage.batches.epoch(0)))
    assert torch.equal(again.loss(again.module, batch)["ce"], stage.loss(stage.module, batch)["ce"])
    again.finish()
    assert torch.equal(phase.network.head.alpha, once[0])
    assert torch.equal(phase.network.head.beta, once[1])


@pytest.mark.parametrize(
    ("options", "groups"),
    [({"exemplars": 1}, 3), ({"exemplars": 0}, 3), ({"correction_epochs": 0}, 3)],
)
def test_without_held_out_images_there_is_no_correction(options, groups):
    learner = ScenarioLearner(config(**options))
    for _ in range(groups):
        phase = learner.prepare_next()
        assert [stage.name for stage in learner.method.stages(phase)] == ["train"]
        learner.learn_next()
    assert learner.network.head.alpha.tolist() == [1.0] * 4


def test_the_base_phase_is_not_corrected():
    learner = ScenarioLearner(config())
    assert [stage.name for stage in learner.method.stages(learner.prepare_next())] == ["train"]
    learner.learn_next()
    assert [stage.name for stage in learner.method.stages(learner.prepare_next())] == ["train", "correct"]


def test_the_schedule_is_the_published_one():
    learner = ScenarioLearner(config(correction_epochs=200))
    schedule = at_correction(learner)[1].schedule
    rates = [schedule.lr_at(epoch, 0, 1) for epoch in range(200)]
    changes = [epoch for epoch in range(1, 200) if rates[epoch] != rates[epoch - 1]]
    assert changes == [60, 120, 160, 180]
    assert rates[0] == 0.1
    assert rates[60] == pytest.approx(0.01)
    assert schedule.weight_decay == 0


def test_held_out_files_are_decoded_once_not_in_every_epoch(monkeypatch):
    learner = ScenarioLearner(config())
    phase, _ = at_correction(learner)
    held = phase.memory.held
    files = FileImages(tuple(held.encoded(i) for i in range(len(held))), held.labels)
    phase.memory = replace(phase.memory, held=files)
    *_, stage = learner.method.stages(phase)
    assert stage.name == "correct"

    def refuse(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(FileImages, "decode", refuse)
    monkeypatch.setattr("geodl.data.batches.open_image", refuse)
    learner.run(phase, stage, 1)


# -- who sees the correction


def test_predictions_and_the_next_teacher_use_corrected_logits(tmp_path):
    # Few images of old classes and many of the new ones: the bias is large.
    options = config(exemplars=2, epochs=6, correction_epochs=60, lr=0.05, distill="none", phases=1, base=3)
    data = tiny.dataset(6, train=40)
    store = run_config(options, out=tmp_path / "r", data=data)
    last = store.load_phase(1)
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
    assert (corrected.argmax(1) == batch.labels.numpy())[old].mean() > (raw.argmax(1) == batch.labels.numpy())[
        old
    ].mean()
