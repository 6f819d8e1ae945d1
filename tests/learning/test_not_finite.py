"""Losses, weights and features that are not finite end the training, and none is kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.phases import KeptProgress, ScenarioLearner, parts_of

from geodl.core.cache import Cache
from geodl.core.errors import TrainingError
from geodl.learning.loop import StageRun
from geodl.methods import Losses, Phase, Schedule, Stage
from geodl.store import Directory


def test_weights_that_a_step_breaks_reach_no_checkpoint(run, tmp_path):
    # The loss of the first step is finite, its step is not: the next loss would be the first to tell.
    with pytest.raises(TrainingError, match=r"epoch 1, step 1 \(the weights after .*the start of"):
        run(lr=1e300, epochs=3, checkpoint_steps=1)
    assert Directory(tmp_path / "r").load_progress() is None


def bad_stage(learner: ScenarioLearner, bad: int, epochs: int = 2) -> tuple[Phase, Stage]:
    """Return a phase and a stage of 5 steps an epoch whose loss is NaN at one of its steps, from 1."""
    phase, steps = learner.prepare_next(), iter(range(1, 1000))
    stage = next(learner.method.stages(phase))
    plain = stage.loss

    def loss(module: torch.nn.Module, batch: Any) -> Losses:
        parts = parts_of(plain(module, batch))
        yield from parts.items()
        yield "own", parts["ce"] * (torch.nan if next(steps) == bad else 0.0)

    return phase, replace(
        stage,
        loss=loss,
        steps=5,
        batches=phase.batches(phase.images, "train", 3),
        schedule=Schedule(epochs, 0.01),
    )


@pytest.mark.parametrize("read", [1, 4, 100])
@pytest.mark.parametrize(
    ("bad", "place", "good"), [(3, (1, 3), (1, 2)), (5, (1, 5), (1, 4)), (8, (2, 3), (2, 1))]
)
def test_the_first_loss_that_is_not_finite_is_named_however_rarely_losses_are_read(
    data, read, bad, place, good
):
    learner = ScenarioLearner(tiny.config(method="finetune", checkpoint_steps=2), data)
    learner.trainer.read_steps, progress = read, KeptProgress()
    phase, stage = bad_stage(learner, bad)
    with pytest.raises(TrainingError) as caught:
        StageRun(learner.trainer, phase, stage, progress=progress).run()
    assert f"epoch {place[0]}, step {place[1]} (ce = " in str(caught.value)
    assert "own = nan" in str(caught.value)
    assert f"checkpoint is epoch {good[0]}, step {good[1]}:" in str(caught.value)
    assert progress.saved
    saved = [tensor for tensors, _ in progress.saved for tensor in tensors.values()]
    assert all(tensor.isfinite().all() for tensor in saved)


def test_features_that_are_not_finite_name_the_place_too(run):
    options = {"distill": "geodesic", "base_lr": 0.05, "lr": 1e30, "checkpoint_steps": 1}
    place = r"not finite in phase 1, stage train, epoch \d, step \d.*last good checkpoint"
    with pytest.raises(TrainingError, match=place):
        run(method="lucir", **options)


@pytest.mark.parametrize(("lr", "broken"), [(1e25, "output"), (1e38, "output|weights")])
def test_a_network_broken_by_the_last_step_is_neither_kept_nor_shared(run, tmp_path, lr, broken):
    # No loss is computed after the only step of the phase. With the lower rate, the weights are finite.
    cache = Cache(tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(TrainingError, match=rf"epoch 1, step 1 .*({broken}).*the start of"):
            run(epochs=1, batch_size=1000, lr=lr, cache=cache)
    assert not cache.size()
    assert not Directory(tmp_path / "r").completed()
    assert Directory(tmp_path / "r").load_progress() is None
