"""Base phases that runs share."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import tiny
from tests.helpers.runs import result_files

from geodl import Learner
from geodl.core.cache import Cache
from geodl.core.errors import Interrupted
from geodl.core.events import BaseAwaited, BaseCached, Event, StageStarted
from geodl.data.batches import transform_of
from geodl.learning import shared_base
from geodl.methods import Method, build
from geodl.nets import build_network
from geodl.store import Directory


def base_key(data, base: str = "data", **options: Any) -> str:
    config = tiny.config(**{"method": "finetune"} | options)
    machine = ("cpu", 1, config.precision)
    return shared_base.base_key(build(config), transform_of(config, data.train), base, 2, machine)


def test_a_base_phase_of_a_loss_without_a_name_is_not_shared(data, tmp_path):
    class Own(Method):
        pass

    cache, config = Cache(tmp_path), tiny.config(method="finetune")
    heard: list[Event] = []
    for _ in range(2):
        shared = shared_base.SharedBase(cache, "data")
        learner = Learner(config, method=Own(), shared_base=shared, listener=heard.append)
        learner.learn(data.train)
    assert not cache.size()
    assert not any(isinstance(event, BaseCached) for event in heard)


def test_the_key_of_a_base_phase_covers_all_that_moves_its_numbers(tmp_path, data, monkeypatch):
    weights = tmp_path / "weights.safetensors"
    convnet = build_network("convnet", 2, head="cosine").backbone
    save_file({name: t.contiguous() for name, t in convnet.state_dict().items()}, weights)
    changes = [
        {"method": "lwf"},
        {"method": "bic"},
        {"network": "resnet8"},
        {"scale": 4.0},
        {"seed": 2},
        {"epochs": 3},
        {"lr": 0.06},
        {"batch_size": 9},
        {"padding": 0},
        {"label_smoothing": 0.1},
        {"clip_norm": 0.1},
        {"precision": "bf16"},
        {"compile": True},
        {"momentum": 0.8},
        {"weight_decay": 0.1},
        {"schedule": "onecycle"},
        {"flip": True},
        {"jitter": 0.2},
        {"image_size": 6},
        {"weights": str(weights)},
        {"base": "other data"},
    ]
    keys = [base_key(data), *(base_key(data, **change) for change in changes)]
    save_file({name: t + 1 for name, t in load_file(weights).items()}, weights)
    keys.append(base_key(data, weights=str(weights)))
    for target, name, value in (
        (shared_base, "VERSION", 0),
        (torch, "__version__", "2.0"),
        (torch, "get_num_threads", lambda: 77),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.append(base_key(data))
    assert len(set(keys)) == len(keys)
    # Nothing of these is in phase 0.
    assert base_key(data, exemplars=1, geodesic_weight=2.0, distill="geodesic") == keys[0]


def test_a_base_phase_that_began_elsewhere_is_not_shared(run, tmp_path):
    cache, steps = Cache(tmp_path / "cache"), iter(range(100))
    with pytest.raises(Interrupted):
        run(checkpoint_steps=1, stop=lambda: next(steps) > 1)
    _, state = Directory(tmp_path / "r").load_progress()
    # As it is where the cache is off, or where another machine's key is not ours.
    assert state["base"] is None
    run(checkpoint_steps=1, cache=cache)
    assert not cache.size()


def test_methods_share_a_base_phase_and_get_the_same_bytes_as_without(run, tmp_path):
    cache = Cache(tmp_path / "cache")
    heard: list[Event] = []
    run("a", cache=cache, listener=heard.append)
    assert not any(isinstance(event, BaseCached) for event in heard)
    run("b", method="lucir", cache=cache, listener=heard.append)
    assert [event.phase for event in heard if isinstance(event, BaseCached)] == [0]
    run("c", method="lucir", cache=None)
    assert result_files(tmp_path / "b") == result_files(tmp_path / "c")


@pytest.mark.parametrize("change", [{"order": "natural"}, {"hold_out": 0.3}])
def test_a_base_phase_is_shared_only_on_the_same_images(run, tmp_path, change):
    cache, heard = Cache(tmp_path / "cache"), []
    run("a", cache=cache)
    run("b", **change, cache=cache, listener=heard.append)
    assert not any(isinstance(event, BaseCached) for event in heard)


def test_a_run_waits_for_the_base_that_another_trains(run, tmp_path):
    cache, options = Cache(tmp_path / "cache"), {"method": "lucir", "epochs": 1}
    first = run("first", **options, cache=cache)
    (entry,) = (tmp_path / "cache" / "entries").glob("*.safetensors")
    ready = entry.read_bytes()
    entry.unlink()
    events, other = [], ExitStack()
    assert cache.claim(entry.stem, other)  # another process is training it

    def hear(event):
        events.append(event)
        if isinstance(event, BaseAwaited):  # and now it is ready
            entry.write_bytes(ready)
            other.close()

    second = run("second", **options, distill="geodesic", cache=cache, listener=hear)
    kinds = [type(event) for event in events if getattr(event, "phase", 1) == 0]
    assert kinds.index(BaseAwaited) < kinds.index(BaseCached)
    assert StageStarted not in kinds
    found = [result_files(each.path)["0/model.safetensors"] for each in (first, second)]
    assert found[0] == found[1]
    held = ExitStack()
    assert cache.claim(entry.stem, held)
    entry.unlink()
    with pytest.raises(Interrupted, match="another run was training the base phase"):
        run("third", **options, cache=cache, stop=lambda: True)
    held.close()
