"""Schedules of the learning rate, and what weight decay spares."""

import math

import pytest
import torch

from geodl.methods import Schedule
from geodl.nets import build_network


def rates_of(schedule, steps):
    """Return the rate of every step."""
    epochs = range(schedule.epochs)
    return [schedule.lr_at(epoch, step, steps) for epoch in epochs for step in range(steps)]


def test_onecycle_rises_to_the_peak_and_falls_to_almost_nothing():
    schedule = Schedule(epochs=4, lr=0.2, kind="onecycle")
    rates = rates_of(schedule, steps=25)
    peak = rates.index(max(rates))
    assert peak == 25
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(0.2, rel=1e-3)
    assert rates[-1] < 1e-3 * 0.2


def test_cosine_starts_at_the_rate_and_falls_along_half_a_cosine():
    schedule = Schedule(epochs=4, lr=0.5, kind="cosine")
    rates = rates_of(schedule, steps=25)
    halves = torch.arange(100, dtype=torch.float64) + 0.5
    assert rates == pytest.approx((0.5 * (halves * math.pi / 200).cos().square()).tolist())


@pytest.mark.parametrize("norm_decay", [True, False])
def test_weight_decay_spares_norms_biases_and_scales_where_asked(norm_decay):
    network = build_network("resnet8", 3, head="cosine")
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    schedule = Schedule(1, lr=0.5, weight_decay=0.1, norm_decay=norm_decay)
    optimizer = schedule.optimizer(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, after in network.named_parameters():
        spared = not norm_decay and ("bn" in name or "downsample.1" in name or name == "head.scale")
        torch.testing.assert_close(after, before[name] * (1.0 if spared else 0.95), msg=name)


def test_a_short_step_schedule_begins_at_the_full_rate():
    for epochs in (1, 2, 3):
        assert Schedule(epochs, 0.1, milestones=(0.5, 0.75)).lr_at(0, 0, 5) == 0.1
    for epochs, milestone, last in ((100, 0.55, 54), (70, 0.7, 48)):
        schedule = Schedule(epochs, 1.0, milestones=(milestone,))
        assert [schedule.lr_at(epoch, 0, 5) for epoch in (last, last + 1)] == [1.0, 0.1]
