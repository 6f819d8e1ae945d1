"""Two processes compute what one would; a run survives the death of one of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.command import completed, started
from tests.helpers.directories import saved
from tests.helpers.runs import wait_until

from geodl.learning.saving import load_model
from geodl.store import Directory

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--preset digits --network convnet --base 6 --phases 2 --base-epochs 1 --epochs 1 --batch-size 50 --accelerator cpu "
    "--no-cache --quiet --method lucir --distill geodesic --out run"
).split()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Directory:
    directory = tmp_path_factory.mktemp("alone")
    completed("run", *OPTIONS, cwd=directory)
    return Directory(directory / "run")


def assert_close(one: Directory, other: Directory) -> None:
    assert one.completed() == other.completed() == 3
    for t in range(3):
        a, b = saved(one, t), saved(other, t)
        for name, tensor in a.model.items():
            torch.testing.assert_close(b.model[name], tensor, atol=1e-4, rtol=0)
        pixels = [load_model(each.phase(t)).memory.images.pixels for each in (one, other)]
        assert torch.equal(*pixels)


def test_two_processes_compute_what_one_does(tmp_path, alone):
    # 1438 images in batches of 50 do not divide evenly: the last batches and their shares differ in size.
    done = completed("run", *OPTIONS, "--devices", "2", cwd=tmp_path)
    assert done.stdout.count("run directory") == 1  # one process speaks
    together = Directory(tmp_path / "run")
    assert_close(alone, together)
    for one, other in zip(losses(alone), losses(together), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def losses(store: Directory) -> list[dict[str, float]]:
    return [event["parts"] for event in store.read_events() if event["kind"] == "epoch"]


def test_a_process_that_dies_ends_the_run_which_then_resumes_alone(tmp_path, alone):
    more = ("--devices", "2", "--checkpoint-steps", "3")
    process, progress = started("run", *OPTIONS, *more, cwd=tmp_path), tmp_path / "run" / "progress"

    def begun() -> bool:
        assert process.poll() is None, process.communicate()
        return bool(list(progress.glob("checkpoint-*")))

    wait_until(begun, 240)
    (second,) = children(process.pid)
    os.kill(second, signal.SIGKILL)
    _, said = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "another process of this run has ended" in said
    assert "Traceback" not in said
    completed("run", *OPTIONS, cwd=tmp_path)
    assert_close(alone, Directory(tmp_path / "run"))


SCRIPT = """
import atexit, hashlib, json, os, sys
from pathlib import Path
from tests.helpers import tiny
from geodl.bench.experiment import scenario_of
from geodl.learning.learner import Learner

def threads():
    return sorted(each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm"))

atexit.register(lambda: Path(sys.argv[1], f"{os.getpid()}.left").write_text(json.dumps(threads())))  # runs last
config = tiny.config(network="resnet8", devices=2, accelerator="cpu", **json.loads(sys.argv[2]))
learner, scenario = Learner(config), scenario_of(config, tiny.dataset())
for t in range(2):
    learner.learn(scenario.train(t))
accuracy = {name: found.accuracy for name, found in learner.evaluate(scenario.test(1)).items()}
tensors = [tensor for _, tensor in sorted(learner.known.to_tensors().items())]
digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()
Path(sys.argv[1], f"{learner.trainer.ranks.rank}.json").write_text(json.dumps([digest, accuracy]))
assert any("gloo" in name for name in threads())
"""


@pytest.mark.parametrize(  # Mnemonics trains as LUCIR does before its exemplars move
    "options",
    [
        {"method": "bic"},
        {"method": "mnemonics"},
        {"method": "analytic", "expansion": 32},
        {"method": "analytic", "keep_features": True, "flip": True},
    ],
    ids=tiny.named,
)
def test_with_batch_norm_the_ranks_stay_identical_in_weights_and_memory(tmp_path, options):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(script), str(tmp_path), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    # A thread that is there when the interpreter ends, and still holds a tensor, aborts it.
    left = [json.loads(path.read_text()) for path in tmp_path.glob("*.left")]
    assert len(left) == 2
    assert not [name for names in left for name in names if "gloo" in name]
