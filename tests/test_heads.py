"""Growing heads: what they compute, how they grow, and that no optimizer reaches a frozen row."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from geodl.errors import ConfigError
from geodl.nets.heads import CosineHead, Head, LinearHead

KINDS = [CosineHead, LinearHead]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def features(rows: int = 6, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def train(head: Head, optimizer: str, steps: int = 5) -> None:
    z, labels = features(12), torch.arange(12) % head.classes
    step = OPTIMIZERS[optimizer](head.parameters())
    for _ in range(steps):
        step.zero_grad()
        F.cross_entropy(head(z), labels).backward()
        step.step()


def test_cosine_head_equals_numpy():
    head = CosineHead(4, 3, scale=2.5)
    z, w = features().double().numpy(), head.weight.detach().double().numpy()
    cosines = (z @ w.T) / np.linalg.norm(z, axis=1)[:, None] / np.linalg.norm(w, axis=1)
    np.testing.assert_allclose(head.cosines(features()).detach().numpy(), cosines, atol=1e-6)
    np.testing.assert_allclose(head(features()).detach().numpy(), 2.5 * cosines, atol=1e-6)


def test_linear_head_equals_numpy():
    head = LinearHead(4, 3)
    with torch.no_grad():
        head.bias.copy_(torch.tensor([1.0, -2.0, 0.5]))
    z, w = features().double().numpy(), head.weight.detach().double().numpy()
    np.testing.assert_allclose(head(features()).detach().numpy(), z @ w.T + [1.0, -2.0, 0.5], atol=1e-6)


def test_cosines_ignore_the_lengths_of_features_and_rows():
    head = CosineHead(4, 3)
    before = head.cosines(features())
    with torch.no_grad():
        head.weight.mul_(torch.tensor([[7.0], [0.1], [300.0]]))
    torch.testing.assert_close(head.cosines(50 * features()), before)


def test_scale_is_learned_and_survives_growth():
    head = CosineHead(4, 3, scale=10.0)
    train(head, "sgd")
    learned = head.scale.item()
    assert learned != 10.0
    head.grow(2, seed=1)
    assert head.scale.item() == learned


@pytest.mark.parametrize("kind", KINDS)
def test_growth_keeps_old_rows_and_their_correction(kind):
    head = kind(4, 3)
    head.correct([2], torch.tensor(0.5), torch.tensor(-1.0))
    weight, logits = head.weight.detach().clone(), head(features()).detach()
    head.grow(2, seed=9)
    assert head.classes == 5
    assert torch.equal(head.weight[:3], weight)
    assert torch.equal(head.alpha, torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0]))
    assert torch.equal(head.beta, torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0]))
    torch.testing.assert_close(head(features())[:, :3], logits)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_from_the_seed_alone(kind):
    torch.manual_seed(1)
    one = kind(4, 2, seed=3)
    one.grow(2, seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two = kind(4, 2, seed=3)
    two.grow(2, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.weight, two.weight)
    other = kind(4, 2, seed=3)
    other.grow(2, seed=6)
    assert torch.equal(other.weight[:2], one.weight[:2])
    assert not torch.equal(other.weight[2:], one.weight[2:])


def test_new_rows_have_norm_about_one():
    assert CosineHead(256, 200).weight.norm(dim=1).mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_may_start_without_classes(kind):
    head = kind(4, 0)
    assert head(features()).shape == (6, 0)
    head.grow(2, seed=0)
    assert head(features()).shape == (6, 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_rows_never_move_and_the_others_move_as_if_none_were_frozen(kind, optimizer):
    frozen = torch.tensor([True, False, True, False])
    free, held = kind(4, 4, seed=1), kind(4, 4, seed=1)
    before = {name: held.rows(name).detach().clone() for name in held.row_parameters}
    held.freeze(frozen)
    assert torch.equal(held.frozen, frozen)
    # One step only: from the second on, the free head's logits differ because its old rows have moved.
    train(free, optimizer, steps=1)
    train(held, optimizer, steps=1)
    for name in held.row_parameters:
        assert torch.equal(held.rows(name)[frozen], before[name][frozen])
        assert torch.equal(held.rows(name)[~frozen], free.rows(name)[~frozen])
        assert not torch.equal(held.rows(name)[~frozen], before[name][~frozen])
    train(held, optimizer, steps=20)
    held.thaw()
    for name in held.row_parameters:
        assert torch.equal(getattr(held, name)[frozen], before[name][frozen])


def test_an_optimizer_from_before_the_freezing_moves_nothing():
    head = CosineHead(4, 3)
    optimizer = OPTIMIZERS["sgd"](head.parameters())
    head(features()).sum().backward()
    optimizer.step()
    before = head.weight.detach().clone()
    head.freeze(torch.tensor([True, True, False]))
    optimizer.step()
    assert torch.equal(head.rows(), before)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(mask=st.lists(st.booleans(), min_size=1, max_size=8))
def test_freezing_and_thawing_change_no_logit_and_no_bit(kind, mask):
    head = kind(4, len(mask), seed=2)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    logits = head(features()).detach()
    head.freeze(torch.tensor(mask))
    assert head.classes == len(mask)
    assert head.frozen.tolist() == mask
    assert len(head.weight) == mask.count(False)
    assert torch.equal(head(features()), logits)
    head.thaw()
    assert not head.frozen.any()
    assert head.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in head.state_dict().items())


def test_freezing_again_replaces_the_mask():
    head = LinearHead(4, 3)
    weight = head.weight.detach().clone()
    head.freeze(torch.tensor([True, True, False]))
    head.freeze(torch.tensor([False, True, True]))
    assert head.frozen.tolist() == [False, True, True]
    assert torch.equal(head.rows(), weight)


def test_all_rows_may_be_frozen():
    head = CosineHead(4, 3)
    before = head.weight.detach().clone()
    head.freeze(torch.ones(3, dtype=torch.bool))
    train(head, "sgd")
    assert torch.equal(head.rows(), before)


def test_a_frozen_head_grows_trainable_rows():
    head = CosineHead(4, 3)
    before = head.weight.detach().clone()
    head.freeze(torch.tensor([True, False, True]))
    head.grow(2, seed=4)
    assert head.frozen.tolist() == [True, False, True, False, False]
    assert torch.equal(head.rows()[:3], before)


@pytest.mark.parametrize("mask", [torch.tensor([True, False]), torch.tensor([0, 1, 2])], ids=["short", "integers"])
def test_freeze_refuses_what_is_not_a_mask_of_all_rows(mask):
    with pytest.raises(ConfigError, match=r"\(3,\) torch.bool"):
        CosineHead(4, 3).freeze(mask)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_imprinted_rows_are_means_at_the_mean_norm_of_the_old_rows(as_tensor):
    head = CosineHead(2, 4)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0], [8.0, 8.0], [9.0, 9.0]]))
    rows = torch.tensor([3, 2]) if as_tensor else [3, 2]
    head.imprint(rows, torch.tensor([[0.3, 0.4], [-2.0, 0.0]], dtype=torch.float64))
    # Old norms 5 and 1 have mean 3; (0.3, 0.4) / 0.5 * 3 = (1.8, 2.4).
    torch.testing.assert_close(head.weight.detach(), torch.tensor([[3.0, 4.0], [0.0, 1.0], [-3.0, 0.0], [1.8, 2.4]]))


def test_imprinted_rows_have_norm_one_without_old_rows():
    head = CosineHead(2, 2)
    head.imprint([0, 1], torch.tensor([[3.0, 4.0], [0.0, -0.1]]))
    torch.testing.assert_close(head.weight.detach(), torch.tensor([[0.6, 0.8], [0.0, -1.0]]))


def test_imprinting_keeps_what_is_frozen():
    head = CosineHead(2, 3)
    before = head.weight.detach().clone()
    head.freeze(torch.tensor([True, True, False]))
    head.imprint([2], torch.tensor([[3.0, 4.0]]))
    assert head.frozen.tolist() == [True, True, False]
    assert torch.equal(head.rows()[:2], before[:2])
    torch.testing.assert_close(F.normalize(head.rows()[2:], dim=1).detach(), torch.tensor([[0.6, 0.8]]))


def test_only_the_cosine_head_can_be_imprinted():
    assert hasattr(CosineHead, "imprint")
    assert not hasattr(LinearHead, "imprint")


@pytest.mark.parametrize("kind", KINDS)
def test_correction_changes_the_named_classes_only(kind):
    head = kind(4, 3)
    before = head(features()).detach()
    alpha, beta = torch.tensor(0.5, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    head.correct([1, 2], alpha, beta)
    assert not head.alpha.requires_grad
    after = head(features()).detach()
    assert torch.equal(after[:, 0], before[:, 0])
    torch.testing.assert_close(after[:, 1:], 0.5 * before[:, 1:] + 2.0)
    assert torch.equal(head.raw(features()), before)
    head.correct(torch.tensor([2]), torch.tensor(3.0), torch.tensor(0.0))
    assert head.alpha.tolist() == [1.0, 0.5, 3.0]
    assert head.beta.tolist() == [0.0, 2.0, 0.0]


def test_correction_is_no_parameter():
    head = LinearHead(4, 3)
    assert {name for name, _ in head.named_parameters()} == {"weight", "bias"}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [(CosineHead, {"weight", "scale", "alpha", "beta"}), (LinearHead, {"weight", "bias", "alpha", "beta"})],
)
def test_state_of_a_thawed_head_has_the_canonical_keys(kind, keys):
    head = kind(4, 3)
    head.freeze(torch.tensor([True, False, False]))
    head.thaw()
    assert head.state_dict().keys() == keys
    assert head.state_dict()["weight"].shape == (3, 4)


@pytest.mark.parametrize("mask", [None, [True, False, True, False, False]], ids=["thawed", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_into_a_head_grown_and_frozen_alike(kind, mask):
    def grown(seed):
        head = kind(4, 3, seed=seed)
        head.grow(2, seed=seed)
        if mask:
            head.freeze(torch.tensor(mask))
        return head

    head, other = grown(1), grown(2)
    train(head, "sgd")
    head.correct([4], torch.tensor(0.7), torch.tensor(0.1))
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(features()), head(features()))
    head.thaw()
    other.thaw()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in head.state_dict().items())


def test_a_copy_is_independent():
    head = CosineHead(4, 3)
    head.freeze(torch.tensor([True, False, False]))
    copy = deepcopy(head)
    before = copy(features()).detach()
    train(head, "sgd")
    head.correct([0], torch.tensor(2.0), torch.tensor(1.0))
    assert torch.equal(copy(features()), before)
