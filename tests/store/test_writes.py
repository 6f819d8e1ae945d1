"""Writes killed at any step, full disks, and several processes."""

import errno
import signal
import subprocess
import sys
import time

import pytest
from tests.helpers.directories import Killed, break_at, commit, contents, make, save_progress
from tests.helpers.writes import WRITES, Whole

from geodl.core import files
from geodl.core.errors import StoreError
from geodl.core.files import TEMPORARY
from geodl.core.locks import is_locked
from geodl.store import Directory, reading, remove_directory


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("tear", [False, True])
def test_killed_at_any_step_the_state_is_the_old_or_the_new_one(tmp_path, name, tear):
    whole = Whole.of(WRITES[name], tmp_path / "whole")
    new = [whole.stopped(tmp_path / str(n), n, Killed(), tear=tear) for n in range(whole.steps)]
    assert new
    assert new == sorted(new), "once new, always new"


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", WRITES)
def test_a_disk_full_at_any_step_is_a_clear_error_and_leaves_no_leftover(tmp_path, name):
    whole = Whole.of(WRITES[name], tmp_path / "whole")
    failure, words = OSError(errno.ENOSPC, "No space left on device"), "the disk is full; make room"
    for n in range(whole.steps):
        whole.stopped(tmp_path / str(n), n, failure, words=words)


@pytest.mark.usefixtures("no_waiting")
def test_killed_while_it_is_created_the_same_call_creates_it(tmp_path, monkeypatch):
    make(tmp_path / "whole")
    for n in range(10):
        path = tmp_path / str(n)
        with monkeypatch.context() as patch:
            patch.setattr(files, "crash_point", break_at(n, Killed(), tear=True))
            with pytest.raises(Killed):
                make(path)
        with make(path).lock():
            pass
        assert contents(path) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("no_waiting")
def test_the_next_writer_removes_leftovers(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        commit(run)
        save_progress(run, 1)
    before = contents(run.path)
    for folder in (".", "objects", "progress"):
        (run.path / folder / f"{TEMPORARY}x-abc").write_bytes(b"half")
    (run.path / "objects" / ("0" * 64)).write_bytes(b"of a killed commit")
    (run.path / "progress" / "checkpoint-0").write_bytes(b"of an earlier phase")
    assert make(run.path).completed() == 1
    assert len(list(run.path.rglob(f"{TEMPORARY}*"))) == 3, "a writer may be at work: hands off"
    with run.lock():
        assert contents(run.path) == before


WRITER = """
import itertools, sys, torch
from pathlib import Path
from geodl.store import Directory

run = Directory(Path(sys.argv[1]))
with run.lock():
    print("locked", flush=True)
    for t in itertools.count(run.completed()):
        for step in range(4):
            run.save_progress({"weight": torch.full((5000,), float(step))}, {"step": step})
            run.events("step", step=step)
        contents = {"model.safetensors": {"weight": torch.full((5000,), float(t))}, "t.json": {"t": t}}
        run.commit(contents, {"step": t}, states=3)
        if t % 3 == 2:
            run.undo(), run.redo()
"""


@pytest.fixture
def writer():
    """Start processes that write to a run without end; none outlives the test."""
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_real_kills_leave_a_sound_run_and_a_free_lock(tmp_path, writer):
    path = tmp_path / "run"
    run = make(path, phases=None)
    done = 0
    for delay in (0.0, 0.011, 0.023):
        process = writer(path)
        expected = f"is being written by process {process.pid} on "
        with pytest.raises(StoreError, match=expected), run.lock():
            pass
        for write in (make, remove_directory):
            with pytest.raises(StoreError, match=expected):
                write(path)
        assert is_locked(path)
        deadline = time.monotonic() + 60
        while Directory(path).completed() <= done and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_locked(path)
        run = Directory(path)
        with run.lock():
            assert not list(path.rglob(f"{TEMPORARY}*"))
        assert run.completed() > done
        done = run.completed()
        run.verify()
        assert run.phase(-1).tensors("model.safetensors")["weight"].unique().tolist() == [done - 1]
        progress = run.load_progress()
        assert progress is None or progress[0]["weight"].unique().tolist() == [progress[1]["step"]]
        assert run.read_events()


def test_readers_never_see_half_a_commit(tmp_path, writer):
    def read(store):
        if not store.completed():
            return None
        phase = store.phase(-1)
        weight = phase.tensors("model.safetensors")["weight"].unique().tolist()
        assert weight == [float(phase.json("t.json")["t"])] == [float(phase.number)]
        return phase.number

    path = make(tmp_path / "run", phases=None).path
    writer(path)
    deadline = time.monotonic() + 60
    seen = {None}
    while len(seen) < 20 and time.monotonic() < deadline:
        seen.add(reading(path, read))
    assert len(seen) == 20
