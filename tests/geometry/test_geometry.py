"""The geodesic flow: its kernel, its path, its derivatives."""

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.angles import ANGLES, DEGREE, angles_of_all_sizes, bases, projector
from tests.helpers.oracles import KnownFlow, literal_kernel, random_orthogonal, spectral_kernel

from geodl.core.errors import GeodlError
from geodl.geometry import GeodesicFlow, principal_angles, subspace


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
    # arccos of cosines near 1
    np.testing.assert_allclose(dense, literal_kernel(p, q).numpy(), atol=1e-7)


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
        between = principal_angles(left, right)
        np.testing.assert_allclose(between, known.angles / 4, rtol=0, atol=1e-10)


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
    turned = GeodesicFlow.between(turn @ p, turn @ q).dense()
    torch.testing.assert_close(turned, turn @ dense @ turn.T, rtol=0, atol=1e-11)
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
    torch.testing.assert_close(dense, torch.diag(torch.tensor([1.0, 0.5, 0.5, 0, 0]).double()))
    # The same whatever bases, coordinates and rounding.
    rng = np.random.default_rng(16)
    turn = torch.tensor(random_orthogonal(rng, 5))
    mix = torch.tensor(random_orthogonal(rng, 2))
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        p, q = (turn @ eye[:, [0, 1]] @ mix).to(dtype), (turn @ eye[:, [0, 2]]).to(dtype)
        for flow in (GeodesicFlow.between(p, q), GeodesicFlow.between(q, p)):
            found, expected = flow.dense().double(), turn @ dense @ turn.T
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
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
    angles = (ANGLES[name][:3] for name in ("none", "tiny", "mixed", "nearly right"))
    flows = [KnownFlow(each, 8, seed=i) for i, each in enumerate(angles)]
    p, q = (torch.stack(x).unflatten(0, (2, 2)) for x in zip(*map(bases, flows), strict=True))
    together = GeodesicFlow.between(p, q)
    rows = torch.randn(2, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(18))
    for i in range(4):
        at = divmod(i, 2)
        single = GeodesicFlow.between(*bases(flows[i]))
        torch.testing.assert_close(together.dense()[at], single.dense())
        torch.testing.assert_close(together.angles[at], single.angles)
        torch.testing.assert_close(together.norm(rows)[at], single.norm(rows[at]))
        found, expected = projector(together.at(0.3)[at]), projector(single.at(0.3))
        np.testing.assert_allclose(found, expected, atol=1e-9)


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


@pytest.mark.parametrize(
    "angles",
    [[0.3, 0.9], [0.5, 0.5, 0.5], [0.0, 0.0, 0.7], [1e-9, 1e-5, 0.2001], [0.5, 0.5001, 1.4]],
    ids=str,
)
def test_gradient_of_the_kernel_with_respect_to_the_bases(angles):
    known = KnownFlow(angles, 2 * len(angles) + 1, seed=19)
    generator = torch.Generator().manual_seed(20)
    rows = torch.randn(4, known.p.shape[0], dtype=torch.float64, generator=generator)

    def kernel(p, q):  # of the spans, so any basis may move
        flow = GeodesicFlow.between(torch.linalg.qr(p).Q, torch.linalg.qr(q).Q)
        return flow.inner(rows[:2], rows[2:])

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
    tie = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]).double().requires_grad_()
    basis = subspace(tie, 1)  # which direction is kept is arbitrary
    (basis @ basis.mT)[0, 1].backward()
    assert tie.grad.isfinite().all()
    turn = torch.tensor(random_orthogonal(np.random.default_rng(4), 7))[:4]
    for dtype in (torch.float64, torch.float32):  # a tie that rounding has broken is one too
        rotated = torch.cat([turn, -turn]).to(dtype).requires_grad_()
        basis = subspace(rotated, 2)
        (basis @ basis.mT)[0, 1].backward()
        assert rotated.grad.abs().max() < 10
    p = torch.eye(4, dtype=torch.float64)[:, :2].clone().requires_grad_()
    q = torch.eye(4, dtype=torch.float64)[:, 2:].clone().requires_grad_()
    GeodesicFlow.between(p, q).inner(torch.ones(1, 4), torch.arange(4.0)[None]).sum().backward()
    assert p.grad.isfinite().all()
    assert q.grad.isfinite().all()
