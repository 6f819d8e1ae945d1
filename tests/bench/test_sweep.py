"""Sweeps: which runs, several at a time, stopping and going on, one process a base phase, SLURM files, searches."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import tiny
from tests.helpers.command import geodl, started
from tests.helpers.runs import DIGITS, quick, result_files, wait_until

from geodl import __version__
from geodl.bench.experiment import run_config
from geodl.bench.sweep import asha, runner, shipping, slurm, status
from geodl.bench.sweep import jobs as jobs_module
from geodl.bench.sweep.jobs import (
    Job,
    Spec,
    bases_first,
    draws,
    expand,
    jobs_in,
    parse_grid,
    parse_over,
    read_spec,
)
from geodl.bench.sweep.runner import Launch, Local, Process, run_all
from geodl.bench.sweep.status import status_of, value_of
from geodl.bench.work import Progress
from geodl.cli import grids
from geodl.cli import sweep as sweep_command
from geodl.config import Layer, all_options, file_layers, preset_layer
from geodl.core.cache import Cache
from geodl.core.errors import Interrupted
from geodl.core.events import BaseAwaited, BaseCached, StageStarted
from geodl.methods import configure
from geodl.store import Directory

# -- which runs


def test_a_grid_is_every_combination_with_the_hashes_of_single_runs(tmp_path):
    grid = parse_grid(["method=lucir,lucir+geodesic", "seed=1,2,3"])
    jobs = expand([preset_layer("digits")], Spec(grids=[grid]).points(1, 0), tmp_path)
    assert [job.label for job in jobs[:2]] == ["LUCIR, seed 1", "LUCIR, seed 2"]
    assert len({job.out for job in jobs}) == 6
    alone = configure(
        [preset_layer("digits"), Layer("", {"method": "lucir", "distill": "geodesic", "seed": 3})]
    ).config
    assert jobs[-1].out == tmp_path / f"digits-lucir-geodesic-{alone.hash()}"


def test_points_that_mean_the_same_run_are_one(tmp_path):
    assert len(quick(tmp_path, {"method": "lucir"}, {"method": "lucir+cosine"}, {"seed": 1})) == 1


def test_a_file_has_options_grids_and_ranges(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(
        'preset = "digits"\nepochs = 3\n[[grid]]\nmethod = ["icarl"]\nseed = [1, 2]\n'
        '[[grid]]\nmethod = ["lucir+geodesic"]\nmilestones = [[0.5], [0.3, 0.6]]\n[over]\nlr = "log:0.01:0.3"\n'
    )
    spec = read_spec(path)
    assert spec.count(trials=5) == 5 * (2 + 2)
    jobs = expand(spec.layers, spec.points(5, 1), tmp_path)
    assert len(jobs) == 20
    assert {job.config.milestones for job in jobs} == {(0.5, 0.75), (0.5,), (0.3, 0.6)}
    assert {job.config.epochs for job in jobs} == {3}


@given(
    st.sampled_from(
        ["finetune", "lucir+geodesic", "bic", "icarl", "mnemonics", "analytic", "joint"]
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "lr": st.floats(1e-9, 1e3),
            "order": st.lists(
                st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
                min_size=1,
                max_size=3,
            ),
            "weights": st.just('a "b"/c\\d.safetensors'),
            "milestones": st.just([0.25]),
            "flip": st.booleans(),
        },
    ),
)
def test_the_file_of_a_job_gives_its_very_configuration(tmp_path_factory, method, options):
    (job,) = expand([Layer("", options)], [{"method": method}], tmp_path_factory.getbasetemp())
    path = tmp_path_factory.getbasetemp() / "job.toml"
    path.write_text(job.toml())
    again = configure(file_layers(path)).config
    assert again == job.config
    assert again.hash() == job.config.hash()


def test_no_option_can_be_unset_that_is_set_by_default():
    # TOML has no word for "unset": the file of a job leaves such options out.
    assert not [
        name
        for name, info in all_options().items()
        if info.default is not None and type(None) in getattr(info.annotation, "__args__", ())
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "seeed=1,2"], "seeed = '1' (sweep): no such option; did you mean seed?"),
        (["--grid", "seed="], "grid: seed = []: a list of one value or more is allowed"),
        (["--grid", "seed"], "--grid seed: OPTION=A,B,... is allowed"),
        ([], "nothing to vary"),
        (["spec.toml"], "spec.toml: No such file"),
        (
            ["--grid", "seed=1", "--grid", "phases=2,4"],
            "phases = 4: allowed for 6 classes after the base: 1, 2, 3, 6",
        ),
        (["--grid", "network=convnet,alexnet"], "network = 'alexnet'"),
        (
            ["--grid", "method=lucir+geodesic", "--grid", "distill=lwf"],
            "it names the distillation, and so does",
        ),
        (["--grid", "seed=1", "-j", "0"], "jobs = 0: at least 1 is allowed"),
        (
            ["--grid", "seed=1", "-j", "2", "--ray", "auto"],
            "--jobs, --ray and --submit: one of them is allowed",
        ),
        (["--search", "random"], "--search and --over belong together"),
        (["--search", "random", "--over", "lr=log:0:1"], "over: lr = log:0:1: LOW:HIGH"),
        (["--search", "random", "--over", "lr=3:1"], "over: lr = 3:1: LOW:HIGH"),
        (
            ["--search", "random", "--over", "epochs=1.2:1.8"],
            "over: epochs = 1.2:1.8: no whole number lies in it",
        ),
        (["--search", "random", "--over", "lr"], "--over lr: OPTION=LOW:HIGH"),
        (
            ["--search", "random", "--over", "lr=1:2", "--trials", "0"],
            "trials = 0: at least 1 is allowed",
        ),
        (
            ["--grid", "lr=1,2", "--submit", "slurm", "--sbatch", "--comment='x"],
            "sbatch = --comment='x: No closing quot",
        ),
        (["--search", "asha", "--over", "lr=1:2", "-j", "2"], "search = asha: it runs on Ray"),
        (["--grid", "devices=1,2"], "devices (sweep): it says how and where a run is done"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, arguments, message):
    said = geodl("sweep", *arguments, "--preset", "digits", cwd=tmp_path, status=2).stderr
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_very_many_runs_are_asked_about_first(tmp_path, monkeypatch):
    monkeypatch.setattr(grids.sys.stdin, "isatty", lambda: False, raising=False)
    grid = [
        "--grid",
        f"seed={','.join(map(str, range(1000)))}",
        "--grid",
        f"lr={','.join(f'0.{i}' for i in range(1, 100))}",
    ]
    said = geodl("sweep", *grid, cwd=tmp_path, status=2).stderr
    assert (
        said == "geodl: these are 99,000 runs, and there is no terminal to confirm it: add --yes\n"
    )


def test_a_dry_run_lists_and_starts_nothing(tmp_path):
    said = geodl("sweep", *DIGITS, "--grid", "seed=1,2", "--dry-run", cwd=tmp_path).stdout
    assert said.count("(waiting; runs/digits-lucir-") == 2
    assert not (tmp_path / "runs").exists()


# -- search


def test_draws_are_of_their_ranges_and_more_trials_begin_with_the_fewer():
    over = parse_over(
        ["lr=log:0.01:0.3", "geodesic-weight=1:20", "epochs=1:3", "schedule=step,onecycle"]
    )
    found = draws(over, 200, seed=1)
    assert found[:50] == draws(over, 50, seed=1)
    assert found[:50] != draws(over, 50, seed=2)
    assert all(0.01 <= each["lr"] <= 0.3 and 1 <= each["geodesic_weight"] <= 20 for each in found)
    assert {each["epochs"] for each in found} == {1, 2, 3}
    assert {each["schedule"] for each in found} == {"step", "onecycle"}
    # Half of a logarithmic range lies below its geometric mean, 0.0548; of a plain one below the middle.
    assert 70 < sum(each["lr"] < 0.0548 for each in found) < 130
    assert 70 < sum(each["geodesic_weight"] < 10.5 for each in found) < 130


def test_whole_numbers_are_drawn_evenly_with_both_ends():
    found = draws({"exemplars": "1:3", "epochs": "log:0.5:3.5"}, 3000, seed=1)
    evenly, by_size = (Counter(each[key] for each in found) for key in ("exemplars", "epochs"))
    assert all(900 < evenly[number] < 1100 for number in (1, 2, 3))
    # By the logarithm a number n has the share of n to n + 1.
    assert all(abs(by_size[n] - 3000 * math.log(1 + 1 / n, 4)) < 100 for n in (1, 2, 3))
    assert evenly.total() == by_size.total() == 3000


def test_random_search_shows_the_best_first(tmp_path, monkeypatch):
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "cache"))
    order = [
        "sweep",
        *DIGITS,
        "--search",
        "random",
        "--trials",
        "2",
        "--over",
        "lr=log:0.0001:0.1",
        "-j",
        "1",
    ]
    said = geodl(*order, cwd=tmp_path).stdout
    assert "on Ray (--ray auto), --search asha stops poor runs after early phases" in said
    stores = [
        Directory(path)
        for path in sorted((tmp_path / "runs").iterdir())
        if path.is_dir() and path.name != ".sweep"
    ]
    values = [value_of(store.path, "average") for store in stores]
    assert f"best average: {max(values):.2f} of LUCIR, lr " in said
    assert geodl(*order, cwd=tmp_path).stdout.count("started") == 0
    known = {stores[0].path.name: None, stores[1].path.name: 30.0}
    for module in (sweep_command, status):
        monkeypatch.setattr(module, "value_of", lambda out, metric: known[out.name])
    assert (
        "best forgetting: 30.00 of " in geodl(*order, "--metric", "forgetting", cwd=tmp_path).stdout
    )
    for module in (sweep_command, status):
        monkeypatch.setattr(module, "value_of", lambda out, metric: None)
    assert (
        "best forgetting: unknown of "
        in geodl(*order, "--metric", "forgetting", cwd=tmp_path).stdout
    )


@pytest.fixture
def tune(monkeypatch):
    """Stand-ins for what a search needs of Ray; each trial takes one step, but the second, which is lost before it."""
    told = []

    class Tuner:
        def __init__(self, kind, *, param_space, **_):
            self.kind, self.jobs = kind, param_space["job"]

        def fit(self):
            return [self.result(job) for job in self.jobs]

        def result(self, job):
            if job == 1:
                return SimpleNamespace(
                    metrics=None, error=RuntimeError("on node 7\nthe worker died")
                )
            trial = self.kind()
            trial.setup({"job": job})
            told.append(trial.step())
            return SimpleNamespace(metrics=told[-1] | {"config": {"job": job}}, error=None)

    any_of = dict.fromkeys(
        ("TuneConfig", "RunConfig", "FailureConfig", "CheckpointConfig"), SimpleNamespace
    )
    bases = {
        "Trainable": type("Trainable", (), {"iteration": 0}),
        "Callback": object,
        "Stopper": object,
    }
    calls = {"Tuner": Tuner, "grid_search": list, "with_resources": lambda kind, _: kind}
    tune = SimpleNamespace(**any_of, **bases, **calls)
    ray = SimpleNamespace(tune=tune, init=lambda *_, **__: None, cluster_resources=dict)
    schedulers = SimpleNamespace(ASHAScheduler=SimpleNamespace)
    for name, module in {"ray": ray, "ray.tune": tune, "ray.tune.schedulers": schedulers}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_failures_of_trials_are_those_of_their_runs(tmp_path, monkeypatch, tune):
    jobs = quick(tmp_path, *({"seed": seed} for seed in range(4)))
    run_config(jobs[3].config, out=jobs[3].out)
    ends = {jobs[0].out.name: "", jobs[2].out.name: "the loss is not finite", jobs[3].out.name: ""}
    monkeypatch.setattr(
        asha, "Process", lambda start: SimpleNamespace(result=lambda: ends[start.log.stem])
    )
    how = {"told": lambda states: None, "stop": lambda: False}
    failed = asha.search(jobs, "local", "forgetting", **how)
    assert failed == {jobs[1]: "Ray: the worker died", jobs[2]: "the loss is not finite"}
    assert [job.file("error").exists() for job in jobs] == [False, True, True, False]
    assert [job.file("stopped").exists() for job in jobs] == [True, False, False, False]
    # Of a run that failed, or has only its base phase, no forgetting is known; none at all would be the best.
    assert [each["value"] for each in tune] == [100.0, 100.0, 100.0]


# -- running


class Fake:
    """An engine whose runs take some turns; `fails` says why which of them fail."""

    def __init__(self, places, fails=None, turns=2):
        self.places, self.fails, self.turns = places, fails or {}, turns
        self.order, self.most, self.alive, self.told = [], 0, set(), []

    def start(self, job):
        self.order.append(job.label)
        self.alive.add(job.label)
        self.most = max(self.most, len(self.alive))
        return FakeRun(self, job.label)


class FakeRun:
    def __init__(self, engine, label):
        self.engine, self.label, self.left = engine, label, engine.turns

    def result(self):
        self.left -= 1
        if self.left > 0:
            return None
        self.engine.alive.discard(self.label)
        return self.engine.fails.get(self.label, "")

    def stop(self):
        self.engine.told.append(f"stop {self.label}")

    def kill(self):
        self.engine.told.append(f"kill {self.label}")


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(runner, "TURN", 0.0)


def test_no_more_runs_at_a_time_than_there_are_places_and_failures_stop_nobody(tmp_path, fast):
    jobs = quick(tmp_path, *({"seed": seed} for seed in range(7)))
    engine = Fake(3, fails={"LUCIR, seed 2": "the loss is not finite"})
    failed = run_all(jobs, engine)
    assert engine.most == 3
    assert engine.order == [job.label for job in jobs]
    assert failed == {jobs[2]: "the loss is not finite"}
    assert status_of(jobs[2]).state == "failed"
    assert status_of(jobs[2]).error == "the loss is not finite"
    assert [job.label for job in jobs_in(tmp_path)] == sorted(
        (job.label for job in jobs),
        key=lambda label: next(j.out.name for j in jobs if j.label == label),
    )
    run_all(jobs[2:3], Fake(1))
    assert status_of(jobs[2]).state == "waiting"


def test_stopping_tells_all_that_run_and_starts_no_more(tmp_path, fast):
    jobs = quick(tmp_path, *({"seed": seed} for seed in range(4)))
    engine, asked = Fake(2, turns=5), iter([False, False, True])
    with pytest.raises(Interrupted, match="the same command continues"):
        run_all(jobs, engine, stop=lambda: next(asked))
    assert engine.order == ["LUCIR, seed 0", "LUCIR, seed 1"]
    assert engine.told[:2] == ["stop LUCIR, seed 0", "stop LUCIR, seed 1"]


def test_an_error_of_the_watcher_leaves_no_process_behind(tmp_path, fast):
    engine = Fake(2, turns=5)

    def broken(states):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(quick(tmp_path, {"seed": 1}), engine, told=broken)
    assert engine.told == ["kill LUCIR, seed 1"]


def test_different_base_phases_come_first(tmp_path):
    points = [
        {"method": method, "seed": seed}
        for seed in (1, 2)
        for method in ("lucir", "lucir+geodesic", "icarl", "bic")
    ]
    order = [job.label for job in bases_first(quick(tmp_path, *points))]
    assert order == [
        *(
            "LUCIR, seed 1",
            "iCaRL, seed 1",
            "BiC, seed 1",
            "LUCIR, seed 2",
            "iCaRL, seed 2",
            "BiC, seed 2",
        ),
        *("LUCIR + GeoDL, seed 1", "LUCIR + GeoDL, seed 2"),
    ]


def test_as_many_runs_as_cores_and_memory_allow(monkeypatch):
    config = tiny.config(threads=2)
    monkeypatch.setattr(runner, "available_cores", lambda: 9)
    assert Local(config).places == 4
    assert Local(config, 7).places == 7
    monkeypatch.setattr(runner, "available_memory", lambda: 3.1e9)
    assert Local(config).places == 2
    monkeypatch.setattr(runner, "available_memory", lambda: 1e6)
    assert Local(config).places == 1


def test_one_run_for_each_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "device_kind", lambda accelerator: "cuda")
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 5)
    seen = []

    class Started:
        def __init__(self, start):
            seen.append(start.environment["CUDA_VISIBLE_DEVICES"])

        def result(self):
            return None if len(seen) < 2 else ""

    monkeypatch.setattr(runner, "Process", Started)
    local = Local(tiny.config(devices=2))
    assert local.places == 2
    for job in quick(tmp_path, {"seed": 1}, {"seed": 2}, {"seed": 3}):
        local.start(job)
    assert seen == ["0,1", "2,3", "0,1"]


def test_two_processes_give_the_bytes_of_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "spec.toml").write_text(
        '[[grid]]\nmethod = ["lucir"]\nseed = [1, 2]\n[[grid]]\nmethod = ["lucir+geodesic"]\nseed = [2]\n'
    )
    said = geodl("sweep", "spec.toml", *DIGITS, "-j", "2", cwd=tmp_path).stdout
    assert "3 runs, 0 of them complete" in said
    assert said.count(": complete: ") == 3
    assert (tmp_path / "runs" / "report.html").exists()
    points = [
        {"method": "lucir", "seed": 1},
        {"method": "lucir", "seed": 2},
        {"method": "lucir+geodesic", "seed": 2},
    ]
    jobs = quick(tmp_path / "runs", *points)
    cached = 0
    for job in jobs:
        alone = run_config(
            job.config, out=tmp_path / "alone" / job.out.name
        )  # no cache: each trains its own base
        assert result_files(alone.path) == result_files(job.out)
        assert len(result_files(job.out)) == 9
        cached += sum(event["kind"] == "cached" for event in Directory(job.out).read_events())
    assert cached == 1  # each base was trained once
    again = geodl("sweep", "spec.toml", *DIGITS, cwd=tmp_path).stdout
    assert "started" not in again
    shown = geodl("sweep", "status", cwd=tmp_path).stdout
    assert "LUCIR + GeoDL, seed 2" in shown
    assert "3 runs: 3 complete" in shown


def test_a_run_that_fails_is_named_with_its_last_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "cache"))
    done = geodl("sweep", *DIGITS, "--grid", "lr=1e30,0.05", "-j", "2", cwd=tmp_path, status=2)
    assert "1 of 2 runs failed; the first: LUCIR, lr 1e30: " in done.stderr
    assert "not finite" in done.stderr
    assert "LUCIR, lr 0.05: complete" in done.stdout
    assert "LUCIR, lr 1e30: failed: " in done.stdout
    shown = geodl("sweep", "status", cwd=tmp_path).stdout
    assert "not finite" in shown
    assert "2 runs: 1 complete, 1 failed" in shown


def start(tmp_path, *arguments) -> subprocess.Popen[str]:
    return started(
        "sweep", *arguments, cwd=tmp_path, environment={"GEODL_CACHE": str(tmp_path / "cache")}
    )


LONG = [*DIGITS[:-1], "300", "--checkpoint-steps", "20", "--grid", "seed=1,2", "-j", "2"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_no_process_stays_and_the_same_command_continues(tmp_path, how):
    process = start(tmp_path, *LONG)
    wait_until(lambda: len(list((tmp_path / "runs").glob("*/progress/checkpoint-*"))) == 2)
    running = jobs_in(tmp_path / "runs")
    assert [status_of(job).state for job in running] == ["running", "running"]
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    wait_until(lambda: all(status_of(job).state == "interrupted" for job in running), 20)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "geodl: stopped; progress is saved; the same command continues" in said
    process = start(tmp_path, *LONG)
    begun = [process.stdout.readline() for _ in range(3)]
    assert sum(line.endswith("resumed\n") for line in begun) == 2
    process.kill()
    process.communicate()


def test_a_table_on_a_terminal(tmp_path, fast, monkeypatch):
    jobs = quick(tmp_path, *({"seed": seed} for seed in range(3)))
    run_config(jobs[0].config, out=jobs[0].out)
    board = grids.Board(jobs)
    board(dict.fromkeys(jobs, "running"))
    with grids.console.capture() as said:
        grids.say(board.table())
    shown = said.get()
    assert "LUCIR, seed 0" in shown
    assert "3/3" in shown
    assert "1 complete, 2 waiting" in shown


# -- one process a base phase


def test_a_run_waits_for_the_base_that_another_trains(tmp_path):
    cache, data, config = Cache(tmp_path / "cache"), tiny.dataset(), tiny.config(epochs=1)
    run_config(config, out=tmp_path / "first", data=data, cache=cache)
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

    second = run_config(
        tiny.config(epochs=1, distill="geodesic"),
        out=tmp_path / "second",
        data=data,
        cache=cache,
        listener=hear,
    )
    kinds_heard = [type(event) for event in events if getattr(event, "phase", 1) == 0]
    assert kinds_heard.index(BaseAwaited) < kinds_heard.index(BaseCached)
    assert StageStarted not in kinds_heard
    assert (
        result_files(second.path)["0/model.safetensors"]
        == result_files(tmp_path / "first")["0/model.safetensors"]
    )
    events.clear()
    held = ExitStack()
    assert cache.claim(entry.stem, held)
    entry.unlink()
    with pytest.raises(Interrupted, match="another run was training the base phase"):
        run_config(config, out=tmp_path / "third", data=data, cache=cache, stop=lambda: True)
    held.close()


# -- how far


def event(kind, seconds, **fields):
    return {
        "kind": kind,
        "time": f"2026-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}+00:00",
    } | fields


def test_time_left_is_told_by_the_work_since_the_start():
    began = 1767225600.0

    def progress(events, now):
        found = Progress.of(events)
        return found.part, found.seconds_left(began + now)

    events = [
        event("run", 0, work=[100, 50, 50], done=0),
        event("stage", 0, phase=0, stage="train", epoch=0, epochs=10, steps=8),
    ]
    assert progress(events, 5) == (0.0, None)
    assert progress([*events, event("step", 5, phase=0, stage="train", epoch=1, step=4)], 5) == (
        0.075,
        pytest.approx(185 / 3),
    )
    events += [event("epoch", 10, phase=0, stage="train", epoch=5, epochs=10)]
    assert progress(events, 10) == (0.25, 30.0)
    # A base phase from the cache took no time, and neither did what was done before the last start.
    events += [event("run", 100, work=[100, 50, 50], done=0), event("cached", 100, phase=0)]
    events += [event("epoch", 120, phase=1, stage="train", epoch=2, epochs=5)]
    assert progress(events, 120) == (0.6, pytest.approx(80.0))
    events += [event("epoch", 121, phase=1, stage="correction", epoch=1, epochs=5), {"kind": "odd"}]
    assert progress(events, 120) == (0.6, pytest.approx(80.0))
    assert progress([], 0) == (0.0, None)


# -- SLURM


def test_an_array_whose_lines_are_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("GEODL_CACHE", str(tmp_path / "cache"))
    said = geodl(
        *(
            "sweep",
            *DIGITS,
            "--grid",
            "seed=1,2",
            "--submit",
            "slurm",
            "--sbatch",
            "--partition=cpu --time=60",
        ),
        cwd=tmp_path,
    ).stdout
    script = tmp_path / "runs" / ".sweep" / "array.sbatch"
    assert f"submit them: sbatch {script}" in said
    text = script.read_text()
    for line in (
        "--array=1-2",
        "--requeue",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--partition=cpu",
        "--time=60",
    ):
        assert f"#SBATCH {line}\n" in text
    commands = re.search(r"^commands=\(\n(.*?)^\)\n", text, re.M | re.S)[1]
    assert [shlex.split(command)[1:4] for command in shlex.split(commands)] == [
        ["-m", "geodl", "run"]
    ] * 2
    assert "2 runs: 2 waiting" in geodl("sweep", "status", cwd=tmp_path).stdout
    # The script, with srun and scontrol that do what SLURM's would.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, code in (("srun", 'exec "$@"'), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        (tools / name).write_text(f"#!/bin/bash\n{code}\n")
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_JOB_ID": "7",
    }
    # What is submitted later to the same directory changes nothing for the copy that SLURM keeps of a script.
    script = Path(shutil.copy(script, tmp_path / "spooled"))
    geodl("sweep", *DIGITS, "--grid", "seed=3,4,5", "--submit", "slurm", cwd=tmp_path)
    subprocess.run(["bash", script], env=environment, check=True, cwd="/")
    assert {job.config.seed for job in jobs_in(tmp_path / "runs") if job.complete()} == {2}
    assert not (tmp_path / "asked").exists()
    # A run whose time is over goes back into the queue.
    (tools / "srun").write_text("#!/bin/bash\nexit 130\n")
    assert subprocess.run(["bash", script], env=environment).returncode == 130
    assert (tmp_path / "asked").read_text() == "requeue 7_2\n"


def test_resources_of_the_array(tmp_path):
    config = tiny.config(devices=4, nodes=2, accelerator="cuda", threads=3)
    text = slurm.write([Job(config, tmp_path / "run", "a run")]).read_text()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=3"):
        assert f"#SBATCH {line}\n" in text


# -- shipping


def test_what_changed_is_shipped_and_what_is_gone_goes(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    config, data = tiny.config(epochs=1), tiny.dataset()
    run_config(config, out=here, data=data)
    files, seen = shipping.changed(here, {})
    shipping.receive(there, files, set(seen))
    assert result_files(there) == result_files(here)
    assert not (there / "lock").exists()
    assert Directory(there).completed() == 3
    Directory(there).verify()
    (here / "progress").mkdir(exist_ok=True)
    (here / "progress" / "checkpoint-3").write_bytes(b"one")
    files, seen = shipping.changed(here, seen)
    assert list(files) == ["progress/checkpoint-3"]
    shipping.receive(there, files, set(seen))
    assert (there / "progress" / "checkpoint-3").read_bytes() == b"one"
    (here / "progress" / "checkpoint-3").unlink()
    files, seen = shipping.changed(here, seen)
    shipping.receive(there, files, set(seen))
    assert not (there / "progress" / "checkpoint-3").exists()


def test_a_folder_that_is_renamed_while_one_looks_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "phases" / "temporary").mkdir(parents=True)
    (tmp_path / "head.json").write_text("{}")
    scan = os.scandir

    def gone(path):
        if Path(path).name == "temporary":
            Path(path).rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert list(shipping.look(tmp_path)) == ["head.json"]
    assert not (tmp_path / "phases" / "temporary").exists()


# -- processes


def test_last_words_of_a_process(tmp_path):
    def ended(*arguments, killed=None):
        process = Process(Launch(arguments, tmp_path / "log", {}))
        if killed:
            process.kill()
        wait_until(lambda: process.result() is not None)
        return process.result()

    assert ended("--version") == ""
    assert ended("rnu") == "rnu: no such command; did you mean run?"
    assert ended("--help", killed=True) == "killed by SIGKILL"


@pytest.mark.parametrize("end", [Process.stop, Process.kill])
def test_a_process_is_ended_where_there_are_no_process_groups(tmp_path, monkeypatch, end):
    monkeypatch.delattr(os, "killpg")  # as on Windows
    monkeypatch.delattr(signal, "SIGKILL")
    process = Process(Launch(LONG, tmp_path / "log", {}))
    end(process)
    wait_until(lambda: process.result() is not None)
    assert "SIGTERM" in process.result()


def test_a_process_starts_where_signals_cannot_be_blocked():
    code = "import runpy, signal; del signal.pthread_sigmask; runpy.run_module('geodl.bench.sweep.child', run_name='__main__')"
    command = [sys.executable, "-c", code, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == __version__, done.stderr


def test_reports_of_whole_directories(tmp_path):
    (job,) = quick(tmp_path / "runs", {"seed": 1})
    run_config(job.config, out=job.out)
    job.file("stopped").parent.mkdir()
    job.file("stopped").write_text("")
    job.prepare()
    assert not job.file("stopped").exists()
    assert "1 run: 1 complete" in geodl("sweep", "status", cwd=tmp_path).stdout
    (tmp_path / "runs" / "report.html").write_text("")
    said = geodl("report", "runs", "--out", "all.html", cwd=tmp_path).stdout
    assert "page: all.html" in said
    given = ("runs/report.html", f"runs/{job.out.name}")  # as a shell gives runs/*
    assert "page: all.html" in geodl("report", *given, "--out", "all.html", cwd=tmp_path).stdout
    failed = geodl("report", "runs/report.html", cwd=tmp_path, status=2)
    assert "report.html is not a geodl directory" in failed.stderr
    assert (
        json.loads(geodl("runs", "list", "--json", cwd=tmp_path).stdout)[0]["state"] == "complete"
    )


def test_checks_are_made_once(tmp_path, monkeypatch):
    loaded = []
    load = jobs_module.load_data
    monkeypatch.setattr(
        jobs_module, "load_data", lambda config: loaded.append(config.data) or load(config)
    )
    jobs_module.check(
        quick(tmp_path, *({"seed": s, "phases": p} for s in range(3) for p in (1, 2)))
    )
    assert loaded == ["digits"]
