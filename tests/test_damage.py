"""Damaged directories: a wrong bit is found by whatever reads it, progress is set aside, nothing hangs or leads outside."""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from tests import tiny
from tests.directories import (  # noqa: F401
    content,
    contents,
    make,
    metrics_of,
    no_waiting,
    rewrite,
    save_phase,
    save_progress,
    sign_phase,
)
from tests.test_cli import geodl

from geodl.errors import StoreError
from geodl.experiment import run_config
from geodl.files import tensor_file
from geodl.reproduce import records
from geodl.store import RunDirectory, list_runs, summarize

pytestmark = pytest.mark.usefixtures("no_waiting")
ODD_NAMES = ["002", "0", "٠٢", "²", "02 ", "+2", "02.bak"]


def model(path: Path) -> RunDirectory:
    """Make a model of three steps with one begun."""
    store = RunDirectory.create_or_open(path, {"kind": "model"})
    with store.lock():
        for t in range(3):
            save_phase(store, t)
        save_progress(store, 1)
    return store


@pytest.fixture
def store(tmp_path):
    return model(tmp_path / "model")


@pytest.fixture
def run(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        for t in range(2):
            save_phase(run, t)
        save_progress(run, 7)
    return run


def plain(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def every_read(path):
    """Everything that reading the last phase gives; a part that is refused gives its error."""
    reads = {
        "record": lambda run: [run.config, run.environment, run.phases],
        "phase": lambda run: [plain(part) if i < 2 else part for i, part in enumerate(run.load_phase(1))],
        "metrics": lambda run: run.load_metrics(1),
        "extra": lambda run: run.load_extra(1),
        "memory": lambda run: plain(run.load_memory(1)),
    }
    found = {}
    for name, read in reads.items():
        try:
            found[name] = read(RunDirectory(path))
        except StoreError as error:
            found[name] = str(error)
    return found


# Every bit counts.


def test_a_changed_bit_in_any_byte_is_found_by_every_read_that_uses_it(run):
    sound = every_read(run.path)
    used = {
        "model.safetensors": {"phase"},
        "memory.safetensors": {"phase", "memory"},
        "metrics.json": {"phase", "metrics"},
        "extra.json": {"phase", "extra"},
    }
    for path in [run.path / "config.json", *sorted((run.path / "phases" / "01").iterdir())]:
        data = path.read_bytes()
        for position in range(len(data)):
            changed = bytearray(data)
            changed[position] ^= 1 << (position % 8)
            path.write_bytes(changed)
            found = every_read(run.path)
            wrong = {name for name in found if found[name] != sound[name]}
            for name in wrong:
                assert isinstance(found[name], str), f"{path.name}, byte {position}: another answer: {found[name]}"
                assert path.name in found[name] or "is not a directory of geodl's" in found[name]
                assert "\n" not in found[name]
            if path.name in used:
                assert wrong == used[path.name], f"{path.name}, byte {position}"
        path.write_bytes(data)
    assert every_read(run.path) == sound


def test_the_error_names_the_file_and_what_to_do(run, store):
    for name in ("model.safetensors", "memory.safetensors", "metrics.json", "extra.json", "manifest.json"):
        for t, remedy in ((2, r"`geodl undo .*model` goes back"), (1, "does not need it: it is of an earlier step")):
            path = store.path / "phases" / f"{t:02d}" / name
            data = path.read_bytes()
            path.write_bytes(data[:-2])
            with pytest.raises(StoreError, match=rf"phases/{t:02d}/{name} is damaged.*; .*{remedy}"):
                store.load_phase(t)
            path.unlink()
            with pytest.raises(StoreError, match=rf"cannot read .*{name}: No such file or directory; .*{remedy}"):
                store.load_phase(t)
            path.write_bytes(data)
        path = run.path / "phases" / "01" / name
        path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(
        StoreError, match=r"is damaged.*; remove .*phases/01, and the same command computes what is missing"
    ):
        run.load_phase(1)
    (run.path / "phases" / "00" / "metrics.json").write_text("{}")
    with pytest.raises(StoreError, match=r"; remove .*phases/00 and the phases after it, and the same command"):
        run.load_metrics(0)


def test_what_cannot_be_read_now_is_not_given_up(store, monkeypatch):
    def fail(*arguments):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(StoreError, match=r"Permission denied$"):
            store.load_metrics(2)
    assert store.load_metrics(2) == metrics_of(2)


def test_a_damaged_last_step_can_be_taken_back(store):
    for file in (store.path / "phases" / "02").iterdir():
        file.write_bytes(b"nothing")
    with store.lock():
        store.drop_last_phase()
    assert store.load_phase(1).extra == {"t": 1}
    store.verify()


def test_phases_that_changed_places_are_found(run):
    phases = run.path / "phases"
    (phases / "00").rename(phases / "x")
    (phases / "01").rename(phases / "00")
    (phases / "x").rename(phases / "01")
    with pytest.raises(StoreError, match=r"00/manifest\.json is damaged.*it is of another phase"):
        run.load_metrics(0)


def test_a_manifest_leads_nowhere_else(run, tmp_path):
    (tmp_path / "secret").write_text("{}")
    path = run.path / "phases" / "01" / "manifest.json"
    manifest = content(path)
    manifest["files"]["../../../secret"] = manifest["files"]["extra.json"]
    rewrite(path, manifest)
    with pytest.raises(StoreError, match="of other files"):
        run.verify()


def test_verify_finds_damage_in_any_phase(run):
    run.verify()
    for path in sorted((run.path / "phases").rglob("*.*")):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(StoreError, match=rf"{path.parent.name}/{path.name} is damaged"):
            run.verify()
        path.write_bytes(data)
    run.verify()


def test_a_phase_that_is_replaced_while_it_is_read_is_read_anew(store, monkeypatch):
    from geodl.store import directory

    real = directory.read_manifest
    calls = []

    def take_back_and_save(folder, t):
        found = real(folder, t)
        if not calls:
            calls.append(t)
            with store.lock():
                store.drop_last_phase()
                store.save_phase(2, {"w": torch.tensor(5)}, {}, {"headline": "another"}, {})
        return found

    monkeypatch.setattr(directory, "read_manifest", take_back_and_save)
    assert RunDirectory(store.path).load_metrics(2) == {"headline": "another"}


def test_tensors_of_another_form_that_were_signed_anew_are_found(run):
    folder = run.path / "phases" / "01"
    (folder / "model.safetensors").write_bytes(tensor_file({"weight": torch.zeros(4, 2), "steps": torch.tensor(10)}))
    sign_phase(folder)
    with pytest.raises(StoreError, match=r"phases/01 is damaged: its tensors have other names, types or shapes"):
        run.load_phase(1)
    assert run.load_phase(0).extra == {"t": 0}


# Runs.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    run_config(tiny.config(method="finetune", analysis=False), out=path, data=tiny.dataset())
    return path


def test_a_run_is_not_complete_over_a_damaged_phase(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    damaged = tmp_path / "run" / "phases" / "00" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")

    def again():
        run_config(tiny.config(method="finetune", analysis=False), out=tmp_path / "run", data=tiny.dataset())

    with pytest.raises(StoreError, match=r"phases/00/model\.safetensors is damaged"):
        again()
    shutil.rmtree(tmp_path / "run" / "phases" / "02")  # interrupted in the last phase
    with pytest.raises(StoreError, match=r"phases/00/model\.safetensors is damaged"):
        again()
    shutil.rmtree(tmp_path / "run" / "phases")  # as the message says
    again()
    assert contents(tmp_path / "run").keys() == contents(finished).keys()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--out {no}/x.html", "file is a file; a directory is needed"),
        ("--out {no}/a/x.html", "cannot write .*: Not a directory"),
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


def test_results_that_cannot_be_kept_are_one_line(finished, tmp_path):
    (tmp_path / "file").write_text("")
    failed = geodl("results", "add", str(finished), "--to", str(tmp_path / "file" / "x"), cwd=tmp_path, status=2)
    assert failed.stderr.count("\n") == 1
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    record = content(path)
    rewrite(path, record | {"config": record["config"] | {"method": "../../outside"}})
    failed = geodl("results", "add", str(tmp_path / "run"), "--to", str(tmp_path / "kept"), cwd=tmp_path, status=2)
    assert "a name that no file can have" in failed.stderr
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize("key", ["config", "seed", "machine", "seconds", "results"])
def test_records_of_another_form_are_named(finished, tmp_path, key):
    (path,) = records.add([finished], tmp_path)
    assert records.read(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "x"}))
    with pytest.raises(StoreError, match=rf"{path.name}: not a record that `geodl results add` wrote"):
        records.read(tmp_path)


# Names of phases.


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_other_names_beside_the_phases_are_not_phases(run, name, kind):
    path = run.path / "phases" / name
    path.mkdir() if kind == "folder" else path.write_text("mine") if kind == "file" else path.symlink_to("nothing")
    assert run.completed() == 2
    assert run.stamp()[0] == 2
    with run.lock():
        save_phase(run, 2)
    assert run.load_metrics(2) == metrics_of(2)
    assert os.path.lexists(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", ["nothing", "00", "02", None])
@pytest.mark.parametrize("name", ["02", "01"])
def test_what_is_no_folder_where_a_phase_would_be_is_named(run, name, target):
    path = run.path / "phases" / name
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("") if target is None else path.symlink_to(target)

    def write():
        with run.lock():
            save_phase(run, 2)

    for action in (run.completed, run.stamp, run.verify, write):
        with pytest.raises(StoreError, match=rf"phases/{name} is a link or a file where geodl keeps a directory"):
            action()


def test_stamp_ends_though_the_phase_vanishes_each_time(run, monkeypatch):
    monkeypatch.setattr(type(run), "completed", lambda self: 7)
    with pytest.raises(StoreError, match="is being changed by another process all the time"):
        run.stamp()


# Progress.


def spoil(path, how):
    checkpoint = path / "progress" / "checkpoint.safetensors"
    if how == "bit":
        data = checkpoint.read_bytes()
        checkpoint.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "empty":
        checkpoint.write_bytes(b"")
    elif how in ("folder", "pipe", "zeros", "link"):
        checkpoint.unlink()
        checkpoint.mkdir() if how == "folder" else os.mkfifo(checkpoint) if how == "pipe" else checkpoint.symlink_to(
            "/dev/zero" if how == "zeros" else "nothing"
        )
    else:
        shutil.rmtree(path / "progress")
        (path / "progress").write_text("") if how == "file for folder" else (path / "progress").symlink_to("/dev/null")


HOW = ["bit", "empty", "folder", "pipe", "zeros", "link", "file for folder", "link for folder"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
def test_damaged_progress_is_set_aside_and_the_work_goes_on(run, how, caplog):
    spoil(run.path, how)
    assert run.load_progress() is None, "who only reads goes on without it"
    assert summarize(run.path).state == "interrupted"
    assert caplog.messages == []
    with run.lock():
        assert run.load_progress() is None
        assert run.load_progress() is None
        told = [event["reason"] for event in run.read_events() if event["kind"] == "progress set aside"]
        save_progress(run, 8)
        assert run.load_progress()[1] == {"step": 8}
        save_phase(run, 2)
    if how not in ("link", "file for folder", "link for folder"):  # where nothing is, nothing is damaged
        (line,) = caplog.messages
        assert "checkpoint.safetensors is" in line
        assert line.endswith("it was set aside, and the work goes on from the last complete phase")
        assert len(told) == 1
    assert run.completed() == 3
    assert not (run.path / "damaged-progress").exists(), "the phase is complete: it is of no use any more"
    assert run.load_progress() is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("action", ["undo", "rename", "save", "fresh"])
def test_damaged_progress_blocks_nobody(store, run, how, action):
    if action == "fresh":
        spoil(run.path, how)
        assert make(run.path, fresh=True).completed() == 0
        return
    spoil(store.path, how)
    with store.lock():
        if action == "undo":
            store.drop_last_phase()
        elif action == "rename":
            save_phase(store, 3)
        else:
            save_progress(store, 5)
            assert store.load_progress()[1] == {"step": 5}
    assert store.completed() == {"undo": 2, "rename": 4, "save": 3}[action]


def test_a_checkpoint_of_another_form_is_damaged_too(run):
    from geodl.files import write_tensors

    for metadata in ({}, {"phase": "2"}, {"phase": "2", "state": "[]"}, {"phase": "2", "state": "[" * 99_999}):
        write_tensors(run.path / "progress" / "checkpoint.safetensors", {}, metadata)
        assert run.load_progress() is None


# Nothing outside is written.


@pytest.mark.parametrize("name", ["lock", "events.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.timeout(60)
def test_files_written_in_place_are_regular_and_no_links(run, tmp_path, name, kind):
    (tmp_path / "mine").write_text("mine")
    path = run.path / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "mine") if kind == "link" else os.mkfifo(path) if kind == "pipe" else path.mkdir()

    def write():
        with run.lock():
            run.events("x")

    with pytest.raises(StoreError, match=f"{name}"):
        write()
    summarize(run.path)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["phases", "progress", "tensorboard"])
def test_links_to_folders_elsewhere_are_not_followed_by_writers(run, tmp_path, name):
    (run.path / "tensorboard").mkdir()
    (run.path / "tensorboard" / "events.out.tfevents.1").write_text("curve")
    (run.path / name).rename(tmp_path / "elsewhere")
    (run.path / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / ".geodl-tmp-x").write_text("not ours")
    before = contents(tmp_path / "elsewhere")

    def write():
        with run.lock():
            save_progress(run, 1)
            save_phase(run, 2)
            run.drop_last_phase()

    for action in (write, lambda: make(run.path, fresh=True)):
        try:
            action()
        except StoreError:
            assert name == "phases"
    assert contents(tmp_path / "elsewhere") == before


# Events.


def test_lines_that_are_no_events_are_passed_over(run):
    with run.lock():
        run.events("learned", phase=0, seconds=1.5)
        path = run.path / "events.jsonl"
        line = path.read_bytes()
        odd = [b'{"kind": "x"}', b'{"kind": 1, "time": "2026-01-01T00:00:00+00:00"}', b'{"kind": "x", "time": 5}']
        odd += [
            b'{"kind": "x", "time": "soon"}',
            b'{"kind": "x", "time": "2026-01-01"}',
            b"{}",
            b'{"": ' + b"[" * 99_999,
        ]
        odd += [b'{"kind": "x", "time": "2026-01-01T00:00:00+00:00", "v": NaN}']
        odd = [each[:-1] + f', "crc32": "{zlib.crc32(each):08x}"}}'.encode() for each in odd]  # signed, but no events
        odd += [b"\xff\xfe", b"[]", b"1", b"", line.strip().replace(b"1.5", b"2.5"), line[:20]]
        path.write_bytes(b"\n".join([*odd, line]))
        run.events("learned", phase="first")
    assert [event["kind"] for event in run.read_events()] == ["learned", "learned"]
    assert list(run.times("learned")) == [0]
    assert "crc32" not in run.read_events()[0]


def test_events_of_any_content_come_back(run):
    with run.lock():
        run.events("odd", crc32="x", by_class={10: 1, 9: 2}, text='", "crc32": "00000000"}', classes=("a", "\u2028"))
    (event,) = run.read_events()
    assert event["by_class"] == {"10": 1, "9": 2}
    assert event["text"] == '", "crc32": "00000000"}'
    assert event["crc32"] == "x"


# The list.


def test_one_bad_run_does_not_hide_the_others(tmp_path):
    with make(tmp_path / "sound").lock():
        pass
    for name in ("broken", "changed", "old", "pipe", "flipped"):
        store = make(tmp_path / name)
        with store.lock():
            save_phase(store, 0)
    (tmp_path / "broken" / "config.json").write_text("{")
    path = tmp_path / "changed" / "config.json"
    path.write_text(path.read_text().replace("lucir", "lucis"))
    path = tmp_path / "old" / "config.json"
    path.write_text(json.dumps(content(path) | {"format": 1}))
    (tmp_path / "pipe" / "config.json").unlink()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    (tmp_path / "flipped" / "phases" / "00" / "metrics.json").write_text('{"headline": "1 %"}')
    found = {each.name: each for each in list_runs(tmp_path)}
    assert {name: each.state for name, each in found.items()} == {
        "broken": "unreadable",
        "changed": "unreadable",
        "flipped": "damaged",
        "old": "unreadable",
        "pipe": "unreadable",
        "sound": "interrupted",
    }
    assert found["old"].error.endswith("was written by geodl 0.1 and cannot be opened by this version")
    assert "does not have the checksum" in found["changed"].error
    assert found["flipped"].result is None
    shown = geodl("runs", "list", str(tmp_path), cwd=tmp_path).stdout
    assert "sound" in shown
    assert "was written by geodl 0.1" in shown
    listed = json.loads(geodl("runs", "list", str(tmp_path), "--json", cwd=tmp_path).stdout)
    assert [each["error"] is None for each in listed] == [False, False, False, False, False, True]


def test_odd_results_are_no_reason_to_fail(run, tmp_path):
    path = run.path / "phases" / "01" / "metrics.json"
    for value, shown in (({"accuracy": {}}, None), ({}, None), (metrics_of(1), "1.0 % on 2 classes (k-NME)")):
        rewrite(path, value)
        assert summarize(run.path).result == shown
    rewrite(path, {"accuracy": {"nme": "[red]"}, "classes": 5})
    assert "damaged" in geodl("runs", "list", str(tmp_path), cwd=tmp_path).stdout
    failed = geodl("runs", "show", str(run.path), cwd=tmp_path, status=2)
    assert "is damaged, or not a file of geodl's" in failed.stderr
    rewrite(path, [])
    assert summarize(run.path).state == "damaged"
