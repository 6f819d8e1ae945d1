"""Mnemonics: a gradient through the inner steps, exemplars that serve better than the herded ones, pixels in range."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.directories import saved
from tests.helpers.phases import ScenarioLearner, changed, parts_of, weights_of
from torch.func import functional_call
from torch.nn import functional as F

from geodl.bench.experiment import run_config
from geodl.data import Dataset
from geodl.data.batches import Transform, as_inputs, evaluation
from geodl.data.images import ArrayImages, FileImages
from geodl.methods import Phase, Stage
from geodl.methods.mnemonics import Pixels, unrolled
from geodl.nets import Network, build_network


def config(**options):
    return tiny.config(
        **{"method": "mnemonics", "epochs": 1, "outer_steps": 4, "inner_batch": 4} | options
    )


def parts_at(stage: Stage) -> dict[str, torch.Tensor]:
    """Return the parts of the loss of the stage's first batch."""
    return parts_of(stage.loss(stage.module, next(iter(stage.batches.epoch(0)))))


def moves_of(learner: ScenarioLearner, phase: Phase, stage: Stage) -> torch.Tensor:
    """Run the stage; return by how many grey levels each exemplar moved."""
    before = stage.module.values.detach().clone()
    learner.run(phase, stage, 1)
    return (stage.module.values.detach() - before).square().mean(dim=(1, 2, 3)).sqrt()


def moving(stage: Stage) -> torch.Tensor:
    """Return which exemplars have a gradient."""
    return stage.module.values.grad.abs().amax(dim=(1, 2, 3)) > 0


def random_problem(
    seed: int = 0,
) -> tuple[Network, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a network in float64, six exemplars x, y and eight images of the phase u, v."""
    generator = torch.Generator().manual_seed(seed)
    network = build_network("convnet", 3, head="cosine", scale=4.0).double().eval()
    x, u = (torch.randn(n, 3, 8, 8, generator=generator, dtype=torch.float64) for n in (6, 8))
    return network, x, torch.tensor([0, 1, 2, 0, 1, 2]), u, torch.arange(8) % 3


# -- the bilevel problem


@pytest.mark.parametrize("steps", [1, 5])
def test_the_gradient_of_an_exemplar_passes_through_the_inner_steps(steps):
    network, x, y, u, v = random_problem()
    places = torch.arange(6).view(2, 3).repeat(3, 1)[:steps]

    def outer(exemplars: torch.Tensor) -> torch.Tensor:
        weights = unrolled(network, exemplars, y, places, 0.1)
        return F.cross_entropy(functional_call(network, weights, (u,)).logits, v)

    exemplars = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(outer(exemplars), exemplars)
    assert gradient.abs().max() > 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        h = 1e-6
        difference = (outer(x + h * direction) - outer(x - h * direction)).item() / (2 * h)
        assert (gradient * direction).sum().item() == pytest.approx(difference, rel=1e-4)


def serves(
    network: Network, exemplars: ArrayImages, images: ArrayImages, transform: Transform
) -> float:
    """Return the loss on images after a copy of the network has trained on the exemplars, by plain SGD."""
    copy = deepcopy(network).eval()
    copy.head.thaw()
    sgd = torch.optim.SGD(copy.parameters(), lr=0.01)
    (given,), (asked,) = (list(evaluation(part, transform)) for part in (exemplars, images))
    for _ in range(5):
        sgd.zero_grad()
        F.cross_entropy(copy(given.images).logits, given.labels).backward()
        sgd.step()
    with torch.no_grad():
        return F.cross_entropy(copy(asked.images).logits, asked.labels).item()


@pytest.mark.parametrize("seed", [1, 2])
def test_optimized_exemplars_serve_the_phase_better_than_the_herded_ones(seed):
    options = config(
        seed=seed, outer_steps=12, inner_batch=8, exemplars=4, base=3, padding=0, batch_size=32
    )
    learner = ScenarioLearner(options, tiny.dataset(5, train=20))
    phase, stage = learner.at_stage(1, learned=0)
    herded = phase.exemplars(4).images
    learner.run(phase, stage, 1)
    optimized = learner.method.exemplars(phase, 4).images
    assert torch.equal(herded.labels, optimized.labels)
    before, after = (
        serves(phase.network, kept, phase.images, phase.transform) for kept in (herded, optimized)
    )
    assert after < before
    moved = (optimized.pixels.double() - herded.pixels.double()).abs()
    assert moved.amax(dim=(1, 2, 3)).min() >= 1  # every exemplar has moved


# -- steps and pixels


def test_stored_pixels_are_clipped_and_rounded_never_wrapped():
    pixels = Pixels(ArrayImages(torch.zeros(1, 3, 1, 2, dtype=torch.uint8), torch.tensor([0])))
    with torch.no_grad():
        pixels.values.copy_(torch.tensor([[[[-3.2, 300.0]], [[12.6, 12.4]], [[255.4, 0.4]]]]))
    assert pixels.stored().flatten().tolist() == [0, 255, 13, 12, 255, 0]
    assert pixels.stored().dtype == torch.uint8


@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_a_step_moves_an_exemplar_by_the_rate_in_grey_levels(rate):
    learner = ScenarioLearner(config(outer_steps=1, outer_rate=rate))
    phase, stage = learner.at_stage(1)
    moves = moves_of(learner, phase, stage)
    new = stage.module.labels >= phase.old
    assert moves[new].tolist() == pytest.approx([rate] * int(new.sum()), rel=1e-3)
    assert set(moves[~new].round(decimals=3).tolist()) == {0.0, rate}


def test_clipping_the_gradient_of_the_network_does_not_hold_the_pixels():
    learner = ScenarioLearner(config(outer_steps=1, outer_rate=1.0, clip_norm=0.1))
    phase, stage = learner.at_stage(1, learned=0)
    assert moves_of(learner, phase, stage).tolist() == pytest.approx([1.0] * 6, rel=1e-3)


def test_the_halves_of_the_old_exemplars_take_turns():
    learner = ScenarioLearner(config(outer_steps=1, exemplars=5))
    phase, stage = learner.at_stage(1)
    rank, old = torch.arange(5).repeat(3), stage.module.labels < phase.old
    for step in (0, 1, 2):
        stage.module.zero_grad()
        parts = parts_at(stage)
        assert set(parts) == {"new", "old"}
        torch.stack(list(parts.values())).sum().backward()
        assert torch.equal(moving(stage), ~old | (rank % 2 == step % 2))


def test_old_exemplars_are_measured_on_the_other_half_as_it_was():
    learner = ScenarioLearner(config(exemplars=4))
    _, stage = learner.at_stage(1)
    first = parts_at(stage)["old"]
    with torch.no_grad():
        stage.module.steps.zero_()
        stage.module.values[1::2] += 40.0  # the half that measures at this step
    assert torch.equal(parts_at(stage)["old"], first)


def test_the_parts_are_the_losses_of_the_trained_copy():
    # Each inner step takes all new exemplars: the reported value is the phase's loss after these steps of SGD.
    learner = ScenarioLearner(config(inner_steps=3, inner_batch=100, padding=0))
    phase, stage = learner.at_stage(1)
    batch = next(iter(stage.batches.epoch(0)))
    part = parts_at(stage)["new"]
    copy = deepcopy(phase.network).eval()
    copy.head.thaw()
    new = stage.module.labels >= phase.old
    sgd = torch.optim.SGD(copy.parameters(), lr=0.01)
    x = as_inputs(stage.module.values.detach()[new], phase.transform)
    for _ in range(3):
        sgd.zero_grad()
        F.cross_entropy(copy(x).logits, stage.module.labels[new]).backward()
        sgd.step()
    expected = F.cross_entropy(copy(batch.images).logits, batch.labels)
    assert float(part.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_the_stage_leaves_the_network_as_it_is():
    learner = ScenarioLearner(config(network="resnet8", outer_steps=2))
    phase, stage = learner.at_stage(1)
    before = weights_of(phase.network)
    learner.run(phase, stage, 1)
    assert not changed(before, phase.network.state_dict())
    assert [name for name, _ in stage.module.named_parameters()] == ["values"]
    # Only the copy's rows may all move.
    assert phase.network.head.frozen.tolist() == [True, True, False]


# -- the memory


def test_the_next_phase_trains_on_the_optimized_exemplars():
    learner = ScenarioLearner(config())
    kept = learner.learn_next().memory.images
    assert torch.bincount(kept.labels).tolist() == [3, 3]
    taken = learner.scenario.train(0).item_digests()
    assert not set(kept.item_digests()) & set(taken), "no picture that was ever taken"
    following = learner.prepare_next()
    stage = next(learner.method.stages(following))
    assert set(kept.item_digests()) <= set(stage.batches.images.item_digests())


def test_without_steps_the_memory_is_that_of_lucir(tmp_path):
    found = {}
    for options in (tiny.config(method="lucir", epochs=1), config(outer_steps=0)):
        out = tmp_path / options.method
        store = run_config(options, out=out, data=tiny.dataset())
        found[options.method] = saved(store, 2).memory
    assert not changed(found["lucir"], found["mnemonics"])


def test_no_exemplars_are_not_optimized():
    learner = ScenarioLearner(config(exemplars=0))
    assert [stage.name for stage in learner.method.stages(learner.prepare_next())] == ["train"]
    assert learner.learn_next().memory.images is None


def test_one_exemplar_a_class_has_no_other_half():
    learner = ScenarioLearner(config(exemplars=1))
    phase, stage = learner.at_stage(1)
    assert set(parts_at(stage)) == {"new"}
    assert phase.old == 2


def test_exemplars_of_a_class_that_comes_back_count_as_new():
    learner = ScenarioLearner(config())
    learner.learn_next()
    again = learner.scenario.train(0)
    phase = learner.prepare_next(again.select(again.labels == 1))
    *_, stage = learner.method.stages(phase)
    parts_at(stage)["new"].backward()
    rank = torch.arange(3).repeat(2)
    assert torch.equal(moving(stage), (stage.module.labels == 1) | (rank % 2 == 0))


def test_a_total_budget_cuts_the_optimized_exemplars_to_ranked_prefixes():
    learner = ScenarioLearner(config(exemplars=8, memory_budget="total"))
    first = learner.learn_next().memory.images
    phase, stage = learner.at_stage(1)
    kept = stage.module.labels
    assert torch.bincount(kept).tolist() == [2, 2, 2]
    for label in (0, 1):
        before = first.pixels[first.labels == label][:2].float()
        assert torch.equal(stage.module.values.detach()[kept == label], before)
    assert phase.index == 1


def test_finishing_twice_is_finishing_once():
    learner = ScenarioLearner(config())
    phase, stage = learner.at_stage(1)
    learner.run(phase, stage, 1)
    once = phase.kept
    stage.finish()
    assert torch.equal(once.images.pixels, phase.kept.images.pixels)
    assert torch.equal(once.images.pixels, stage.module.stored())


# -- image files


def test_image_files_become_pixels_that_the_network_sees_later_as_it_saw_them():
    data = tiny.dataset(4, size=20)
    files = [
        FileImages(tuple(part.encoded(i) for i in range(len(part))), part.labels)
        for part in (data.train, data.test)
    ]
    options = config(crop="resized", image_size=14, workers=0, outer_steps=2)
    learner = ScenarioLearner(options, Dataset("files", *files, data.classes, "files"))
    phase, stage = learner.at_stage(1)
    assert phase.transform.shorter_side == 16
    assert stage.module.values.shape[2:] == (16, 16)
    learner.run(phase, stage, 1)
    kept = learner.method.exemplars(phase, 3).images
    assert isinstance(kept, ArrayImages)
    (seen,) = evaluation(kept, phase.transform)
    np.testing.assert_allclose(
        as_inputs(kept.pixels.float(), phase.transform), seen.images, atol=1e-5
    )
    again = learner.learn_next()  # old exemplars are pixels now, new images are files
    assert isinstance(again.memory.images, ArrayImages)
    assert torch.bincount(again.memory.images.labels).tolist() == [3, 3, 3]
    learner.learn_next()


# -- exemplars as phases train on them


def test_inputs_are_cropped_and_flipped_as_in_training_and_can_be_differentiated():
    transform = Transform(4, (0.0,) * 3, (1.0,) * 3, padding=1)
    pixels = (
        (torch.arange(48.0).view(1, 3, 4, 4) + 1).expand(64, -1, -1, -1).clone().requires_grad_()
    )
    inputs = as_inputs(pixels, transform, torch.Generator().manual_seed(0))
    padded = F.pad(pixels[0].detach() / 255, (1, 1, 1, 1))
    cut = [padded[:, top : top + 4, left : left + 4] for top in range(3) for left in range(3)]
    allowed = torch.stack([*cut, *(each.flip(2) for each in cut)])
    distances = (inputs.detach()[:, None] - allowed).abs().amax((2, 3, 4))
    assert distances.amin(1).max() < 1e-6
    assert len(set(distances.argmin(1).tolist())) == 18  # all of them occur
    (gradient,) = torch.autograd.grad(inputs.sum(), pixels)
    seen = (inputs.detach() > 0).sum((1, 2, 3))  # each pixel that is not cut off counts once
    assert torch.allclose(gradient.sum((1, 2, 3)) * 255, seen.float())


def test_the_inner_steps_see_exemplars_cropped_and_flipped_where_asked_for():
    losses = {}
    for augment in (False, True):
        learner = ScenarioLearner(config(inner_augment=augment, padding=2, flip=True))
        _, stage = learner.at_stage(1)
        losses[augment] = parts_at(stage)["new"].item()
    assert losses[False] != losses[True]
