"""Options of the loop: each changes the result."""

import os
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.command import completed
from tests.helpers.directories import saved

from geodl.core.errors import MissingExtraError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5},
        {"label_smoothing": 0.1},
        {"schedule": "onecycle"},
        {"schedule": "cosine"},
        {"weight_factor": "new/old"},
        {"geodesic_features": "pooled"},
        {"freeze_old_rows": False},
        {"hold_out": 0.3},
        {"jitter": 0.25},
        {"nesterov": True},
        {"norm_decay": False},
    ],
)
def test_options_change_the_result_and_keep_it_finite(run, options):
    given = {"method": "lucir", "distill": "geodesic"}
    plain, other = run("plain", **given), run("other", **given | options)
    a, b = (saved(each, 2).model["head.weight"] for each in (plain, other))
    assert b.isfinite().all()
    assert not torch.equal(a, b)


BF16 = """
import sys
from pathlib import Path
import torch
from tests.helpers import tiny
from geodl.bench.experiment import run_config
from geodl.nets.network import FrozenNetwork

forward, low = FrozenNetwork.forward, []
FrozenNetwork.forward = lambda self, x: low.append(torch.is_autocast_enabled("cpu")) or forward(self, x)
config = tiny.config(method="lucir", distill="geodesic", precision="bf16")
store = run_config(config, out=Path(sys.argv[1]), data=tiny.dataset())
tensors = store.phase(2).tensors("model.safetensors").values()
assert all(t.isfinite().all() for t in tensors if t.is_floating_point())
assert low and all(low)
"""


def test_bf16_trains_to_finite_weights_and_asks_the_teacher_in_bf16(tmp_path):
    # In a process of its own, without AMX: on some virtual machines that advertise it, its instructions end the process.
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": path}
    completed(tmp_path / "r", code=BF16, environment=environment)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_training_gives_the_same_network(run):
    given = {"method": "lucir", "distill": "geodesic"}
    plain, compiled = run("plain", **given), run("compiled", **given, compile=True)
    for name, tensor in saved(plain, 2).model.items():
        torch.testing.assert_close(saved(compiled, 2).model[name], tensor, atol=1e-4, rtol=0)


def test_tensorboard_gets_losses_and_accuracies(run, tmp_path, data, monkeypatch):
    drawn: list[str] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path / "r" / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert isinstance(value, float)
            drawn.append(name)

        def close(self) -> None:
            drawn.append("closed")

    stand_in = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    run(method="lucir", tensorboard=True)
    parts = {"phase 0 train/ce", "phase 1 train/distill", "phase 2 train/margin"}
    assert parts | {"accuracy/cnn", "accuracy/nme"} <= set(drawn)
    assert drawn[-1] == "closed"
    shutil.rmtree(tmp_path / "r")
    drawn.clear()
    untested = replace(data, test=data.test.select([]))
    run(method="lucir", tensorboard=True, data=untested)
    assert "phase 2 train/margin" in drawn
    assert not [name for name in drawn if name.startswith("accuracy")]


def test_tensorboard_without_the_extra_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*tensorboard"):
        run(method="lucir", tensorboard=True)
