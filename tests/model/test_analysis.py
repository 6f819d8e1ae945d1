"""SVCCA, linear CKA and angles against independent numpy computations and known cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import qr, sqrtm, subspace_angles

from geodl.core.errors import ConfigError, DataError
from geodl.model.analysis import leading_angles, linear_cka, svcca


def decaying(rows: int, width: int, seed: int) -> torch.Tensor:
    """Features with a decaying spectrum, so that the cut at 99 % of the variance drops directions."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(
        random.normal(size=(rows, width)) * 0.7 ** np.arange(width) + random.normal(size=width)
    )


def rotation(width: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(qr(np.random.default_rng(seed).normal(size=(width, width)))[0])


def reference_svcca(x: np.ndarray, y: np.ndarray, keep: float) -> float:
    """CCA in its textbook form, from covariance matrices and their square roots, of the leading principal components."""

    def components(z: np.ndarray) -> np.ndarray:
        z = z - z.mean(0)
        values, vectors = np.linalg.eigh(z.T @ z)
        values, vectors = values[::-1], vectors[:, ::-1]
        count = next(
            k for k in range(1, len(values) + 1) if values[:k].sum() >= keep * values.sum()
        )
        return z @ vectors[:, :count]

    a, b = components(x), components(y)
    white_a, white_b = np.linalg.inv(sqrtm(a.T @ a)), np.linalg.inv(sqrtm(b.T @ b))
    return float(np.linalg.svd(white_a @ (a.T @ b) @ white_b)[1].mean())


def reference_cka(x: np.ndarray, y: np.ndarray) -> float:
    """CKA in its kernel form: the alignment of the centered N x N Gram matrices."""
    center = np.eye(len(x)) - 1 / len(x)
    k, m = center @ x @ x.T @ center, center @ y @ y.T @ center
    return float(np.trace(k @ m) / math.sqrt(np.trace(k @ k) * np.trace(m @ m)))


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("widths", [(12, 12), (8, 20)])
def test_svcca_equals_textbook_cca(widths, keep):
    x = decaying(150, widths[0], 0)
    y = 0.5 * x @ torch.from_numpy(np.random.default_rng(5).normal(size=widths)) + decaying(
        150, widths[1], 1
    )
    value = svcca(x, y, keep)
    assert value == pytest.approx(reference_svcca(x.numpy(), y.numpy(), keep), abs=1e-9)
    assert 0.1 < value < 0.999


@pytest.mark.parametrize(("rows", "widths"), [(150, (12, 12)), (150, (8, 20)), (10, (30, 16))])
def test_linear_cka_equals_kernel_form(rows, widths):
    x, y = decaying(rows, widths[0], 2), decaying(rows, widths[1], 3)
    y[:, 0] += x[:, 0]
    assert linear_cka(x, y) == pytest.approx(reference_cka(x.numpy(), y.numpy()), abs=1e-12)


@pytest.mark.parametrize("similarity", [svcca, linear_cka])
def test_identical_rotated_scaled_and_shifted_features_are_alike(similarity):
    x = decaying(200, 16, 4)
    assert similarity(x, x) == pytest.approx(1, abs=1e-12)
    assert similarity(x, 3.7 * x @ rotation(16, 6) + 11) == pytest.approx(1, abs=1e-9)


def test_svcca_ignores_directions_beyond_the_share_kept_and_cka_hardly_sees_them():
    x = decaying(500, 6, 11)
    x -= x.mean(0)
    noise = [
        1e-3 * torch.from_numpy(np.random.default_rng(s).normal(size=(500, 10))) for s in (12, 13)
    ]
    left, right = (torch.cat([x, n], dim=1) for n in noise)
    assert svcca(left, right, 0.99) > 0.9999
    assert svcca(left, right, 1.0) < 0.9  # with everything kept the noise counts like the signal
    assert linear_cka(left, right) > 0.9999


def test_float32_features_are_computed_in_float64():
    x = (decaying(100, 8, 14) + 1000).float()
    y = (x * 2).float()
    assert linear_cka(x, y) == pytest.approx(1, abs=1e-12)
    assert svcca(x, y) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("similarity", [svcca, linear_cka])
def test_constant_features_have_no_similarity(similarity):
    # The computed mean of 1000 times 0.1 is not quite 0.1: what is left is rounding, not a direction.
    assert math.isnan(
        similarity(torch.full((1000, 4), 0.1, dtype=torch.float64), decaying(1000, 4, 15))
    )


def test_fewer_images_than_features_is_finite():
    assert svcca(decaying(6, 20, 16), decaying(6, 20, 17), 1.0) == pytest.approx(1, abs=1e-9)


def test_wrong_input_is_refused():
    x = decaying(10, 3, 18)
    with pytest.raises(DataError, match="10 and 9 images"):
        svcca(x, x[:9])
    with pytest.raises(DataError, match="at least 2"):
        linear_cka(x[:1], x[:1])
    with pytest.raises(ConfigError, match=r"keep = 1\.5"):
        svcca(x, x, keep=1.5)
    with pytest.raises(DataError, match="NaN"):
        linear_cka(x, x * math.nan)


@given(seed=st.integers(0, 2**16), d=st.integers(2, 40))
def test_leading_angles_agree_with_scipy(seed, d):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 60, d, generator=generator, dtype=torch.float64).unbind()
    n = min(16, d // 2)
    bases = [np.linalg.svd(z - z.mean(axis=0))[2][:n].T for z in (x.numpy(), y.numpy())]
    expected = np.rad2deg(subspace_angles(*bases))[::-1]
    np.testing.assert_allclose(leading_angles(x, y), expected, atol=1e-6)


def test_leading_angles_of_one_space_are_zero_and_constants_have_none():
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(1))
    assert max(leading_angles(x, 3 * x + 1)) < 1e-3
    assert leading_angles(x, torch.ones(50, 12)) == []
