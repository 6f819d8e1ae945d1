"""Selection against the literal algorithm in float64; budgets, prefixes, and storing the memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from geodl import memory as module
from geodl.data.images import ArrayImages, FileImages
from geodl.errors import ConfigError, DataError, TrainingError
from geodl.memory import Memory, herd_classes, herding, nearest, quota


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


def random_features(rows: int, width: int, seed: int, offset: float = 0.3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(offset, 1, size=(rows, width))).float()


def pictures(labels: list[int], seed: int = 0) -> ArrayImages:
    pixels = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 4, 4), dtype=np.uint8))
    return ArrayImages(pixels, torch.tensor(labels, dtype=torch.int64))


# ----------------------------------------------------------------------------------------------------------- herding


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 45),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.5, 3]),
)
def test_herding_equals_the_literal_algorithm(rows, width, k, seed, offset):
    features = random_features(rows, width, seed, offset)
    assert herding(features, k).tolist() == literal(features.numpy(), k)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_herding_of_a_large_class_equals_the_literal_algorithm(dtype):
    features = random_features(600, 64, 1).to(dtype)
    assert herding(features, 100).tolist() == literal(features.double().numpy(), 100)


def test_what_float32_cannot_tell_apart_is_decided_in_float64():
    # All rows lie within 1e-6 of one direction, so that their scores agree to about 7 digits.
    features = 1 + 1e-6 * random_features(80, 32, 2)
    reference = literal(features.numpy(), 20)
    assert herding(features, 20).tolist() == reference
    float32 = literal_float32(features, 20)
    assert float32 != reference, "the example must be one that float32 gets wrong"


def literal_float32(features: torch.Tensor, k: int) -> list[int]:
    rows = features / features.norm(dim=1, keepdim=True)
    mean, total, chosen = rows.mean(dim=0), torch.zeros(rows.shape[1]), []
    for rank in range(1, k + 1):
        distances = (mean - (total + rows) / rank).norm(dim=1)
        distances[chosen] = torch.inf
        chosen.append(int(distances.argmin()))
        total = total + rows[chosen[-1]]
    return chosen


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
    for choose in (herding, nearest):
        assert choose(features * lengths, 12).tolist() == choose((features * lengths).double(), 12).tolist()
    assert herding(features * lengths, 12).tolist() == literal((features * lengths).numpy(), 12)


@pytest.mark.parametrize("size", [1e-200, 1e160])
def test_lengths_whose_squares_leave_double_precision_count_as_zero(size):
    features = random_features(20, 4, 6).double()
    features[7] = 0
    expected = herding(features, 12)
    features[7] = size
    assert herding(features, 12).equal(expected)


def test_what_is_wrong_with_another_class_does_not_matter():
    features = random_features(6, 3, 9)
    features[0] = torch.nan
    herded = herd_classes(features, torch.tensor([2, 0, 0, 1, 1, 1]), 2, [0, 1])
    assert herded[0].tolist() == (1 + herding(features[1:3], 2)).tolist()
    assert herded[1].tolist() == (3 + herding(features[3:], 2)).tolist()


def test_rows_of_zeros_are_allowed():
    features = random_features(10, 4, 8)
    features[3] = 0
    assert herding(features, 10).tolist() == literal(features.numpy(), 10)
    assert sorted(nearest(torch.zeros(3, 2), 3).tolist()) == [0, 1, 2]


def test_no_rows_give_no_exemplars():
    assert herding(torch.empty(0, 5), 3).shape == (0,)
    assert nearest(torch.empty(0, 5), 3).shape == (0,)


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


def test_herding_and_nearest_differ():
    features = random_features(100, 8, 11)
    assert herding(features, 10).tolist() != nearest(features, 10).tolist()
    assert herding(features, 10)[0] == nearest(features, 10)[0]


# --------------------------------------------------------------------------------------------------- several classes


@pytest.mark.parametrize("stack", [1, 2000, module.STACK])
@pytest.mark.parametrize("block", [1, 300, module.BLOCK])
def test_classes_herded_together_are_as_herded_alone(monkeypatch, stack, block):
    monkeypatch.setattr(module, "STACK", stack)
    monkeypatch.setattr(module, "BLOCK", block)
    random = np.random.default_rng(12)
    labels = torch.from_numpy(random.choice(9, size=400, p=np.arange(1, 10) / 45))
    features = random_features(400, 10, 13)
    asked = [7, 0, 8, 3]
    herded = herd_classes(features, labels, 12, asked)
    assert list(herded) == asked
    for c in asked:
        members = np.flatnonzero(labels.numpy() == c)
        assert herded[c].tolist() == members[literal(features.numpy()[members], 12)].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.3, 30.0, 3e4])
def test_half_precision_narrows_the_choice_but_does_not_make_it(offset, dtype):
    labels = torch.arange(20).repeat(200)
    features = random_features(4000, 64, 15, offset).to(dtype)
    for c, picks in herd_classes(features, labels, 20, range(20)).items():
        members = np.flatnonzero(labels.numpy() == c)
        assert picks.tolist() == members[literal(features.double().numpy()[members], 20)].tolist()


def test_the_doubt_grows_with_the_distance_of_the_picks_from_the_mean():
    features = random_features(2000, 128, 16, offset=0.0)  # a mean near 0, from which the picks stray
    features[1000:] = features[:1000] + 1e-3 * random_features(1000, 128, 17, offset=0.0)
    assert herding(features, 200).tolist() == literal(features.numpy(), 200)


def test_a_class_without_images_is_named():
    for absent in (1, 5):
        with pytest.raises(DataError, match=f"class {absent} has no image"):
            herd_classes(random_features(4, 2, 0), torch.tensor([0, 0, 2, 2]), 1, [0, absent])


def test_all_1623_classes_of_omniglot(omniglot):
    labels = omniglot.train.labels
    features = omniglot.train.pixels[:, 0].flatten(1)[:, ::7].float()
    herded = herd_classes(features, labels, 5, range(1623))
    assert len(herded) == 1623
    for c in range(0, 1623, 101):
        members = torch.nonzero(labels == c).flatten()
        assert herded[c].tolist() == members[literal(features[members].numpy(), 5)].tolist()
    exemplars = Memory.empty().update(omniglot.train, features, range(1623), quota=5, selection="herding")
    assert exemplars.per_class() == dict.fromkeys(range(1623), 5)


# ------------------------------------------------------------------------------------------------------------ budget


def test_quota_of_both_budgets():
    assert [quota(c, 20, "per_class") for c in (1, 50, 100)] == [20, 20, 20]
    assert [quota(c, 2000, "total") for c in (50, 55, 100, 3000)] == [40, 36, 20, 0]
    assert quota(0, 2000, "total") == 2000
    assert quota(10, 0, "per_class") == quota(10, 0, "total") == 0


def test_impossible_budgets_are_refused():
    with pytest.raises(ConfigError, match=r"budget = 'both': allowed are 'per_class' and 'total'"):
        quota(10, 20, "both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exemplars = -1"):
        quota(10, -1, "per_class")


def grow(budget: str, exemplars: int, selection: str = "herding") -> list[Memory]:
    """Learn classes {0, 1}, then {2}, then {3, 4}, of 30 images each."""
    memory, history, seen = Memory.empty(), [], 0
    for phase, group in enumerate(([0, 1], [2], [3, 4])):
        seen += len(group)
        candidates = pictures(sorted(group * 30), seed=phase)
        features = random_features(len(candidates), 6, 20 + phase)
        memory = memory.update(candidates, features, group, quota=quota(seen, exemplars, budget), selection=selection)
        history.append(memory)
    return history


@pytest.mark.parametrize("selection", ["herding", "nearest"])
def test_per_class_budget_is_not_doubled(selection):
    """A public version keeps twice the budget without a word: mirrored copies, or the class's share twice."""
    for memory, seen in zip(grow("per_class", 4, selection), (2, 3, 5), strict=True):
        assert memory.per_class() == dict.fromkeys(range(seen), 4)
        assert len(memory.images) == 4 * seen
        assert len(set(memory.images.item_digests())) == 4 * seen


@pytest.mark.parametrize("selection", ["herding", "nearest"])
def test_total_budget_is_shared_and_cut_to_ranked_prefixes(selection):
    history = grow("total", 20, selection)
    assert [memory.per_class() for memory in history] == [
        dict.fromkeys(range(2), 10),
        dict.fromkeys(range(3), 6),
        dict.fromkeys(range(5), 4),
    ]
    first, last = history[0].images.item_digests(), history[-1].images.item_digests()
    assert last[:4] == first[:4]  # class 0: the first four of ten
    assert last[4:8] == first[10:14]  # class 1
    assert history[-1].images.labels.tolist() == sorted([0, 1, 2, 3, 4] * 4)


def test_exemplars_are_ranked_within_their_class():
    candidates = pictures([1, 0] * 15)
    features = random_features(30, 5, 30)
    for selection, choose in (("herding", herding), ("nearest", nearest)):
        memory = Memory.empty().update(candidates, features, [1, 0], quota=6, selection=selection)
        for c in (0, 1):
            members = torch.nonzero(candidates.labels == c).flatten()
            expected = candidates.select(members[choose(features[members], 6)]).item_digests()
            assert memory.images.item_digests()[6 * c : 6 * c + 6] == expected


def test_a_class_that_comes_back_is_chosen_anew_from_what_is_given():
    memory = grow("per_class", 4)[-1]
    before = memory.images.item_digests()
    candidates = pictures([1] * 8, seed=99)
    updated = memory.update(candidates, random_features(8, 6, 31), [1], quota=4, selection="herding")
    after = updated.images.item_digests()
    assert updated.per_class() == memory.per_class()
    assert after[:4] == before[:4]
    assert after[8:] == before[8:]
    assert set(after[4:8]) <= set(candidates.item_digests())
    assert memory.images.item_digests() == before, "update returns a new memory"


def test_candidates_of_other_classes_are_not_kept():
    memory = Memory.empty().update(pictures([0, 5, 5, 0]), random_features(4, 3, 0), [5], quota=9, selection="herding")
    assert memory.per_class() == {5: 2}  # fewer than the quota: all of them


def test_no_exemplars_at_all():
    memory = replace(grow("per_class", 0)[-1], means=torch.eye(3))
    assert memory.images is None
    assert memory.per_class() == {}
    assert Memory.from_tensors(memory.to_tensors()).means.equal(torch.eye(3))
    full = grow("per_class", 4)[-1]
    assert full.update(pictures([5]), torch.ones(1, 3), [5], quota=0, selection="herding").images is None


def test_updating_no_class_only_cuts():
    memory = grow("per_class", 4)[-1]
    none = pictures([])
    assert memory.update(none, torch.empty(0, 6), [], quota=1, selection="nearest").per_class() == dict.fromkeys(
        range(5), 1
    )


def test_wrong_updates_are_refused():
    with pytest.raises(DataError, match="2 candidates have 3 features"):
        Memory.empty().update(pictures([0, 0]), torch.ones(3, 2), [0], quota=1, selection="herding")
    with pytest.raises(ConfigError, match=r"selection = 'random': allowed are 'herding' and 'nearest'"):
        Memory.empty().update(pictures([0]), torch.ones(1, 2), [0], quota=1, selection="random")  # type: ignore[arg-type]


def test_held_out_images_and_means_survive_updates():
    held, means = pictures([0, 1], seed=50), torch.eye(4)
    memory = replace(grow("per_class", 4)[0], held=held, means=means)
    updated = memory.update(pictures([2] * 9), random_features(9, 6, 0), [2], quota=2, selection="herding")
    assert updated.held is held
    assert updated.means is means


# ----------------------------------------------------------------------------------------------------------- storing


def same(a: Memory, b: Memory) -> None:
    assert a.embed == b.embed
    for left, right in ((a.images, b.images), (a.held, b.held)):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert left.digest() == right.digest()
    assert (a.means is None) == (b.means is None)
    assert a.means is None or a.means.equal(b.means)


def test_memory_of_arrays_comes_back_from_tensors():
    for memory in (
        Memory.empty(),
        grow("per_class", 3)[-1],
        replace(grow("per_class", 3)[-1], held=pictures([0, 1], 60), means=torch.eye(5)),
    ):
        same(Memory.from_tensors(memory.to_tensors()), memory)


def test_bytes_of_the_memory_are_those_of_its_pixels():
    memory = replace(grow("per_class", 3)[-1], means=torch.zeros(5, 6))
    pixels, labels, means = 15 * 3 * 4 * 4, 15 * 8, 5 * 6 * 4
    assert memory.nbytes == pixels + labels + means + 1


def files(folder: Path, count: int) -> FileImages:
    paths = []
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (5 + i, 6, 3), dtype=np.uint8)
        paths.append(folder / f"{i}.png")
        Image.fromarray(pixels).save(paths[-1])
    return FileImages(tuple(paths), torch.arange(count) % 2)


@pytest.mark.parametrize("embed", [True, False])
def test_memory_of_files_is_embedded_or_referenced(tmp_path, embed):
    images = files(tmp_path, 6)
    memory = Memory.empty(embed=embed).update(images, random_features(6, 3, 40), [0, 1], quota=2, selection="herding")
    assert memory.per_class() == {0: 2, 1: 2}
    tensors = memory.to_tensors()
    same(Memory.from_tensors(tensors), memory)
    for item in images.items:
        item.unlink()  # the user's originals are gone by the next phase
    if embed:
        assert Memory.from_tensors(tensors).images.decode(0).width == 6
    else:
        with pytest.raises(DataError, match=r"\.png"):
            Memory.from_tensors(tensors)
