"""The list of runs, damaged runs, and output that cannot be written."""

import json
import os
import re
import shutil

import pytest
from tests.helpers import tiny
from tests.helpers.command import geodl
from tests.helpers.directories import (
    commit,
    make,
    make_model,
    metrics_of,
    object_of,
    rewrite,
    save_progress,
)
from tests.helpers.runs import result_files

from geodl.bench.experiment import run_config
from geodl.bench.runs import list_runs, summarize
from geodl.bench.sweep import shipping
from geodl.bench.sweep.jobs import Job
from geodl.core.errors import StoreError
from geodl.store import Directory, remove_directory

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    run_config(tiny.config(method="finetune", analysis=False), out=path, data=tiny.dataset())
    return path


def test_runs_are_listed_with_state_and_result(tmp_path):
    for name, phases in (("complete", 3), ("begun", 1), ("new", 0)):
        run = make(tmp_path / name)
        with run.lock():
            for _ in range(phases):
                commit(run)
    model = make_model(tmp_path / "model")
    with model.lock():
        commit(model)
    (tmp_path / "photos").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("[]")
    (tmp_path / "notes.txt").write_text("")
    with make(tmp_path / "running").lock():
        runs = list_runs(tmp_path)
    found = [(run.name, run.state, run.done, run.total, run.result) for run in runs]
    assert found == [
        ("begun", "interrupted", 1, 3, "0.0 % on 1 class (k-NME)"),
        ("complete", "complete", 3, 3, "2.0 % on 3 classes (k-NME)"),
        ("model", "complete", 1, None, "0.0 % on 1 class (k-NME)"),
        ("new", "interrupted", 0, 3, None),
        ("running", "running", 0, 3, None),
    ]
    assert runs[1].size == sum(p.stat().st_size for p in runs[1].path.rglob("*") if p.is_file())
    with model.lock():
        save_progress(model, 1)
    assert summarize(model.path).state == "interrupted"
    remove_directory(tmp_path / "begun")
    assert [run.name for run in list_runs(tmp_path)] == ["complete", "model", "new", "running"]


def test_no_runs_where_there_is_nothing(tmp_path):
    assert list_runs(tmp_path) == []
    assert list_runs(tmp_path / "missing") == []


def test_one_bad_run_does_not_hide_the_others(tmp_path):
    with make(tmp_path / "sound").lock():
        pass
    for name in ("broken", "changed", "old", "pipe", "flipped"):
        store = make(tmp_path / name)
        with store.lock():
            commit(store)
        if name != "flipped":
            (tmp_path / name / "head-copy.json").unlink()
    (tmp_path / "broken" / "head.json").write_text("{")
    path = tmp_path / "changed" / "head.json"
    path.write_text(path.read_text().replace("lucir", "lucis"))
    (tmp_path / "old" / "head.json").unlink()
    (tmp_path / "old" / "config.json").write_text(json.dumps({"config": {}, "format": 1}))
    (tmp_path / "pipe" / "head.json").unlink()
    os.mkfifo(tmp_path / "pipe" / "head.json")
    object_of(tmp_path / "flipped", 0, "metrics.json").write_text('{"headline": "1 %"}')
    found = {each.name: each for each in list_runs(tmp_path)}
    bad = dict.fromkeys(("broken", "changed", "old", "pipe"), "unreadable")
    assert {name: each.state for name, each in found.items()} == {
        **bad,
        "flipped": "damaged",
        "sound": "interrupted",
    }
    assert "was written by geodl 0.1" in found["old"].error
    assert "does not have the checksum" in found["changed"].error
    assert found["flipped"].result is None
    shown = geodl("runs", "list", str(tmp_path), cwd=tmp_path).stdout
    assert "sound" in shown
    assert "was written by geodl 0.1" in shown
    listed = json.loads(geodl("runs", "list", str(tmp_path), "--json", cwd=tmp_path).stdout)
    assert [each["error"] is None for each in listed] == [False, False, False, False, False, True]


def test_odd_results_are_no_reason_to_fail(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        commit(run)
    for value, shown in (
        ({"accuracy": {}}, None),
        ({}, None),
        ({"accuracy": {"ame": 5.0}, "classes": ["a"]}, "5.0 % on 1 class (AME (oracle))"),
        ({"accuracy": {"mine": 5.0}, "classes": ["a"]}, "5.0 % on 1 class (mine)"),
        (metrics_of(1), "1.0 % on 2 classes (k-NME)"),
    ):
        rewrite(run.path, 0, "metrics.json", value)
        assert summarize(run.path).result == shown
    rewrite(run.path, 0, "metrics.json", {"accuracy": {"nme": "[red]"}, "classes": 5})
    assert "damaged" in geodl("runs", "list", str(tmp_path), cwd=tmp_path).stdout
    failed = geodl("runs", "show", str(run.path), cwd=tmp_path, status=2)
    assert "is damaged, or not a geodl file" in failed.stderr
    rewrite(run.path, 0, "metrics.json", [])
    assert summarize(run.path).state == "damaged"


def test_a_damaged_phase_and_those_after_it_are_computed_again(finished, tmp_path, caplog):
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    damaged = object_of(path, 1, "model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(StoreError, match=r"phase 1/model\.safetensors is damaged.*same command"):
        Directory(path).verify()
    run_config(tiny.config(method="finetune", analysis=False), out=path, data=tiny.dataset())
    assert "phase 1/model.safetensors is damaged" in caplog.text
    assert result_files(path) == result_files(finished)
    kinds = [event["kind"] for event in Directory(path).read_events()]
    assert kinds.count("evaluated") == 3 + 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--out {no}/x.html", "file is a file; a directory is needed"),
        ("--out {yes}/x.html --figures {no}/f", "cannot write .*: Not a directory"),
        ("--out {yes}/x.html --tables {no}/t", "cannot write .*: Not a directory"),
    ],
)
def test_a_report_that_cannot_be_written_is_one_line(finished, tmp_path, words, expected):
    (tmp_path / "file").write_text("")
    options = words.format(no=tmp_path / "file", yes=tmp_path).split()
    failed = geodl("report", str(finished), *options, cwd=tmp_path, status=2)
    assert failed.stderr.count("\n") == 1
    assert re.search(expected, failed.stderr)


def prepare_sweep(run):
    Job(tiny.config(), run, "a run").prepare()


def draw_curves(run):
    pytest.importorskip("tensorboard")
    config = tiny.config(method="finetune", analysis=False, tensorboard=True)
    run_config(config, out=run, data=tiny.dataset())


def receive_files(run):
    shipping.receive(run, {"objects/one": b"1"}, {"objects/one"})


@pytest.mark.parametrize(
    ("write", "link"),
    [
        (prepare_sweep, ".sweep"),
        (draw_curves, "run/tensorboard"),
        (receive_files, "run/objects"),
    ],
)
def test_nothing_is_written_through_a_link_below_the_named_directory(tmp_path, write, link):
    (tmp_path / "outside").mkdir()
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="is a link or a file where geodl keeps a directory"):
        write(tmp_path / "run")
    assert list((tmp_path / "outside").iterdir()) == []
