"""Growing heads: logits, growth, frozen rows, imprinting, correction."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.phases import changed, weights_of
from torch.nn import functional as F

from geodl.core.errors import ConfigError
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


def test_heads_equal_numpy():
    cosine, linear = CosineHead(4, 3, scale=2.5), LinearHead(4, 3)
    z, w = features().double().numpy(), cosine.weight.detach().double().numpy()
    cosines = (z @ w.T) / np.linalg.norm(z, axis=1)[:, None] / np.linalg.norm(w, axis=1)
    np.testing.assert_allclose(cosine.cosines(features()).detach().numpy(), cosines, atol=1e-6)
    np.testing.assert_allclose(cosine(features()).detach().numpy(), 2.5 * cosines, atol=1e-6)
    with torch.no_grad():  # the lengths of features and rows do not matter
        cosine.weight.mul_(torch.tensor([[7.0], [0.1], [300.0]]))
        linear.bias.copy_(torch.tensor([1.0, -2.0, 0.5]))
    found = cosine.cosines(50 * features()).detach().numpy()
    np.testing.assert_allclose(found, cosines, atol=1e-6)
    expected = z @ linear.weight.detach().double().numpy().T + [1.0, -2.0, 0.5]
    np.testing.assert_allclose(linear(features()).detach().numpy(), expected, atol=1e-6)


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


def test_new_rows_have_norm_about_one_and_may_be_the_first():
    assert CosineHead(256, 200).weight.norm(dim=1).mean().item() == pytest.approx(1.0, abs=0.02)
    for kind in KINDS:
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
    before = weights_of(head)
    logits = head(features()).detach()
    head.freeze(torch.tensor(mask))
    assert head.classes == len(mask)
    assert head.frozen.tolist() == mask
    assert len(head.weight) == mask.count(False)
    assert torch.equal(head(features()), logits)
    head.thaw()
    assert not head.frozen.any()
    parameters = {"weight", "scale" if kind is CosineHead else "bias"}
    assert {name for name, _ in head.named_parameters()} == parameters
    assert head.state_dict().keys() == before.keys() == parameters | {"alpha", "beta"}
    assert not changed(before, head.state_dict())


def test_other_rows_are_frozen_all_of_them_or_more_are_grown():
    head = CosineHead(4, 3)
    before = head.weight.detach().clone()
    head.freeze(torch.tensor([True, True, False]))
    head.freeze(torch.tensor([False, True, True]))
    assert head.frozen.tolist() == [False, True, True]
    head.freeze(torch.ones(3, dtype=torch.bool))
    train(head, "sgd")
    assert torch.equal(head.rows(), before)
    head.freeze(torch.tensor([True, False, True]))
    head.grow(2, seed=4)
    assert head.frozen.tolist() == [True, False, True, False, False]
    assert torch.equal(head.rows()[:3], before)
    for mask in (torch.tensor([True, False]), torch.tensor([0, 1, 2])):
        with pytest.raises(ConfigError, match=r"\(3,\) torch.bool"):
            CosineHead(4, 3).freeze(mask)


@pytest.mark.parametrize("rows", [[3, 2], torch.tensor([3, 2])])
def test_imprinted_rows_are_means_at_the_mean_norm_of_the_old_rows(rows):
    head = CosineHead(2, 4)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0], [8.0, 8.0], [9.0, 9.0]]))
    head.freeze(torch.tensor([True, True, False, False]))
    head.imprint(rows, torch.tensor([[0.3, 0.4], [-2.0, 0.0]], dtype=torch.float64))
    assert head.frozen.tolist() == [True, True, False, False]  # still frozen
    # Old norms 5 and 1 have mean 3; (0.3, 0.4) / 0.5 * 3 = (1.8, 2.4).
    expected = torch.tensor([[3.0, 4.0], [0.0, 1.0], [-3.0, 0.0], [1.8, 2.4]])
    torch.testing.assert_close(head.rows().detach(), expected)
    head = CosineHead(2, 2)  # without old rows the norm is 1
    head.imprint([0, 1], torch.tensor([[3.0, 4.0], [0.0, -0.1]]))
    torch.testing.assert_close(head.weight.detach(), torch.tensor([[0.6, 0.8], [0.0, -1.0]]))


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


@pytest.mark.parametrize(
    "mask", [None, [True, False, True, False, False]], ids=["thawed", "frozen"]
)
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
    assert not changed(weights_of(head), other.state_dict())
