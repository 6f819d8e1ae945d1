"""Directories of version 0.2: reading, conversion by the first writer, damage."""

import os
import shutil

import pytest
from tests.helpers.directories import (
    CONFIG,
    commit,
    content,
    contents,
    make,
    metrics_of,
    saved,
    sign,
    write_old,
)

from geodl.core.errors import StoreError
from geodl.store import Directory, exists

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def old(tmp_path):
    write_old(tmp_path / "model", 2, model=True, undone=1)
    return tmp_path / "model"


def test_it_is_read_without_being_touched(old):
    before = contents(old)
    store = Directory(old)
    assert exists(old)
    assert (store.kind, store.config, store.completed()) == ("model", {}, 2)
    assert saved(store, 1).metrics == metrics_of(1)
    assert saved(store, 1).model["weight"].tolist() == [[1.0] * 4] * 2
    assert store.phase(1).action == {"action": "learn", "step": 1}
    assert store.undone() == [{"action": "learn", "step": 2}]
    assert store.load_progress() is None
    store.verify()
    assert contents(old) == before


def test_the_first_writer_converts_it(old):
    (old / "notes.txt").write_text("mine")
    before = Directory(old)
    with before.lock():
        pass
    after = Directory(old)
    names = {path.name for path in old.iterdir()}
    assert names == {"head.json", "head-copy.json", "objects", "lock", "notes.txt"}
    assert [after.phase(t).files for t in range(2)] == [before.phase(t).files for t in range(2)]
    assert after.version is not None
    with after.lock():
        assert after.redo()["step"] == 2
        commit(after)
    assert [saved(after, t).extra["t"] for t in range(4)] == [0, 1, 2, 3]
    after.verify()


def test_a_run_resumes(tmp_path):
    write_old(tmp_path / "run", 2)
    run = make(tmp_path / "run")
    assert (run.kind, run.phases, run.completed()) == ("run", 3, 2)
    with pytest.raises(StoreError, match="seed is 0 there and 1 now"):
        make(run.path, config=CONFIG | {"seed": 1})
    with run.lock():
        commit(run)
    assert [saved(run, t).extra["t"] for t in range(3)] == [0, 1, 2]
    write_old(tmp_path / "again", 2)
    assert make(tmp_path / "again", fresh=True).completed() == 0
    assert not (tmp_path / "again" / "phases").exists()


def test_a_disk_without_hard_links_gets_copies(old, monkeypatch):
    def refuse(*arguments):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with Directory(old).lock():
        pass
    Directory(old).verify()


@pytest.mark.parametrize("name", ["model.safetensors", "extra.json", "manifest.json"])
@pytest.mark.parametrize("how", ["bit", "missing", "link"])
def test_damage_survives_conversion(old, tmp_path, name, how):
    path = old / "phases" / "01" / name
    data = path.read_bytes()
    path.unlink()
    (tmp_path / "secret").write_bytes(data[:-1] + b"!")
    if how == "bit":
        path.write_bytes(data[:-1] + b"!")
    elif how == "link":
        path.symlink_to(tmp_path / "secret")
    for _ in range(2):
        store = Directory(old)
        with pytest.raises(StoreError, match=r"phase 1/.* is (damaged|not kept)"):
            saved(store, 1)
        assert saved(store, 0).extra["t"] == 0
        with store.lock():  # converts
            pass
    with store.lock():
        assert store.undo() == {"action": "damaged"}
    assert not any(path.is_symlink() for path in old.rglob("*"))


@pytest.mark.parametrize("name", ["phases", "phases/01"])
def test_links_in_place_of_folders_are_refused(old, tmp_path, name):
    (old / name).rename(tmp_path / "elsewhere")
    (old / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"{name} is a link or a file where geodl keeps"):
        Directory(old)


def test_a_missing_phase_and_odd_names(old):
    for name in ("002", "0", "٠٢", "+2", "02.bak"):
        (old / "phases" / name).mkdir()
    assert Directory(old).completed() == 2
    with Directory(old).lock():
        pass
    assert (old / "phases" / "02.bak").is_dir()
    write_old(old.with_name("gap"), 3)
    shutil.rmtree(old.with_name("gap") / "phases" / "01")
    with pytest.raises(StoreError, match="phase 1 is missing"):
        Directory(old.with_name("gap"))


def test_a_manifest_cannot_name_files_outside(old, tmp_path):
    path = old / "phases" / "01" / "manifest.json"
    manifest = content(path)
    manifest["files"]["../../../secret"] = manifest["files"].pop("extra.json")
    sign(path, manifest)
    assert "damaged" in Directory(old).phase(1).damage()


@pytest.mark.parametrize("change", [{"format": 3}, {"environment": 5}, {"config": {"kind": "x"}}])
def test_an_odd_record_is_refused(old, change):
    sign(old / "config.json", content(old / "config.json") | change)
    with pytest.raises(StoreError, match=r"is damaged|has format 3"):
        Directory(old)


def test_a_record_without_a_format_is_refused(old):
    record = content(old / "config.json")
    del record["format"]
    sign(old / "config.json", record)
    with pytest.raises(StoreError, match="has format None"):
        Directory(old)
