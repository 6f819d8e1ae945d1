"""The methods: their losses on worked numbers, what a phase prepares for them, and edge cases that all must stand."""

import re

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.directories import saved
from tests.helpers.oracles import geodesic_loss
from tests.helpers.phases import (
    ScenarioLearner,
    bare_phase,
    batch_of,
    changed,
    cosine_distance,
    cross_entropy,
    divergence,
    output,
    parts_of,
    weights_of,
)
from torch import nn

from geodl.bench.experiment import results_of, run_config
from geodl.data import Dataset
from geodl.data.batches import evaluation
from geodl.data.images import ArrayImages
from geodl.learning.learner import Learner
from geodl.methods import METHODS, Method, Schedule, Stage, build
from geodl.methods.icarl import sigmoid_losses
from geodl.nets import CosineHead, LinearHead, Network, build_network

DISTILLATIONS = ("none", "lwf", "cosine", "geodesic")
DISTILLING = [name for name in METHODS if name not in ("joint", "analytic")]

# Four images; three old classes and one or two new ones.
STUDENT = [
    [2.0, -1.0, 0.5, 0.3, -0.2],
    [0.1, 0.4, -0.3, 1.2, 0.7],
    [1.5, 1.0, -2.0, 0.0, 0.6],
    [0.2, 0.1, 0.9, -1.1, 2.0],
]
TEACHER = [[1.0, -0.5, 0.2], [0.3, 0.8, -0.1], [0.9, 1.4, -1.0], [0.0, 0.2, 0.4]]
LABELS = [0, 3, 1, 4]


def loss_parts(
    config, student=STUDENT, teacher=TEACHER, labels=LABELS, **phase_options
) -> dict[str, float]:
    phase = bare_phase(config, **phase_options)
    asked = output(teacher, seed=2) if phase.teacher else None
    losses = build(config).loss(phase, batch_of(labels), output(student, seed=1), asked)
    return {name: float(value.detach()) for name, value in parts_of(losses).items()}


# -- losses on worked numbers


def test_finetune_is_cross_entropy_alone():
    assert loss_parts(tiny.config(method="finetune")) == {
        "ce": pytest.approx(cross_entropy(STUDENT, LABELS), rel=1e-6)
    }


@pytest.mark.parametrize("method", ["lwf", "icarl", "finetune"])
def test_lwf_distils_the_old_classes_at_temperature_two(method):
    parts = loss_parts(tiny.config(method=method, distill="lwf"))
    expected = divergence([row[:3] for row in STUDENT], TEACHER, temperature=2.0)
    assert parts == {
        "ce": pytest.approx(cross_entropy(STUDENT, LABELS), rel=1e-6),
        "distill": pytest.approx(expected, rel=1e-5),  # weight 1, and no further factor T^2
    }


@pytest.mark.parametrize("method", ["finetune", "lwf", "icarl"])
@pytest.mark.parametrize(("old", "new"), [(3, 2), (3, 1), (3, 0)])
def test_feature_distillations_are_weighted_by_the_root_of_old_over_new(method, old, new):
    student, teacher = output(STUDENT, seed=1), output(TEACHER, seed=2)
    geodesic = geodesic_loss(student.grid.numpy(), teacher.grid.numpy(), dim=2)
    for options, expected in (
        ({"distill": "cosine"}, 5 * cosine_distance(student.pooled, teacher.pooled)),
        (
            {"distill": "cosine", "cosine_features": "grid"},
            5 * cosine_distance(student.grid, teacher.grid),
        ),
        ({"distill": "geodesic", "subspace_dim": 2}, 6 * geodesic),
    ):
        parts = loss_parts(tiny.config(method=method, **options), old=old, new=new)
        assert parts["distill"] == pytest.approx(np.sqrt(old / max(new, 1)) * expected, rel=1e-5)


def test_without_a_teacher_there_is_nothing_to_distil():
    for method in METHODS.values():
        config = tiny.config(method=method.name)
        assert set(loss_parts(config, old=0, new=5)) == {"ce"}


def test_icarl_sigmoids_by_numpy():
    def bce(logits, targets):
        p = 1 / (1 + np.exp(-np.asarray(logits)))
        return -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean(axis=1)

    targets = np.eye(5)[LABELS]
    config = tiny.config(method="icarl", sigmoid=True)
    first = sigmoid_losses(torch.tensor(STUDENT), torch.tensor(LABELS), None)
    np.testing.assert_allclose(first.numpy(), bce(STUDENT, targets), rtol=1e-5)
    targets[:, :3] = 1 / (
        1 + np.exp(-np.asarray(TEACHER))
    )  # iCaRL Alg. 3: q for the old classes, labels for the new
    assert loss_parts(config) == {"bce": pytest.approx(bce(STUDENT, targets).mean(), rel=1e-5)}
    targets[:, 1] = np.eye(5)[LABELS][:, 1]  # a class that comes back is learned by its labels
    assert loss_parts(config, back=[1]) == {
        "bce": pytest.approx(bce(STUDENT, targets).mean(), rel=1e-5)
    }
    with_features = loss_parts(tiny.config(method="icarl", sigmoid=True, distill="cosine"))
    assert with_features["bce"] == pytest.approx(float(first.mean()), rel=1e-5)
    assert with_features["distill"] > 0


def lucir_network(scale: float = 7.0) -> nn.Module:
    network = build_network("convnet", 5, head="cosine", scale=scale)
    network.head = CosineHead(3, 5, scale, seed=4)
    return network


def hinges(network, labels, old, margin, top) -> list[float]:
    """LUCIR Eq. 8 written out for the features of `output(STUDENT, seed=1)`."""
    z = output(STUDENT, seed=1).pooled.double().numpy()
    w = network.head.weight.detach().double().numpy()
    cosines = (z @ w.T) / np.linalg.norm(z, axis=1)[:, None] / np.linalg.norm(w, axis=1)
    found = []
    for row, label in zip(cosines, labels, strict=True):
        if label < old:
            hardest = sorted(row[old:], reverse=True)[:top]
            found += [max(0.0, margin - row[label] + other) for other in hardest]
    return found


@pytest.mark.parametrize(("margin", "weight"), [(0.5, 1.0), (0.2, 1.0), (0.9, 3.0)])
def test_lucir_margin_is_read_from_the_configuration(margin, weight):
    network = lucir_network()
    config = tiny.config(method="lucir", margin=margin, margin_weight=weight)
    parts = loss_parts(config, network=network)
    assert parts["margin"] == pytest.approx(
        weight * np.mean(hinges(network, LABELS, 3, margin, 2)), rel=1e-5
    )
    assert set(parts) == {"ce", "distill", "margin"}


def test_lucir_margin_is_on_the_cosines_before_sigma():
    small, large = (
        loss_parts(tiny.config(method="lucir"), network=lucir_network(scale))
        for scale in (1.0, 50.0)
    )
    assert small["margin"] == pytest.approx(large["margin"], rel=1e-6)


@pytest.mark.parametrize(("old", "hard"), [(4, 2), (3, 9), (3, 1)])
def test_lucir_takes_as_many_hard_classes_as_asked_for_but_no_more_than_are_new(old, hard):
    network = lucir_network()
    teacher = [[*row, 0.0][:old] for row in TEACHER]
    config = tiny.config(method="lucir", hard_classes=hard)
    parts = loss_parts(config, teacher=teacher, network=network, old=old, new=5 - old)
    expected = np.mean(hinges(network, LABELS, old, 0.5, hard))
    assert parts["margin"] == pytest.approx(expected, rel=1e-5)


def test_lucir_distils_in_the_first_incremental_phase():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1)).learn_next()
    phase = learner.prepare_next()
    assert phase.index == 1
    stage = next(learner.method.stages(phase))
    batch = next(iter(stage.batches.epoch(0)))
    phase.network.train(stage.training)

    def distilled() -> tuple[float, float]:
        found = parts_of(stage.loss(phase.network, batch))["distill"]
        student, teacher = phase.network(batch.images), phase.teacher(batch.images)
        distance = cosine_distance(student.pooled.detach(), teacher.pooled)
        return float(found.detach()), 5 * np.sqrt(2 / 1) * distance

    # Before the first step both agree but for the folding; a moved student must be pulled back.
    found, expected = distilled()
    assert found == pytest.approx(expected, abs=1e-5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in phase.network.backbone.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    found, expected = distilled()
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01


def test_lucir_with_geodesic_keeps_cross_entropy_and_margin():
    cosine, geodesic = (
        loss_parts(tiny.config(method="lucir", distill=d), network=lucir_network())
        for d in ("cosine", "geodesic")
    )
    assert cosine["ce"] == geodesic["ce"]
    assert cosine["margin"] == geodesic["margin"]
    assert cosine["distill"] != geodesic["distill"]


# -- what a phase prepares


@pytest.mark.parametrize("method", DISTILLING)
@pytest.mark.parametrize("distill", DISTILLATIONS)
def test_head_and_frozen_rows(method, distill):
    more = {"outer_steps": 0} if method == "mnemonics" else {}
    learner = ScenarioLearner(tiny.config(method=method, distill=distill, epochs=1, **more))
    features = distill in ("cosine", "geodesic")
    linear = method in ("lwf", "bic") or (method == "icarl" and not features)
    learner.learn_next()
    phase = learner.prepare_next()
    assert isinstance(phase.network.head, LinearHead if linear else CosineHead)
    frozen = [True, True, False] if features and not linear else [False] * 3
    assert phase.network.head.frozen.tolist() == frozen
    assert (phase.old, phase.new) == (2, 1)


def test_old_rows_are_trained_where_they_are_not_to_be_frozen():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1, freeze_old_rows=False))
    learner.learn_next()
    before = learner.network.head.rows().clone()
    assert not learner.prepare_next().network.head.frozen.any()
    learner.learn_next()
    assert not torch.isclose(learner.network.head.rows()[:2], before).all(dim=1).any()


def test_the_row_of_a_class_that_comes_back_is_trained():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1))
    learner.learn_next()
    again = learner.scenario.train(0)
    phase = learner.prepare_next(again.select(again.labels == 1))
    assert phase.network.head.frozen.tolist() == [True, False]
    assert (phase.old, phase.new) == (2, 0)


def test_new_rows_are_imprinted_with_the_mean_at_the_norm_of_the_old_rows():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1))
    learner.learn_next()
    phase = learner.prepare_next()
    phase.network.eval()
    (batch,) = evaluation(phase.images, phase.transform)
    with torch.no_grad():
        z = phase.network.features(batch.images).double().numpy()
    mean = (z / np.linalg.norm(z, axis=1, keepdims=True)).mean(axis=0)
    rows = phase.network.head.rows().detach().double().numpy()
    norm = np.linalg.norm(rows[:2], axis=1).mean()
    np.testing.assert_allclose(rows[2], norm * mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_only_bic_holds_images_out(method):
    held = METHODS[method](tiny.config(method=method)).held_out(20)
    assert held == (2 if method == "bic" else 0)


@pytest.mark.parametrize("method", DISTILLING)
def test_the_teacher_is_the_network_as_the_phase_before_left_it(method):
    learner = ScenarioLearner(tiny.config(method=method, epochs=1, **tiny.SMALL.get(method, {})))
    assert learner.prepare_next().teacher is None
    learner.learn_next().learn_next().network.eval()
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = learner.network(images).logits
    phase = learner.prepare_next()
    torch.testing.assert_close(phase.teacher(images).logits, before)
    learner.run(phase, next(learner.method.stages(phase)))
    torch.testing.assert_close(phase.teacher(images).logits, before)
    assert not torch.allclose(phase.network(images).logits[:, :3], before), "the student moves"


def test_joint_training_has_no_teacher_and_a_new_network(tmp_path):
    config = tiny.config(method="joint", epochs=1)
    store = run_config(config, out=tmp_path / "r", data=tiny.dataset())
    epochs = [event for event in store.read_events() if event["kind"] == "epoch"]
    assert [set(event["parts"]) for event in epochs] == [{"ce"}] * 3
    # The second phase is what a network would be that sees all three classes first.
    learner = ScenarioLearner(tiny.config(method="joint", epochs=1)).learn_next()
    phase = learner.prepare_next()
    assert (phase.teacher, phase.old, len(phase.images)) == (None, 0, 27)
    learner.run(phase, next(learner.method.stages(phase)))
    assert not changed(phase.network.state_dict(), saved(store, 1).model)


def test_class_balanced_finetuning_moves_the_head_alone():
    learner = ScenarioLearner(
        tiny.config(method="lucir", epochs=1, finetune_epochs=2, network="resnet8")
    )
    assert [stage.name for stage in learner.method.stages(learner.prepare_next())] == ["train"]
    phase, stage = learner.at_stage(1)
    assert torch.bincount(stage.batches.images.labels).tolist() == [3] * 3, "as many of each"
    before = weights_of(phase.network)
    learner.run(phase, stage, 1)
    assert changed(before, phase.network.state_dict()) == {"head.weight", "head.scale"}


def test_class_balanced_finetuning_is_in_the_precision_of_the_run(monkeypatch):
    learner = ScenarioLearner(
        tiny.config(method="lucir", epochs=1, finetune_epochs=1, precision="bf16")
    )
    learner.learn_next()
    seen, features = [], Network.features
    monkeypatch.setattr(
        Network,
        "features",
        lambda self, x: seen.append(torch.is_autocast_enabled("cpu")) or features(self, x),
    )
    learner.learn_next()
    assert seen
    assert all(seen)


def test_without_old_images_there_is_no_balanced_finetuning():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1, finetune_epochs=2, exemplars=0))
    learner.learn_next()
    assert [stage.name for stage in learner.method.stages(learner.prepare_next())] == ["train"]


# -- faults of public implementations that belong here


def test_the_rate_falls_after_the_milestone_and_not_an_epoch_before():
    learner = ScenarioLearner(tiny.config(method="finetune"))
    phase = learner.prepare_next()
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    stage = Stage(
        "slope",
        weight,
        phase.batches(phase.images, "slope"),
        # Its gradient is 1 at every step.
        lambda module, batch: iter([("slope", module(torch.ones(1, 1)).sum())]),
        Schedule(epochs=4, lr=1.0, milestones=(0.5,), decay=0.1, momentum=0.0),
    )
    learner.run(phase, stage)
    moved = -len(stage.batches) * (1 + 1 + 0.1 + 0.1)
    assert weight.weight.item() == pytest.approx(moved, rel=1e-5)


def test_exemplars_are_chosen_by_features_without_augmentation():
    config = tiny.config(method="finetune", epochs=1, flip=True, padding=3, jitter=0.5, exemplars=4)
    phase = (learner := ScenarioLearner(config)).prepare_next()
    learner.run(phase, next(learner.method.stages(phase)))
    chosen = learner.method.exemplars(phase, 4).images
    phase.network.eval()
    mean, std = (np.array(part)[:, None, None] for part in (config.mean, config.std))
    for label in (0, 1):
        pixels = phase.images.pixels[phase.images.labels == label]
        inputs = torch.tensor((pixels.numpy() / 255 - mean) / std).float()
        with torch.no_grad():
            z = phase.network.features(inputs).double().numpy()
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        picks: list[int] = []
        for k in range(1, 5):  # iCaRL Alg. 4
            distances = [
                np.inf if i in picks else np.linalg.norm(z.mean(0) - z[[*picks, i]].sum(0) / k)
                for i in range(len(z))
            ]
            picks.append(int(np.argmin(distances)))
        assert torch.equal(chosen.pixels[chosen.labels == label], pixels[picks])


def test_the_seed_decides_first_weights_order_and_augmentation():
    def drawn(seed):
        phase = ScenarioLearner(tiny.config(method="finetune", seed=seed)).prepare_next()
        batch = next(iter(next(METHODS["finetune"](phase.config).stages(phase)).batches.epoch(0)))
        return phase.network.backbone.state_dict(), batch

    (first, batch), (again, same), (other, different) = drawn(1), drawn(1), drawn(2)
    assert not changed(first, again)
    assert torch.equal(batch.images, same.images)
    assert changed(first, other)
    assert not torch.equal(batch.indices, different.indices)


# -- combinations that make no sense, and words


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_its_words_and_describes_its_own_options(name):
    method = METHODS[name]
    assert issubclass(method, Method)
    assert method.name == name
    assert 20 < len(method.summary) < 120
    assert "\n" not in method.summary
    assert re.search(r"(19|20)\d\d", method.paper)
    own = method.Options.model_fields.values()
    assert all(info.description.endswith((".", ").")) for info in own)


# -- edge cases


def uneven_dataset() -> Dataset:
    """Return five classes with 9, 2, 1, 9, 4 training images."""
    data = tiny.dataset(5)
    keep = torch.cat([torch.arange(9 * c, 9 * c + n) for c, n in enumerate((9, 2, 1, 9, 4))])
    assert isinstance(data.train, ArrayImages)
    return Dataset("uneven", data.train.select(keep), data.test, data.classes, "uneven")


@pytest.mark.parametrize(
    "options",
    [{"method": m} for m in METHODS] + [{"method": m, "distill": "geodesic"} for m in DISTILLING],
    ids=lambda options: "-".join(options.values()),
)
def test_groups_of_one_uneven_groups_and_classes_smaller_than_the_budget(tmp_path, options):
    more = tiny.SMALL.get(options["method"], {})
    if options["method"] in ("lucir", "mnemonics"):
        more = {**more, "hard_classes": 7}
    # Groups of one class, of unequal sizes; K above the new classes; a class of one image; batches far below dimension 127.
    config = tiny.config(
        **options,
        **more,
        groups=(2, 1, 2),
        base=None,
        order="natural",
        epochs=1,
        exemplars=5,
        batch_size=32,
    )
    store = run_config(config, out=tmp_path / "r", data=uneven_dataset())
    last = Learner.load(store.path)
    assert all(tensor.isfinite().all() for tensor in last.network.state_dict().values())
    kept = [4, 1, 1, 4, 3] if options["method"] == "bic" else [5, 2, 1, 5, 4]  # BiC holds one out
    assert list(last.memory.per_class().values()) == kept
    assert len(results_of(store)["nme"].accuracy) == 3


@pytest.mark.parametrize("distill", DISTILLATIONS)
def test_a_phase_of_two_images_in_one_batch_without_memory(distill):
    learner = ScenarioLearner(
        tiny.config(method="lucir", distill=distill, epochs=1, exemplars=0, base=2)
    )
    learner.learn_next()
    learner.learn(learner.scenario.train(1).select([0, 1]))
    assert all(tensor.isfinite().all() for tensor in learner.network.state_dict().values())
    assert learner.memory.images is None
