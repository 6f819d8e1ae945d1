"""The losses of the methods on worked numbers, against numpy."""

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.oracles import geodesic_loss
from tests.helpers.phases import (
    ScenarioLearner,
    bare_phase,
    batch_of,
    cosine_distance,
    cross_entropy,
    divergence,
    output,
    parts_of,
)
from torch import nn

from geodl.methods import METHODS, build
from geodl.methods.icarl import sigmoid_losses
from geodl.nets import CosineHead, build_network

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


def test_finetune_is_cross_entropy_alone():
    expected = pytest.approx(cross_entropy(STUDENT, LABELS), rel=1e-6)
    assert loss_parts(tiny.config(method="finetune")) == {"ce": expected}


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
    pooled = cosine_distance(student.pooled, teacher.pooled)
    grid = cosine_distance(student.grid, teacher.grid)
    for options, expected in (
        ({"distill": "cosine"}, 5 * pooled),
        ({"distill": "cosine", "cosine_features": "grid"}, 5 * grid),
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
    # iCaRL Alg. 3: q for the old classes, labels for the new
    targets[:, :3] = 1 / (1 + np.exp(-np.asarray(TEACHER)))
    assert loss_parts(config) == {"bce": pytest.approx(bce(STUDENT, targets).mean(), rel=1e-5)}
    targets[:, 1] = np.eye(5)[LABELS][:, 1]  # a class that comes back is learned by its labels
    expected = pytest.approx(bce(STUDENT, targets).mean(), rel=1e-5)
    assert loss_parts(config, back=[1]) == {"bce": expected}
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
    expected = weight * np.mean(hinges(network, LABELS, 3, margin, 2))
    assert parts["margin"] == pytest.approx(expected, rel=1e-5)
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
