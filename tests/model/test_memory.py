"""Budgets, prefixes, and storing the memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.plain import pictures, random_features

from geodl.core.errors import DataError
from geodl.data.images import FileImages
from geodl.model.herding import herding, nearest
from geodl.model.memory import Memory, quota

# ------------------------------------------------------------------------------------------------------------ budget


def test_quota_of_both_budgets():
    assert [quota(c, 20, "per_class") for c in (1, 50, 100)] == [20, 20, 20]
    assert [quota(c, 2000, "total") for c in (50, 55, 100, 3000)] == [40, 36, 20, 0]
    assert quota(0, 2000, "total") == 2000
    assert quota(10, 0, "per_class") == quota(10, 0, "total") == 0


def grow(budget: str, exemplars: int, selection: str = "herding") -> list[Memory]:
    """Learn classes {0, 1}, then {2}, then {3, 4}, of 30 images each."""
    memory, history, seen = Memory(), [], 0
    for phase, group in enumerate(([0, 1], [2], [3, 4])):
        seen += len(group)
        candidates = pictures(sorted(group * 30), seed=phase)
        features = random_features(len(candidates), 6, 20 + phase)
        share = quota(seen, exemplars, budget)
        memory = memory.update(candidates, features, group, quota=share, selection=selection)
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
        memory = Memory().update(candidates, features, [1, 0], quota=6, selection=selection)
        for c in (0, 1):
            members = torch.nonzero(candidates.labels == c).flatten()
            expected = candidates.select(members[choose(features[members], 6)]).item_digests()
            assert memory.images.item_digests()[6 * c : 6 * c + 6] == expected


def test_an_update_changes_no_more_than_it_is_for():
    memory = grow("per_class", 4)[-1]
    given = {"quota": 9, "selection": "herding"}
    other = Memory().update(pictures([0, 5, 5, 0]), random_features(4, 3, 0), [5], **given)
    assert other.per_class() == {5: 2}, "fewer than the quota, and none of other classes"
    none = {"quota": 0, "selection": "herding"}
    assert memory.update(pictures([5]), torch.ones(1, 3), [5], **none).images is None
    cut = memory.update(pictures([]), torch.empty(0, 6), [], quota=1, selection="nearest")
    assert cut.per_class() == dict.fromkeys(range(5), 1)


def test_exemplars_of_a_returning_class_are_selected_from_the_candidates():
    memory = grow("per_class", 4)[-1]
    before = memory.images.item_digests()
    candidates = pictures([1] * 8, seed=99)
    updated = memory.update(
        candidates, random_features(8, 6, 31), [1], quota=4, selection="herding"
    )
    after = updated.images.item_digests()
    assert updated.per_class() == memory.per_class()
    assert after[:4] == before[:4]
    assert after[8:] == before[8:]
    assert set(after[4:8]) <= set(candidates.item_digests())
    assert memory.images.item_digests() == before, "update returns a new memory"


def test_images_are_held_out_for_good_and_something_is_left_to_train_on():
    images = pictures([0] * 6 + [1] * 6 + [2])
    rest, memory = Memory().hold_out(images, [0, 1, 2], 2, seed=3)
    # Of the class with one image nothing.
    assert torch.bincount(memory.held.labels).tolist() == [2, 2]
    assert sorted(rest.item_digests() + memory.held.item_digests()) == sorted(images.item_digests())
    again, same_held = Memory().hold_out(images, [0, 1, 2], 2, seed=3)
    assert same_held.held.digest() == memory.held.digest()
    other = Memory().hold_out(images, [0, 1, 2], 2, seed=4)[1]
    assert other.held.item_digests() != memory.held.item_digests()
    # A total budget has shrunk.
    more, later = memory.hold_out(pictures([3] * 5, seed=1), [3], 1, seed=3)
    assert torch.bincount(later.held.labels, minlength=4).tolist() == [1, 1, 0, 1]
    assert set(later.held.item_digests()[:2]) < set(memory.held.item_digests())
    assert (len(again), len(more)) == (len(rest), 4)
    back, unchanged = memory.hold_out(images.select([0, 1]), [], 2, seed=3)  # no class is new
    assert (len(back), unchanged.held.digest()) == (2, memory.held.digest())


def test_a_removed_class_leaves_nothing_and_those_after_it_move_up():
    full = replace(grow("per_class", 3)[-1], held=pictures([0, 1, 4], seed=60))
    gone = full.without(1)
    assert gone.per_class() == dict.fromkeys(range(4), 3)
    digests = full.images.item_digests()
    assert gone.images.item_digests() == digests[:3] + digests[6:]
    assert gone.held.labels.tolist() == [0, 3]
    assert Memory(images=pictures([0, 0])).without(0).images is None
    same(Memory.from_tensors(gone.to_tensors()), gone)
    assert replace(full, held=None).nbytes == 15 * 3 * 8 * 8 + 15 * 8 + 1, "pixels, labels, a flag"


# ----------------------------------------------------------------------------------------------------------- storing


def same(a: Memory, b: Memory) -> None:
    assert a.store_images == b.store_images
    for left, right in ((a.images, b.images), (a.held, b.held)):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert left.digest() == right.digest()


def files(folder: Path, count: int) -> FileImages:
    paths = []
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (5 + i, 6, 3), dtype=np.uint8)
        paths.append(folder / f"{i}.png")
        Image.fromarray(pixels).save(paths[-1])
    return FileImages(tuple(paths), torch.arange(count) % 2)


@pytest.mark.parametrize("store", [True, False])
def test_memory_of_files_is_stored_or_referenced(tmp_path, store):
    images = files(tmp_path, 6)
    memory = Memory(store_images=store).update(
        images, random_features(6, 3, 40), [0, 1], quota=2, selection="herding"
    )
    assert memory.per_class() == {0: 2, 1: 2}
    tensors = memory.to_tensors()
    same(Memory.from_tensors(tensors, tmp_path), memory)
    for item in images.items:
        item.unlink()  # the user's originals are gone by the next phase
    if store:
        assert Memory.from_tensors(tensors).images.decode(0).width == 6
    else:
        with pytest.raises(DataError, match=r"\.png"):
            Memory.from_tensors(tensors, tmp_path)


def test_all_1623_classes_of_omniglot(omniglot):
    features = omniglot.train.pixels[:, 0].flatten(1)[:, ::7].float()
    memory = Memory().update(omniglot.train, features, range(1623), quota=5, selection="herding")
    assert memory.per_class() == dict.fromkeys(range(1623), 5)
