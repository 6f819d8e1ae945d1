"""First-session adaptation: what moves, when it is kept, and who judges afterwards."""

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import tiny
from tests.helpers.phases import KeptProgress, changed, weights_of

from geodl import Learner
from geodl.closed_form.apart import set_apart
from geodl.core.cache import Cache
from geodl.core.errors import ConfigError
from geodl.data.images import ArrayImages
from geodl.learning.shared_base import SharedBase
from geodl.methods import adaptation
from geodl.nets import build_network

OPTIONS = {
    "method": "analytic",
    "network": "resnet8",
    "keep_features": True,
    "exemplars": 0,
    "precision": "32",
    "threads": 1,
    "adapt_epochs": 2,
    "adapt_lr": 0.01,
    "flip": False,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of a network, as published ones are given."""
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    state = build_network("resnet8", 1, head="cosine", seed=7).backbone.state_dict()
    save_file({key: each.contiguous() for key, each in state.items()}, file)
    return file


@pytest.fixture(scope="module")
def groups():
    data = tiny.dataset(classes=6).train
    first = data.labels < 4
    names = tuple(f"class {i}" for i in range(6))
    named = ArrayImages(data.pixels, data.labels, names)
    return named.select(first), named.select(~first)


def taught(weights, groups, **options) -> Learner:
    learner = Learner(**OPTIONS | options, weights=weights)
    for images in groups:
        learner.learn(images)
    return learner


def backbone(learner: Learner) -> dict[str, torch.Tensor]:
    return weights_of(learner.known.network.backbone)


def test_it_moves_norms_and_biases_in_the_first_phase_alone(weights, groups):
    frozen, adapted = taught(weights, groups[:1]), taught(weights, groups[:1], adapt="yes")
    before, after = backbone(frozen), backbone(adapted)
    moved = changed(before, after)
    assert moved
    assert all(after[key].ndim <= 1 for key in moved)
    assert not any("running" in key for key in moved)
    adapted.learn(groups[1])
    assert not changed(after, backbone(adapted))
    (note,) = adapted.known.default.notes()
    assert "adapted to the images of the first step" in note


def test_what_the_network_was_adapted_to_judges_nothing(weights, groups):
    learner = taught(weights, groups, adapt="yes")
    closed = learner.known.default
    judged, first = closed.left_out(), len(groups[0])
    apart = int((judged.rows < first).sum())
    assert 0 < apart <= 0.2 * first
    assert int((judged.rows >= first).sum()) == len(groups[1])
    assert closed.state.adapted.sum() == first - apart
    again = type(closed).from_tensors(closed.tensors(), learner.config)
    assert torch.equal(again.state.adapted, closed.state.adapted)
    assert again.notes() == closed.notes()


@pytest.mark.parametrize("keep_features", [True, False])
def test_nor_does_it_where_its_class_is_removed_and_learned_again(weights, groups, keep_features):
    learner = taught(weights, groups, adapt="yes", keep_features=keep_features)
    images = groups[0].select(groups[0].labels == 1)
    saw = learner.known.default.adapted.saw(images)
    assert 0 < saw.sum() < len(images)
    learner.remove("class 1")
    closed = learner.known.default
    loaded = type(closed).from_tensors(closed.tensors(), learner.config)
    assert torch.equal(loaded.adapted.saw(images), saw)
    learner.learn(images)
    judged = learner.known.default.left_out()
    row = learner.classes.index("class 1")
    assert (judged.labels == row).sum() == (~saw).sum()


@pytest.mark.parametrize("pays", [True, False])
def test_it_is_kept_only_where_images_set_apart_tell_that_it_pays(
    weights, groups, monkeypatch, pays
):
    answers = [torch.zeros(9, dtype=torch.bool), torch.ones(9, dtype=torch.bool)]
    order = iter(answers if pays else answers[::-1])
    monkeypatch.setattr(adaptation, "right", lambda *given: next(order))
    learner, frozen = taught(weights, groups[:1], adapt="auto"), taught(weights, groups[:1])
    (note,) = learner.known.default.notes()
    assert ("does not pay (0.0 % instead of 100.0 % on 9 images" in note) != pays
    assert ("cnn" in learner.known.classifiers) == pays
    whole, before = (weights_of(each.known.network) for each in (learner, frozen))
    assert bool(changed(whole, before)) == pays
    everyone = len(learner.known.default.left_out().labels) == len(groups[0])
    assert everyone != pays


def test_an_adapted_network_is_no_base_phase_that_runs_share(weights, groups, tmp_path):
    straight = taught(weights, groups[:1], adapt="yes")
    for _ in range(2):
        shared = SharedBase(Cache(tmp_path), "data")
        learner = taught(weights, groups[:1], adapt="yes", shared_base=shared)
        assert learner.known.default.notes() == straight.known.default.notes()
        assert not changed(straight.known.to_tensors(), learner.known.to_tensors())


def test_whole_groups_are_set_apart():
    labels = torch.tensor([0] * 20 + [1] * 20 + [2] * 3)
    series = torch.arange(43) // 4
    series[40:] = torch.arange(40, 43)
    apart = set_apart(labels, series, 0.2, seed=0)
    assert [int(apart[labels == c].sum()) for c in range(3)] == [4, 4, 0]
    assert len(series[apart].unique()) == 2
    assert not torch.equal(apart, set_apart(labels, series, 0.2, seed=1))


def test_a_network_without_weights_is_not_adapted():
    with pytest.raises(ConfigError, match="adapt = auto: only a network that comes with weights"):
        Learner(method="analytic", adapt="auto")


def test_an_interrupted_adaptation_resumes_to_the_same_network(weights, groups):
    straight, steps = taught(weights, groups[:1], adapt="yes"), [True]
    progress = KeptProgress()
    stopped = Learner(
        **OPTIONS, weights=weights, adapt="yes", stop=lambda: steps.pop(0) if steps else False
    )
    with pytest.raises(Exception, match="stopped in phase 0, epoch"):
        stopped.learn(groups[0], progress=progress)
    resumed = Learner(**OPTIONS, weights=weights, adapt="yes")
    resumed.learn(groups[0], progress=progress)
    assert not changed(straight.known.to_tensors(), resumed.known.to_tensors())
