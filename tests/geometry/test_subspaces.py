"""Subspaces of batches of features, and the angles between them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.angles import angles_of_all_sizes, bases, projector
from tests.helpers.oracles import KnownFlow, principal_basis, random_orthogonal

from geodl.core.errors import GeodlError
from geodl.geometry import GeodesicFlow, geodesic_distance, principal_angles, subspace
from geodl.geometry.subspaces import Spectrum


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
    rng, sizes = torch.Generator().manual_seed(2), ((shape[0], 3), (3, shape[1]))
    left, right = (torch.randint(-2, 3, each, generator=rng).float() for each in sizes)
    exact = left @ right
    assert subspace(exact.to(dtype), 10).shape == (shape[1], 3)
    if dtype != torch.bfloat16:
        left, right = (torch.randn(each, generator=rng, dtype=dtype) for each in sizes)
        assert subspace(left @ right + 1, 10).shape == (shape[1], 3)


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
    expected = projector(subspace(z, 3))
    np.testing.assert_allclose(projector(subspace(size * z, 3)), expected, atol=1e-12)
    if 1e-30 < size < 1e30:
        small = projector(subspace((size * z).float(), 3))
        np.testing.assert_allclose(small, expected, atol=1e-6)


def test_subspace_is_batched_over_leading_dimensions():
    z = torch.randn(2, 3, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    together = subspace(z, 4)
    for i in np.ndindex(2, 3):
        single = projector(subspace(z[i], 4))
        np.testing.assert_allclose(projector(together[i]), single, atol=1e-12)


def test_invalid_batches_are_refused():
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
    masked = spectrum.leading(torch.tensor([True, True, False, False]))
    cut = spectrum.leading(torch.tensor([True, True]))
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


@angles_of_all_sizes
def test_angles_are_right_to_the_last_digits(angles):
    known = KnownFlow(angles, 40, seed=6)
    for found in (principal_angles(*bases(known)), GeodesicFlow.between(*bases(known)).angles):
        np.testing.assert_allclose(found.numpy(), known.angles, rtol=0, atol=1e-14)
    single = principal_angles(*bases(known, torch.float32))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), known.angles, rtol=0, atol=1e-6)


def test_many_tiny_angles_at_once_in_a_large_space():
    known = KnownFlow(np.geomspace(1e-13, 1e-7, 60), 256, seed=7)
    found = principal_angles(*bases(known)).numpy()
    np.testing.assert_allclose(found, known.angles, rtol=0, atol=1e-14)


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
