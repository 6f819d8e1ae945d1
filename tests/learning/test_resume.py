"""A run that is stopped, continued, or started again with something else."""

from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import tiny
from tests.helpers.runs import result_files

from geodl.core.errors import Interrupted, StoreError, TrainingError
from geodl.core.events import EpochEnded, Event
from geodl.core.ranks import Ranks
from geodl.learning import loop
from geodl.nets import build_network
from geodl.store import Directory

ONE = {"method": "finetune", "phases": 0, "base": None}
"""Options of a run of one phase."""


def test_a_complete_run_is_not_computed_again(run):
    run()
    heard: list[Event] = []
    run(listener=heard.append)
    assert [event.kind for event in heard] == ["run", "done"]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lucir", "distill": "geodesic", "finetune_epochs": 2},
        {"method": "bic", "correction_epochs": 4},
        {"method": "mnemonics", "outer_steps": 3},
        {"method": "finetune", "norm_decay": False, "nesterov": True},
        {"method": "lucir", "optimizer": "adamw", "lr": 0.001},
    ],
    ids=tiny.named,
)
def test_a_run_stopped_after_any_step_resumes_to_the_same_bytes(tmp_path, run, options):
    options = {"epochs": 1} | options
    run("whole", **options)
    for every in (1, 4):
        heard: list[Event] = []
        for _ in range(200):
            steps = iter([*[False] * (every - 1), True])
            how = {"stop": lambda left=steps: next(left), "listener": heard.append}
            with suppress(Interrupted):
                run(f"{every}", **options, **how)
                break
        assert result_files(tmp_path / f"{every}") == result_files(tmp_path / "whole")
        ends = [event for event in heard if isinstance(event, EpochEnded)]
        # None without a step, also where the last one was the place to stop.
        assert all(event.parts for event in ends)
        assert len({(event.phase, event.stage, event.epoch) for event in ends}) == len(ends)


def test_other_weights_under_the_same_name_are_another_run(tmp_path, run):
    weights = tmp_path / "weights.safetensors"
    for seed in (1, 2):
        convnet = build_network("convnet", 2, head="cosine", seed=seed).backbone
        save_file({name: t.contiguous() for name, t in convnet.state_dict().items()}, weights)
        if seed == 1:
            run(weights=str(weights))
    with pytest.raises(StoreError, match="weights_sha256"):
        run(weights=str(weights))


def test_threads_are_kept_and_another_number_is_refused(run):
    run(**ONE)
    with pytest.raises(StoreError, match=r"threads .*1.*2"):
        run(**ONE, threads=2)
    torch.set_num_threads(2)
    run(**ONE, threads=None)
    assert torch.get_num_threads() == 1  # restored from the run
    run(**ONE, threads=2, allow_environment_change=True)
    torch.set_num_threads(1)


def test_other_data_are_refused(run):
    run(**ONE)
    with pytest.raises(StoreError, match="fingerprint"):
        run(**ONE, data=tiny.dataset(seed=5))


def test_of_several_processes_one_that_fails_by_itself_does_not_blame_another(run, monkeypatch):
    def failing(error: Exception) -> str:
        def lock(store: Directory) -> None:
            raise error

        monkeypatch.setattr(Directory, "lock", lock)
        with pytest.raises((RuntimeError, TrainingError)) as caught:
            run()
        return f"{caught.type.__name__}: {caught.value}"

    assert failing(RuntimeError("a reason")) == "RuntimeError: a reason"
    monkeypatch.setattr(loop, "Ranks", lambda *_: Ranks(0, 2))
    monkeypatch.setattr(Ranks, "group", None)
    blamed = failing(RuntimeError("connection\nclosed"))
    assert blamed.startswith("TrainingError: another process of this run has ended")
    assert blamed.endswith("(connection closed)")
    full = torch.cuda.OutOfMemoryError("out of memory")
    assert failing(full) == "OutOfMemoryError: out of memory"
