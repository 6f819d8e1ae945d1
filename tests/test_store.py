"""Run directories: old or new after a fault at every step of every write, one writer, the same configuration or an error."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.directories import (  # noqa: F401
    CONFIG,
    ENVIRONMENT,
    Killed,
    break_at,
    content,
    contents,
    make,
    metrics_of,
    no_waiting,
    rewrite,
    save_phase,
    save_progress,
    state,
)

from geodl import files
from geodl.errors import StoreError
from geodl.files import TEMPORARY, directory_size
from geodl.store import RunDirectory, list_runs, remove_run, summarize

pytestmark = pytest.mark.usefixtures("no_waiting")

# The same configuration, or an error.


def test_a_new_directory_reads_back_what_it_was_made_with(tmp_path):
    run = make(tmp_path / "deep" / "run")
    assert run.config == {"method": "lucir", "schedule": {"epochs": 3, "milestones": [1, 2]}, "seed": 0}
    assert run.environment == ENVIRONMENT
    assert run.phases == 3
    assert run.completed() == 0
    assert run.load_progress() is None
    assert run.read_events() == []
    again = make(tmp_path / "deep" / "run")
    assert again.config == run.config
    assert RunDirectory(tmp_path / "deep" / "run").config == run.config


def test_another_configuration_is_refused_with_every_difference_named(tmp_path):
    make(tmp_path / "run")
    other = {"method": "lucir", "schedule": {"epochs": 5, "milestones": [1, 2]}, "extra": True}
    with pytest.raises(StoreError) as error:
        make(tmp_path / "run", config=other)
    message = str(error.value)
    assert "another configuration" in message
    assert "schedule.epochs is 3 there and 5 now" in message
    assert "extra is null there and true now" in message
    assert "seed is 0 there and null now" in message
    assert "milestones" not in message
    assert "--fresh" in message
    assert "\n" not in message
    make(tmp_path / "run")


def test_another_number_of_threads_is_refused_unless_the_change_is_allowed(tmp_path):
    make(tmp_path / "run")
    other = {"threads": 2, "torch": "2.14.0"}
    with pytest.raises(
        StoreError, match=r"another environment: threads is 1 there and 2 now.*--allow-environment-change"
    ):
        make(tmp_path / "run", environment=other)
    assert RunDirectory(tmp_path / "run").environment == ENVIRONMENT
    run = make(tmp_path / "run", environment=other, allow_environment_change=True)
    assert run.environment == other
    assert make(tmp_path / "run", environment=other).environment == other, "from now on that is the environment"
    (event,) = run.read_events()
    assert event["kind"] == "environment changed"
    assert event["differences"] == ["threads is 1 there and 2 now"]


def test_what_need_not_match_may_differ(tmp_path):
    make(tmp_path / "run")
    assert make(tmp_path / "run", environment={"threads": 1, "torch": "3"}).environment == ENVIRONMENT


def test_a_change_of_environment_does_not_excuse_another_configuration(tmp_path):
    make(tmp_path / "run")
    with pytest.raises(StoreError, match="seed is 0 there and 1 now"):
        make(tmp_path / "run", config=CONFIG | {"seed": 1}, allow_environment_change=True)


def test_fresh_removes_what_geodl_wrote_and_nothing_else(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        for t in range(2):
            save_phase(run, t)
        save_progress(run, 1)
        run.events("started")
    (run.path / "report.html").write_text("old")
    (run.path / "notes.txt").write_text("mine")
    (run.path / "phases" / "notes.txt").write_text("mine too")
    run = make(tmp_path / "run", config=CONFIG | {"seed": 1}, fresh=True)
    assert run.config["seed"] == 1
    assert run.completed() == 0
    assert run.load_progress() is None
    assert run.read_events() == []
    assert sorted(contents(run.path)) == ["config.json", "notes.txt", "phases/notes.txt"]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_of_somebody_else_is_refused_and_untouched(tmp_path, fresh):
    (tmp_path / "config.json").write_text('{"architectures": ["other"]}')
    with pytest.raises(StoreError, match="is not a directory of geodl's"):
        make(tmp_path, fresh=fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json").rename(tmp_path / "holiday.jpg")
    with pytest.raises(StoreError, match="is not a directory of geodl's"):
        make(tmp_path, fresh=fresh)
    with pytest.raises(StoreError, match=r"holiday\.jpg is a file; a directory is needed"):
        make(tmp_path / "holiday.jpg", fresh=fresh)


def test_directories_of_other_versions_are_refused_in_one_line(tmp_path):
    path = make(tmp_path / "run").path / "config.json"
    record = content(path)
    rewrite(path, record | {"format": 99})
    with pytest.raises(StoreError, match="has format 99; this version of geodl reads format 2"):
        make(tmp_path / "run")
    path.write_text(json.dumps(record | {"format": 1}))
    for fresh in (False, True):
        with pytest.raises(StoreError, match=r"run was written by geodl 0\.1 and cannot be opened by this version$"):
            make(tmp_path / "run", fresh=fresh)


# Phases and progress.


def test_phases_come_back_in_order_and_drop_the_progress(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        save_progress(run, 1)
        save_progress(run, 2)
        tensors, progress = run.load_progress()
        assert tensors["weight"].tolist() == [2.0] * 4
        assert progress == {"step": 2}
        save_phase(run, 0)
        assert run.completed() == 1
        assert run.load_progress() is None
        for t in (0, 2):
            with pytest.raises(StoreError, match=f"phase {t} cannot be saved, the next one is 1"):
                save_phase(run, t)
        save_progress(run, 3)
        run.clear_progress()
        assert run.load_progress() is None
    phase = RunDirectory(run.path).load_phase(0)
    assert phase.model["weight"].tolist() == [[0.0] * 4]
    assert phase.memory["pixels"].dtype == torch.uint8
    assert phase.metrics == metrics_of(0)
    assert phase.extra == {"t": 0}
    assert sorted(p.name for p in (run.path / "phases" / "00").iterdir()) == [
        "extra.json",
        "manifest.json",
        "memory.safetensors",
        "metrics.json",
        "model.safetensors",
    ]


def test_equal_runs_have_equal_bytes_wherever_they_are(tmp_path):
    for name in ("a", "b"):
        run = make(tmp_path / name)
        with run.lock():
            save_phase(run, 0)
            save_progress(run, 5)
            run.events("started", run=name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 7


def test_nothing_is_written_without_the_lock(tmp_path):
    run = make(tmp_path / "run")
    before = contents(run.path)
    writes = [lambda: save_phase(run, 0), lambda: save_progress(run, 0), run.clear_progress, lambda: run.events("x")]
    for write in writes:
        with pytest.raises(StoreError, match="only be written by the holder of its lock"):
            write()
    with run.lock():
        pass
    with pytest.raises(StoreError, match="only be written by the holder of its lock"):
        save_phase(run, 0)
    assert contents(run.path) == before


def test_a_missing_phase_is_named(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        for t in range(3):
            save_phase(run, t)
    (run.path / "phases/01").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="phases/01 is missing, although a later phase is there"):
        run.completed()


def test_more_than_a_hundred_phases_keep_their_order(tmp_path):
    run = make(tmp_path / "run")
    for t in range(101):
        (run.path / "phases" / f"{t:02d}").mkdir(parents=True)
    assert run.completed() == 101
    with run.lock():
        save_phase(run, 101)
    assert run.load_phase(101).extra == {"t": 101}


# Events.


def test_events_keep_their_order_and_survive_torn_lines(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        run.events("phase", t=0, name="µ")
        run.events("loss", value=float("nan"))
        with (run.path / "events.jsonl").open("ab") as file:
            file.write('{"kind": "torn µ'.encode()[:-1])  # in the middle of a letter
        assert [e["kind"] for e in run.read_events()] == ["phase", "loss"]
        run.events("phase", t=1)
    events = run.read_events()
    assert [e["kind"] for e in events] == ["phase", "loss", "phase"]
    assert events[0]["name"] == "µ"
    assert events[1]["value"] == "nan"
    assert events[2]["t"] == 1
    assert all(e["time"].endswith("+00:00") for e in events)


# A fault at every step of every write.


def before_save(run):
    save_phase(run, 0)
    save_progress(run, 7)


def before_start_over(run):
    save_phase(run, 0)
    save_phase(run, 1)
    save_progress(run, 7)
    run.events("started")
    (run.path / "report.html").write_text("old")


def locking(write):
    """Open the run as a new process would, take the lock, write."""

    def operation(path):
        run = make(path)
        with run.lock():
            write(run)

    return operation


WRITES = {
    "save_progress": (before_save, locking(lambda run: save_progress(run, 8))),
    "clear_progress": (before_save, locking(lambda run: run.clear_progress())),
    "save_phase": (before_save, locking(lambda run: save_phase(run, 1))),
    "first phase": (lambda run: save_progress(run, 7), locking(lambda run: save_phase(run, 0))),
    "environment": (before_save, lambda path: make(path, environment={"threads": 2}, allow_environment_change=True)),
}


def prepare(path, before):
    run = make(path)
    with run.lock():
        before(run)
    return state(run)


def count_steps(path, monkeypatch, before, operation):
    """Do it without a fault; give the number of steps, the states before and after, and the final bytes."""
    old = prepare(path, before)
    names = []
    with monkeypatch.context() as patch:
        patch.setattr(files, "crash_point", lambda step, _: names.append(step))
        operation(path)
    return len(names), old, state(RunDirectory(path)), contents(path)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("tear", [False, True])
def test_killed_at_any_step_the_state_is_the_old_or_the_new_one(tmp_path, monkeypatch, name, tear):
    before, operation = WRITES[name]
    steps, old, new, final = count_steps(tmp_path / "whole", monkeypatch, before, operation)
    assert steps > 0
    seen = []
    for n in range(steps):
        path = tmp_path / str(n)
        prepare(path, before)
        with monkeypatch.context() as patch:
            patch.setattr(files, "crash_point", break_at(n, Killed(), tear))
            with pytest.raises(Killed):
                operation(path)
        found = state(RunDirectory(path))
        assert found in (old, new), f"a mixture after step {n}"
        seen.append(found == new)
        if found == old:
            operation(path)
        run = RunDirectory(path)
        with run.lock():
            run.events("continued")
            if run.load_progress() is None:
                run.clear_progress()
        assert state(run) == new
        assert contents(path) == final, "the same bytes as without the kill, and no leftovers"
    assert seen == sorted(seen), "once new, always new"


@pytest.mark.parametrize("name", WRITES)
def test_a_disk_full_at_any_step_is_a_clear_error_and_leaves_no_leftover(tmp_path, monkeypatch, name):
    before, operation = WRITES[name]
    steps, old, new, _ = count_steps(tmp_path / "whole", monkeypatch, before, operation)
    for n in range(steps):
        path = tmp_path / str(n)
        prepare(path, before)
        with monkeypatch.context() as patch:
            failure = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(files, "crash_point", break_at(n, failure, tear=False))
            with pytest.raises(StoreError, match=r"\(what was there before is kept\): the disk is full; make room"):
                operation(path)
        assert state(RunDirectory(path)) in (old, new)
        assert not list(path.rglob(f"{TEMPORARY}*"))


def test_killed_while_it_is_created_the_same_call_creates_it(tmp_path, monkeypatch):
    make(tmp_path / "whole")
    for n in range(5):
        path = tmp_path / str(n)
        with monkeypatch.context() as patch:
            patch.setattr(files, "crash_point", break_at(n, Killed(), tear=True))
            with pytest.raises(Killed):
                make(path)
        with make(path).lock():
            pass
        assert contents(path) == contents(tmp_path / "whole")


def test_killed_while_starting_over_a_shorter_sound_run_remains(tmp_path, monkeypatch):
    def start_over(path):
        return make(path, config=CONFIG | {"seed": 1}, fresh=True)

    steps, old, new, final = count_steps(tmp_path / "whole", monkeypatch, before_start_over, start_over)
    lengths = []
    for n in range(steps):
        path = tmp_path / str(n)
        prepare(path, before_start_over)
        with monkeypatch.context() as patch:
            patch.setattr(files, "crash_point", break_at(n, Killed(), tear=True))
            with pytest.raises(Killed):
                start_over(path)
        found = state(RunDirectory(path))
        assert found == new or (found["config"] == old["config"] and found["progress"] is None)
        assert found["phases"] == old["phases"][: len(found["phases"])]
        lengths.append(len(found["phases"]))
        with start_over(path).lock():
            pass
        assert contents(path) == final
    assert set(lengths) == {0, 1, 2}


def test_leftovers_are_ignored_by_readers_and_removed_by_the_next_writer(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        before_save(run)
    before = contents(run.path)
    (run.path / "phases" / f"{TEMPORARY}01-abc").mkdir()
    (run.path / "phases" / f"{TEMPORARY}01-abc" / "model.safetensors").write_bytes(b"half")
    (run.path / "progress" / f"{TEMPORARY}checkpoint.safetensors-abc").write_bytes(b"half")
    (run.path / f"{TEMPORARY}config.json-abc").write_bytes(b"half")
    assert make(run.path).completed() == 1
    assert len(list(run.path.rglob(f"{TEMPORARY}*"))) == 3, "another process may be writing: hands off without the lock"
    with run.lock():
        assert contents(run.path) == before
        assert not list(run.path.rglob(f"{TEMPORARY}*"))


# Several processes.


def test_a_run_that_was_replaced_meanwhile_is_not_written(tmp_path):
    run = make(tmp_path / "run")
    make(tmp_path / "run", config=CONFIG | {"seed": 1}, fresh=True)
    with pytest.raises(StoreError, match="was replaced by another process"), run.lock():
        pass
    with make(tmp_path / "run", config=CONFIG | {"seed": 1}).lock():
        pass


WRITER = """
import itertools, sys, torch
from pathlib import Path
from geodl.store import RunDirectory

run = RunDirectory(Path(sys.argv[1]))
with run.lock():
    print("locked", flush=True)
    for t in itertools.count(run.completed()):
        for step in range(4):
            run.save_progress({"weight": torch.full((5000,), float(step))}, {"step": step})
            run.events("step", step=step)
        run.save_phase(t, {"weight": torch.full((5000,), float(t))}, {}, {"t": t}, {})
"""


@pytest.fixture
def writer():
    """Start processes that write to a run without end; none outlives the test."""
    started = []

    def start(path):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_size_is_told_while_files_and_folders_come_and_go(tmp_path):
    (tmp_path / "kept").write_bytes(b"12345")
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            folder = tmp_path / "phases" / "temporary"
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(b"")
            shutil.rmtree(tmp_path / "phases")

    writer = threading.Thread(target=come_and_go)
    writer.start()
    try:
        assert {directory_size(tmp_path) for _ in range(2000)} == {5}
    finally:
        stop.set()
        writer.join()


def test_real_kills_leave_a_sound_run_and_a_free_lock(tmp_path, writer):
    path = tmp_path / "run"
    run = make(path, phases=None)
    done = 0
    for delay in (0.0, 0.011, 0.023):
        process = writer(path)
        expected = f"is being written by process {process.pid} on "
        with pytest.raises(StoreError, match=expected), run.lock():
            pass
        with pytest.raises(StoreError, match=expected):
            make(path)
        with pytest.raises(StoreError, match=expected):
            remove_run(path)
        assert summarize(path).state == "running"
        deadline = time.monotonic() + 60
        while run.completed() <= done and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with run.lock():
            assert not list(path.rglob(f"{TEMPORARY}*"))
        assert run.completed() > done
        done = run.completed()
        for t in range(done):
            assert run.load_phase(t).model["weight"].unique().tolist() == [float(t)]
            assert run.load_phase(t).metrics == {"t": t}
        progress = run.load_progress()
        assert progress is None or progress[0]["weight"].unique().tolist() == [float(progress[1]["step"])]
        assert run.read_events()


# The list of runs.


def test_runs_are_listed_with_state_and_result(tmp_path):
    for name, phases in (("complete", 3), ("begun", 1), ("new", 0)):
        run = make(tmp_path / name)
        with run.lock():
            for t in range(phases):
                save_phase(run, t)
    with make(tmp_path / "damaged").lock():
        (tmp_path / "damaged/phases/01").mkdir(parents=True)
    model = make(tmp_path / "model", phases=None)
    with model.lock():
        save_phase(model, 0)
    (tmp_path / "photos").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("[]")
    (tmp_path / "notes.txt").write_text("")
    with make(tmp_path / "running").lock():
        runs = list_runs(tmp_path)
    found = [(r.name, r.state, r.done, r.total, r.result) for r in runs]
    assert found == [
        ("begun", "interrupted", 1, 3, "0.0 % on 1 class (k-NME)"),
        ("complete", "complete", 3, 3, "2.0 % on 3 classes (k-NME)"),
        ("damaged", "damaged", 0, 3, None),
        ("model", "complete", 1, None, "0.0 % on 1 class (k-NME)"),
        ("new", "interrupted", 0, 3, None),
        ("running", "running", 0, 3, None),
    ]
    assert runs[1].size == sum(p.stat().st_size for p in runs[1].path.rglob("*") if p.is_file())
    with model.lock():
        save_progress(model, 1)
    assert summarize(model.path).state == "interrupted"


def test_no_runs_where_there_is_nothing(tmp_path):
    assert list_runs(tmp_path) == []
    assert list_runs(tmp_path / "missing") == []


def test_a_run_is_removed_whole_and_nothing_else_is(tmp_path, monkeypatch):
    make(tmp_path / "a")
    run = make(tmp_path / "b")
    with run.lock(), pytest.raises(StoreError, match="is being written by"):
        remove_run(run.path)
    (tmp_path / "photos").mkdir()
    for path in (tmp_path / "photos", tmp_path / "missing", tmp_path):
        with pytest.raises(StoreError, match="is not a directory of geodl's"):
            remove_run(path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "crash_point", break_at(0, Killed(), tear=False))
        with pytest.raises(Killed):
            remove_run(tmp_path / "b")
    assert [r.name for r in list_runs(tmp_path)] == ["a"]
    monkeypatch.chdir(tmp_path)
    remove_run(Path("a"))
    assert [p.name for p in tmp_path.iterdir()] == ["photos"], "also what the killed removal left"
