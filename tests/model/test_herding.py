"""Which exemplars are chosen, against the literal algorithm in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.plain import random_features

from geodl.core.errors import DataError, TrainingError
from geodl.model.herding import herding, members, nearest


def literal(features: np.ndarray, k: int) -> list[int]:
    """Algorithm 4 of iCaRL, pick by pick in numpy float64; distances within 1e-12 tie and the lowest row wins."""
    rows = np.asarray(features, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(lengths > 0, lengths, 1)
    mean = rows.mean(axis=0)
    chosen: list[int] = []
    for rank in range(1, min(k, len(rows)) + 1):
        total = rows[chosen].sum(axis=0)
        distances = np.linalg.norm(mean - (total + rows) / rank, axis=1)
        distances[chosen] = np.inf
        chosen.append(int(np.flatnonzero(distances <= distances.min() + 1e-12)[0]))
    return chosen


# ----------------------------------------------------------------------------------------------------------- herding


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 12),
    k=st.integers(0, 45),
    seed=st.integers(0, 2**32 - 1),
    offset=st.sampled_from([0.0, 0.5, 3]),
)
def test_herding_equals_the_literal_algorithm(rows, width, k, seed, offset):
    features = random_features(rows, width, seed, offset)
    assert herding(features, k).tolist() == literal(features.numpy(), k)


def test_herding_does_not_give_up_after_1000_picks():
    """A public loop ends after 1000 picks, so that large budgets stay unfilled."""
    features = random_features(1200, 4, 3)
    ranked = herding(features, 1150)
    assert len(ranked) == 1150
    assert len(ranked.unique()) == 1150
    assert len(herding(features, 5000)) == 1200


def test_herding_never_repeats_and_a_smaller_memory_is_a_prefix():
    features = torch.cat([random_features(5, 3, 4)] * 6)  # many duplicates tempt to pick again
    ranked = herding(features, 30)
    assert sorted(ranked.tolist()) == list(range(30))
    for k in (0, 1, 7):
        assert herding(features, k).tolist() == ranked[:k].tolist()


@pytest.mark.parametrize("choose", [herding, nearest])
@pytest.mark.parametrize("width", [3, 64, 129])
def test_the_lowest_row_wins_a_tie(choose, width):
    distinct = random_features(37, width, 5)
    copies = torch.cat([distinct, distinct, distinct])
    ranked = choose(copies, 111).tolist()
    for row in range(37):
        places = [ranked.index(row + 37 * copy) for copy in range(3)]
        assert places == sorted(places)
    assert choose(torch.ones(9, width), 4).tolist() == [0, 1, 2, 3]


def test_opposite_rows_that_are_equally_good_tie_whatever_the_rounding():
    # Of 12 times -1 and 24 times +1 the second pick may be either, at distance 1/3 from the mean; and so on.
    for rows, every in ((36, 3), (30, 7), (50, 4)):
        signs = torch.tensor([-1.0 if i % every == 1 else 1.0 for i in range(rows)])
        for width in (1, 7, 64):
            features = signs[:, None] * random_features(1, width, 14)
            assert herding(features, rows).tolist() == literal(features.numpy(), rows)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e18])
def test_lengths_of_features_do_not_matter(scale):
    features = random_features(50, 16, 6)
    lengths = torch.from_numpy(np.random.default_rng(7).uniform(0.5, 2, (50, 1))).float() * scale
    long = features * lengths
    for choose in (herding, nearest):
        assert choose(long, 12).equal(choose(long.double(), 12))
    assert herding(long, 12).tolist() == literal(long.numpy(), 12)


def test_rows_of_zeros_and_no_rows_are_allowed():
    features = random_features(10, 4, 8)
    features[3] = 0
    assert herding(features, 10).tolist() == literal(features.numpy(), 10)
    assert sorted(nearest(torch.zeros(3, 2), 3).tolist()) == [0, 1, 2]
    assert herding(torch.empty(0, 5), 3).shape == nearest(torch.empty(0, 5), 3).shape == (0,)


@pytest.mark.parametrize("choose", [herding, nearest])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_features_that_are_not_finite_are_refused(choose, bad):
    features = random_features(10, 4, 9)
    features[2, 1] = bad
    with pytest.raises(TrainingError, match="NaN or infinite"):
        choose(features, 3)


def test_nearest_ranks_by_cosine_to_the_class_mean():
    features = random_features(200, 20, 10)
    rows = features.double().numpy()
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = np.argsort(-(rows @ rows.mean(0)), kind="stable")[:15]
    assert nearest(features, 15).tolist() == expected.tolist()
    assert herding(features, 15).tolist() != expected.tolist()
    assert herding(features, 15)[0] == expected[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.3, 30.0, 3e4])
def test_far_from_the_origin_the_picks_are_the_same(offset, dtype):
    for some in random_features(4000, 64, 15, offset).to(dtype).split(200):
        assert herding(some, 20).tolist() == literal(some.double().numpy(), 20)


def test_picks_that_stray_far_from_a_mean_near_zero():
    features = random_features(2000, 128, 16, offset=0.0)
    features[1000:] = features[:1000] + 1e-3 * random_features(1000, 128, 17, offset=0.0)
    assert herding(features, 200).tolist() == literal(features.numpy(), 200)


def test_the_rows_of_classes_and_a_class_without_images_is_named():
    labels = torch.tensor([2, 0, 0, 2])
    found = {c: rows.tolist() for c, rows in members(labels, [2, 0]).items()}
    assert found == {2: [0, 3], 0: [1, 2]}
    for absent in (1, 5):
        with pytest.raises(DataError, match=f"class {absent} has no image"):
            members(labels, [0, absent])
