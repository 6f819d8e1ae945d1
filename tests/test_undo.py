"""Taking phases back and forgetting them: after a fault at every step, the old or the new state, never a mix."""

import errno

import pytest
import torch
from tests.directories import Killed, contents

from geodl import files
from geodl.errors import StoreError
from geodl.store import RunDirectory, read_steadily


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create_or_open(tmp_path / "run", {"kind": "model"})
    with run.lock():
        for t in range(3):
            run.save_phase(t, {"w": torch.tensor(t)}, {"m": torch.tensor(t)}, {"t": t}, {"t": t})
        run.save_progress({"w": torch.tensor(9)}, {"step": 1})
    return run


def readable(run):
    return [run.load_phase(t).extra["t"] for t in range(run.completed()) if run.remembers(t)]


def test_the_last_phase_is_taken_back_with_the_progress_beyond_it(run):
    with run.lock():
        run.drop_last_phase()
        assert readable(run) == [0, 1]
        assert run.load_progress() is None
        run.save_phase(2, {"w": torch.tensor(5)}, {}, {}, {"t": 5})
        assert run.load_progress() is None  # not that of the phase that was taken back
        assert readable(run) == [0, 1, 5]
        for _ in range(3):
            run.drop_last_phase()
        with pytest.raises(StoreError, match="no phase that could be taken back"):
            run.drop_last_phase()
    with pytest.raises(StoreError, match="holder of its lock"):
        run.drop_last_phase()


def test_what_was_taken_back_is_brought_back_exactly(run):
    with run.lock():
        run.clear_progress()
        before = contents(run.path)
        for _ in range(2):
            run.drop_last_phase(keep=True)
        assert (readable(run), run.undone()) == ([0], [1, 2])
        assert run.load_undone(2) == {"t": 2}
        run.save_progress({"w": torch.tensor(9)}, {"step": 1})
        run.redo_phase()
        assert (readable(run), run.undone(), run.load_progress()) == ([0, 1], [2], None)
        run.redo_phase()
        assert contents(run.path) == before
        with pytest.raises(StoreError, match="nothing to bring back"):
            run.redo_phase()
    with pytest.raises(StoreError, match="holder of its lock"):
        run.redo_phase()


def test_a_phase_that_is_away_for_a_moment_is_read_again(run):
    reads = []

    def read(store):
        reads.append(store)
        if len(reads) == 1:  # between two looks of a reader another process takes the phase back and brings it again
            with run.lock():
                run.drop_last_phase(keep=True)
                try:
                    return store.load_phase(2)
                finally:
                    run.redo_phase()
        return store.load_phase(2)

    assert read_steadily(run.path, read).extra == {"t": 2}
    (run.path / "phases" / "02" / "extra.json").unlink()
    with pytest.raises(StoreError, match=r"extra\.json"):
        read_steadily(run.path, lambda store: store.load_phase(2))


@pytest.mark.parametrize("change", ["save", "drop"])
def test_another_change_removes_what_was_taken_back(run, change):
    with run.lock():
        run.drop_last_phase(keep=True)
        if change == "save":
            run.save_phase(2, {"w": torch.tensor(5)}, {"m": torch.tensor(5)}, {}, {"t": 5})
        else:
            run.drop_last_phase()
        assert run.undone() == []
        assert not (run.path / "undone").exists()


def test_what_was_damaged_since_is_not_brought_back(run):
    with run.lock():
        run.drop_last_phase(keep=True)
        (run.path / "undone" / "02" / "extra.json").write_text('{"t": 3}')
        with pytest.raises(StoreError, match=r"undone/02/extra\.json is damaged"):
            run.redo_phase()
        assert readable(run) == [0, 1]


def test_odd_things_in_the_place_of_what_was_taken_back_are_harmless(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "02").mkdir()
    (run.path / "undone").symlink_to(tmp_path / "mine")
    assert run.undone() == []
    with run.lock():
        run.drop_last_phase(keep=True)
        assert run.undone() == [2]
    assert (tmp_path / "mine" / "02").is_dir()


@pytest.mark.parametrize("action", ["keep", "redo", "save"])
def test_a_kill_at_any_step_of_undo_and_redo_leaves_the_old_or_the_new_state(run, monkeypatch, action):
    with run.lock():
        run.drop_last_phase(keep=True)  # phase 2
    states = {"keep": ([0], [1, 2]), "redo": ([0, 1, 2], []), "save": ([0, 1, 5], [])}
    acts = {
        "keep": lambda: run.drop_last_phase(keep=True),
        "redo": run.redo_phase,
        "save": lambda: run.save_phase(2, {"w": torch.tensor(5)}, {"m": torch.tensor(5)}, {}, {"t": 5}),
    }
    for when in range(40):
        left = iter(range(when))

        def crash(step, path, left=left):
            if next(left, None) is None:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(files, "crash_point", crash)
            try:
                with run.lock():
                    acts[action]()
                done = True
            except Killed:
                done = False
        with run.lock():  # cleans up
            found = (readable(run), run.undone())
            run.verify()
            assert found in (([0, 1], [2]), states[action])
            assert not list(run.path.rglob(".geodl*"))
            if done:
                assert found == states[action]
                return
            if found == states[action]:  # once more from the start
                run.redo_phase() if action == "keep" else run.drop_last_phase(keep=True)
    pytest.fail("it never came to its end")


def test_forgotten_phases_keep_their_record(run):
    with run.lock():
        run.forget_phase(0)
        run.forget_phase(0)
        for t in (-1, 2):
            with pytest.raises(StoreError, match=f"phase {t} cannot be forgotten"):
                run.forget_phase(t)
    assert readable(run) == [1, 2]
    assert run.completed() == 3
    assert sorted(path.name for path in (run.path / "phases" / "00").iterdir()) == ["manifest.json", "metrics.json"]
    assert run.load_metrics(0) == {"t": 0}
    with pytest.raises(StoreError, match=r"extra\.json is no longer kept"):
        run.load_extra(0)
    run.verify()
    with pytest.raises(StoreError, match="holder of its lock"):
        run.forget_phase(1)


@pytest.mark.parametrize("action", ["drop_last_phase", "forget_phase"])
def test_a_kill_at_any_step_leaves_a_sound_run(run, monkeypatch, action):
    for when in range(20):
        left = iter(range(when))

        def crash(step, path, left=left):
            if next(left, None) is None:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(files, "crash_point", crash)
            try:
                with run.lock():
                    run.drop_last_phase() if action == "drop_last_phase" else run.forget_phase(0)
                done = True
            except Killed:
                done = False
        again = RunDirectory(run.path)
        with again.lock():  # cleans up
            found = readable(again)
            again.verify()
            assert found in ([0, 1, 2], [0, 1]) if action == "drop_last_phase" else found in ([0, 1, 2], [1, 2])
            assert not list((run.path / "phases").rglob(".geodl*"))
            if again.completed() == 2:
                again.save_phase(2, {"w": torch.tensor(2)}, {"m": torch.tensor(2)}, {"t": 2}, {"t": 2})
        if done:
            return
    pytest.fail("it never came to its end")


def test_a_phase_with_a_damaged_manifest_is_forgotten_but_never_signed_anew(run):
    (run.path / "phases" / "00" / "manifest.json").write_text("{}")
    assert not run.remembers(0)
    with run.lock():
        run.forget_phase(0)
    assert sorted(path.name for path in (run.path / "phases" / "00").iterdir()) == ["manifest.json", "metrics.json"]
    with pytest.raises(StoreError, match=r"phases/00/manifest\.json is damaged"):
        run.load_metrics(0)
    assert run.load_phase(2).extra == {"t": 2}


def test_a_full_disk_while_forgetting_is_told(run, monkeypatch):
    def full(step, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "crash_point", full)
    with run.lock(), pytest.raises(StoreError, match="the disk is full"):
        run.forget_phase(0)
    assert run.load_phase(0).extra == {"t": 0}
