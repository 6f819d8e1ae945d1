"""The methods: what a phase prepares for them, their stages, and edge cases that all must stand."""

import re

import numpy as np
import pytest
import torch
from tests.helpers import tiny
from tests.helpers.directories import saved
from tests.helpers.phases import ScenarioLearner, changed, weights_of
from torch import nn

from geodl.bench.experiment import results_of, run_config
from geodl.data import Dataset
from geodl.data.batches import evaluation
from geodl.data.images import ArrayImages
from geodl.learning.learner import Learner
from geodl.methods import METHODS, Method, Schedule, Stage
from geodl.nets import CosineHead, LinearHead, Network

DISTILLATIONS = ("none", "lwf", "cosine", "geodesic")


DISTILLING = [name for name in METHODS if name not in ("joint", "analytic")]


@pytest.mark.parametrize("method", DISTILLING)
@pytest.mark.parametrize("distill", DISTILLATIONS)
def test_head_and_frozen_rows(method, distill):
    more = {"outer_steps": 0} if method == "mnemonics" else {}
    learner = ScenarioLearner(tiny.config(method=method, distill=distill, epochs=1, **more))
    features = distill in ("cosine", "geodesic")
    linear = method in ("lwf", "bic") or (method == "icarl" and not features)
    learner.learn_next()
    phase = learner.prepare_next()
    assert isinstance(phase.network.head, LinearHead if linear else CosineHead)
    frozen = [True, True, False] if features and not linear else [False] * 3
    assert phase.network.head.frozen.tolist() == frozen
    assert (phase.old, phase.new) == (2, 1)
    if features:
        config = tiny.config(method=method, distill=distill, freeze_old_rows=False, **more)
        trained = Learner(config, model=learner.model)
        assert not trained.method.freezes_old_rows


def test_the_row_of_a_class_that_comes_back_is_trained():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1))
    learner.learn_next()
    again = learner.scenario.train(0)
    phase = learner.prepare_next(again.select(again.labels == 1))
    assert phase.network.head.frozen.tolist() == [True, False]
    assert (phase.old, phase.new) == (2, 0)


def test_new_rows_are_imprinted_with_the_mean_at_the_norm_of_the_old_rows():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1))
    learner.learn_next()
    phase = learner.prepare_next()
    phase.network.eval()
    (batch,) = evaluation(phase.images, phase.transform)
    with torch.no_grad():
        z = phase.network.features(batch.images).double().numpy()
    mean = (z / np.linalg.norm(z, axis=1, keepdims=True)).mean(axis=0)
    rows = phase.network.head.rows().detach().double().numpy()
    norm = np.linalg.norm(rows[:2], axis=1).mean()
    np.testing.assert_allclose(rows[2], norm * mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", DISTILLING)
def test_the_teacher_is_the_network_as_the_phase_before_left_it(method):
    learner = ScenarioLearner(tiny.config(method=method, epochs=1, **tiny.SMALL.get(method, {})))
    assert learner.prepare_next().teacher is None
    learner.learn_next().learn_next().network.eval()
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = learner.network(images).logits
    phase = learner.prepare_next()
    torch.testing.assert_close(phase.teacher(images).logits, before)
    learner.run(phase, next(learner.method.stages(phase)))
    torch.testing.assert_close(phase.teacher(images).logits, before)
    assert not torch.allclose(phase.network(images).logits[:, :3], before), "the student moves"


def test_joint_training_has_no_teacher_and_a_new_network(tmp_path):
    config = tiny.config(method="joint", epochs=1)
    store = run_config(config, out=tmp_path / "r", data=tiny.dataset())
    epochs = [event for event in store.read_events() if event["kind"] == "epoch"]
    assert [set(event["parts"]) for event in epochs] == [{"ce"}] * 3
    # The second phase is what a network would be that sees all three classes first.
    learner = ScenarioLearner(tiny.config(method="joint", epochs=1)).learn_next()
    phase = learner.prepare_next()
    assert (phase.teacher, phase.old, len(phase.images)) == (None, 0, 27)
    learner.run(phase, next(learner.method.stages(phase)))
    assert not changed(phase.network.state_dict(), saved(store, 1).model)


def test_class_balanced_finetuning_moves_the_head_alone():
    learner = ScenarioLearner(
        tiny.config(method="lucir", epochs=1, finetune_epochs=2, network="resnet8")
    )
    assert [stage.name for stage in learner.method.stages(learner.prepare_next())] == ["train"]
    phase, stage = learner.at_stage(1)
    assert torch.bincount(stage.batches.images.labels).tolist() == [3] * 3, "as many of each"
    before = weights_of(phase.network)
    learner.run(phase, stage, 1)
    assert changed(before, phase.network.state_dict()) == {"head.weight", "head.scale"}


def test_class_balanced_finetuning_is_in_the_precision_of_the_run(monkeypatch):
    learner = ScenarioLearner(
        tiny.config(method="lucir", epochs=1, finetune_epochs=1, precision="bf16")
    )
    learner.learn_next()
    seen, features = [], Network.features

    def spy(self, x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return features(self, x)

    monkeypatch.setattr(Network, "features", spy)
    learner.learn_next()
    assert seen
    assert all(seen)


def test_without_old_images_there_is_no_balanced_finetuning():
    learner = ScenarioLearner(tiny.config(method="lucir", epochs=1, finetune_epochs=2, exemplars=0))
    learner.learn_next()
    assert [stage.name for stage in learner.method.stages(learner.prepare_next())] == ["train"]


def test_the_rate_falls_after_the_milestone_and_not_an_epoch_before():
    learner = ScenarioLearner(tiny.config(method="finetune"))
    phase = learner.prepare_next()
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    stage = Stage(
        "slope",
        weight,
        phase.batches(phase.images, "slope"),
        # Its gradient is 1 at every step.
        lambda module, batch: iter([("slope", module(torch.ones(1, 1)).sum())]),
        Schedule(epochs=4, lr=1.0, milestones=(0.5,), decay=0.1, momentum=0.0),
    )
    learner.run(phase, stage)
    moved = -len(stage.batches) * (1 + 1 + 0.1 + 0.1)
    assert weight.weight.item() == pytest.approx(moved, rel=1e-5)


def test_exemplars_are_chosen_by_features_without_augmentation():
    """A public version takes exemplar features with augmentation."""
    config = tiny.config(method="finetune", epochs=1, flip=True, padding=3, jitter=0.5, exemplars=4)
    phase = (learner := ScenarioLearner(config)).prepare_next()
    learner.run(phase, next(learner.method.stages(phase)))
    chosen = learner.method.exemplars(phase, 4).images
    phase.network.eval()
    mean, std = (np.array(part)[:, None, None] for part in (config.mean, config.std))
    for label in (0, 1):
        pixels = phase.images.pixels[phase.images.labels == label]
        inputs = torch.tensor((pixels.numpy() / 255 - mean) / std).float()
        with torch.no_grad():
            z = phase.network.features(inputs).double().numpy()
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        picks: list[int] = []
        for k in range(1, 5):  # iCaRL Alg. 4
            distances = [
                np.inf if i in picks else np.linalg.norm(z.mean(0) - z[[*picks, i]].sum(0) / k)
                for i in range(len(z))
            ]
            picks.append(int(np.argmin(distances)))
        assert torch.equal(chosen.pixels[chosen.labels == label], pixels[picks])


def test_the_seed_decides_first_weights_order_and_augmentation():
    def drawn(seed):
        phase = ScenarioLearner(tiny.config(method="finetune", seed=seed)).prepare_next()
        batch = next(iter(next(METHODS["finetune"](phase.config).stages(phase)).batches.epoch(0)))
        return phase.network.backbone.state_dict(), batch

    (first, batch), (again, same), (other, different) = drawn(1), drawn(1), drawn(2)
    assert not changed(first, again)
    assert torch.equal(batch.images, same.images)
    assert changed(first, other)
    assert not torch.equal(batch.indices, different.indices)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_its_words_and_describes_its_own_options(name):
    method = METHODS[name]
    assert issubclass(method, Method)
    assert method.name == name
    assert 20 < len(method.summary) < 120
    assert "\n" not in method.summary
    assert re.search(r"(19|20)\d\d", method.paper)
    own = method.Options.model_fields.values()
    assert all(info.description.endswith((".", ").")) for info in own)


def uneven_dataset() -> Dataset:
    """Return five classes with 9, 2, 1, 9, 4 training images."""
    data = tiny.dataset(5)
    keep = torch.cat([torch.arange(9 * c, 9 * c + n) for c, n in enumerate((9, 2, 1, 9, 4))])
    assert isinstance(data.train, ArrayImages)
    return Dataset("uneven", data.train.select(keep), data.test, data.classes, "uneven")


@pytest.mark.parametrize(
    "options",
    [{"method": m} for m in METHODS] + [{"method": m, "distill": "geodesic"} for m in DISTILLING],
    ids=lambda options: "-".join(options.values()),
)
def test_groups_of_one_uneven_groups_and_classes_smaller_than_the_budget(tmp_path, options):
    more = tiny.SMALL.get(options["method"], {})
    if options["method"] in ("lucir", "mnemonics"):
        more = {**more, "hard_classes": 7}
    # Groups of one class, of unequal sizes; K above the new classes; a class of one image; batches far below dimension 127.
    given = {"groups": (2, 1, 2), "base": None, "order": "natural"}
    config = tiny.config(**options, **more, **given, epochs=1, exemplars=5, batch_size=32)
    store = run_config(config, out=tmp_path / "r", data=uneven_dataset())
    last = Learner.load(store.path)
    assert all(tensor.isfinite().all() for tensor in last.network.state_dict().values())
    kept = [4, 1, 1, 4, 3] if options["method"] == "bic" else [5, 2, 1, 5, 4]  # BiC holds one out
    assert list(last.memory.per_class().values()) == kept
    assert len(results_of(store)["nme"].accuracy) == 3


@pytest.mark.parametrize("distill", DISTILLATIONS)
def test_a_phase_of_two_images_in_one_batch_without_memory(distill):
    learner = ScenarioLearner(
        tiny.config(method="lucir", distill=distill, epochs=1, exemplars=0, base=2)
    )
    learner.learn_next()
    learner.learn(learner.scenario.train(1).select([0, 1]))
    assert all(tensor.isfinite().all() for tensor in learner.network.state_dict().values())
    assert learner.memory.images is None
