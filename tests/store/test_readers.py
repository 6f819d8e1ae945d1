"""Readers beside a writer, and the log of events."""

import zlib

import pytest
from tests.helpers.directories import commit, make

from geodl.core.errors import StoreError
from geodl.store import Directory, reading

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_reader_sees_one_state_whatever_a_writer_does(model):
    changes = iter([lambda: model.undo(), lambda: commit(model, 5), lambda: commit(model, 6)])
    seen = []

    def read(store):
        phase = store.phase(-1)
        first = phase.json("metrics.json")["phase"]
        with model.lock():
            next(changes, lambda: None)()
        seen.append(first)
        return first, phase.json("extra.json")["t"]

    # Undone, the phase can still be read; after another commit it is gone, and the reader starts again.
    assert reading(model.path, read) == (2, 2)
    with model.lock():
        model.redo()
    assert reading(model.path, lambda store: read(store)) == (2, 2)
    with model.lock():
        model.undo()
        commit(model, 8, states=1)
    assert reading(model.path, read) == (8, 8)


def test_a_reader_retries_if_its_files_are_gone(model):
    reads = []

    def read(store):
        reads.append(store.phase(-1).number)
        if len(reads) == 1:
            with model.lock():
                model.undo()
                commit(model, 5)
        return store.phase(-1).json("extra.json")["t"]

    assert reading(model.path, read) == 5
    assert len(reads) == 2
    (model.path / "objects" / Directory(model.path).phase(-1).files["extra.json"][0]).unlink()
    reads[:] = [0]
    with pytest.raises(StoreError, match=r"extra\.json is damaged.*`geodl undo"):
        reading(model.path, read)
    assert len(reads) == 2, "what is damaged is not read again"


def test_events_keep_their_order_and_survive_torn_lines(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        run.events("phase", t=0, name="µ")
        run.events("loss", value=float("nan"), parts={"ce": [1.0, float("inf")]})
        with (run.path / "events.jsonl").open("ab") as file:
            file.write('{"kind": "torn µ'.encode()[:-1])  # in the middle of a letter
        assert [event["kind"] for event in run.read_events()] == ["phase", "loss"]
        odd = {"crc32": "x", "by_class": {10: 1}, "text": '", "crc32": "00000000"}'}
        run.events("phase", t=1, classes=("a", "\u2028"), **odd)
    events = run.read_events()
    assert [event["kind"] for event in events] == ["phase", "loss", "phase"]
    assert (events[0]["name"], events[1]["value"], events[2]["t"]) == ("µ", "nan", 1)
    assert (events[1]["parts"], events[2]["by_class"]) == ({"ce": [1.0, "inf"]}, {"10": 1})
    assert (events[2]["text"], events[2]["crc32"]) == (odd["text"], "x")
    assert all(event["time"].endswith("+00:00") for event in events)


def test_invalid_lines_are_skipped(tmp_path):
    run = make(tmp_path / "run")
    with run.lock():
        run.events("learned", phase=0, seconds=1.5)
        path = run.path / "events.jsonl"
        line = path.read_bytes()
        time = b'"time": "2026-01-01T00:00:00+00:00"'
        odd = [b'{"kind": "x"}', b'{"kind": 1, %s}' % time, b'{"kind": "x", "time": 5}', b"{}"]
        odd += [b'{"kind": "x", "time": "soon"}', b'{"kind": "x", "time": "2026-01-01"}']
        odd += [b'{"": ' + b"[" * 99_999, b'{"kind": "x", %s, "v": NaN}' % time]
        # signed, but no events
        odd = [each[:-1] + f', "crc32": "{zlib.crc32(each):08x}"}}'.encode() for each in odd]
        odd += [b"\xff\xfe", b"[]", b"1", b"", line.strip().replace(b"1.5", b"2.5"), line[:20]]
        path.write_bytes(b"\n".join([*odd, line]))
        run.events("learned", phase="first")
    assert [event["kind"] for event in run.read_events()] == ["learned", "learned"]
    assert list(run.times("learned")) == [0]
    assert "crc32" not in run.read_events()[0]
