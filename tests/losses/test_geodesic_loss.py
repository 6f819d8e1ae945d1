"""The geodesic loss: exact to the digits it promises, and differentiable."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.oracles import geodesic_loss, random_orthogonal
from tests.helpers.pairs import gradient, pair

from geodl.core.errors import GeodlError
from geodl.geometry import GeodesicFlow, common_subspaces, subspace, unit
from geodl.losses import CosineDistillation, GeodesicDistillation

FLOAT32_EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("batch", "d", "dim"),
    [(16, 40, 127), (17, 40, 15), (40, 16, 127), (40, 16, 5), (16, 16, 8), (3, 5, 9)],
)
@pytest.mark.parametrize("center", [True, False])
def test_geodesic_loss_is_that_of_the_dense_kernel(batch, d, dim, center):
    student, teacher = pair(batch, d)
    expected = geodesic_loss(student.numpy(), teacher.numpy(), dim, center=center)
    loss = GeodesicDistillation(dim, center=center)
    assert loss(student, teacher).item() == pytest.approx(expected, rel=1e-11)
    student, teacher = student.float(), teacher.float()
    expected = geodesic_loss(student.numpy(), teacher.numpy(), dim, FLOAT32_EPS, center)
    single = loss(student, teacher)
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(expected, rel=1e-6)


def spread(batch, d, decay, noise, seed, rotation):
    """A teacher whose centred singular values decay to `decay`, and a student turned away from it by `rotation`."""
    rng = np.random.default_rng(seed)
    centred = np.linalg.qr(
        np.hstack([np.ones((batch, 1)), rng.standard_normal((batch, batch - 1))])
    )[0][:, 1:]
    k = batch - 1
    frame = np.linalg.qr(rng.standard_normal((d, 2 * k)))[0]
    values = np.geomspace(1, decay, k)
    a, b = frame[:, :k], frame[:, k : 2 * k]
    turned = a * np.cos(rotation) + b * np.sin(rotation)
    mean = rng.standard_normal(d) / math.sqrt(d)
    old = centred @ (values[:, None] * a.T) * math.sqrt(batch) + mean
    new = (centred + noise * rng.standard_normal(centred.shape) / batch) @ (
        values[:, None] * turned.T
    ) * math.sqrt(batch) + mean
    return torch.tensor(new), torch.tensor(old)


@pytest.mark.parametrize("decay", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("degrees", [0.01, 1.0, 45.0, 89.0, 89.9])
@pytest.mark.parametrize(("dim", "d"), [(127, 80), (12, 80), (127, 2048)])
def test_single_precision_agrees_with_double_on_the_same_inputs(decay, degrees, dim, d):
    rotation = np.linspace(0.01, degrees, 31) * math.pi / 180
    new, old = (z.float() for z in spread(32, d, decay, 0.3, seed=3, rotation=rotation))
    loss = GeodesicDistillation(dim)
    single, double = loss(new, old).item(), loss(new.double(), old.double()).item()
    assert single == pytest.approx(double, rel=1e-5, abs=1e-7)
    if d < 100:  # the oracle's kernel is dense
        assert double == pytest.approx(
            geodesic_loss(new.numpy(), old.numpy(), dim), rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize(
    ("batch", "d", "mean", "weak"), [(64, 128, 30, 1e-2), (128, 512, 30, 3e-3), (128, 512, 0, 3e-3)]
)
def test_one_weak_direction_keeps_its_digits(batch, d, mean, weak):
    rng = np.random.default_rng(0)
    centred = rng.standard_normal((batch, batch - 1))
    left = np.linalg.svd(centred - centred.mean(0), full_matrices=False)[0]
    directions = np.linalg.qr(rng.standard_normal((d, batch - 1)))[0]
    values = np.where(np.arange(batch - 1) < batch - 2, 1, weak)
    old = (left * values) @ directions.T + mean * rng.standard_normal(d) / math.sqrt(d * batch)
    # moves along the weak one
    far = 0.3 * weak / math.sqrt(batch) * rng.standard_normal((batch, 1))
    new = old + far * directions[:, -1]
    old, new = torch.tensor(old).float(), torch.tensor(new).float()
    single, single_gradient = gradient(GeodesicDistillation(), new, old)
    double, double_gradient = gradient(GeodesicDistillation(), new.double(), old.double())
    assert single.item() == pytest.approx(double.item(), rel=1e-5)
    assert (single_gradient - double_gradient).norm() < 1e-5 * double_gradient.norm()


@pytest.mark.parametrize("decay", [1.0, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize(("batch", "d"), [(65, 132), (17, 256)])
def test_the_gradient_in_single_precision_agrees_with_double(decay, batch, d):
    rotation = np.linspace(0.01, 89, batch - 1) * math.pi / 180
    new, old = (z.float() for z in spread(batch, d, decay, 0.3, seed=batch, rotation=rotation))
    _, single = gradient(GeodesicDistillation(), new, old)
    _, double = gradient(GeodesicDistillation(), new.double(), old.double())
    assert (single - double).norm() < 1e-5 * double.norm()


@pytest.mark.parametrize(("batch", "d", "dim"), [(40, 8, 1), (2, 2, 127), (2, 3, 127)])
def test_rows_nearly_orthogonal_to_few_directions_keep_their_digits(batch, d, dim):
    for seed in range(100):
        student, teacher = pair(batch, d, 0.1, seed, torch.float32, mean=5)
        loss = GeodesicDistillation(dim)
        assert loss(student, teacher).item() == pytest.approx(
            loss(student.double(), teacher.double()).item(), rel=1e-5
        )


@pytest.mark.parametrize("difference", [0.0, 3e-7])  # both are no rank by the rule
def test_rows_that_are_alike_lower_the_rank(difference):
    student, teacher = pair(20, 50, dtype=torch.float32)
    student[7] = student[3] + difference * teacher[0]
    expected = geodesic_loss(student.numpy(), teacher.numpy(), 127, FLOAT32_EPS)
    assert GeodesicDistillation()(student, teacher).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_full_space_gives_the_cosine_loss(dtype):
    student, teacher = pair(30, 12, dtype=dtype)
    value, slope = gradient(GeodesicDistillation(12), student, teacher)
    cosine, cosine_slope = gradient(CosineDistillation(), student, teacher)
    torch.testing.assert_close(value, cosine)
    torch.testing.assert_close(slope, cosine_slope)


@settings(max_examples=40, derandomize=True)
@given(st.integers(2, 12), st.integers(1, 14), st.integers(1, 14), st.integers(0, 10**6))
def test_swapping_and_orthogonal_changes_leave_the_loss_unchanged(batch, d, dim, seed):
    student, teacher = pair(batch, d, seed=seed)
    loss = GeodesicDistillation(dim)
    value = loss(student, teacher).item()
    assert 0 <= value <= 2 + 1e-12
    assert loss(teacher, student).item() == pytest.approx(value, rel=1e-7, abs=1e-12)
    turn = torch.tensor(random_orthogonal(np.random.default_rng(seed), d))
    assert loss(student @ turn, teacher @ turn).item() == pytest.approx(value, rel=1e-7, abs=1e-12)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    assert loss(student[order], teacher[order]).item() == pytest.approx(value, rel=1e-7, abs=1e-12)


def test_orthogonal_batches_take_the_mean_over_the_shortest_geodesics():
    rng = torch.Generator().manual_seed(5)
    student, teacher = torch.zeros(6, 12), torch.zeros(6, 12)
    student[:, :6], teacher[:, 6:] = (
        torch.randn(6, 6, generator=rng),
        torch.randn(6, 6, generator=rng),
    )
    for through_flow in (False, True):
        for dtype in (torch.float32, torch.float64):
            loss = GeodesicDistillation(through_flow=through_flow)
            value, slope = gradient(loss, student.to(dtype), teacher.to(dtype))
            assert value.item() == pytest.approx(1, abs=1e-6)  # nothing in common
            assert slope.isfinite().all()


@pytest.mark.parametrize(("batch", "d"), [(8, 20), (40, 60), (40, 200)])
def test_small_losses_keep_their_digits(batch, d):
    student, teacher = pair(batch, d, noise=1e-4, dtype=torch.float32)
    for loss in (GeodesicDistillation(), CosineDistillation()):
        expected, expected_slope = gradient(loss, student.double(), teacher.double())
        value, slope = gradient(loss, student, teacher)
        assert expected < 1e-7
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
        assert (slope - expected_slope).norm() < 1e-5 * expected_slope.norm()


# ---- what does not count


@pytest.mark.parametrize("through_flow", [False, True])
@pytest.mark.parametrize(("old", "new"), [(3, 5), (5, 3), (3, 3)])
def test_directions_beyond_the_common_rank_count_for_nothing(old, new, through_flow):
    rng = np.random.default_rng(old)
    batches = [
        rng.standard_normal((9, rank)) @ rng.standard_normal((rank, 12)) for rank in (new, old)
    ]
    student, teacher = (torch.tensor(z) for z in batches)
    value, slope = gradient(GeodesicDistillation(8, through_flow, center=False), student, teacher)
    assert value.item() == pytest.approx(geodesic_loss(*batches, 8, center=False), rel=1e-9)
    assert slope.isfinite().all()
    cut, cut_slope = gradient(GeodesicDistillation(3, through_flow, center=False), student, teacher)
    torch.testing.assert_close(value, cut, rtol=1e-10, atol=0)
    torch.testing.assert_close(slope, cut_slope, rtol=1e-7, atol=1e-12)


def test_right_angles_beside_directions_beyond_the_rank():
    eye = torch.eye(6, dtype=torch.float64)
    # rank 2 of 4 rows; one direction in common, one at 90 degrees
    student, teacher = eye[[0, 1, 1, 0]], eye[[0, 2, 2, 0]]
    flow = GeodesicFlow(*common_subspaces(teacher, student, 9, center=False, eps=2e-16), eps=2e-16)
    torch.testing.assert_close(
        flow.dense(), torch.diag(torch.tensor([1, 0.5, 0.5, 0, 0, 0], dtype=torch.float64))
    )


def test_a_row_without_projection_counts_nothing():
    student, teacher = (torch.zeros(5, 6, dtype=torch.float64) for _ in range(2))
    student[:, :3], teacher[:, :3] = (z[:, :3] for z in pair(5, 3))
    # Its own direction is not among the two that are kept: it is not seen at all.
    student[4], teacher[4] = torch.eye(6, dtype=torch.float64)[[5, 4]] * 1e-3
    # rounding leaves it some projection
    turn = torch.tensor(random_orthogonal(np.random.default_rng(1), 6))
    student, teacher = student @ turn, teacher @ turn
    loss = GeodesicDistillation(2, center=False)
    value, slope = gradient(loss, student, teacher)
    rest = gradient(loss, student[:4], teacher[:4])[0]
    assert (slope[4] == 0).all()
    assert value.item() == pytest.approx(losses_of_unit(student, teacher), rel=1e-9)
    assert rest.isfinite()


def losses_of_unit(student, teacher):
    p, q = (subspace(unit(z), 2, center=False) for z in (teacher, student))
    flow = GeodesicFlow.between(p, q)
    inner = flow.inner(student, teacher)[:4] / (flow.norm(student) * flow.norm(teacher))[:4]
    return (1 - inner).sum().item() / 5


def test_a_zero_row_of_one_batch_counts_nothing():
    student, teacher = pair(9, 14, dtype=torch.float32)
    student[2] = 0
    value, slope = gradient(GeodesicDistillation(), student, teacher)
    new, old = (unit(z) for z in (student, teacher))
    flow = GeodesicFlow.between(subspace(old, 127), subspace(new, 127))
    rows = 1 - flow.inner(new, old) / (flow.norm(new) * flow.norm(old))
    assert value.item() == pytest.approx(rows[torch.arange(9) != 2].sum().item() / 9, rel=1e-6)
    assert (slope[2] == 0).all()


# ---- gradients


@pytest.mark.parametrize(
    ("batch", "d", "dim"), [(6, 12, 10), (10, 6, 10), (9, 12, 4), (9, 5, 3), (5, 7, 1)]
)
def test_gradient_through_the_flow_agrees_with_finite_differences(batch, d, dim):
    inputs = [z.requires_grad_() for z in pair(batch, d, 0.7, seed=6)]
    assert torch.autograd.gradcheck(GeodesicDistillation(dim, True), inputs)


def cross_polytope(copies, d, seed):
    """Unit rows +-e_i, so that the centred singular values coincide for equal numbers of copies."""
    eye = np.eye(d)
    rows = np.concatenate(
        [np.repeat(sign * eye[[i]], k, 0) for i, k in enumerate(copies) for sign in (1, -1)]
    )
    return torch.tensor(rows @ random_orthogonal(np.random.default_rng(seed), d))


@pytest.mark.parametrize(
    ("copies", "dim"), [([1, 1, 1], 3), ([2, 2, 1, 1], 2), ([2, 2, 1, 1, 1], 5)]
)
def test_coinciding_singular_values_do_not_harm_the_gradient(copies, dim):
    teacher = cross_polytope(copies, 7, seed=7).requires_grad_()
    student = cross_polytope(copies, 7, seed=8).requires_grad_()
    generic = pair(len(teacher), 7, seed=9)[0].requires_grad_()
    assert torch.autograd.gradcheck(GeodesicDistillation(dim, True), (generic, teacher))
    assert torch.autograd.gradcheck(GeodesicDistillation(dim, True), (student, teacher))


def test_by_default_the_flow_is_constant():
    student, teacher = pair(9, 14, seed=10)
    for z, tolerance in ((student, 1e-10), (student.float(), 1e-5)):
        value, slope = gradient(GeodesicDistillation(6), z, teacher.to(z.dtype))
        rows = z.double().clone().requires_grad_()
        old = unit(teacher.to(z.dtype).double())
        flow = GeodesicFlow.between(subspace(old, 6), subspace(unit(z.double()), 6))
        kernel = flow.dense()
        inner = (rows @ kernel * old).sum(1)
        expected = (
            1 - inner / ((rows @ kernel * rows).sum(1) * (old @ kernel * old).sum(1)).sqrt()
        ).mean()
        expected.backward()
        torch.testing.assert_close(value.double(), expected.detach(), rtol=tolerance, atol=1e-12)
        torch.testing.assert_close(slope.double(), rows.grad, rtol=tolerance, atol=tolerance)
        through = gradient(GeodesicDistillation(6, True), z, teacher.to(z.dtype))[1]
        assert (through - slope).abs().max() > 0.01 * slope.abs().max()


def test_the_teacher_gets_no_gradient_by_default():
    student, teacher = pair(9, 14, dtype=torch.float32)
    teacher.requires_grad_()
    assert not GeodesicDistillation()(student, teacher).requires_grad


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("dim", "through_flow"), [(127, False), (127, True), (4, False), (4, True)]
)
def test_compiled_code_computes_the_same(dim, through_flow):
    layer = torch.nn.Linear(10, 14)
    x, teacher = (
        torch.randn(9, 10, generator=torch.Generator().manual_seed(11)),
        pair(9, 14, dtype=torch.float32)[1],
    )
    loss = GeodesicDistillation(dim, through_flow)

    def step(x):
        return loss(layer(x).relu(), teacher) * 2

    expected = torch.autograd.grad(step(x), layer.weight)[0]
    actual = torch.autograd.grad(torch.compile(step, backend="aot_eager")(x), layer.weight)[0]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_second_derivatives_exist_for_a_constant_flow_only(dtype):
    student, teacher = (z.requires_grad_() for z in pair(6, 9, dtype=dtype))
    slope = torch.autograd.grad(
        GeodesicDistillation()(student, teacher), student, create_graph=True
    )[0]
    assert torch.autograd.grad(slope.square().sum(), student)[0].abs().max() > 0
    value = GeodesicDistillation(through_flow=True)(student, teacher)
    # rather than silently wrong ones
    with pytest.raises(GeodlError, match="no second derivatives"):
        torch.autograd.grad(value, student, create_graph=True)


def test_the_squared_distance_is_that_under_the_kernel():
    student, teacher = pair(9, 14)
    new, old = unit(student), unit(teacher)
    kernel = GeodesicFlow.between(subspace(old, 5), subspace(new, 5)).dense()
    expected = ((new - old) @ kernel * (new - old)).sum(1).mean()
    value, slope = gradient(GeodesicDistillation(5, distance="squared"), student, teacher)
    torch.testing.assert_close(value, expected)
    rows = student.clone().requires_grad_()
    (unit(rows) - old).mul((unit(rows) - old) @ kernel).sum(1).mean().backward()
    torch.testing.assert_close(slope, rows.grad)
    student[0] = 0
    _, slope = gradient(GeodesicDistillation(5, distance="squared"), student, teacher)
    assert slope.isfinite().all()


def test_invalid_arguments_are_refused():
    for dim in (2.5, "3", None):
        with pytest.raises(GeodlError, match="dim = "):
            GeodesicDistillation(dim)
    for wrong in (np.ones((4, 3)), None):
        with pytest.raises(GeodlError, match="must be tensors"):
            GeodesicDistillation()(torch.ones(4, 3), wrong)
    whole = torch.ones(4, 3, dtype=torch.int64)
    for student, teacher in ((whole, whole.float()), (whole.float(), whole)):
        with pytest.raises(GeodlError, match="floating point"):
            GeodesicDistillation()(student, teacher)
    with pytest.raises(GeodlError, match="dim = 0"):
        GeodesicDistillation(0)
    with pytest.raises(GeodlError, match=r"distance = .square.*cosine and squared"):
        GeodesicDistillation(distance="square")
