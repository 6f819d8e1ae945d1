"""Killed at any step of any write, and several processes: the old or the new state, never a mix, and one writer."""

import errno
import signal
import subprocess
import sys
import time

import pytest
from tests.helpers.directories import (
    CONFIG,
    Killed,
    break_at,
    commit,
    contents,
    make,
    make_model,
    save_progress,
    state,
    write_old,
)

from geodl.bench.sweep import shipping
from geodl.core import files
from geodl.core.errors import StoreError
from geodl.core.files import TEMPORARY
from geodl.core.locks import is_locked
from geodl.store import Directory, exists, remove_directory


def three_steps(path):
    """Make a model of three steps, one more undone, and one begun."""
    model = make_model(path)
    with model.lock():
        for _ in range(4):
            commit(model)
        model.undo()
        save_progress(model, 7)


def begun_run(path):
    run = make(path)
    with run.lock():
        commit(run)
        commit(run)
        save_progress(run, 7)
        run.events("started")
    (path / "report.html").write_text("old")


def old_model(path):
    write_old(path, 2, model=True, undone=1)


def locking(write):
    """Open the directory as a new process would, take the lock, write."""

    def operation(path):
        store = Directory(path)
        with store.lock():
            write(store)

    return operation


def nothing(store):
    pass


def run_elsewhere(path):
    """Make a run on another machine, as it were."""
    other = path.parent / "elsewhere"
    if not exists(other):
        run = make(other)
        with run.lock():
            for _ in range(3):
                commit(run)
            save_progress(run, 9)


def earlier_copy(path):
    run_elsewhere(path)
    run = make(path)
    with run.lock():
        commit(run)
        save_progress(run, 3)


def from_elsewhere(path):
    """Put what the other machine has in the place of what is here."""
    found, seen = shipping.changed(path.parent / "elsewhere", {})
    shipping.receive(path, found, set(seen))


WRITES = {
    "checkpoint": (three_steps, locking(lambda store: save_progress(store, 8))),
    "drop checkpoint": (three_steps, locking(lambda store: store.clear_progress())),
    "commit": (three_steps, locking(commit)),
    "first commit": (make_model, locking(commit)),
    "forget": (three_steps, locking(lambda store: commit(store, states=1, lasting=["extra.json"]))),
    "undo": (three_steps, locking(lambda store: store.undo())),
    "redo": (three_steps, locking(lambda store: store.redo())),
    "conversion": (old_model, locking(nothing)),
    "conversion and commit": (old_model, locking(commit)),
    "fresh": (begun_run, lambda path: make(path, config=CONFIG | {"seed": 1}, fresh=True)),
    "environment": (
        begun_run,
        lambda path: make(path, environment={"threads": 2}, allow_environment_change=True),
    ),
    "first arrival": (run_elsewhere, from_elsewhere),
    "arrival": (earlier_copy, from_elsewhere),
}


def comparable(path):
    """Return the state; a conversion and a start over give up the checkpoint first, which is disposable."""
    found = state(Directory(path)) if exists(path) else {"progress": None}
    return {key: value for key, value in found.items() if key != "progress"}, found["progress"]


def count_steps(path, monkeypatch, before, operation):
    """Do it without a fault; give the number of steps, the states before and after, and the final bytes."""
    before(path)
    old, names = comparable(path), []
    with monkeypatch.context() as patch:
        patch.setattr(files, "crash_point", lambda step, _: names.append(step))
        operation(path)
    return len(names), old, comparable(path), contents(path)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("tear", [False, True])
def test_killed_at_any_step_the_state_is_the_old_or_the_new_one(tmp_path, monkeypatch, name, tear):
    before, operation = WRITES[name]
    steps, old, new, final = count_steps(tmp_path / "whole", monkeypatch, before, operation)
    assert steps > 0
    seen = []
    for n in range(steps):
        path = tmp_path / str(n)
        before(path)
        with monkeypatch.context() as patch:
            patch.setattr(files, "crash_point", break_at(n, Killed(), tear))
            with pytest.raises(Killed):
                operation(path)
        found = comparable(path)
        assert found in (old, new, (old[0], None)), f"a mixture after step {n}"
        seen.append(found == new)
        if found != new:
            operation(path)
        with Directory(path).lock():
            pass
        assert comparable(path) == new
        assert contents(path) == final, "the same bytes as without the kill, and no leftovers"
        assert not list(path.rglob(f"{TEMPORARY}*"))
    assert seen == sorted(seen), "once new, always new"


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", WRITES)
def test_a_disk_full_at_any_step_is_a_clear_error_and_leaves_no_leftover(
    tmp_path, monkeypatch, name
):
    before, operation = WRITES[name]
    steps, old, new, _ = count_steps(tmp_path / "whole", monkeypatch, before, operation)
    for n in range(steps):
        path = tmp_path / str(n)
        before(path)
        with monkeypatch.context() as patch:
            failure = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(files, "crash_point", break_at(n, failure, tear=False))
            with pytest.raises(StoreError, match="the disk is full; make room"):
                operation(path)
        assert comparable(path) in (old, new, (old[0], None))
        if exists(path):
            with Directory(path).lock():
                assert not list(path.rglob(f"{TEMPORARY}*"))


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
def test_leftovers_are_ignored_by_readers_and_removed_by_the_next_writer(tmp_path):
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


# Several processes.

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


def test_readers_meet_no_half_of_a_commit(tmp_path, writer):
    from geodl.store import reading

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
