"""Options: what is chosen from the images, what is refused, what stays."""

from threading import current_thread

import pytest
import torch
from tests.helpers.folders import QUICK

from geodl.app import choices, estimates, state, step
from geodl.app.choices import checked, choose_start, stands_still, training_asked
from geodl.app.classifier import IncrementalClassifier
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, install
from geodl.core.events import Advised, StepTaken, TimeEstimated
from geodl.data import squares
from geodl.store import Directory


def test_the_estimate_of_the_time_waits_for_the_device(monkeypatch):
    waited, item = [], torch.Tensor.item
    monkeypatch.setattr(
        torch.Tensor, "item", lambda tensor: waited.append(tensor.requires_grad) or item(tensor)
    )
    config = RunConfig(network="convnet", image_size=8, batch_size=2)
    assert estimates.step_seconds(config, images=10, classes=2) > 0
    assert sum(waited) == 4  # one step to warm up and three


@pytest.mark.parametrize(
    ("side", "kind", "network", "size"),
    [
        (5, "cpu", "resnet8", 8),
        (8, "cpu", "resnet8", 8),
        (28, "cpu", "resnet20", 28),
        (32, "cpu", "resnet20", 32),
        (3000, "cpu", "resnet20", 64),
        (3000, "cuda", "resnet18", 128),
        (32, "cuda", "resnet32", 32),
    ],
)
def test_networks_are_chosen_by_size_and_device(monkeypatch, side, kind, network, size):
    monkeypatch.setattr(choices, "has_pretrained", lambda: False)
    assert choose_start(side, {}, kind) == {"network": network, "image_size": size}
    asked = {"image_size": 48, "network": "convnet"}
    assert choose_start(side, asked | {"method": "lucir"}, kind) == asked
    monkeypatch.setattr(choices, "has_pretrained", lambda: True)
    assert choose_start(side, {"method": "lucir"}, kind) == {"network": network, "image_size": size}


@pytest.mark.parametrize(
    ("side", "size"), [(8, 64), (28, 112), (32, 128), (100, 128), (192, 192), (3000, 224)]
)
def test_with_pretrained_weights_their_features_are_read_in_closed_form(monkeypatch, side, size):
    monkeypatch.setattr(choices, "has_pretrained", lambda: True)
    start = choose_start(side, {}, "cpu")
    pretrained = {"network": "efficientnet-lite0", "pretrained": True, "method": "analytic"}
    assert start.items() >= (pretrained | {"image_size": size}).items()
    assert stands_still(start, {})
    adapted = checked({"adapt": "auto"})
    assert choose_start(side, adapted, "cpu") == start
    assert not stands_still(start, adapted)


def test_before_a_long_training_one_is_asked_and_told_what_would_serve_better(
    classifier, weeks, monkeypatch
):
    for module in (choices, step):
        monkeypatch.setattr(module, "has_pretrained", lambda: False)
    monkeypatch.setattr(estimates, "step_seconds", lambda *_, **__: 500.0)
    heard = []
    with pytest.raises(ConfigError, match="not confirmed: nothing was learned"):
        classifier.learn(weeks[0], listener=heard.append, confirm=lambda seconds: seconds < 500)
    (advised,) = [event.sentence for event in heard if isinstance(event, Advised)]
    assert install("pretrained") in advised
    assert TimeEstimated(500.0) in heard
    assert not [event for event in heard if isinstance(event, StepTaken)]
    assert not classifier.path.exists()


def test_what_a_model_is_made_with_stays(classifier, weeks):
    classifier.learn(weeks[0], image_size=12, network="convnet", **QUICK)
    with pytest.raises(ConfigError, match="image_size = 16: this model was made with 12"):
        classifier.learn(weeks[1], image_size=16, **QUICK)
    classifier.learn(weeks[1], image_size=12, **QUICK)
    assert state.load(Directory(classifier.path)).config.network == "convnet"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 3}, "epoch = 3 .* did you mean epochs?"),
        ({"data_dir": "x"}, "data_dir: not an option of learn"),
        ({"lwf_weight": 2}, "lwf_weight = 2 .* distillation lwf"),
        ({"devices": 2}, "devices: not an option of learn"),
        ({"epochs": 0}, "epochs = 0"),
        ({"epochs": "many"}, "epochs = 'many'"),
        ({"method": "bic"}, r"method = 'bic': allowed .* are analytic, lucir, finetune"),
        ({"network": "resnet9"}, "network = 'resnet9'"),
    ],
)
def test_impossible_options_are_named(classifier, weeks, options, message):
    with pytest.raises(ConfigError, match=message):
        classifier.learn(weeks[0], **options)
    assert not classifier.path.exists()


def test_options_are_understood_as_written():
    assert checked({"image_size": "32", "flip": None}) == {"image_size": 32}
    assert checked({"epochs": "7", "lr": "0.5"}) == {"epochs": 7, "lr": 0.5}


@pytest.mark.parametrize(
    "option",
    [
        {"epochs": 1},
        {"jitter": 0.5},
        {"clip_norm": 1},
        {"distill": "cosine"},
        {"margin": 1},
        {"subspace_dim": 1},
    ],
)
def test_whoever_sets_an_option_of_training_wants_the_network_trained(monkeypatch, option):
    monkeypatch.setattr(choices, "has_pretrained", lambda: True)
    found = checked({"image_size": 16} | option)
    assert [training_asked(found)] == list(option)
    assert choose_start(16, found, "cpu").get("method") is None


def test_other_options_do_not_ask_for_training():
    other = {"gamma": 0.1, "exemplars": 3, "seed": 2, "threads": 1, "flip": False}
    assert training_asked(other) is None
    assert training_asked({"network": "resnet8"}) == "network"
    assert training_asked({"network": "efficientnet-lite0"}) is None


def test_later_steps_keep_to_the_method_of_the_model(classifier, weeks, tmp_path):
    classifier.learn(weeks[0], method="finetune", network="convnet", **QUICK)
    classifier.learn(weeks[1], epochs=1)
    assert state.load(Directory(classifier.path)).config.method == "finetune"
    closed = IncrementalClassifier(tmp_path / "closed")
    closed.learn(weeks[0], method="analytic", network="convnet", image_size=12)
    with pytest.raises(ConfigError, match=r"epochs: only training uses it.*closed form"):
        closed.learn(weeks[1], epochs=1)
    closed.learn(weeks[1], network="convnet")


def test_without_workers_the_calling_thread_decodes(classifier, weeks, monkeypatch):
    threads, square = set(), squares.square

    def watched(*arguments, **options):
        threads.add(current_thread())
        return square(*arguments, **options)

    monkeypatch.setattr(squares, "square", watched)
    classifier.learn(weeks[0], **QUICK | {"workers": 0})
    assert len(classifier.predict(weeks[0], workers=0))
    assert threads == {current_thread()}
