"""Several runs at a time, each in a process of its own."""

import os
import signal

import pytest
from tests.helpers import tiny
from tests.helpers.command import completed
from tests.helpers.runs import DIGITS, quick, seeds, wait_until

from geodl import __version__
from geodl.bench.sweep import runner
from geodl.bench.sweep.jobs import jobs_in
from geodl.bench.sweep.runner import Launch, Local, Process, run_all
from geodl.bench.sweep.status import status_of
from geodl.core.errors import Interrupted


class Fake:
    """An engine whose runs end after some polls; `fails` has the errors of those that fail."""

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


def test_at_most_as_many_runs_as_places_and_failures_do_not_stop_others(tmp_path, fast):
    jobs = seeds(tmp_path, 7)
    engine = Fake(3, fails={"LUCIR, seed 2": "the loss is not finite"})
    failed = run_all(jobs, engine)
    assert engine.most == 3
    assert engine.order == [job.label for job in jobs]
    assert failed == {jobs[2]: "the loss is not finite"}
    assert status_of(jobs[2]).state == "failed"
    assert status_of(jobs[2]).error == "the loss is not finite"
    by_name = sorted(jobs, key=lambda job: job.out.name)
    assert [job.label for job in jobs_in(tmp_path)] == [job.label for job in by_name]
    run_all(jobs[2:3], Fake(1))
    assert status_of(jobs[2]).state == "waiting"


def test_a_watcher_is_notified_of_running_jobs(tmp_path, fast):
    jobs, heard = seeds(tmp_path, 3), []
    run_all(
        jobs, Fake(2), notify=lambda running: heard.append([jobs.index(job) for job in running])
    )
    assert heard[0] == [0, 1]
    assert heard[-1] == []
    assert {job for running in heard for job in running} == {0, 1, 2}


def test_stopping_stops_all_runs_and_starts_no_more(tmp_path, fast):
    jobs = seeds(tmp_path, 4)
    engine, asked = Fake(2, turns=5), iter([False, False, True])
    with pytest.raises(Interrupted, match="the same command continues"):
        run_all(jobs, engine, stop=lambda: next(asked))
    assert engine.order == ["LUCIR, seed 0", "LUCIR, seed 1"]
    assert engine.told[:2] == ["stop LUCIR, seed 0", "stop LUCIR, seed 1"]


def test_an_error_of_the_watcher_leaves_no_process_behind(tmp_path, fast):
    engine = Fake(2, turns=5)

    def broken(running):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(quick(tmp_path, {"seed": 1}), engine, notify=broken)
    assert engine.told == ["kill LUCIR, seed 1"]


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
    for job in seeds(tmp_path, 3):
        local.start(job)
    assert seen == ["0,1", "2,3", "0,1"]


def test_the_error_of_a_process_is_its_last_line(tmp_path):
    def ended(*arguments, killed=None):
        process = Process(Launch(arguments, tmp_path / "log", {}))
        if killed:
            process.kill()
        wait_until(lambda: process.result() is not None)
        return process.result()

    assert ended("--version") == ""
    assert ended("rnu").startswith('Unknown command "rnu".')
    assert ended("--help", killed=True) == "killed by SIGKILL"


@pytest.mark.parametrize("end", [Process.stop, Process.kill])
def test_a_process_is_ended_where_there_are_no_process_groups(tmp_path, monkeypatch, end):
    monkeypatch.delattr(os, "killpg")  # as on Windows
    monkeypatch.delattr(signal, "SIGKILL")
    process = Process(Launch(["run", *DIGITS], tmp_path / "log", {}))
    end(process)
    wait_until(lambda: process.result() is not None)
    assert "SIGTERM" in process.result()


def test_a_process_starts_where_signals_cannot_be_blocked():
    code = "import runpy, signal; del signal.pthread_sigmask; runpy.run_module('geodl.bench.sweep.child', run_name='__main__')"
    assert completed("--version", code=code).stdout.strip() == __version__
