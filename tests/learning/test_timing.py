"""Timing of steps on made-up images."""

import pytest
import torch

from geodl.learning.timing import LOSSES, Shape, Step, measure, take_turns

LEAN = Shape("convnet", 8, batch=8, old=3, new=2)


def test_turns_rotate_and_the_first_is_thrown_away():
    order = []
    times = take_turns({name: lambda name=name: order.append(name) for name in "abc"}, turns=2)
    assert "".join(order) == "abcbcacab"
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize("distill", LOSSES)
def test_a_step_trains_the_student_and_not_the_teacher(distill):
    step = Step(distill, LEAN)
    networks = [step.student] if step.teacher is None else [step.student, step.teacher]
    before = [[parameter.clone() for parameter in network.parameters()] for network in networks]
    step()
    step.evaluate()
    assert step.student.training
    moved = [
        any(
            not torch.equal(one, other)
            for one, other in zip(each, network.parameters(), strict=True)
        )
        for each, network in zip(before, networks, strict=True)
    ]
    assert moved == [True, False][: len(networks)]


def test_measured_speeds():
    speed = measure(LEAN)
    assert list(speed.training) == list(LOSSES)
    assert min(*speed.training.values(), speed.evaluation) > 0
    assert measure(LEAN, ()).training == {}
