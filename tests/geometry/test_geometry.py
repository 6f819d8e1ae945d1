import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.oracles import (
    KnownFlow,
    literal_kernel,
    principal_basis,
    random_orthogonal,
    spectral_kernel,
)

from geodl.core.errors import GeodlError
from geodl.geometry import GeodesicFlow, geodesic_distance, principal_angles, subspace
from geodl.geometry.subspaces import Spectrum

DEGREE = math.pi / 180
ANGLES = {
    "none": [0.0, 0.0, 0.0],
    "tiny": [1e-12, 3e-11, 1e-9, 2e-9, 1e-8, 1e-8, 5e-8],
    "small": [1e-6, 1e-5, 1e-4, 0.01 * DEGREE, 1e-3],
    "mixed": [0.0, 1e-9, 1e-4, 0.1, 0.5, 0.785398, 1.0, 1.5],
    "equal": [0.3, 0.3, 0.3, 0.3],
    "around the end of the series": [0.19, 0.2, 0.2002, 0.21],
    "nearly right": [45 * DEGREE, 89 * DEGREE, 89.9 * DEGREE, 89.99 * DEGREE, 89.9999 * DEGREE],
}
angles_of_all_sizes = pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES.keys())


def bases(known, dtype=torch.float64):
    return torch.tensor(known.p, dtype=dtype), torch.tensor(known.q, dtype=dtype)


def projector(p):
    return (p @ p.mT).detach().double().numpy()


# ---- subspaces


@pytest.mark.parametrize(
    ("batch", "d", "dim"), [(10, 30, 4), (10, 30, 50), (30, 10, 4), (30, 10, 50), (2, 5, 3)]
)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_subspace_spans_the_leading_principal_directions(batch, d, dim, center, dtype):
    z = torch.randn(batch, d, dtype=dtype, generator=torch.Generator().manual_seed(1)) + 2
    basis = subspace(z, dim, center=center)
    expected = principal_basis(z.double().numpy(), dim, torch.finfo(dtype).eps, center)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert basis.dtype == dtype
    assert basis.shape == expected.shape == (d, min(dim, d, batch - center))
    np.testing.assert_allclose((basis.mT @ basis).numpy(), np.eye(basis.shape[1]), atol=tolerance)
    np.testing.assert_allclose(projector(basis), expected @ expected.T, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_subspace_stops_at_the_numerical_rank(dtype, shape):
    rng = torch.Generator().manual_seed(2)
    exact = (
        torch.randint(-2, 3, (shape[0], 3), generator=rng).float()
        @ torch.randint(-2, 3, (3, shape[1]), generator=rng).float()
    )
    assert subspace(exact.to(dtype), 10).shape == (shape[1], 3)
    if dtype != torch.bfloat16:
        rounded = torch.randn(shape[0], 3, generator=rng, dtype=dtype) @ torch.randn(
            3, shape[1], generator=rng, dtype=dtype
        )
        assert subspace(rounded + 1, 10).shape == (shape[1], 3)


@pytest.mark.parametrize(
    "z",
    [
        torch.full((8, 5), 0.1),
        torch.zeros(8, 5),
        torch.ones(1, 5),
        torch.ones(0, 5),
        torch.ones(4, 0),
    ],
)
def test_a_batch_without_spread_has_no_subspace(z):
    assert subspace(z, 3).shape == (z.shape[1], 0)
    assert subspace(z.double(), 3).shape == (z.shape[1], 0)


@given(seed=st.integers(0, 2**16), batch=st.integers(2, 600), d=st.integers(1, 40))
def test_equal_rows_leave_nothing(seed, batch, d):
    row = torch.randn(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert subspace(row.expand(batch, d), d).shape == (d, 0)


@pytest.mark.parametrize("size", [1e-200, 1e-20, 1e18, 1e200])
def test_subspace_does_not_depend_on_scale(size):
    z = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    np.testing.assert_allclose(
        projector(subspace(size * z, 3)), projector(subspace(z, 3)), atol=1e-12
    )
    if 1e-30 < size < 1e30:
        small = projector(subspace((size * z).float(), 3))
        np.testing.assert_allclose(small, projector(subspace(z, 3)), atol=1e-6)


def test_subspace_is_batched_over_leading_dimensions():
    z = torch.randn(2, 3, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    together = subspace(z, 4)
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(
                projector(together[i, j]), projector(subspace(z[i, j], 4)), atol=1e-12
            )


def test_subspace_refuses_what_it_cannot_use():
    with pytest.raises(GeodlError, match="NaN or infinite"):
        subspace(torch.tensor([[1.0, math.nan], [0.0, 1.0]]), 1)
    with pytest.raises(GeodlError, match=r"\(batch, d\), not \(3,\)"):
        subspace(torch.ones(3), 1)
    with pytest.raises(GeodlError, match="cannot be -1"):
        subspace(torch.rand(4, 5), -1)


@pytest.mark.parametrize("act", [principal_angles, geodesic_distance, GeodesicFlow.between])
def test_bases_that_are_not_finite_are_refused(act):
    p = torch.eye(4)[:, :2]
    with pytest.raises(GeodlError, match="bases contain NaN or infinite"):
        act(p, p * math.nan)


@pytest.mark.parametrize("decay", [1e-3, 1e-4, 1e-5, 3e-6, 1e-6])
def test_bases_of_steep_spectra_are_orthonormal(decay):
    rng = np.random.default_rng(3)
    rows = np.diag([1.0, decay, decay, decay]) @ random_orthogonal(rng, 6)[:4]
    basis = subspace(torch.tensor(rows, dtype=torch.float32), 4, center=False)
    assert basis.shape == (6, 4)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(4), atol=1e-6, rtol=0)


def test_what_rounding_leaves_of_a_common_row_is_no_direction():
    rng = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.float64):
        last_bit = torch.randint(0, 2, (30, 6), generator=rng).to(dtype) * torch.finfo(dtype).eps
        assert subspace(1 + last_bit, 4).shape == (6, 0)
        assert subspace(1 + 1e3 * last_bit, 4).shape == (6, 4)


def test_centering_takes_one_direction_whatever_rounding_leaves():
    z = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for eps in (1e-16, 0.0):
        assert Spectrum.of(z, center=True, eps=eps).in_rank.tolist() == [True] * 4 + [False]
        assert Spectrum.of(z, center=False, eps=eps).in_rank.all()


def test_directions_that_are_not_kept_are_zero_and_get_no_gradient():
    z = torch.randn(
        6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()
    spectrum = Spectrum.of(z, center=True, eps=1e-16)
    masked, cut = (
        spectrum.leading(torch.tensor(keep)) for keep in ([True, True, False, False], [True, True])
    )
    assert not masked[:, 2:].any()
    # A gradient comes in for the zero columns too.
    slope, expected = (
        torch.autograd.grad((basis + basis.square()).sum(), z, retain_graph=True)[0]
        for basis in (masked, cut)
    )
    torch.testing.assert_close(slope, expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_single_row_has_a_derivative():
    with torch.autograd.detect_anomaly():
        subspace(torch.ones(1, 3, requires_grad=True), 2).sum().backward()


# ---- angles


@angles_of_all_sizes
def test_angles_are_right_to_the_last_digits(angles):
    known = KnownFlow(angles, 40, seed=6)
    np.testing.assert_allclose(
        principal_angles(*bases(known)).numpy(), known.angles, rtol=0, atol=1e-14
    )
    np.testing.assert_allclose(
        GeodesicFlow.between(*bases(known)).angles.numpy(), known.angles, rtol=0, atol=1e-14
    )
    single = principal_angles(*bases(known, torch.float32))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), known.angles, rtol=0, atol=1e-6)


def test_many_tiny_angles_at_once_in_a_large_space():
    known = KnownFlow(np.geomspace(1e-13, 1e-7, 60), 256, seed=7)
    np.testing.assert_allclose(
        principal_angles(*bases(known)).numpy(), known.angles, rtol=0, atol=1e-14
    )


def test_angles_of_subspaces_of_unequal_dimension():
    known = KnownFlow([1e-9, 0.2, 1.3, 1.5], 12, seed=8)
    p, q = bases(known)
    wider = torch.tensor(
        np.hstack([known.start, random_orthogonal(np.random.default_rng(0), 12)[:, :0]])
    )
    np.testing.assert_allclose(
        principal_angles(wider, torch.tensor(known.at(1.0)[:, 1:3])), [0.2, 1.3], atol=1e-14
    )
    np.testing.assert_allclose(
        principal_angles(torch.tensor(known.at(1.0)[:, :1]), p), [1e-9], rtol=0, atol=1e-14
    )
    assert principal_angles(p, q[:, :0]).shape == (0,)


def test_geodesic_distance_is_the_norm_of_the_angles_and_is_batched():
    one, two = KnownFlow([0.1, 0.2, 0.2], 9, seed=9), KnownFlow([0.0, 1e-8, 1.5], 9, seed=10)
    p, q = (torch.stack(pair) for pair in zip(bases(one), bases(two), strict=True))
    np.testing.assert_allclose(geodesic_distance(p, q), [0.3, math.hypot(1e-8, 1.5)], atol=1e-14)


def test_geodesic_distance_has_a_finite_gradient_even_at_its_ends():
    p = torch.eye(6, dtype=torch.float64)[:, :3].clone().requires_grad_()
    q = torch.eye(6, dtype=torch.float64)[:, 2:5].clone().requires_grad_()  # angles 0, 90, 90
    geodesic_distance(p, q).backward()
    assert p.grad.isfinite().all()
    assert q.grad.isfinite().all()


# ---- the flow


@angles_of_all_sizes
def test_kernel_is_the_integral_along_the_flow(angles):
    known = KnownFlow(angles, 20, seed=11)
    dense = GeodesicFlow.between(*bases(known)).dense().numpy()
    np.testing.assert_allclose(dense, known.kernel(), rtol=0, atol=1e-10)
    np.testing.assert_allclose(dense, known.kernel(), rtol=0, atol=1e-13 / math.cos(max(angles)))


@pytest.mark.parametrize("name", ["small", "mixed", "equal", "nearly right"])
def test_kernel_agrees_with_the_one_line_oracle_and_with_algorithm_2(name):
    known = KnownFlow(ANGLES[name], 20, seed=12)
    p, q = bases(known)
    dense = GeodesicFlow.between(p, q).dense().numpy()
    np.testing.assert_allclose(dense, spectral_kernel(known.p, known.q), atol=1e-9)
    np.testing.assert_allclose(
        dense, literal_kernel(p, q).numpy(), atol=1e-7
    )  # arccos of cosines near 1


@angles_of_all_sizes
def test_flow_joins_the_subspaces_at_constant_speed(angles):
    known = KnownFlow(angles, 20, seed=13)
    p, q = bases(known)
    flow = GeodesicFlow.between(p, q)
    np.testing.assert_allclose(projector(flow.at(0.0)), projector(p), atol=1e-12)
    np.testing.assert_allclose(projector(flow.at(1.0)), projector(q), atol=1e-12)
    path = flow.at(torch.linspace(0, 1, 5))
    for v, basis in zip(np.linspace(0, 1, 5), path, strict=True):
        np.testing.assert_allclose((basis.mT @ basis).numpy(), np.eye(len(angles)), atol=1e-12)
        np.testing.assert_allclose(projector(basis), known.at(v) @ known.at(v).T, atol=1e-9)
    for left, right in pairwise(path):
        np.testing.assert_allclose(
            principal_angles(left, right), known.angles / 4, rtol=0, atol=1e-10
        )


dimensions = st.tuples(st.integers(1, 6), st.integers(0, 5)).map(lambda x: (x[0], 2 * x[0] + x[1]))


@settings(max_examples=60, derandomize=True)
@given(dimensions, st.integers(0, 10**6), st.data())
def test_invariants_of_the_flow(shape, seed, data):
    n, d = shape
    angles = data.draw(st.lists(st.floats(0, 89.9 * DEGREE), min_size=n, max_size=n))
    p, q = bases(KnownFlow(angles, d, seed))
    flow = GeodesicFlow.between(p, q)
    dense = flow.dense()
    eigenvalues = torch.linalg.eigvalsh(dense)
    assert abs(dense.trace().item() - n) < 1e-12 * d
    assert eigenvalues.min() > -1e-13
    assert eigenvalues.max() < 1 + 1e-13
    torch.testing.assert_close(GeodesicFlow.between(q, p).dense(), dense, rtol=0, atol=1e-11)
    turn = torch.tensor(random_orthogonal(np.random.default_rng(seed), d))
    torch.testing.assert_close(
        GeodesicFlow.between(turn @ p, turn @ q).dense(), turn @ dense @ turn.T, rtol=0, atol=1e-11
    )
    v = data.draw(st.floats(0, 1))
    basis = flow.at(v)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(n, dtype=p.dtype), rtol=0, atol=1e-12)


def test_inner_and_norm_are_those_of_the_dense_kernel():
    flow = GeodesicFlow.between(*bases(KnownFlow([0.0, 0.4, 1.2], 9, seed=14)))
    rng = torch.Generator().manual_seed(15)
    a, b = (torch.randn(5, 9, dtype=torch.float64, generator=rng) for _ in range(2))
    torch.testing.assert_close(flow.inner(a, b), (a @ flow.dense() * b).sum(1))
    torch.testing.assert_close(flow.norm(a), (a @ flow.dense() * a).sum(1).sqrt())
    assert flow.project(a).shape == (5, 6)


def test_at_exactly_90_degrees_the_mean_over_the_shortest_geodesics():
    eye = torch.eye(5, dtype=torch.float64)
    # One common direction, one at 90 degrees: its geodesics turn e1 into +e2 or -e2; on their mean e1e2' cancels.
    dense = GeodesicFlow.between(eye[:, [0, 1]], eye[:, [0, 2]]).dense()
    torch.testing.assert_close(
        dense, torch.diag(torch.tensor([1.0, 0.5, 0.5, 0, 0], dtype=torch.float64))
    )
    # The same whatever bases, coordinates and rounding.
    rng = np.random.default_rng(16)
    turn = torch.tensor(random_orthogonal(rng, 5))
    mix = torch.tensor(random_orthogonal(rng, 2))
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        p, q = (turn @ eye[:, [0, 1]] @ mix).to(dtype), (turn @ eye[:, [0, 2]]).to(dtype)
        for flow in (GeodesicFlow.between(p, q), GeodesicFlow.between(q, p)):
            torch.testing.assert_close(
                flow.dense().double(), turn @ dense @ turn.T, rtol=0, atol=tolerance
            )
            assert flow.at(0.5).isfinite().all()


@angles_of_all_sizes
def test_single_precision_bases_give_the_kernel_in_single_precision(angles):
    known = KnownFlow([a for a in angles if a < 89.91 * DEGREE], 20, seed=17)
    p, q = bases(known, torch.float32)
    dense = GeodesicFlow.between(p, q).dense()
    assert dense.dtype == torch.float32
    reference = GeodesicFlow.between(p.double(), q.double()).dense()
    torch.testing.assert_close(dense.double(), reference, rtol=0, atol=2e-7)


def test_flow_is_batched_over_leading_dimensions():
    flows = [
        KnownFlow(ANGLES[name][:3], 8, seed=i)
        for i, name in enumerate(("none", "tiny", "mixed", "nearly right"))
    ]
    p, q = (torch.stack(x).unflatten(0, (2, 2)) for x in zip(*map(bases, flows), strict=True))
    together = GeodesicFlow.between(p, q)
    rows = torch.randn(2, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(18))
    for i in range(4):
        at = divmod(i, 2)
        single = GeodesicFlow.between(*bases(flows[i]))
        torch.testing.assert_close(together.dense()[at], single.dense())
        torch.testing.assert_close(together.angles[at], single.angles)
        torch.testing.assert_close(together.norm(rows)[at], single.norm(rows[at]))
        np.testing.assert_allclose(
            projector(together.at(0.3)[at]), projector(single.at(0.3)), atol=1e-9
        )


def test_flow_of_empty_subspaces_is_zero():
    flow = GeodesicFlow.between(torch.ones(4, 0), torch.ones(4, 0))
    assert flow.angles.shape == (0,)
    torch.testing.assert_close(flow.dense(), torch.zeros(4, 4))


def test_flow_refuses_bases_that_do_not_fit():
    eye = torch.eye(4)
    with pytest.raises(GeodlError, match="equal dimension, not 2 and 3"):
        GeodesicFlow.between(eye[:, :2], eye[:, :3])
    with pytest.raises(GeodlError, match=r"\(4, 2\) and \(3, 2\)"):
        GeodesicFlow.between(eye[:, :2], torch.eye(3)[:, :2])


def test_the_examples_of_the_documentation_run():
    page = (Path(__file__).parents[2] / "docs" / "geometry.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    names = {}
    for example in examples:
        exec(example, names)
    assert names["loss"].item() == pytest.approx(names["by_hand"].item(), rel=1e-6)
    assert names["z_new"].grad.isfinite().all()


# ---- derivatives


@pytest.mark.parametrize(
    "angles",
    [[0.3, 0.9], [0.5, 0.5, 0.5], [0.0, 0.0, 0.7], [1e-9, 1e-5, 0.2001], [0.5, 0.5001, 1.4]],
    ids=str,
)
def test_gradient_of_the_kernel_with_respect_to_the_bases(angles):
    known = KnownFlow(angles, 2 * len(angles) + 1, seed=19)
    rows = torch.randn(
        4, known.p.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(20)
    )

    def kernel(p, q):  # of the spans, so any basis may move
        return GeodesicFlow.between(torch.linalg.qr(p).Q, torch.linalg.qr(q).Q).inner(
            rows[:2], rows[2:]
        )

    assert torch.autograd.gradcheck(kernel, [x.requires_grad_() for x in bases(known)])


@pytest.mark.parametrize(
    ("values", "keep", "d"),
    [
        ([5.0, 4, 3, 2, 1], 2, 8),
        ([3.0, 3, 3, 1, 1], 3, 8),
        ([3.0, 3, 3, 1, 1], 3, 5),
        ([2.0, 2, 2, 2], 4, 8),
        ([4.0, 2, 1], 2, 3),
    ],
    ids=str,
)
def test_gradient_of_a_subspace_survives_ties_inside_the_kept_and_the_dropped(values, keep, d):
    rng = np.random.default_rng(21)
    k = len(values)
    centred = np.linalg.qr(np.hstack([np.ones((9, 1)), rng.standard_normal((9, k))]))[0][:, 1:]
    z = torch.tensor(centred @ np.diag(values) @ random_orthogonal(rng, d)[:k] + 0.7)
    weights = torch.tensor(rng.standard_normal((d, d)))

    def of_span(z):
        basis = subspace(z, keep)
        return (weights * (basis @ basis.mT)).sum()

    assert torch.autograd.gradcheck(of_span, (z.requires_grad_(),))


def test_gradients_are_finite_where_there_is_none():
    tie = torch.tensor(
        [[1.0, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64, requires_grad=True
    )
    basis = subspace(tie, 1)  # which direction is kept is arbitrary
    (basis @ basis.mT)[0, 1].backward()
    assert tie.grad.isfinite().all()
    turn = torch.tensor(random_orthogonal(np.random.default_rng(4), 7))[:4]
    for dtype in (
        torch.float64,
        torch.float32,
    ):  # a tie that rounding has broken is one all the same
        rotated = torch.cat([turn, -turn]).to(dtype).requires_grad_()
        basis = subspace(rotated, 2)
        (basis @ basis.mT)[0, 1].backward()
        assert rotated.grad.abs().max() < 10
    p = torch.eye(4, dtype=torch.float64)[:, :2].clone().requires_grad_()
    q = torch.eye(4, dtype=torch.float64)[:, 2:].clone().requires_grad_()
    GeodesicFlow.between(p, q).inner(torch.ones(1, 4), torch.arange(4.0)[None]).sum().backward()
    assert p.grad.isfinite().all()
    assert q.grad.isfinite().all()
