"""Runs whose files go from node to node."""

import os
from pathlib import Path

from tests.helpers import tiny
from tests.helpers.runs import result_files

from geodl.bench.experiment import run_config
from geodl.bench.sweep import shipping
from geodl.store import Directory


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
    assert list(shipping.scan(tmp_path)) == ["head.json"]
    assert not (tmp_path / "phases" / "temporary").exists()
