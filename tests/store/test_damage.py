"""Damaged directories: every flipped bit is found, a lost head is replaced, odd files and links do no harm."""

import os
import shutil
from contextlib import nullcontext
from functools import partial

import pytest
from tests.helpers.directories import (
    FILES,
    commit,
    content,
    contents,
    make,
    make_model,
    metrics_of,
    object_of,
    put_odd,
    save_progress,
    saved,
    sign,
    state,
)

from geodl.core.errors import StoreError
from geodl.store import Directory

pytestmark = pytest.mark.usefixtures("no_waiting")


def begun(store):
    """Add two phases, and a third one that is begun."""
    with store.lock():
        commit(store)
        commit(store)
        save_progress(store, 7)
    return store


@pytest.fixture(params=[make, make_model])
def store(request, tmp_path):
    return begun(request.param(tmp_path / "store"))


@pytest.fixture
def run(tmp_path):
    return begun(make(tmp_path / "run"))


def spoil(path, how):
    """Change the content of a file, or put something else in its place."""
    data = path.read_bytes()
    path.unlink()
    changed = {"empty": b"", "short": data[:-1], "long": data + b" "}
    changed |= {
        "bit": data[:-1] + bytes([data[-1] ^ 1]),
        "word": data.replace(b"learn", b"leard", 1),
    }
    links = {"link": "nothing", "zeros": "/dev/zero", "loop": path.name}
    if how in changed:
        path.write_bytes(changed[how])
    elif how != "missing":
        put_odd(path, links.get(how, how))


def every_read(path):
    """Return the results of all reads, or their errors."""
    reads = {"record": lambda: (lambda run: [run.config, run.environment])(Directory(path))}
    reads |= {
        name: partial(lambda name: Directory(path).phase(1).read(name), name) for name in FILES
    }
    found = {}
    for name, read in reads.items():
        try:
            found[name] = read()
        except StoreError as error:
            found[name] = str(error)
    return found


def test_a_changed_bit_in_any_byte_is_found_by_every_read_that_uses_it(run):
    sound = every_read(run.path)
    used = {object_of(run.path, 1, name): {name} for name in FILES}
    used |= {run.path / name: set() for name in ("head.json", "head-copy.json")}
    for path, names in used.items():
        data = path.read_bytes()
        for position in range(0, len(data), 1 if names else 7):
            changed = bytearray(data)
            changed[position] ^= 1 << (position % 8)
            path.write_bytes(changed)
            found = every_read(run.path)
            wrong = {name for name in found if found[name] != sound[name]}
            assert wrong == names, f"{path.name}, byte {position}"
            for name in wrong:
                assert f"phase 1/{name} is damaged" in found[name]
                assert path.name in found[name]
                assert "\n" not in found[name]
        path.write_bytes(data)
    assert every_read(run.path) == sound


IRREGULAR = ["folder", "pipe", "socket", "loop"]


@pytest.mark.parametrize("how", ["missing", "short", "long", "link", "zeros", *IRREGULAR])
@pytest.mark.timeout(60)
def test_errors_name_the_damaged_file_and_a_remedy(store, how):
    spoil(object_of(store.path, 1, "model.safetensors"), how)
    remedy = "--fresh" if store.kind == "run" else f"`geodl undo {store.path}`"
    with pytest.raises(StoreError, match=rf"phase 1/model\.safetensors is damaged.*{remedy}"):
        store.verify()
    assert saved(store, 0).extra == {"t": 0}
    with store.lock():
        if store.kind == "run":
            dropped = store.drop_damaged()
            assert "is damaged" in dropped
            assert "not a regular file" in dropped or how not in IRREGULAR
            assert store.read_events()[-1]["phase"] == 1
        else:
            assert store.undo() == {"action": "damaged"}
            assert store.undone() == []
        assert store.completed() == 1
        commit(store)
    store.verify()
    assert saved(store, 1).extra == {"t": 1}


def test_a_damaged_step_that_is_not_needed_or_was_undone(tmp_path):
    model = make_model(tmp_path / "model")
    with model.lock():
        for _ in range(3):
            commit(model)
        object_of(model.path, 1, "extra.json").write_text("{}")
        with pytest.raises(StoreError, match="does not need it"):
            model.phase(1).json("extra.json")
        model.undo()
        path = object_of(model.path, 0, "extra.json")
        undone = content(model.path / "head.json")["undone"][0]["files"]["extra.json"][0]
        path.with_name(undone).unlink()
        with pytest.raises(StoreError, match=r"phase 2/extra\.json is damaged"):
            model.redo()
        assert model.completed() == 2


def test_a_damaged_object_is_rewritten_by_a_commit_that_shares_it(run):
    path = object_of(run.path, 0, "memory.safetensors")
    path.write_bytes(b"x" * path.stat().st_size)
    with run.lock():
        commit(run, 0)
    run.verify()


def test_unreadable_files_are_not_reported_as_damaged(run, monkeypatch):
    def fail(*arguments):
        raise PermissionError(13, "Permission denied")

    with run.lock(), monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(StoreError, match=r"Permission denied$"):
            run.phase(1).json("metrics.json")
        assert run.phase(1).damage() is None
        with pytest.raises(StoreError, match=r"Permission denied$"):
            Directory(run.path)
    assert run.phase(1).json("metrics.json") == metrics_of(1)


@pytest.mark.parametrize("how", ["missing", "empty", "word", "folder"])
@pytest.mark.parametrize("name", ["head.json", "head-copy.json"])
@pytest.mark.timeout(60)
def test_a_lost_head_is_replaced_by_its_copy_exactly(tmp_path, how, name):
    model = make_model(tmp_path / "model")
    with model.lock():
        for _ in range(3):
            commit(model)
        model.undo()
        save_progress(model, 7)
    before, facts = contents(model.path), state(model)
    spoil(model.path / name, how)
    again = Directory(model.path)
    assert state(again) == facts
    if how == "folder":  # nothing of a user's is removed
        return
    with again.lock():
        assert contents(model.path) == before


def test_losing_both_heads_is_an_error(run):
    for name in ("head.json", "head-copy.json"):
        (run.path / name).write_text("{")
    with pytest.raises(StoreError, match=r"head\.json is damaged"):
        Directory(run.path)
    for name in ("head.json", "head-copy.json"):
        (run.path / name).unlink()
    with pytest.raises(StoreError, match="is not a geodl directory"):
        Directory(run.path)


OUTSIDE = [{"id": "a", "action": {}, "files": {"x": ["../../secret", 5]}}]


@pytest.mark.parametrize("change", [{"kind": "photo"}, {"record": {}}, {"phases": OUTSIDE}])
def test_a_malformed_head_is_damaged(run, change):
    for name in ("head.json", "head-copy.json"):
        sign(run.path / name, content(run.path / name) | change)
    with pytest.raises(StoreError, match=r"head\.json is damaged, or not a geodl file"):
        Directory(run.path)


HOW = ["bit", "empty", "folder", "pipe", "file for folder", "link for folder"]


def spoil_progress(path, how, outside):
    """Damage the checkpoint, or put something else in the place of its folder."""
    progress = path / "progress"
    (checkpoint,) = progress.iterdir()
    if "for folder" not in how:
        return spoil(checkpoint, how)
    outside.mkdir()
    checkpoint.rename(outside / checkpoint.name)
    progress.rmdir()
    return progress.write_text("") if how == "file for folder" else progress.symlink_to(outside)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
def test_damaged_progress_is_dropped_and_work_resumes(run, tmp_path, how, caplog):
    spoil_progress(run.path, how, tmp_path / "outside")
    assert Directory(run.path).load_progress() is None, "who only reads goes on without it"
    assert caplog.messages == []
    with run.lock():
        assert run.load_progress() is None
        assert run.load_progress() is None
        if "for folder" not in how:
            (line,) = caplog.messages
            assert "resumes from the last complete phase" in line
            assert [event["kind"] for event in run.read_events()] == ["progress dropped"]
        save_progress(run, 8)
        assert run.load_progress()[1] == {"step": 8}
        commit(run)
        assert run.load_progress() is None
    assert not (run.path / "progress").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("action", ["undo", "commit", "fresh"])
def test_damaged_progress_blocks_nobody(run, tmp_path, how, action):
    spoil_progress(run.path, how, tmp_path / "outside")
    outside = contents(tmp_path / "outside")
    if action == "fresh":
        make(run.path, fresh=True)
    else:
        with run.lock():
            run.undo() if action == "undo" else commit(run)
    assert Directory(run.path).completed() == {"undo": 1, "commit": 3, "fresh": 0}[action]
    assert contents(tmp_path / "outside") == outside


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.timeout(60)
def test_the_log_is_a_regular_file_and_no_link(run, tmp_path, kind):
    (tmp_path / "mine").write_text("mine")
    put_odd(run.path / "events.jsonl", str(tmp_path / "mine") if kind == "link" else kind)
    with run.lock(), pytest.raises(StoreError, match=r"events\.jsonl"):
        run.events("x")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["objects", "progress", "tensorboard", "phases", "undone"])
def test_links_to_folders_elsewhere_are_not_followed_by_writers(run, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (run.path / "tensorboard").mkdir()
    (run.path / "tensorboard" / "events.out.tfevents.1").write_text("curve")
    if (run.path / name).exists():
        (run.path / name).rename(elsewhere)
    else:
        (elsewhere / "00").mkdir(parents=True)
    (run.path / name).symlink_to(elsewhere)
    (elsewhere / ".geodl-tmp-x").write_text("not ours")
    (elsewhere / ("0" * 64)).write_text("not ours")
    before = contents(elsewhere)

    def write():
        with run.lock():
            save_progress(run, 1)
            commit(run)
            run.undo()

    for action in (write, lambda: make(run.path, fresh=True)):
        refused = pytest.raises(StoreError, match="is a link or a file where geodl keeps")
        with refused if name == "objects" else nullcontext():
            action()
    assert contents(elsewhere) == before


def test_objects_behind_a_link_are_not_read(run, tmp_path):
    objects = run.path / "objects"
    objects.rename(tmp_path / "elsewhere")
    objects.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link"):
        run.verify()


def test_the_directory_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run = make(tmp_path / "run")
    with run.lock():
        commit(run)
    assert Directory(tmp_path / "disk").completed() == 1
    shutil.rmtree(tmp_path / "disk" / "objects")
    assert Directory(tmp_path / "run").phase(0).damage()
