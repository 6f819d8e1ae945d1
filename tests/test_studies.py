"""The studies: every variant of the base network trains."""

import pytest
import torch
from studies.base import VARIANTS
from tests import tiny

from geodl import Learner
from geodl.events import EpochEnded


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_and_reads_the_later_classes(name):
    kind, options = VARIANTS[name]
    data, heard = tiny.dataset(), []
    config = tiny.config(method="analytic", exemplars=0, expansion=64, **options)
    learner = Learner(config, listener=lambda event: heard.append(event) if isinstance(event, EpochEnded) else None)
    learner.method = kind(learner.config)
    learner.learn(data.train.pixels[:18], data.train.labels[:18])
    learner.learn(data.train.pixels[18:], data.train.labels[18:])
    assert [event.epoch for event in heard] == [1, 2]
    assert all(torch.isfinite(p).all() for p in learner.network.parameters())
    assert learner.evaluate(data.test.pixels, data.test.labels)["analytic"].accuracy > 50
    plain = Learner(tiny.config(method="analytic", exemplars=0, expansion=64))
    plain.learn(data.train.pixels[:18], data.train.labels[:18])
    both = (each.network.backbone.parameters() for each in (plain, learner))
    assert (name == "plain") == all(torch.equal(a, b) for a, b in zip(*both, strict=True))
