"""Directories: configuration, phases, undo and redo, shared and forgotten files, removal."""

import json

import pytest
import torch
from tests.helpers.command import completed
from tests.helpers.directories import (
    CONFIG,
    ENVIRONMENT,
    commit,
    content,
    contents,
    contents_of,
    make,
    make_model,
    metrics_of,
    save_progress,
    saved,
    sign,
    state,
)

from geodl.core import files
from geodl.core.errors import StoreError
from geodl.store import Directory, exists, refuse_foreign, remove_directory

pytestmark = pytest.mark.usefixtures("no_waiting")


def steps(store):
    return [store.phase(t).action["step"] for t in range(store.completed())]


def test_a_new_directory_reads_back_what_it_was_made_with(tmp_path):
    assert not exists(tmp_path / "deep" / "run")
    run = make(tmp_path / "deep" / "run")
    schedule = {"epochs": 3, "milestones": [1, 2]}
    for each in (run, make(run.path), Directory(run.path)):
        assert each.config == {"method": "lucir", "schedule": schedule, "seed": 0}
        assert (each.environment, each.phases, each.kind) == (ENVIRONMENT, 3, "run")
        assert (each.completed(), each.version, each.load_progress()) == (0, None, None)
        assert (each.read_events(), each.undone()) == ([], [])
    assert exists(run.path)


def test_a_directory_that_is_read_while_it_is_made_has_lost_nothing(tmp_path, monkeypatch, caplog):
    write = files.atomic_write

    def read_after(path, content):
        write(path, content)
        Directory(tmp_path / "run").completed()

    monkeypatch.setattr(files, "atomic_write", read_after)
    Directory.create_or_open(tmp_path / "run", {"seed": 1})
    assert not caplog.records


def test_another_configuration_is_refused_with_every_difference_named(tmp_path):
    make(tmp_path / "run")
    other = {"method": "lucir", "schedule": {"epochs": 5, "milestones": [1, 2]}, "extra": True}
    for allowed in (False, True):
        with pytest.raises(StoreError, match="another configuration") as error:
            make(tmp_path / "run", config=other, allow_environment_change=allowed)
    message = str(error.value)
    for words in ("schedule.epochs is 3", "5 now", "extra is null", "seed is 0", "--fresh"):
        assert words in message
    assert "milestones" not in message
    assert "\n" not in message


def test_another_number_of_threads_is_refused_unless_the_change_is_allowed(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        commit(run)
        save_progress(run, 7)
    other = {"threads": 2, "torch": "2.14.0"}
    with pytest.raises(StoreError, match=r"threads is 1 .* 2 now.*--allow-environment-change"):
        make(run.path, environment=other)
    assert make(run.path, environment={"threads": 1, "torch": "3"}).environment == ENVIRONMENT
    run = make(run.path, environment=other, allow_environment_change=True)
    assert run.environment == make(run.path, environment=other).environment == other
    assert run.load_progress()[1] == {"step": 7}, "the work goes on"
    (event,) = run.read_events()
    assert event["differences"] == ["threads is 1 there and 2 now"]


def test_fresh_removes_only_files_of_geodl(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        commit(run)
        commit(run)
        save_progress(run, 1)
        run.events("started")
    (run.path / "tensorboard").mkdir()
    for name in ("report.html", "tensorboard/events.out.tfevents.1", "notes.txt", "objects/mine"):
        (run.path / name).write_text("x")
    version = Directory(run.path).version
    again = make(run.path, config=CONFIG | {"seed": 1}, fresh=True)
    assert again.config["seed"] == 1
    assert (again.completed(), again.load_progress(), again.read_events()) == (0, None, [])
    kept = ["head-copy.json", "head.json", "notes.txt", "objects/mine"]
    assert sorted(contents(run.path)) == kept
    with pytest.raises(StoreError, match="was replaced by another process"), run.lock():
        pass
    with again.lock():
        commit(again)
    assert again.version[0] > version[0], "no state is taken for another"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_foreign_directory_is_refused_and_untouched(tmp_path, fresh):
    for name in ("config.json", "head.json"):
        (tmp_path / name).write_text('{"architectures": ["other"]}')
        with pytest.raises(StoreError, match=r"not a geodl (directory|file)"):
            make(tmp_path, fresh=fresh)
        assert [p.name for p in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    (tmp_path / "holiday.jpg").write_text("")
    for refused in (lambda: make(tmp_path, fresh=fresh), lambda: refuse_foreign(tmp_path)):
        with pytest.raises(StoreError, match="is not a geodl directory"):
            refused()
    with pytest.raises(StoreError, match=r"holiday\.jpg is a file; a directory is needed"):
        make(tmp_path / "holiday.jpg", fresh=fresh)


def test_a_model_is_not_removed_for_a_run(model):
    with pytest.raises(StoreError, match="is the directory of a model"):
        make(model.path, fresh=True)
    assert Directory(model.path).completed() == 3


def test_directories_of_other_versions_are_refused_in_one_line(tmp_path):
    path = make(tmp_path / "run").path
    record = content(path / "head.json")
    sign(path / "head.json", record | {"format": 99})
    (path / "head-copy.json").unlink()
    with pytest.raises(StoreError, match="has format 99; this version of geodl reads"):
        make(path)
    (path / "head.json").unlink()
    (path / "config.json").write_text(json.dumps({"config": {}, "format": 1}))
    for fresh in (False, True):
        with pytest.raises(StoreError, match=r"run was written by geodl 0\.1 and cannot be opened"):
            make(path, fresh=fresh)


def test_phases_are_read_back_in_order_and_drop_the_progress(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        save_progress(run, 1)
        save_progress(run, 2)
        tensors, progress = run.load_progress()
        assert (tensors["weight"].tolist(), progress) == ([2.0] * 4, {"step": 2})
        commit(run)
        assert run.load_progress() is None
        save_progress(run, 3)
        run.clear_progress()
        assert run.load_progress() is None
        assert not (run.path / "progress").exists()
        commit(run)
    phase = saved(Directory(run.path), 0)
    assert phase.model["weight"].tolist() == [[0.0] * 4]
    assert phase.memory["pixels"].dtype == torch.uint8
    assert (phase.metrics, phase.extra) == (metrics_of(0), {"t": 0})
    assert steps(Directory(run.path)) == [0, 1]
    for number in (2, -3):
        with pytest.raises(StoreError, match="no phase"):
            run.phase(number)


def test_equal_runs_have_equal_bytes_wherever_they_are(tmp_path):
    for name in ("a", "b"):
        run = make(tmp_path / name)
        with run.lock():
            commit(run)
            save_progress(run, 5)
            run.events("started", run=name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 7


def test_nothing_is_written_without_the_lock(tmp_path):
    run = make(tmp_path / "run")
    before = contents(run.path)

    def refused():
        for write in (
            lambda: commit(run),
            lambda: save_progress(run, 0),
            lambda: run.events("x"),
            run.clear_progress,
            run.undo,
            run.redo,
            run.drop_damaged,
        ):
            with pytest.raises(StoreError, match="only be written by the holder of its lock"):
                write()

    refused()
    with run.lock():
        pass
    refused()
    assert contents(run.path) == before


def test_what_was_undone_is_redone_exactly(model):
    with model.lock():
        model.clear_progress()
        before = contents(model.path / "objects")
        facts = state(model)
        assert [model.undo()["step"] for _ in range(2)] == [2, 1]
        assert (steps(model), [each["step"] for each in model.undone()]) == ([0], [1, 2])
        save_progress(model, 9)
        assert model.redo()["step"] == 1
        assert (steps(model), model.load_progress()) == ([0, 1], None)
        model.redo()
        assert (state(model), contents(model.path / "objects")) == (facts, before)
        with pytest.raises(StoreError, match="nothing to redo"):
            model.redo()
        for _ in range(3):
            model.undo()
        with pytest.raises(StoreError, match="nothing to undo"):
            model.undo()
        assert model.version is None


def test_another_commit_ends_what_could_be_redone_and_every_state_has_a_version(model):
    seen = [model.version]
    with model.lock():
        for change in (model.undo, lambda: commit(model, 5), model.undo, model.redo):
            change()
            seen.append(model.version)
            assert model.load_progress() is None, "not that of the phase that was undone"
        assert (steps(model), model.undone()) == ([0, 1, 5], [])
    assert len(set(seen)) == len(seen)
    assert Directory(model.path).version == seen[-1]
    assert len(list((model.path / "objects").iterdir())) == 12


def test_files_of_any_name_and_kind_are_stored_once(tmp_path):
    store = make_model(tmp_path / "model")
    picture = b"\xff\xd8 as it came"
    with store.lock():
        store.commit({"pictures/1.jpg": picture, "x.safetensors": {}, "a.json": {"µ": 1}}, {})
        shared = store.phase(0).files["pictures/1.jpg"]
        store.commit({"pictures/2.jpg": picture, "pictures/3.jpg": shared}, {"action": "more"})
    again = Directory(store.path)
    assert again.phase(0).read("pictures/1.jpg") == again.phase(1).read("pictures/3.jpg") == picture
    assert again.phase(0).tensors("x.safetensors") == {}
    assert again.phase(0).json("a.json") == {"µ": 1}
    assert len(list((store.path / "objects").iterdir())) == 3
    with pytest.raises(StoreError, match=r"phase 1/a\.json is not kept"):
        again.phase(1).json("a.json")


def test_newest_only_files_are_removed_from_older_phases(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        for t in range(3):
            files = contents_of(t) | {"statistics.safetensors": {"sum": torch.full((4,), t)}}
            run.commit(files, {}, newest_only=["statistics.safetensors"])
    kept = ["statistics.safetensors" in run.phase(t).files for t in range(3)]
    assert kept == [False, False, True]
    assert len(list((run.path / "objects").iterdir())) == 13
    assert state(run)["phases"][1][1] is False


def test_forgotten_states_keep_only_lasting_files(model):
    with model.lock():
        for _ in range(2):
            commit(model, states=3, lasting=["metrics.json"])
        assert [model.phase(t).forgotten for t in range(5)] == [True, True, False, False, False]
        assert list(model.phase(1).files) == ["metrics.json"]
        assert model.phase(1).json("metrics.json") == metrics_of(1)
        assert len(list((model.path / "objects").iterdir())) == 2 + 3 * 4
        for _ in range(2):
            model.undo()
        with pytest.raises(StoreError, match="no longer kept, it cannot be undone"):
            model.undo()
        commit(model, 7, states=1)
    assert [list(model.phase(t).files) for t in range(3)] == [[], [], []]
    assert len(list((model.path / "objects").iterdir())) == 4, "nothing of the others is left"


def test_remove_directory_removes_nothing_else(tmp_path):
    run = make(tmp_path / "run")
    with run.lock(), pytest.raises(StoreError, match="is being written by"):
        remove_directory(run.path)
    (tmp_path / "photos").mkdir()
    for path in (tmp_path / "photos", tmp_path / "missing", tmp_path):
        with pytest.raises(StoreError, match=r"not a geodl directory|no such directory"):
            remove_directory(path)
    (tmp_path / ".geodl-tmp-killed").mkdir()
    remove_directory(run.path)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_the_store_loads_no_torch_until_tensors_are_read(model):
    code = (
        "import sys; from pathlib import Path; from geodl.store import Directory\n"
        "phase = Directory(Path(sys.argv[1])).phase(-1); phase.json('metrics.json')\n"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "ours = {name for name in sys.modules if name.startswith('geodl.')}\n"
        "assert all(name.startswith(('geodl.core', 'geodl.store')) for name in ours), ours\n"
        "assert phase.tensors('model.safetensors') and 'torch' in sys.modules\n"
    )
    completed(model.path, code=code)
