"""A learner after a step that failed, and after classes are removed."""

from dataclasses import replace

import numpy as np
import pytest
from tests.helpers import tiny
from tests.helpers.learners import METHODS, made, state, taught
from tests.helpers.phases import changed, weights_of

from geodl.core.errors import ConfigError, DataError, GeodlError, TrainingError
from geodl.core.events import Event, ignore
from geodl.data.images import concat


def test_joint_training_forgets_the_images_of_a_class_that_is_removed(scenario):
    learner, first = made(method="joint", epochs=1), scenario.train(0)
    learner.learn(concat([first, scenario.train(1)]))
    gone, renamed, kept = learner.classes
    learner.remove(gone)
    learner.rename(renamed, gone)  # a name that comes back is another class
    learner.learn(scenario.train(2))
    expected = [first.select(first.labels == 1), scenario.train(1), scenario.train(2)]
    assert learner.seen.item_digests() == concat(expected).item_digests()
    assert learner.classes == (gone, kept, scenario.classes[3])
    learner.remove(gone)
    assert learner.seen.item_digests() == concat(expected[1:]).item_digests()


@pytest.mark.parametrize("at", ["stage", "step", "epoch"])
@pytest.mark.parametrize("options", METHODS[:3], ids=tiny.named)
def test_an_interrupted_learn_leaves_the_learner_unchanged(scenario, at, options):
    learner, whole = (taught(scenario, 1, **options, epochs=1) for _ in range(2))
    before = state(learner)
    predictions = learner.predict(scenario.test(0).pixels).probabilities

    def hear(event: Event) -> None:
        if event.kind == at:
            raise KeyboardInterrupt

    learner.listen(hear)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(scenario.train(1))
    assert state(learner) == before
    found = learner.predict(scenario.test(0).pixels).probabilities
    np.testing.assert_array_equal(found, predictions)
    learner.listen(ignore)
    for each in (learner, whole):
        each.learn(scenario.train(1))
    assert state(learner) == state(whole)


def test_a_failed_learn_leaves_the_learner_unchanged(scenario):
    learner = taught(scenario, 1, lr=1e300, base_lr=0.05)
    before = state(learner)
    with pytest.raises(TrainingError, match="not finite in phase 1"):
        learner.learn(scenario.train(1))
    with pytest.raises(GeodlError):
        learner.learn([b"no picture"], ["a new class"])
    assert state(learner) == before
    assert learner.evaluate(scenario.test(0))["nme"].images == 10


@pytest.mark.parametrize("options", METHODS, ids=tiny.named)
def test_a_removed_class_is_never_predicted_and_can_come_back(scenario, options):
    learner = taught(scenario, **options, epochs=1)
    gone, kept = learner.classes[0], learner.classes[1:]
    before = learner.predict(scenario.test(1).pixels).probabilities
    learner.remove(gone)
    assert learner.classes == kept
    after = learner.predict(scenario.test(1).pixels)
    assert after.probabilities.shape == (15, 2)
    assert gone not in after.labels
    rest = before[:, 1:] / before[:, 1:].sum(axis=1, keepdims=True)
    if options["method"] != "analytic":
        np.testing.assert_allclose(after.probabilities, rest, rtol=1e-4)
    with pytest.raises(DataError, match=f"{gone!r}"):
        learner.evaluate(scenario.test(1))
    with pytest.raises(ConfigError, match=f"{gone!r}"):
        learner.remove(gone)
    learner.learn(scenario.train(0).select(scenario.train(0).labels == 0))
    assert learner.classes == (*kept, gone)
    assert all(each.images == 15 for each in learner.evaluate(scenario.test(1)).values())


@pytest.mark.parametrize("options", METHODS, ids=tiny.named)
def test_more_images_of_the_only_class_left_join_what_is_kept_of_it(scenario, options):
    learner = taught(scenario, 1, **options, epochs=1)
    learner.remove(learner.classes[1])
    kept, weights = learner.memory.images, weights_of(learner.network.backbone)
    first = scenario.train(0).select(scenario.train(0).labels == 0)
    more = replace(first, pixels=255 - first.pixels).select([0])
    learner.learn(more)
    assert (learner.classes, learner.network.head.classes) == (scenario.classes[:1], 1)
    assert not changed(weights, learner.network.backbone.state_dict())
    if kept is not None:
        allowed = {*kept.item_digests(), *more.item_digests()}
        assert set(learner.memory.images.item_digests()) <= allowed
        assert learner.memory.per_class() == {0: len(kept)}
    learner.learn(scenario.train(1))
    assert learner.classes == (scenario.classes[0], scenario.classes[2])
