"""From features to expanded features: standardization, random weights."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.ridge import close

from geodl.closed_form.expansion import Expansion, Standardization, kept, share_out


def test_standardization_is_that_of_numpy_by_block_and_sets_dead_coordinates_to_zero():
    rng = np.random.default_rng(13)
    z = rng.normal(size=(50, 6)) * [1, 2, 3, 1, 1e-5, 0] + 7
    found = Standardization.of({"a": torch.tensor(z), "b": torch.tensor(1e-5 * z)})
    scaled = found({"a": torch.tensor(z), "b": torch.tensor(1e-5 * z)})
    expected = (z[:, :4] - z[:, :4].mean(0)) / z[:, :4].std(0)
    for block in scaled.values():
        close(block[:, :4], expected, 1e-4)  # the mean is kept in float32
        assert not block[:, 4:].any()
    single = found({"a": torch.tensor(z).float()})
    assert single["a"].dtype == torch.float32
    assert found({"a": torch.tensor(z).half()})["a"].dtype == torch.float32


@given(total=st.integers(0, 5000), widths=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_shares_add_up_and_are_in_proportion(total, widths):
    shares = share_out(total, {str(i): width for i, width in enumerate(widths)})
    assert sum(shares.values()) == total
    for i, width in enumerate(widths):
        assert abs(shares[str(i)] - total * width / sum(widths)) <= 1


def test_the_expansion_is_the_formula_and_depends_on_the_seed_alone():
    sizes, generator = {"a": 200, "b": 100}, torch.Generator().manual_seed(9)
    z = {name: torch.randn(7, d, generator=generator) for name, d in (("a", 9), ("b", 4))}
    found = Expansion(sizes, seed=1)(z)
    for name, part in (("a", found[:, :200]), ("b", found[:, 200:])):
        width = z[name].shape[1]
        w = Expansion(sizes, seed=1).weights(name, width)
        close(part, np.maximum(z[name].numpy() @ w.numpy(), 0), 1e-6)
        assert abs(w.mean()) < 0.1
        assert abs(math.sqrt(width) * w.std() - 1) < 0.1
    assert Expansion(sizes, seed=1).width == 300
    assert found.equal(Expansion(sizes, seed=1)(z))
    assert found[:, 200:].equal(Expansion({"b": 100}, seed=1)(z))
    assert not found.equal(Expansion(sizes, seed=2)(z))
    alike = Expansion({"a": 3, "b": 3}, seed=1)
    assert not alike.weights("a", 2).equal(alike.weights("b", 2))


def test_weights_are_those_that_stored_models_were_fitted_with():
    found = Expansion({"stage3": 40}, seed=1).weights("stage3", 25)[::12, ::13]
    expected = [
        [0.06040671, 0.15036863, 0.34812254, 0.44219568],
        [-0.16894840, 0.00582358, -0.03604211, -0.16503397],
        [0.18907838, -0.40113276, -0.07881904, 0.03391238],
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_kept_features_survive_numbers_that_float16_has_not():
    z = kept({"a": torch.tensor([[1e9, -1e9, 0.1]])})["a"]
    assert z.dtype == torch.float16
    assert z.isfinite().all()
